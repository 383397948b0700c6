"""Mutants of what at least once and at most once promise, and of how the mode travels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.api import test_possible_guarantees as api_tests
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.operators import test_timestamps as timestamp_tests
from tests.protocol.checkpoints import test_coordinator as coordinator_tests
from tests.protocol.checkpoints import test_track as track_tests
from tests.protocol.subtasks import test_read_ahead as ahead_tests
from tests.protocol.subtasks import test_subtask as subtask_tests
from tests.runtime.checkpoints import test_restoring as restoring_tests
from tests.runtime.worker import test_ahead_reader as reader_tests
from tests.runtime.worker import test_subtask_runner as runner_tests
from tests.sim.product.patching import around, skipped, without

from headgate.api import pipeline as pipeline_module
from headgate.model.options import ORDINARY, Alignment, Guarantee
from headgate.operators.base import RestoredState
from headgate.operators.timestamps import WithTimestampsOperator
from headgate.protocol.checkpoints.align import Decline, EmitCancel
from headgate.protocol.checkpoints.track import Tracker
from headgate.protocol.checkpoints.triggering import Triggering
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks.read_ahead import ReadAhead
from headgate.protocol.subtasks.subtask import Subtask
from headgate.runtime.checkpoints import restoring
from headgate.runtime.worker.ahead_reader import AheadReader


def the_first_barrier_completes() -> AbstractContextManager[None]:  # GM11
    return skipped(Tracker, "_is_complete", True)


def nobody_hears_of_older_checkpoints_that_are_given_up() -> AbstractContextManager[None]:  # GM11
    return without(Tracker, "_give_up_before", (EmitCancel, Decline))


def an_older_barrier_is_counted_again() -> AbstractContextManager[None]:  # GM12
    def finish(call: Any, self: Any, checkpoint: Any) -> None:
        call(self, checkpoint)
        self._done = type(checkpoint)(0)

    return around(Tracker, "_finish", finish)


def any_number_is_counted() -> AbstractContextManager[None]:  # GM13
    return skipped(Tracker, "_drop_oldest", [])


def a_cancel_marker_leaves_older_ones_waiting() -> AbstractContextManager[None]:  # GM14
    return skipped(Tracker, "_give_up_before", [])


def an_abort_gives_up_older_ones_too() -> AbstractContextManager[None]:  # GM15
    def on_abort(call: Any, self: Any, checkpoint: Any) -> Any:
        effects = call(self, checkpoint)
        if any(isinstance(effect, EmitCancel) for effect in effects):
            self._finish(checkpoint)
        return effects

    return around(Tracker, "_on_abort", on_abort)


def an_abort_before_the_barrier_is_forgotten() -> AbstractContextManager[None]:  # GM15
    return skipped(Tracker, "_on_abort", [Ignored("abort remembered until the barrier comes")])


def an_ended_channel_is_waited_for() -> AbstractContextManager[None]:  # GM16
    return skipped(Tracker, "_on_end", [Ignored("an ended channel counts as seen")])


def every_subtask_aligns() -> AbstractContextManager[None]:  # GM2
    return patched(Guarantee, "alignment", property(lambda self: Alignment.ALIGNED))


def barriers_say_nothing_of_the_mode() -> AbstractContextManager[None]:  # GM2, GM3
    return skipped(Triggering, "_options", ORDINARY)


def a_source_reads_on_behind_the_last_barrier() -> AbstractContextManager[None]:  # GM3
    return patched(Subtask, "is_suspended", property(lambda self: False))


def channels_go_on_where_they_were_read_on() -> AbstractContextManager[None]:  # GM20
    def restore(call: Any, self: Any, states: Any) -> None:
        call(self, [RestoredState(s.subtask_index, s.parallelism, s.source) for s in states])

    return around(WithTimestampsOperator, "restore", restore)


def a_subtask_sees_its_own_former_state_only() -> AbstractContextManager[None]:  # GM20
    return patched(restoring, "is_exact", lambda manifest: True)


def every_guarantee_is_possible() -> AbstractContextManager[None]:  # GM21
    return skipped(pipeline_module, "check_guarantee")


def what_is_read_is_processed_at_once() -> AbstractContextManager[None]:  # GM30
    return patched(ReadAhead, "may_take", property(lambda self: self.held > 0))


def a_snapshot_that_is_not_completed_covers_what_was_read() -> AbstractContextManager[None]:  # GM30
    def cut(call: Any, self: Any, checkpoint: Any, *, is_last: bool) -> Any:
        is_ahead = call(self, checkpoint, is_last=is_last)
        self._released = self._read
        return is_ahead

    return around(ReadAhead, "cut", cut)


def a_completion_covers_what_was_read_since_its_snapshot() -> AbstractContextManager[None]:  # GM30
    def completed(call: Any, self: Any, checkpoint: Any) -> None:
        call(self, checkpoint)
        self._released = self._read

    return around(ReadAhead, "completed", completed)


def processing_goes_on_behind_the_last_checkpoint() -> AbstractContextManager[None]:  # GM32
    def cut(call: Any, self: Any, checkpoint: Any, *, is_last: bool) -> Any:
        is_ahead = call(self, checkpoint, is_last=is_last)
        self._is_over = False
        return is_ahead

    return around(ReadAhead, "cut", cut)


def positions_are_in_front_of_what_is_held() -> AbstractContextManager[None]:  # GM31
    return around(ReadAhead, "cut", lambda call, self, *a, **options: call(self, *a, **options) and False)


def a_stop_skips_what_is_held() -> AbstractContextManager[None]:  # GM32
    return around(ReadAhead, "cut", lambda call, self, *a, **options: call(self, *a, **options) or True)


def a_reader_holds_any_amount() -> AbstractContextManager[None]:  # GM36
    return patched(AheadReader, "is_full", property(lambda self: False))


def a_source_ends_with_its_input() -> AbstractContextManager[None]:  # GM37
    return around(AheadReader, "is_finished", lambda call, self: self._inner.is_finished())


def a_drain_reads_on() -> AbstractContextManager[None]:  # GM37
    return skipped(AheadReader, "end")


LEAST = Guarantee.AT_LEAST_ONCE
CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (the_first_barrier_completes, track_tests.test_the_last_barrier_takes_the_snapshot_and_goes_on, ()),
    (
        nobody_hears_of_older_checkpoints_that_are_given_up,
        track_tests.test_a_completed_checkpoint_gives_up_older_ones,
        (),
    ),
    (an_older_barrier_is_counted_again, track_tests.test_a_barrier_of_a_finished_or_older_checkpoint_is_ignored, ()),
    (any_number_is_counted, track_tests.test_the_oldest_of_too_many_is_given_up, ()),
    (
        a_cancel_marker_leaves_older_ones_waiting,
        track_tests.test_a_cancel_marker_gives_up_its_checkpoint_and_older_ones,
        (),
    ),
    (an_abort_gives_up_older_ones_too, track_tests.test_an_abort_gives_up_one_checkpoint_alone, ()),
    (an_abort_before_the_barrier_is_forgotten, track_tests.test_an_abort_before_the_first_barrier_is_remembered, ()),
    (
        an_ended_channel_is_waited_for,
        track_tests.test_the_end_of_a_channel_completes_the_newest_that_misses_nothing_else,
        (),
    ),
    (every_subtask_aligns, coordinator_tests.test_checkpoints_are_triggered_as_the_mode_wants_them, (LEAST,)),
    (
        barriers_say_nothing_of_the_mode,
        coordinator_tests.test_checkpoints_are_triggered_as_the_mode_wants_them,
        (LEAST,),
    ),
    (
        a_source_reads_on_behind_the_last_barrier,
        runner_tests.test_a_source_sends_nothing_behind_the_last_barrier_before_a_stop,
        (),
    ),
    (
        a_source_reads_on_behind_the_last_barrier,
        subtask_tests.test_a_source_is_suspended_behind_the_last_barrier_and_stays_so,
        (),
    ),
    (
        channels_go_on_where_they_were_read_on,
        timestamp_tests.test_a_channel_that_was_read_on_behind_its_barrier_holds_nobody_elses_records_to_be_late,
        (),
    ),
    (
        a_subtask_sees_its_own_former_state_only,
        restoring_tests.test_a_checkpoint_that_is_not_exact_is_restored_from_all_former_subtasks,
        (),
    ),
    (
        every_guarantee_is_possible,
        api_tests.test_a_loop_that_counts_rounds_is_refused_at_least_once,
        ({"max_rounds": 3},),
    ),
    (every_guarantee_is_possible, api_tests.test_a_loop_is_refused_at_most_once, ()),
    (every_guarantee_is_possible, api_tests.test_going_back_is_refused_at_most_once, ()),
    (
        what_is_read_is_processed_at_once,
        ahead_tests.test_a_batch_is_handed_over_when_a_completed_checkpoint_covers_it,
        (),
    ),
    (
        a_snapshot_that_is_not_completed_covers_what_was_read,
        ahead_tests.test_a_batch_is_handed_over_when_a_completed_checkpoint_covers_it,
        (),
    ),
    (
        a_completion_covers_what_was_read_since_its_snapshot,
        ahead_tests.test_a_batch_is_handed_over_when_a_completed_checkpoint_covers_it,
        (),
    ),
    (
        processing_goes_on_behind_the_last_checkpoint,
        ahead_tests.test_nothing_is_taken_behind_the_last_checkpoint_before_a_stop,
        (),
    ),
    (positions_are_in_front_of_what_is_held, reader_tests.test_positions_of_a_snapshot_are_behind_what_is_held, ()),
    (a_stop_skips_what_is_held, reader_tests.test_the_last_positions_before_a_stop_are_in_front_of_what_is_held, ()),
    (a_source_ends_with_its_input, reader_tests.test_a_source_ends_when_everything_it_holds_is_handed_over, ()),
    (a_drain_reads_on, reader_tests.test_a_drain_reads_no_more_and_hands_over_what_is_held, ()),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT)
def test_a_broken_guarantee_is_caught(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    assert_caught(mutant, test, *arguments)


def test_a_reader_that_holds_any_amount_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(a_reader_holds_any_amount, reader_tests.test_a_reader_that_holds_enough_reads_no_more, monkeypatch)
