"""Bugs planted in the coordinator's hooks, and in sources that set their own barrier."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tests.mutants.harness import patched
from tests.sim.product.patching import around, both, planted

from headgate.protocol.checkpoints import pending
from headgate.protocol.checkpoints.markers import MarkerPatience
from headgate.protocol.subtasks import induced
from headgate.protocol.subtasks.induced import InducedCut
from headgate.protocol.subtasks.subtask import Subtask
from headgate.runtime.driver.hook_calls import HookCalls


def a_trigger_cuts_a_source_that_sets_its_own_barrier() -> AbstractContextManager[None]:  # C47, EI20
    def on_trigger(call: Any, self: Any, event: Any) -> Any:
        kept, self._induced = self._induced, None
        try:
            return call(self, event)
        finally:
            self._induced = kept

    return around(Subtask, "_on_trigger", on_trigger)


def the_first_marker_cuts_all_splits() -> AbstractContextManager[None]:  # EI21
    return patched(
        InducedCut, "_is_waiting", property(lambda self: self._is_read and bool(self._open) and not self._held)
    )


def any_marker_cuts_the_oldest_checkpoint() -> AbstractContextManager[None]:  # EI23
    def met(call: Any, self: Any, split: str, checkpoint: Any) -> Any:
        return call(self, split, min(self._announced, default=checkpoint))

    return around(InducedCut, "met", met)


def a_marker_that_means_nothing_is_waited_at() -> AbstractContextManager[None]:  # EI23
    def release(self: Any) -> list[Any]:
        over = [s for s, c in self._held.items() if c == self._newest and c not in self._announced]
        for split in over:
            del self._held[split]
        return [induced.ReadOn(tuple(over))] if over else []

    check = patched(InducedCut, "_check", lambda self: None)  # which would notice at once
    return both(patched(InducedCut, "_released", release), check)


def splits_are_not_read_on_behind_an_abort() -> AbstractContextManager[None]:  # EI27
    def aborted(call: Any, self: Any, checkpoint: Any) -> list[Any]:
        call(self, checkpoint)
        return []

    return around(InducedCut, "aborted", aborted)


def a_marker_that_is_far_away_counts() -> AbstractContextManager[None]:  # EI36
    return patched(MarkerPatience, "_only_reads", lambda self, wait, missing: False)


def a_manifest_forgets_what_hooks_returned() -> AbstractContextManager[None]:  # EI4
    def write(call: Any, self: Any, carried: Any) -> Any:
        return [replace(e, hooks=()) if isinstance(e, pending.WriteManifest) else e for e in call(self, carried)]

    return around(pending.PendingCheckpoints, "write_next", write)


def hooks_are_not_awaited() -> AbstractContextManager[None]:  # EI4
    def is_full(self: Any, checkpoint: Any) -> bool:
        return len(self._pending[checkpoint].acks) == len(self._participants)

    return patched(pending.PendingCheckpoints, "is_full", is_full)


def hooks_hear_of_no_restart() -> AbstractContextManager[None]:  # EI8, C37
    def begin(call: Any, self: Any, pipeline: Any, generation: Any, restored: Any) -> None:
        if generation == 1:
            call(self, pipeline, generation, restored)

    return around(HookCalls, "begin", begin)


def hooks_get_the_data_of_no_checkpoint() -> AbstractContextManager[None]:  # EI8
    def begin(call: Any, self: Any, pipeline: Any, generation: Any, restored: Any) -> None:
        call(self, pipeline, generation, None if restored is None else replace(restored, hooks=()))

    return around(HookCalls, "begin", begin)


SEEDS: dict[str, int] = {
    "a_manifest_forgets_what_hooks_returned": 1,
    "a_marker_that_is_far_away_counts": 3017,
    "a_marker_that_means_nothing_is_waited_at": 1,
    "a_trigger_cuts_a_source_that_sets_its_own_barrier": 1,
    "any_marker_cuts_the_oldest_checkpoint": 0,
    "hooks_are_not_awaited": 1,
    "hooks_get_the_data_of_no_checkpoint": 1,
    "hooks_hear_of_no_restart": 1,
    "splits_are_not_read_on_behind_an_abort": 6,
    "the_first_marker_cuts_all_splits": 6,
}
"""By name of the bug, a seed that found it; others are tried when it does not any more."""

ALL = planted(globals(), __name__)
