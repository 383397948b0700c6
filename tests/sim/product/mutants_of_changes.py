"""Bugs planted in what a pipeline does that is another one than before; seeds of ``sim.kinds.changing`` find them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tests.mutants.harness import patched

from headgate.codec.snapshot_path import stored_file
from headgate.model.definition import PipelineDefinition
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints import recovery, restoring_by_name

FILES = Manifest.files.fget  # type: ignore[attr-defined]


def a_start_that_is_repeated_goes_back_again() -> AbstractContextManager[None]:  # SV24
    return patched(restoring_by_name, "_was_restored", lambda newest, life, named: False)


def a_checkpoint_needs_only_what_was_written_for_it() -> AbstractContextManager[None]:  # SF4
    def files(self: Manifest) -> frozenset[str]:
        found = {path: stored_file(path) for path in FILES(self)}
        return frozenset(path for path, of in found.items() if of is None or of.checkpoint == self.checkpoint)

    return patched(Manifest, "files", property(files))


def state_of_any_operator_that_is_gone_is_left_behind() -> AbstractContextManager[None]:  # SV30
    def fits(manifest: Manifest, definition: PipelineDefinition) -> recovery.Refuse | None:
        plan = definition.plan
        names, derived = manifest.state_texts, definition.derived_names
        return INCOMPATIBILITY(manifest, plan.state_texts(), plan.max_parallelism, names, derived)

    return patched(recovery, "incompatibility_with", fits)


def an_operator_without_a_name_starts_empty() -> AbstractContextManager[None]:  # SV31
    def fits(manifest: Manifest, definition: PipelineDefinition) -> recovery.Refuse | None:
        plan, left = definition.plan, definition.config.start.allow_unclaimed_state
        return INCOMPATIBILITY(manifest, plan.state_texts(), plan.max_parallelism, left)

    return patched(recovery, "incompatibility_with", fits)


INCOMPATIBILITY = recovery.incompatibility
