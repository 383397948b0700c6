"""Mutants of what one subtask decides: alignment, its own checkpoints, prepared output, event time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol import test_watermarks as watermark_tests
from tests.protocol.checkpoints import test_align as align_tests
from tests.protocol.checkpoints import test_commit as commit_tests
from tests.protocol.making import ch
from tests.protocol.subtasks import test_subtask as subtask_tests
from tests.sim.product.patching import around, skipped, without

from headgate.model.ids import ChannelIndex
from headgate.model.manifest import SnapshotPart
from headgate.protocol import watermarks
from headgate.protocol.checkpoints import align
from headgate.protocol.checkpoints.align import Aligner
from headgate.protocol.checkpoints.commit import Precommit
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks.subtask import Acknowledge, Decline, EndReceived, Subtask
from headgate.protocol.watermarks import WatermarkMerger

# -- alignment ------------------------------------------------------------------------------------------------------


@contextmanager
def records_behind_a_barrier_are_processed() -> Iterator[None]:  # A1
    with (
        without(Aligner, "handle", (align.BlockChannel, align.UnblockChannels)),
        patched(Aligner, "blocked", property(lambda self: frozenset[ChannelIndex]())),
    ):
        yield


def channels_stay_blocked_behind_the_snapshot() -> AbstractContextManager[None]:  # A2
    return without(Aligner, "handle", align.UnblockChannels)


def a_late_barrier_takes_the_snapshot_again() -> AbstractContextManager[None]:  # A3
    def on_barrier(call: Any, self: Any, event: Any) -> Any:
        if event.checkpoint == self._current and self._phase is align.Phase.FLOWING:
            self._enter(align.Phase.ALIGNING)
            return self._complete()
        return call(self, event)

    return around(Aligner, "_on_barrier", on_barrier)


def the_last_channel_is_not_waited_for() -> AbstractContextManager[None]:  # A2
    return around(Aligner, "_missing", lambda call, self: max(call(self) - (self._channels_count > 1), 1))


def nobody_downstream_learns_of_a_checkpoint_given_up() -> AbstractContextManager[None]:  # A5
    return without(Aligner, "handle", align.EmitCancel)


def an_abort_is_not_remembered() -> AbstractContextManager[None]:  # A8
    return skipped(Aligner, "_on_abort", [Ignored("forgotten")])


# -- checkpoints and the end of input -------------------------------------------------------------------------------


def an_abort_discards_prepared_output() -> AbstractContextManager[None]:  # T5
    def on_abort(call: Any, self: Any, event: Any) -> Any:
        self._precommit._pending.clear()
        return call(self, event)

    return around(Subtask, "_on_abort", on_abort)


def output_is_forgotten_once_it_is_acknowledged() -> AbstractContextManager[None]:  # K3
    def covered_by(call: Any, self: Any, checkpoint: Any) -> Any:
        found = call(self, checkpoint)
        self._pending.clear()
        return found

    return around(Precommit, "covered_by", covered_by)


def an_acknowledgement_carries_its_own_output_only() -> AbstractContextManager[None]:  # C16, K3
    def covered_by(call: Any, self: Any, checkpoint: Any) -> Any:
        return tuple(c for c in call(self, checkpoint) if c.checkpoint == checkpoint)

    return around(Precommit, "covered_by", covered_by)


def output_prepared_by_a_cancelled_write_is_forgotten() -> AbstractContextManager[None]:  # T5
    def on_written(call: Any, self: Any, event: Any) -> Any:
        return call(self, event) if event.checkpoint in self._writing else [Ignored("dropped")]

    return around(Subtask, "_on_written", on_written)


def restored_operators_finish_again() -> AbstractContextManager[None]:  # T8
    def init(call: Any, self: Any, channels: int, *, is_restored_finished: bool = False, **options: Any) -> None:
        call(self, channels, **options)

    return around(Subtask, "__init__", init)


def operators_that_went_on_do_not_finish_again() -> AbstractContextManager[None]:  # T10
    return skipped(Subtask, "_on_resumed", [Ignored("it has finished")])


def the_first_end_of_data_finishes() -> AbstractContextManager[None]:  # T6
    def on_end(call: Any, self: Any, event: Any) -> Any:
        return [Ignored("finished")] if self._is_finished else self._finish()

    return around(Subtask, "_on_end", on_end)


def a_write_that_failed_is_acknowledged() -> AbstractContextManager[None]:  # T3
    def on_failed(call: Any, self: Any, event: Any) -> Any:
        effects = call(self, event)
        if not isinstance(effects[-1], Decline):
            return effects
        covered = self._precommit.covered_by(event.checkpoint)
        return [Acknowledge(event.checkpoint, (SnapshotPart(0, 0, "", b""),), covered)]

    return around(Subtask, "_on_failed", on_failed)


# -- event time -----------------------------------------------------------------------------------------------------


def the_fastest_input_decides_about_event_time() -> AbstractContextManager[None]:  # W10
    def advance(call: Any, self: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(watermarks, "min", max, raising=False)
            return call(self)

    return around(WatermarkMerger, "_advance", advance)


def an_idle_channel_stops_event_time() -> AbstractContextManager[None]:  # W11
    def handle(call: Any, self: Any, event: Any) -> Any:
        return [] if isinstance(event, watermarks.IdleReceived) else call(self, event)

    return around(WatermarkMerger, "handle", handle)


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (records_behind_a_barrier_are_processed, align_tests.test_first_barrier_blocks_its_channel, ()),
    (channels_stay_blocked_behind_the_snapshot, align_tests.test_last_barrier_snapshots_then_emits_then_unblocks, ()),
    (a_late_barrier_takes_the_snapshot_again, align_tests.test_barrier_of_a_finished_checkpoint_is_ignored, ()),
    (the_last_channel_is_not_waited_for, align_tests.test_last_barrier_snapshots_then_emits_then_unblocks, ()),
    (
        nobody_downstream_learns_of_a_checkpoint_given_up,
        align_tests.test_cancel_of_the_current_checkpoint_unblocks_declines_and_is_forwarded_once,
        (),
    ),
    (an_abort_is_not_remembered, align_tests.test_barrier_of_an_aborted_checkpoint_becomes_a_cancel_marker, ()),
    (an_abort_discards_prepared_output, subtask_tests.test_an_abort_cancels_the_write_and_discards_nothing, ()),
    (
        output_is_forgotten_once_it_is_acknowledged,
        commit_tests.test_the_acknowledgement_of_a_checkpoint_carries_everything_up_to_it,
        (),
    ),
    (
        an_acknowledgement_carries_its_own_output_only,
        commit_tests.test_the_acknowledgement_of_a_checkpoint_carries_everything_up_to_it,
        (),
    ),
    (
        output_prepared_by_a_cancelled_write_is_forgotten,
        subtask_tests.test_output_prepared_for_an_aborted_checkpoint_travels_with_the_next,
        (),
    ),
    (
        restored_operators_finish_again,
        subtask_tests.test_operators_of_a_restored_finished_subtask_do_not_finish_again,
        (1, EndReceived(ch(0))),
    ),
    (
        operators_that_went_on_do_not_finish_again,
        subtask_tests.test_a_restored_finished_subtask_goes_on_when_more_input_comes,
        (1, EndReceived(ch(0))),
    ),
    (the_first_end_of_data_finishes, subtask_tests.test_operators_finish_once_when_the_last_input_has_ended, ()),
    (a_write_that_failed_is_acknowledged, subtask_tests.test_a_failed_write_declines, ()),
    (
        the_fastest_input_decides_about_event_time,
        watermark_tests.test_the_merged_watermark_is_the_least_of_the_channels,
        (),
    ),
    (an_idle_channel_stops_event_time, watermark_tests.test_an_idle_channel_does_not_hold_back, ()),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_named_test_of_the_machine_finds_it(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    test(*arguments)
    assert_caught(mutant, test, *arguments)
