"""Bugs planted in savepoints and in restores by name; seeds of ``sim.kinds.savepoints`` find them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tests.mutants.harness import Mutant, patched
from tests.sim.product.patching import around

from headgate.model.savepoint import Copied
from headgate.protocol.checkpoints.commit import CommitQueue
from headgate.protocol.checkpoints.restoring_by_name import Adopt, GoOn, Named
from headgate.protocol.checkpoints.savepoints import Savepoints
from headgate.runtime.checkpoints.uploads import SnapshotWriter
from headgate.runtime.driver import adopting


def a_savepoint_does_not_wait_for_its_output() -> AbstractContextManager[None]:  # SV2
    return patched(CommitQueue, "has_confirmed", lambda self, checkpoint: True)


def a_savepoint_refers_to_the_files_of_its_checkpoint() -> AbstractContextManager[None]:  # SV1, SV3
    def copied(self: Any, job: Any, to: Any) -> Copied:
        return Copied(self._write_state(job, self._to, job.plain))

    return patched(SnapshotWriter, "_copied", copied)


def every_start_adopts_what_it_names() -> AbstractContextManager[None]:  # SV24
    def decide(log: Any, life: str, named: Named) -> Any:
        found = DECIDE(log, life, named)
        return Adopt() if isinstance(found, GoOn) else found

    return patched(adopting, "decide", decide)


DECIDE = adopting.decide


def an_adopted_savepoint_is_looked_for_in_the_pipelines_directory() -> AbstractContextManager[None]:  # SV27
    def adoptable(call: Any, self: Any, claimed: Any) -> Any:
        manifest = self._found.manifest
        self._found = replace(self._found, manifest=replace(manifest, place=None))
        return call(self, claimed)

    return around(adopting.Adoption, "adoptable", adoptable)


def a_drain_takes_its_savepoint_of_the_next_checkpoint() -> AbstractContextManager[None]:  # SV10
    def begun(call: Any, self: Any, checkpoint: Any, *, is_last: bool) -> Any:
        return call(self, checkpoint, is_last=is_last or self._at_the_end is not None)

    return around(Savepoints, "begun", begun)


def who_begins_at_the_savepoint_of_a_drain_reads_on() -> AbstractContextManager[None]:  # E9
    def look(found: Any) -> Any:
        return found and replace(found, manifest=replace(found.manifest, is_final=False, is_draining=False))

    real = adopting._savepoint_at
    return patched(adopting, "_savepoint_at", lambda url: look(real(url)))


ALL: dict[Mutant, int] = {
    a_savepoint_does_not_wait_for_its_output: 6,
    a_savepoint_refers_to_the_files_of_its_checkpoint: 5,
    every_start_adopts_what_it_names: 5,
    an_adopted_savepoint_is_looked_for_in_the_pipelines_directory: 5,
    a_drain_takes_its_savepoint_of_the_next_checkpoint: 43,
    who_begins_at_the_savepoint_of_a_drain_reads_on: 43,
}
"""Each with a seed that finds it."""
