"""Mutants of what unaligned checkpoints promise: what is recorded, held, given up, written and restored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from tests.api import test_possible_guarantees as api_tests
from tests.codec import test_log_entry as log_tests
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.checkpoints import test_coordinator as coordinator_tests
from tests.protocol.checkpoints import test_overtake as machine_tests
from tests.protocol.checkpoints import test_overtake_histories as history_tests
from tests.protocol.subtasks import test_subtask_overtaking as subtask_tests
from tests.runtime.checkpoints import test_in_flight as in_flight_tests
from tests.runtime.worker import test_late_inputs as input_tests
from tests.runtime.worker import test_overtaking_runner as runner_tests
from tests.sim.product.patching import around, both, skipped, without

from headgate.api.config import Checkpointing
from headgate.codec import log_entry
from headgate.codec.frames import BatchElement
from headgate.model.manifest import MANIFEST_VERSION
from headgate.model.options import Alignment, CheckpointOptions
from headgate.model.plan import Plan
from headgate.protocol.checkpoints import overtake
from headgate.protocol.checkpoints.align import BlockChannel, Decline, EmitCancel, UnblockChannels
from headgate.protocol.checkpoints.overtake import AllRecorded, DropRecording, Overtaker, RecordChannels
from headgate.protocol.checkpoints.triggering import Triggering
from headgate.protocol.subtasks.subtask import Subtask
from headgate.runtime.checkpoints import in_flight
from headgate.runtime.wire.channels import InputChannel
from headgate.runtime.worker.in_flight import InFlight
from headgate.runtime.worker.overtaking import Delays, Timing
from headgate.runtime.worker.subtask_runner import SubtaskRunner


def what_waits_is_not_recorded() -> AbstractContextManager[None]:  # UA7
    return skipped(InFlight, "record")


def what_is_behind_a_barrier_is_recorded_too() -> AbstractContextManager[None]:  # UA7
    def waiting(self: Any, checkpoint: Any) -> list[BatchElement]:
        return [element for element in self._queue if isinstance(element, BatchElement)]

    return patched(InputChannel, "waiting_before", waiting)


def channels_without_their_barrier_are_read_on() -> AbstractContextManager[None]:  # UA7
    return without(Overtaker, "_go_over", BlockChannel)


def channels_that_were_set_aside_stay_so() -> AbstractContextManager[None]:  # UA7
    return without(Overtaker, "_go_over", UnblockChannels)


def a_held_channel_is_not_read_again() -> AbstractContextManager[None]:  # UA7
    return without(Overtaker, "_record", UnblockChannels)


def a_barrier_that_arrives_late_records_nothing() -> AbstractContextManager[None]:  # UA7
    return without(Overtaker, "_record", RecordChannels)


def what_was_read_counts_as_waiting() -> AbstractContextManager[None]:  # UA7
    return around(Overtaker, "_go_over", lambda call, self, just_read=None: call(self))


def a_snapshot_is_written_before_all_is_recorded() -> AbstractContextManager[None]:  # UA8
    def go_over(call: Any, self: Any, just_read: Any = None) -> Any:
        effects = call(self, just_read)
        return effects if AllRecorded(self.current) in effects else [*effects, AllRecorded(self.current)]

    return around(Overtaker, "_go_over", go_over)


def a_barrier_that_overtook_is_like_any_other() -> AbstractContextManager[None]:  # UA6
    def note(call: Any, self: Any, channel: Any, checkpoint: Any, options: CheckpointOptions, *, is_read: bool) -> Any:
        if options.alignment is Alignment.OVERTAKING:
            options = replace(options, alignment=Alignment.TIMED)
        return call(self, channel, checkpoint, options, is_read=is_read)

    return around(Overtaker, "_note", note)


def each_subtask_waits_for_a_timeout_of_its_own() -> AbstractContextManager[None]:  # UA6
    return patched(Delays, "begun_ms", lambda self, checkpoint, now_ms: now_ms)


def a_barrier_that_takes_credit_has_no_time_left() -> AbstractContextManager[None]:  # UA20
    def deadline_of(self: Any, checkpoint: Any, overtaking: Any) -> int:
        begun_ms: int = self._delays.begun_ms(checkpoint, overtaking.clock_ms())
        return begun_ms + int(overtaking.timeout_ms)

    return patched(Timing, "_deadline_of", deadline_of)


def every_barrier_may_overtake() -> AbstractContextManager[None]:  # UA3
    def options(call: Any, self: Any, savepoint: Any) -> CheckpointOptions:
        found: CheckpointOptions = call(self, savepoint)
        return replace(found, alignment=Alignment.TIMED)

    return around(Triggering, "_options", options)


def downstream_gets_a_cancel_marker_behind_its_barrier() -> AbstractContextManager[None]:  # UA10
    def give_up(call: Any, self: Any, reason: Any) -> Any:
        effects = call(self, reason)
        dropped = [EmitCancel(effect.checkpoint) for effect in effects if isinstance(effect, DropRecording)]
        return [*effects, *dropped]

    return around(Overtaker, "_give_up", give_up)


def nobody_hears_of_a_dropped_recording() -> AbstractContextManager[None]:  # UA10
    return without(Overtaker, "_give_up", Decline)


def an_abort_leaves_channels_held() -> AbstractContextManager[None]:  # UA10
    return patched(Subtask, "recording", property(lambda self: None))


def the_sealed_output_of_a_dropped_recording_is_lost() -> AbstractContextManager[None]:  # UA10
    def drop(self: Any, checkpoint: Any) -> None:
        self._in_flight.drop()
        self._freezing.thawed().release()

    return patched(SubtaskRunner, "_drop_recording", drop)


def a_turn_goes_on_when_a_barrier_arrives() -> AbstractContextManager[None]:  # UA4
    return patched(Timing, "is_interrupted", property(lambda self: False))


def new_input_comes_before_what_was_restored() -> AbstractContextManager[None]:  # UA12
    def step(call: Any, self: Any) -> Any:
        with patched(InFlight, "is_replaying", property(lambda _: False)):
            did = call(self)
        return did or call(self)

    return around(SubtaskRunner, "_step_input", step)


def what_is_left_of_a_replay_is_in_no_snapshot() -> AbstractContextManager[None]:  # UA13
    return skipped(InFlight, "begin")


def everybody_gets_all_records_of_a_shuffle() -> AbstractContextManager[None]:  # UA14
    return patched(in_flight, "_mine", lambda batch, *_: batch)


def records_stay_with_the_number_of_their_subtask() -> AbstractContextManager[None]:  # UA14
    return around(in_flight._Heirs, "of", lambda call, self, index: index)


def any_pipeline_fits() -> AbstractContextManager[None]:  # UA16
    nobody = in_flight.EdgeName("", "", "", "", "", (), 0)
    return around(in_flight, "edge_names", lambda call, plan, schemas: [nobody for _ in schemas])


def edges_between_the_same_ends_are_one() -> AbstractContextManager[None]:  # UA16
    return patched(in_flight, "_section", lambda way: f"{way.name.from_node}/{way.channel.upstream.index}")


def parts_have_no_key_groups() -> AbstractContextManager[None]:  # UA17
    def write(call: Any, self: Any, target: Any) -> None:
        class Keyless:
            keys = None
            put = target.put

        call(self, Keyless())

    return around(in_flight.FrozenInFlight, "_write", write)


def parts_grow_with_what_is_in_flight() -> AbstractContextManager[None]:  # UA17
    return patched(in_flight, "_parts", lambda recorded: [[one] for one in recorded])


def an_older_headgate_reads_the_manifest() -> AbstractContextManager[None]:  # UA18
    return skipped(log_entry, "_version", MANIFEST_VERSION)


def overlapping_checkpoints_may_overtake() -> AbstractContextManager[None]:  # UA1
    return skipped(Checkpointing, "_alignment_timeout_ms", 0)


Test = Callable[..., object]


def every_channel_may_be_held() -> AbstractContextManager[None]:  # UA20
    def init(call: Any, self: Any, channels_count: int, *, is_immediate: bool, late: object) -> None:
        call(self, channels_count, is_immediate=is_immediate)

    return around(Overtaker, "__init__", init)


def one_barrier_that_takes_credit_is_enough() -> AbstractContextManager[None]:  # UA20
    def is_free(self: Any) -> bool:
        return not self._late or bool(self._late & (self._arrived | self._ended))

    return both(patched(Overtaker, "_is_free", property(is_free)), patched(Overtaker, "_check", lambda self: None))


def the_end_of_a_channel_is_no_barrier() -> AbstractContextManager[None]:  # UA20
    return patched(Overtaker, "_is_free", property(lambda self: self._late <= self._arrived))


def what_is_aligned_goes_on_as_one_that_overtook() -> AbstractContextManager[None]:  # UA20
    return patched(overtake, "_as_sent", lambda options: options)


def only_the_source_itself_takes_credit() -> AbstractContextManager[None]:  # UA20
    return patched(Plan, "behind", lambda self, vertex: frozenset())


CAUGHT: list[tuple[Mutant, Test, tuple[object, ...]]] = [
    (
        every_channel_may_be_held,
        machine_tests.test_nobody_goes_over_before_a_barrier_that_takes_credit_has_arrived,
        (),
    ),
    (every_channel_may_be_held, history_tests.test_a_source_gets_the_credit_that_its_barrier_takes, ()),
    (
        one_barrier_that_takes_credit_is_enough,
        machine_tests.test_the_timeout_runs_from_the_last_barrier_that_takes_credit,
        (),
    ),
    (
        the_end_of_a_channel_is_no_barrier,
        machine_tests.test_the_end_of_a_channel_stands_for_a_barrier_that_takes_credit,
        (),
    ),
    (
        what_is_aligned_goes_on_as_one_that_overtook,
        machine_tests.test_the_end_of_a_channel_stands_for_a_barrier_that_takes_credit,
        (),
    ),
    (
        only_the_source_itself_takes_credit,
        input_tests.test_a_barrier_takes_credit_wherever_such_a_source_is_in_front_of_it,
        (),
    ),
    (what_waits_is_not_recorded, runner_tests.test_a_timeout_snapshots_at_once_and_records_what_waits, ()),
    (
        what_is_behind_a_barrier_is_recorded_too,
        runner_tests.test_a_timeout_snapshots_at_once_and_records_what_waits,
        (),
    ),
    (
        channels_without_their_barrier_are_read_on,
        runner_tests.test_a_channel_without_its_barrier_is_not_read_until_it_comes,
        (),
    ),
    (channels_that_were_set_aside_stay_so, runner_tests.test_what_was_set_aside_has_nothing_in_flight, ()),
    (a_held_channel_is_not_read_again, machine_tests.test_a_channel_without_its_barrier_is_held_until_it_arrives, ()),
    (
        a_barrier_that_arrives_late_records_nothing,
        runner_tests.test_a_channel_without_its_barrier_is_not_read_until_it_comes,
        (),
    ),
    (
        what_was_read_counts_as_waiting,
        machine_tests.test_a_barrier_that_is_read_before_its_arrival_is_told_counts_once,
        (),
    ),
    (a_snapshot_is_written_before_all_is_recorded, runner_tests.test_nothing_is_written_before_all_is_recorded, ()),
    (each_subtask_waits_for_a_timeout_of_its_own, runner_tests.test_the_timeout_runs_from_the_trigger, ()),
    (
        a_barrier_that_takes_credit_has_no_time_left,
        runner_tests.test_a_barrier_that_takes_credit_has_all_of_the_timeout,
        (),
    ),
    (
        a_barrier_that_overtook_is_like_any_other,
        machine_tests.test_a_barrier_that_overtook_makes_the_next_one_go_over_at_once,
        (),
    ),
    (every_barrier_may_overtake, coordinator_tests.test_the_last_checkpoint_of_a_run_stays_aligned, ()),
    (
        downstream_gets_a_cancel_marker_behind_its_barrier,
        runner_tests.test_a_recording_that_is_given_up_is_declined,
        (),
    ),
    (nobody_hears_of_a_dropped_recording, machine_tests.test_a_newer_barrier_gives_up_what_is_being_recorded, ()),
    (an_abort_leaves_channels_held, subtask_tests.test_an_abort_of_what_is_recorded_drops_it_and_cancels_no_write, ()),
    (
        the_sealed_output_of_a_dropped_recording_is_lost,
        runner_tests.test_the_sealed_output_of_a_dropped_recording_goes_into_the_next_snapshot,
        (),
    ),
    (a_turn_goes_on_when_a_barrier_arrives, runner_tests.test_a_turn_ends_when_a_barrier_arrives, ()),
    (new_input_comes_before_what_was_restored, runner_tests.test_restored_records_come_before_anything_new, ()),
    (what_is_left_of_a_replay_is_in_no_snapshot, runner_tests.test_what_is_left_of_a_replay_is_recorded_again, ()),
    (
        everybody_gets_all_records_of_a_shuffle,
        in_flight_tests.test_every_recorded_row_is_replayed_once_whatever_the_parallelism,
        (2, 3),
    ),
    (
        records_stay_with_the_number_of_their_subtask,
        in_flight_tests.test_every_recorded_row_is_replayed_once_whatever_the_parallelism,
        (3, 2),
    ),
    (any_pipeline_fits, in_flight_tests.test_a_pipeline_without_the_edge_or_with_another_schema_is_refused, ()),
    (edges_between_the_same_ends_are_one, in_flight_tests.test_edges_between_the_same_ends_are_kept_apart, ()),
    (parts_have_no_key_groups, in_flight_tests.test_a_worker_is_sent_only_the_key_groups_that_it_may_own, ()),
    (
        parts_grow_with_what_is_in_flight,
        in_flight_tests.test_recorded_records_are_written_in_bounded_parts_and_counted,
        (),
    ),
    (
        an_older_headgate_reads_the_manifest,
        log_tests.test_a_manifest_with_records_in_flight_is_of_a_version_of_its_own,
        (),
    ),
    (
        overlapping_checkpoints_may_overtake,
        api_tests.test_an_alignment_timeout_needs_exactly_once_and_one_checkpoint_at_a_time,
        (),
    ),
]


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"), CAUGHT, ids=[f"{mutant.__name__}-{at}" for at, (mutant, _, _) in enumerate(CAUGHT)]
)
def test_a_mutant_of_what_overtakes_is_caught(mutant: Mutant, test: Test, arguments: tuple[object, ...]) -> None:
    assert_caught(mutant, test, *arguments)
