"""Mutants of loops: the head's log, probes, rounds, and the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught
from tests.protocol.loops import test_loop_head_machine as head_tests
from tests.protocol.loops import test_loop_part as part_tests
from tests.protocol.loops import test_rounds as rounds_tests
from tests.protocol.subtasks import test_subtask_loops as subtask_tests
from tests.sim.product.patching import around, skipped

from headgate.protocol.checkpoints.align import BlockChannel, Decline
from headgate.protocol.loops import head, rounds
from headgate.protocol.loops.head import LoopHead
from headgate.protocol.loops.part import LoopPart
from headgate.protocol.loops.rounds import LoopProber, ProbeAligner
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks.subtask import ReportFinished, Subtask

# -- the log --------------------------------------------------------------------------------------------------------


def what_comes_back_is_not_logged() -> AbstractContextManager[None]:  # L2
    return skipped(LoopHead, "_on_feedback", [head.ForwardFeedback()])


def a_log_takes_records_behind_the_sentinel() -> AbstractContextManager[None]:  # L11
    def on_feedback(call: Any, self: Any, channel: Any) -> Any:
        call(self, channel)
        return [head.LogFeedback(self.pending), head.ForwardFeedback()] if self.pending else [head.ForwardFeedback()]

    return around(LoopHead, "_on_feedback", on_feedback)


def one_sentinel_seals_for_all_channels() -> AbstractContextManager[None]:  # L11
    def on_sentinel(call: Any, self: Any, channel: Any, checkpoint: Any) -> Any:
        if checkpoint in self._pending:
            self._pending[checkpoint] = {channel}
        return call(self, channel, checkpoint)

    return around(LoopHead, "_on_sentinel", on_sentinel)


def records_go_into_the_newest_log_only() -> AbstractContextManager[None]:  # L12
    def on_feedback(call: Any, self: Any, channel: Any) -> Any:
        return [
            head.LogFeedback(e.checkpoints[-1:]) if isinstance(e, head.LogFeedback) else e for e in call(self, channel)
        ]

    return around(LoopHead, "_on_feedback", on_feedback)


def a_log_is_sealed_when_the_barrier_has_gone_out() -> AbstractContextManager[None]:  # L4
    def on_snapshot(call: Any, self: Any, checkpoint: Any) -> Any:
        call(self, checkpoint)
        self._pending.pop(checkpoint, None)
        return [head.OpenLog(checkpoint), head.SealLog(checkpoint)]

    return around(LoopHead, "_on_snapshot", on_snapshot)


def a_later_sentinel_completes_the_log_of_a_skipped_checkpoint() -> AbstractContextManager[None]:  # L3
    def on_sentinel(call: Any, self: Any, channel: Any, checkpoint: Any) -> Any:
        effects = call(self, channel, checkpoint)
        dropped = [e.checkpoint for e in effects if isinstance(e, head.DropLog)]
        kept = [e for e in effects if not isinstance(e, head.DropLog | Decline)]
        return [head.SealLog(c) for c in dropped] + kept

    return around(LoopHead, "_on_sentinel", on_sentinel)


def a_log_is_opened_by_the_first_barrier() -> AbstractContextManager[None]:  # L1
    def aligned(call: Any, self: Any, event: Any) -> Any:
        effects = call(self, event)
        if self._head is not None and any(isinstance(e, BlockChannel) for e in effects):
            effects += self._logged(head.SnapshotTaken(event.checkpoint))
        return effects

    return around(Subtask, "_aligned", aligned)


# -- early sentinels and aborts -------------------------------------------------------------------------------------


def what_is_behind_an_early_sentinel_overtakes_the_barrier() -> AbstractContextManager[None]:  # L6
    def on_sentinel(call: Any, self: Any, channel: Any, checkpoint: Any) -> Any:
        effects = call(self, channel, checkpoint)
        self._held.pop(channel, None)
        return [e for e in effects if not isinstance(e, BlockChannel)] or [Ignored("not held")]

    return around(LoopHead, "_on_sentinel", on_sentinel)


def a_channel_stays_held_for_an_aborted_checkpoint() -> AbstractContextManager[None]:  # L6
    def on_released(call: Any, self: Any, checkpoint: Any) -> Any:
        held, self._held = self._held, {}
        effects = call(self, checkpoint)
        self._held = held
        return effects

    return around(LoopHead, "_on_released", on_released)


def a_held_channel_is_never_read_again() -> AbstractContextManager[None]:  # L6
    return skipped(LoopHead, "_release", [])


def an_aborted_checkpoint_keeps_its_log() -> AbstractContextManager[None]:  # L5
    return skipped(LoopHead, "_on_released", [Ignored("kept")])


# -- probes ---------------------------------------------------------------------------------------------------------


def the_first_probe_may_end_a_loop() -> AbstractContextManager[None]:  # L34
    class Eager(int):
        def __gt__(self, other: int) -> bool:
            return True

    def on_complete(call: Any, self: Any) -> Any:
        self._probe = dataclasses.replace(self._probe, number=Eager(self._probe.number))
        return call(self)

    return around(LoopProber, "_on_complete", on_complete)


def a_probe_that_comes_back_counts_as_a_batch() -> AbstractContextManager[None]:  # L34
    def on_returned(call: Any, self: Any, event: Any) -> Any:
        self._count += 1
        return call(self, event)

    return around(LoopPart, "_on_returned", on_returned)


def what_came_back_before_the_probe_is_not_counted() -> AbstractContextManager[None]:  # L34
    def on_returned(call: Any, self: Any, event: Any) -> Any:
        self._count = 0
        return call(self, event)

    return around(LoopPart, "_on_returned", on_returned)


def inner_heads_are_not_asked() -> AbstractContextManager[None]:  # L34
    def init(call: Any, self: Any, entrances: Any, outer: Any, inner: Any, leaves: Any, **options: Any) -> None:
        call(self, entrances, outer, (), leaves, **options)

    return around(LoopProber, "__init__", init)


def one_head_is_enough() -> AbstractContextManager[None]:  # L34
    def next_probe(call: Any, self: Any, **options: Any) -> Any:
        effects = call(self, **options)
        self._waiting = {min(self._waiting)}
        return effects

    return around(LoopProber, "_next_probe", next_probe)


def probes_begin_when_the_first_entrance_has_ended() -> AbstractContextManager[None]:  # L34
    def on_ended(call: Any, self: Any, event: Any) -> Any:
        if self._phase is not rounds.Phase.ENTERING:
            return [Ignored("begun")]
        self._entering = {event.subtask}
        self._start_rounds = self._start_rounds or [0]
        return call(self, event)

    return around(LoopProber, "_on_entrance_ended", on_ended)


def a_probe_is_passed_on_when_it_has_come_on_one_input() -> AbstractContextManager[None]:  # L33
    def handle(call: Any, self: Any, event: Any) -> Any:
        before = self._numbers
        self._numbers = {channel: max(event.probe.number, number) for channel, number in before.items()}
        self._numbers[event.channel] = event.probe.number - 1
        try:
            return [Ignored("passed before")] if event.probe.number <= self._passed else call(self, event)
        finally:
            self._numbers = before

    return around(ProbeAligner, "handle", handle)


# -- the end, and rounds --------------------------------------------------------------------------------------------


def a_head_reports_its_end_before_it_is_back() -> AbstractContextManager[None]:  # L29
    return around(Subtask, "_finish", lambda call, self: [*call(self), ReportFinished()])


def a_head_ends_when_its_regular_input_has() -> AbstractContextManager[None]:  # L29
    return around(Subtask, "_finish_if_empty", lambda call, self: self._finish())


def the_last_watermark_is_not_awaited() -> AbstractContextManager[None]:  # L37
    def next_probe(call: Any, self: Any, **options: Any) -> Any:
        if self._phase is rounds.Phase.FLUSHING:
            self._enter(rounds.Phase.ENDED)
            return [rounds.EndLoop()]
        return call(self, **options)

    return around(LoopProber, "_next_probe", next_probe)


def rounds_go_on_from_the_foremost_head() -> AbstractContextManager[None]:  # L36
    def on_ended(call: Any, self: Any, event: Any) -> Any:
        if len(self._entering) == 1:
            self._start_rounds = [max([*self._start_rounds, event.started_round])]
            event = dataclasses.replace(event, started_round=self._start_rounds[0])
        return call(self, event)

    return around(LoopProber, "_on_entrance_ended", on_ended)


def inner_loops_do_not_hold_up_the_end_of_a_round() -> AbstractContextManager[None]:  # L35
    def init(call: Any, self: Any, *arguments: Any, **options: Any) -> None:
        call(self, *arguments, **options)
        self._has_inner = False

    return around(LoopProber, "__init__", init)


def a_loop_ends_before_its_last_round() -> AbstractContextManager[None]:  # L35
    def on_complete(call: Any, self: Any) -> Any:
        self._highest_round -= 1
        effects = call(self)
        self._highest_round += 1
        return effects

    return around(LoopProber, "_on_complete", on_complete)


def the_probe_goes_on_before_operators_hear_of_the_end_of_a_round() -> AbstractContextManager[None]:  # L35
    return around(ProbeAligner, "pass_on", lambda call, self, probe: list(reversed(call(self, probe))))


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (what_comes_back_is_not_logged, head_tests.test_records_are_logged_before_they_are_processed, ()),
    (a_log_takes_records_behind_the_sentinel, head_tests.test_each_channel_is_cut_at_its_own_sentinel, ()),
    (one_sentinel_seals_for_all_channels, head_tests.test_a_log_is_complete_with_the_last_sentinel, ()),
    (records_go_into_the_newest_log_only, head_tests.test_records_go_into_every_log_that_is_open_on_their_channel, ()),
    (a_log_is_sealed_when_the_barrier_has_gone_out, head_tests.test_a_sentinel_ends_the_log, ()),
    (
        a_later_sentinel_completes_the_log_of_a_skipped_checkpoint,
        head_tests.test_a_log_that_a_newer_sentinel_passes_is_dropped_and_declined,
        (),
    ),
    (a_log_is_opened_by_the_first_barrier, subtask_tests.test_feedback_is_never_aligned, ()),
    (
        what_is_behind_an_early_sentinel_overtakes_the_barrier,
        head_tests.test_a_channel_is_held_while_its_sentinel_is_early,
        (),
    ),
    (
        a_channel_stays_held_for_an_aborted_checkpoint,
        subtask_tests.test_an_abort_of_a_checkpoint_that_is_being_aligned_frees_the_held_channel,
        (),
    ),
    (a_held_channel_is_never_read_again, head_tests.test_a_channel_is_held_while_its_sentinel_is_early, ()),
    (an_aborted_checkpoint_keeps_its_log, head_tests.test_an_abort_drops_its_log_and_no_other, ()),
    (the_first_probe_may_end_a_loop, rounds_tests.test_an_empty_loop_ends_after_the_last_watermark_went_round, ()),
    (a_probe_that_comes_back_counts_as_a_batch, part_tests.test_every_probe_is_counted_anew, ()),
    (
        what_came_back_before_the_probe_is_not_counted,
        part_tests.test_a_head_counts_from_passing_a_probe_to_having_it_back_everywhere,
        (),
    ),
    (inner_heads_are_not_asked, rounds_tests.test_the_counts_of_all_heads_are_added, ()),
    (one_head_is_enough, rounds_tests.test_the_counts_of_all_heads_are_added, ()),
    (probes_begin_when_the_first_entrance_has_ended, rounds_tests.test_probes_start_when_nothing_enters_any_more, ()),
    (
        a_probe_is_passed_on_when_it_has_come_on_one_input,
        rounds_tests.test_a_probe_is_passed_on_when_it_has_come_on_every_channel,
        (),
    ),
    (
        a_head_reports_its_end_before_it_is_back,
        subtask_tests.test_a_head_has_finished_when_the_end_is_back_on_all_feedback_channels,
        (),
    ),
    (a_head_ends_when_its_regular_input_has, subtask_tests.test_a_head_does_not_end_with_its_regular_input, ()),
    (the_last_watermark_is_not_awaited, rounds_tests.test_what_the_last_watermark_set_free_goes_round_first, ()),
    (rounds_go_on_from_the_foremost_head, rounds_tests.test_rounds_go_on_from_the_lowest_that_any_head_was_in, ()),
    (
        inner_loops_do_not_hold_up_the_end_of_a_round,
        rounds_tests.test_a_round_with_a_loop_inside_ends_after_a_probe_that_found_that_empty,
        (),
    ),
    (a_loop_ends_before_its_last_round, rounds_tests.test_rounds_end_one_after_another_and_then_the_loop, ()),
    (
        the_probe_goes_on_before_operators_hear_of_the_end_of_a_round,
        part_tests.test_operators_see_the_end_of_a_round_before_the_probe_passes,
        (),
    ),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_named_test_of_the_machine_finds_it(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    test(*arguments)
    assert_caught(mutant, test, *arguments)
