"""Mutants of how long checkpoints wait for sources that read towards their markers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.checkpoints import test_coordinator_markers as coordinator_tests
from tests.runtime.worker import test_marker_reports as report_tests

from headgate.protocol.checkpoints import reasons
from headgate.protocol.checkpoints.completion import Completion
from headgate.protocol.checkpoints.markers import MarkerPatience, MarkerWait
from headgate.protocol.checkpoints.reasons import AbortReason
from headgate.runtime.worker import sources
from headgate.runtime.worker.sources import MarkerReports, Source

Test = Callable[..., object]


def changed(owner: object, name: str, change: Callable[..., Any]) -> AbstractContextManager[None]:
    original = getattr(owner, name)
    return patched(owner, name, lambda *a, **options: change(original, *a, **options))


# -- the coordinator --------------------------------------------------------------------------------------------------


def a_marker_that_is_far_away_counts() -> AbstractContextManager[None]:  # EI36
    return patched(reasons, "_COUNTED", reasons._COUNTED | {AbortReason.MARKER_AHEAD})


def every_checkpoint_has_one_timeout() -> AbstractContextManager[None]:  # EI37
    return patched(MarkerPatience, "begun", lambda self: MarkerWait())


def a_source_may_read_for_ever() -> AbstractContextManager[None]:  # EI37
    def expired(call: Any, self: Any, wait: Any, missing: Any) -> Any:
        found = call(self, wait, missing)
        return None if found is AbortReason.MARKER_NOT_MET else found

    return changed(MarkerPatience, "expired", expired)


def time_that_was_given_once_is_given_for_ever() -> AbstractContextManager[None]:  # EI37
    return patched(MarkerPatience, "completed", lambda self, wait: None)


def a_standstill_is_no_failure() -> AbstractContextManager[None]:  # EI27, EI36
    def only_reads(call: Any, self: Any, wait: Any, missing: Any) -> bool:
        wait.reading |= wait.uncut
        return bool(call(self, wait, missing))

    return changed(MarkerPatience, "_only_reads", only_reads)


def one_source_that_reads_excuses_all() -> AbstractContextManager[None]:  # EI36
    def only_reads(self: Any, wait: Any, missing: Any) -> bool:
        return bool(wait.reading.intersection(missing))

    return patched(MarkerPatience, "_only_reads", only_reads)


def nobody_is_behind_a_source() -> AbstractContextManager[None]:  # EI36
    return changed(MarkerPatience, "__init__", lambda call, self, behind: call(self, {}))


def a_hook_that_is_awaited_is_excused() -> AbstractContextManager[None]:  # EI5, EI36
    def expired(call: Any, self: Any, checkpoint: Any) -> Any:
        if checkpoint in self.pending.ids:
            self.pending[checkpoint].awaited = []
        return call(self, checkpoint)

    return changed(Completion, "expired", expired)


def the_timeout_runs_from_the_beginning() -> AbstractContextManager[None]:  # EI35
    def told(call: Any, self: Any, subtask: Any, **options: Any) -> bool:
        call(self, subtask, **options)
        return False

    return changed(MarkerWait, "told", told)


def a_cut_is_not_noted() -> AbstractContextManager[None]:  # EI34, EI35
    def told(call: Any, self: Any, subtask: Any, *, is_uncut: bool) -> bool:
        return bool(call(self, subtask, is_uncut=is_uncut or subtask in self.uncut))

    return changed(MarkerWait, "told", told)


def sources_of_other_generations_come_forward() -> AbstractContextManager[None]:  # EI34
    def reads_on(call: Any, self: Any, event: Any) -> Any:
        return call(self, type(event)(self.generation, event.subtask, event.uncut))

    return changed(Completion, "source_reads_on", reads_on)


# -- the source -------------------------------------------------------------------------------------------------------


def nobody_tells_that_it_reads() -> AbstractContextManager[None]:  # EI34
    return patched(MarkerReports, "due", lambda self, awaited, read_count, now_ms: None)


def a_source_that_stands_still_tells_that_it_reads() -> AbstractContextManager[None]:  # EI34
    def due(call: Any, self: Any, awaited: Any, read_count: int, now_ms: int) -> Any:
        return call(self, awaited, now_ms, now_ms)

    return changed(MarkerReports, "due", due)


def a_cut_is_not_told() -> AbstractContextManager[None]:  # EI35
    def due(call: Any, self: Any, *rest: Any) -> Any:
        self._told = ()
        return call(self, *rest)

    return changed(MarkerReports, "due", due)


def everything_is_told_at_once() -> AbstractContextManager[None]:  # EI34
    def due(call: Any, self: Any, *rest: Any) -> Any:
        self.period_ms = 0
        return call(self, *rest)

    return changed(MarkerReports, "due", due)


def empty_batches_are_progress() -> AbstractContextManager[None]:  # EI34
    return patched(sources, "is_progress", lambda polled: polled is not None)


def what_is_handed_over_is_progress() -> AbstractContextManager[None]:  # EI30, EI34
    return patched(Source, "read_count", property(lambda self: self._polled_count))


COORDINATOR = coordinator_tests
REPORTS = report_tests

CAUGHT: list[tuple[Mutant, Test]] = [
    (
        a_marker_that_is_far_away_counts,
        COORDINATOR.test_a_checkpoint_whose_sources_read_towards_its_marker_is_no_failure,
    ),
    (
        every_checkpoint_has_one_timeout,
        COORDINATOR.test_each_checkpoint_that_did_not_wait_long_enough_gives_the_next_one_twice_the_time,
    ),
    (a_source_may_read_for_ever, COORDINATOR.test_a_marker_that_is_never_met_counts_again_and_again),
    (
        time_that_was_given_once_is_given_for_ever,
        COORDINATOR.test_a_completion_leaves_the_next_checkpoint_the_time_that_it_took,
    ),
    (a_standstill_is_no_failure, COORDINATOR.test_a_source_that_stands_still_counts),
    (one_source_that_reads_excuses_all, COORDINATOR.test_every_source_that_is_not_cut_must_come_forward),
    (one_source_that_reads_excuses_all, COORDINATOR.test_whoever_is_not_behind_such_a_source_counts),
    (nobody_is_behind_a_source, COORDINATOR.test_a_checkpoint_whose_sources_read_towards_its_marker_is_no_failure),
    (a_hook_that_is_awaited_is_excused, COORDINATOR.test_a_hook_that_is_awaited_counts),
    (the_timeout_runs_from_the_beginning, COORDINATOR.test_the_timeout_begins_when_the_last_source_has_been_cut),
    (a_cut_is_not_noted, COORDINATOR.test_a_source_that_is_cut_and_does_not_write_its_snapshot_counts),
    (sources_of_other_generations_come_forward, COORDINATOR.test_markers_that_nobody_waits_for_change_nothing),
    (nobody_tells_that_it_reads, REPORTS.test_a_source_tells_that_it_reads_towards_a_marker),
    (a_source_that_stands_still_tells_that_it_reads, REPORTS.test_a_source_that_stands_still_tells_nothing),
    (a_cut_is_not_told, REPORTS.test_a_cut_is_told_at_once_if_it_was_awaited),
    (everything_is_told_at_once, REPORTS.test_nothing_is_told_of_a_marker_that_is_met_soon),
    (empty_batches_are_progress, REPORTS.test_a_batch_without_records_is_no_progress),
    (what_is_handed_over_is_progress, REPORTS.test_at_most_once_reading_ahead_is_progress),
]


@pytest.mark.parametrize(("mutant", "test"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_caught(mutant: Mutant, test: Test) -> None:
    test()
    assert_caught(mutant, test)
