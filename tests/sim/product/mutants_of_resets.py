"""Bugs planted where a pipeline starts over; seeds of ``sim.kinds.resetting`` find them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tests.mutants.harness import Mutant, patched
from tests.sim.product.patching import around, both, skipped

from headgate.connectors.files.ledger import Ledger, _manifests, read_manifest
from headgate.connectors.files.owner import FileOwner
from headgate.connectors.files.starting_over import PublishedFiles
from headgate.model.ids import Generation
from headgate.model.life import Life
from headgate.protocol.checkpoints import recovery
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import claims
from headgate.runtime.driver.starting_over import StartingOver


def output_goes_before_it_is_decided() -> AbstractContextManager[None]:  # SO2
    def carry_out(call: Any, self: StartingOver, plan: Any) -> None:
        for found in plan.targets:
            early = Life("early", plan.home, "here", 0)
            found.sink.start_over("p", found.target.sink, Generation(99), early, lambda owner: True)
        call(self, plan)

    return around(StartingOver, "carry_out", carry_out)


def whoever_claimed_meanwhile_is_not_noticed() -> AbstractContextManager[None]:  # SO2
    def start_over(self: Any, order: str, wall_ms: int, seen: Any, above: Any) -> Any:
        return self._claim("a reset", wall_ms, None, lambda log: recovery.next_claim(log, above).ending_life(), order)

    return both(patched(CheckpointLog, "start_over", start_over), skipped(StartingOver, "_refuse_if_changed"))


def the_order_goes_before_the_output() -> AbstractContextManager[None]:  # SO7
    def finish(call: Any, self: Any, order: Any, number: int, generation: Generation) -> None:
        self._log.records.carried_out(number, order.token)
        call(self, order, number, generation)

    return around(StartingOver, "_finish", finish)


def a_driver_begins_in_front_of_half_empty_targets() -> AbstractContextManager[None]:  # SO3
    nobody = classmethod(lambda cls, root, pipeline: False)
    return both(patched(StartingOver, "is_due", nobody), skipped(claims, "_refuse_half_started_over"))


def nobody_finishes_what_was_begun() -> AbstractContextManager[None]:  # SO3
    nobody = classmethod(lambda cls, root, pipeline: False)
    return both(patched(StartingOver, "is_due", nobody), skipped(StartingOver, "finish", False))


def nobody_is_fenced() -> AbstractContextManager[None]:  # SO5
    def start_over(self: Any, generation: Generation, life: Life) -> None:
        owner = FileOwner(self._storage, self._identity)
        known = owner.owner().life
        if known is None or known.id != life.id:
            self._ledger.empty(lambda: None)
            owner.hand_over(life, lambda: None)

    return patched(PublishedFiles, "start_over", start_over)


def a_manifest_that_is_gone_is_missed() -> AbstractContextManager[None]:  # SO6
    def empty(self: Any, check: Any) -> None:
        paths = _manifests(self._storage, self._identity.committed)
        check()
        for path in paths:
            for file in read_manifest(self._storage, path):
                self._storage.delete(file.name)
            self._storage.delete(path)

    return patched(Ledger, "empty", empty)


def what_was_given_up_is_restored() -> AbstractContextManager[None]:  # C72
    def ending(self: Any) -> Any:
        return recovery.NextClaim(self.sequence, self.generation, self.follows, self.sequence)

    return patched(recovery.NextClaim, "ending_life", ending)


ALL: dict[Mutant, int] = {
    output_goes_before_it_is_decided: 0,
    whoever_claimed_meanwhile_is_not_noticed: 20,
    the_order_goes_before_the_output: 5,
    a_driver_begins_in_front_of_half_empty_targets: 0,
    nobody_finishes_what_was_begun: 0,
    nobody_is_fenced: 38,
    a_manifest_that_is_gone_is_missed: 31,
    what_was_given_up_is_restored: 2,
}
"""Each with a seed that finds it."""
