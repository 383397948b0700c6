"""Mutants of what a worker does around its machines: positions, sentinels, the logs of loops, what is restored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.operators import test_timestamps as timestamp_tests
from tests.runtime.checkpoints import test_restoring as restoring_tests
from tests.runtime.driver import test_owning as owning_tests
from tests.runtime.wire import test_feedback as feedback_tests
from tests.runtime.worker import test_hooks as hook_tests
from tests.runtime.worker import test_loop_head_runner as head_tests
from tests.runtime.worker import test_loop_log as log_tests
from tests.runtime.worker import test_subtask_runner as runner_tests
from tests.runtime.worker import test_worker_turns as turn_tests
from tests.sim.product.patching import around

from headgate.codec.frames import Barrier, BatchElement, Probe
from headgate.model.failure import Failure, FailureKind
from headgate.protocol.subtasks import subtask as machine
from headgate.protocol.watermarks import WatermarkTracker
from headgate.runtime.checkpoints.restoring import RestoredSnapshots
from headgate.runtime.driver.lives import SinkOwners
from headgate.runtime.wire import feedback
from headgate.runtime.worker import loop_log
from headgate.runtime.worker.loop_head_runner import LoopHeadRunner
from headgate.runtime.worker.loop_log import LoopLog, SealedLog
from headgate.runtime.worker.outlets import EdgeOutlet
from headgate.runtime.worker.source_reading import SourceReading
from headgate.runtime.worker.subtask_runner import SubtaskRunner
from headgate.runtime.worker.worker import Worker, failure_of

# -- peers ----------------------------------------------------------------------------------------------------------


def a_peer_is_blamed_before_the_coordinator_is_heard() -> AbstractContextManager[None]:  # CN16
    def give_up(call: Any, self: Any, since_ms: int, lost: BaseException) -> None:
        raise lost

    return around(Worker, "_give_up_without", give_up)


# -- sources --------------------------------------------------------------------------------------------------------


def positions_are_those_of_the_next_read() -> AbstractContextManager[None]:  # N1
    def take(call: Any, self: Any, checkpoint: Any, **options: Any) -> None:
        if self._reading is not None:
            self._reading.source.reader.poll()
        call(self, checkpoint, **options)

    return around(SubtaskRunner, "_take_snapshot", take)


def a_drained_source_says_that_it_has_read_everything() -> AbstractContextManager[None]:  # E8
    def drain(call: Any, self: Any) -> None:
        while self._reading is not None and self._reading.source.reader.poll() is not None:
            pass
        call(self)

    return around(SubtaskRunner, "drain", drain)


def a_source_says_nothing_of_having_no_splits() -> AbstractContextManager[None]:  # W7
    def update(call: Any, self: Any, *also: Any) -> None:
        if self.source.reader.splits() or also:
            call(self, *also)

    return around(SourceReading, "_update_splits", update)


def a_source_has_no_splits_before_it_has_looked() -> AbstractContextManager[None]:  # W7
    def start(call: Any, self: Any) -> None:
        self._update_splits()
        call(self)

    return around(SourceReading, "start", start)


def a_split_goes_on_with_the_latest_time_of_any_other() -> AbstractContextManager[None]:  # W9
    def restore(call: Any, self: Any, latest_ms: Any, *others: Any) -> None:
        call(self, dict.fromkeys(latest_ms, max(latest_ms.values(), default=0)), *others)

    return around(WatermarkTracker, "restore", restore)


# -- whoever feeds back ---------------------------------------------------------------------------------------------


@contextmanager
def a_sentinel_goes_out_with_the_first_barrier() -> Iterator[None]:  # L8
    def note(call: Any, self: Any, checkpoint: Any) -> None:
        call(self, checkpoint)
        for outlet in self._outlets:
            if outlet.edge.is_feedback:
                outlet.send_element(Barrier(checkpoint))

    def emit(call: Any, self: Any, effect: Any) -> None:
        kept, self._outlets = self._outlets, [o for o in self._outlets if not o.edge.is_feedback]
        call(self, effect)
        self._outlets = kept

    with around(SubtaskRunner, "_note_barrier", note), around(SubtaskRunner, "_emit_barrier", emit):
        yield


@contextmanager
def a_sentinel_goes_out_behind_the_acknowledgement() -> Iterator[None]:  # L8
    def emit(call: Any, self: Any, effect: Any) -> None:
        kept, self._outlets = self._outlets, [o for o in self._outlets if not o.edge.is_feedback]
        call(self, effect)
        self._outlets = kept

    def run(call: Any, self: Any, effect: Any, text: str) -> None:
        call(self, effect, text)
        for outlet in self._outlets if isinstance(effect, machine.Acknowledge) else ():
            if outlet.edge.is_feedback:
                outlet.send_element(Barrier(effect.checkpoint))

    with around(SubtaskRunner, "_emit_barrier", emit), around(SubtaskRunner, "_run", run):
        yield


def feedback_waits_for_credit() -> AbstractContextManager[None]:  # L22
    return patched(feedback, "FEEDBACK_CREDIT_BYTES", 10)


def probes_do_not_pass_feedback_channels() -> AbstractContextManager[None]:  # L32
    def send(call: Any, self: Any, element: Any) -> None:
        if not (self.edge.is_feedback and isinstance(element, Probe)):
            call(self, element)

    return around(EdgeOutlet, "send_element", send)


# -- the logs of loops ----------------------------------------------------------------------------------------------


def a_record_is_logged_when_the_next_one_comes_back() -> AbstractContextManager[None]:  # L2
    waiting: dict[Any, Any] = {}

    def append(call: Any, self: Any, batch: Any, checkpoints: Any) -> None:
        if self in waiting:
            late, into = waiting.pop(self)
            call(self, late, [c for c in into if c in self._pending])
        waiting[self] = (batch, checkpoints)

    return around(LoopLog, "append", append)


def a_log_can_be_restored_once() -> AbstractContextManager[None]:  # L17
    seen: set[bytes] = set()

    def replay_of(call: Any, states: Any, *others: Any) -> Any:
        fresh = [state for state in states if bytes(state.payload) not in seen]
        seen.update(bytes(state.payload) for state in states)
        return call(fresh, *others)

    return around(log_tests, "replay_of", replay_of)


@contextmanager
def a_head_replays_the_log_that_was_written_last() -> Iterator[None]:  # L17
    last: list[bytes] = []

    def encode(call: Any, self: Any) -> Any:
        parts = call(self)
        last[:] = [b"".join(bytes(memoryview(part)) for part in parts)]
        return parts

    def replay_of(call: Any, states: Any, *others: Any) -> Any:
        return call([dataclasses.replace(state, source=memoryview(last[0])) for state in states], *others)

    with around(SealedLog, "_encode", encode), around(log_tests, "replay_of", replay_of):
        yield


def a_keyed_log_goes_to_one_head_after_a_rescale() -> AbstractContextManager[None]:  # L19
    def slice_(call: Any, chunk: Any, former: Any, owner: Any) -> tuple[int, int]:
        is_mine = former.subtask_index % owner.parallelism == owner.subtask_index
        return (0, chunk.rows) if is_mine else (0, 0)

    return around(loop_log, "_owned_slice", slice_)


def key_groups_without_records_are_left_out() -> AbstractContextManager[None]:  # L20
    def chunk(call: Any, self: Any, batches: Any) -> Any:
        made = call(self, batches)
        return dataclasses.replace(made, group_rows=made.group_rows[made.group_rows > 0])

    return around(SealedLog, "_chunk", chunk)


def an_abort_discards_what_came_back() -> AbstractContextManager[None]:  # L5
    def drop(call: Any, self: Any, checkpoint: Any) -> None:
        call(self, checkpoint)
        for channel in self._feedback:
            while len(channel) and isinstance(channel.poll(), BatchElement):
                pass

    return around(LoopHeadRunner, "_drop", drop)


# -- rounds and lives -----------------------------------------------------------------------------------------------


def _restored_without(**changes: int) -> AbstractContextManager[None]:
    def rounds(call: Any, self: Any, vertex: Any) -> Any:
        return dataclasses.replace(call(self, vertex), **changes)

    return around(RestoredSnapshots, "rounds", rounds)


def a_closed_round_is_not_in_the_snapshot() -> AbstractContextManager[None]:  # L36
    return _restored_without(closed=-1)


def a_started_round_is_not_in_the_snapshot() -> AbstractContextManager[None]:  # L36
    return _restored_without(started=-1, closed=-1)


def the_highest_round_is_not_in_the_snapshot() -> AbstractContextManager[None]:  # L36
    return _restored_without(highest=-1)


def targets_are_told_before_all_were_asked() -> AbstractContextManager[None]:  # LV2
    def ask(self: Any) -> Any:
        found = {}
        for name, sink in self._sinks.items():
            found[name] = sink.owner(self._pipeline, name)
            sink.own(self._pipeline, name, self._life)
        return found

    return patched(SinkOwners, "ask", ask)


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[object, ...]]] = [
    (
        a_source_says_nothing_of_having_no_splits,
        runner_tests.test_operators_hear_that_a_source_owns_no_split_once_it_has_looked,
        (),
    ),
    (
        a_source_has_no_splits_before_it_has_looked,
        runner_tests.test_nobody_is_without_splits_before_the_source_has_looked,
        (),
    ),
    (
        positions_are_those_of_the_next_read,
        runner_tests.test_the_position_in_a_snapshot_is_exactly_what_was_sent_before_its_barrier,
        (),
    ),
    (
        a_drained_source_says_that_it_has_read_everything,
        runner_tests.test_a_drained_source_ends_where_it_is_and_keeps_its_position,
        (),
    ),
    (
        a_split_goes_on_with_the_latest_time_of_any_other,
        timestamp_tests.test_the_times_of_splits_move_with_them_to_another_parallelism,
        (),
    ),
    (
        a_sentinel_goes_out_with_the_first_barrier,
        runner_tests.test_a_sentinel_goes_out_with_the_snapshot_and_before_it_is_acknowledged,
        (),
    ),
    (
        a_sentinel_goes_out_behind_the_acknowledgement,
        runner_tests.test_a_sentinel_goes_out_with_the_snapshot_and_before_it_is_acknowledged,
        (),
    ),
    (
        feedback_waits_for_credit,
        feedback_tests.test_a_sender_of_feedback_is_never_out_of_credit_and_never_overdrawn,
        (),
    ),
    (probes_do_not_pass_feedback_channels, runner_tests.test_a_probe_goes_back_in_line_with_records, ()),
    (
        a_record_is_logged_when_the_next_one_comes_back,
        log_tests.test_overlapping_checkpoints_share_one_copy_of_a_batch,
        (),
    ),
    (a_log_can_be_restored_once, log_tests.test_the_log_of_the_restored_checkpoint_is_replayed_at_every_restore, ()),
    (
        a_head_replays_the_log_that_was_written_last,
        log_tests.test_the_log_of_the_restored_checkpoint_is_replayed_at_every_restore,
        (),
    ),
    (
        a_keyed_log_goes_to_one_head_after_a_rescale,
        log_tests.test_at_another_parallelism_every_head_replays_the_keys_that_it_owns,
        (),
    ),
    (
        key_groups_without_records_are_left_out,
        log_tests.test_overlapping_checkpoints_share_one_copy_of_a_batch,
        (),
    ),
    (
        an_abort_discards_what_came_back,
        head_tests.test_what_was_to_be_logged_for_an_aborted_checkpoint_is_processed,
        (),
    ),
    (
        a_closed_round_is_not_in_the_snapshot,
        restoring_tests.test_after_a_rescale_rounds_go_on_from_the_lowest_round_of_any_head,
        (1,),
    ),
    (
        a_started_round_is_not_in_the_snapshot,
        restoring_tests.test_after_a_rescale_rounds_go_on_from_the_lowest_round_of_any_head,
        (1,),
    ),
    (
        the_highest_round_is_not_in_the_snapshot,
        restoring_tests.test_after_a_rescale_rounds_go_on_from_the_lowest_round_of_any_head,
        (1,),
    ),
    (
        a_peer_is_blamed_before_the_coordinator_is_heard,
        turn_tests.test_a_worker_that_had_no_turn_reads_why_its_peer_left_before_it_gives_up,
        (True,),
    ),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_named_test_of_the_worker_finds_it(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    test(*arguments)
    assert_caught(mutant, test, *arguments)


@pytest.mark.parametrize("kind", owning_tests.KINDS)
def test_telling_targets_too_early_is_found(tmp_path: Path, kind: Any) -> None:
    test = owning_tests.test_nobody_is_told_and_nothing_claimed_when_one_target_belongs_to_somebody_else
    for place in ("sound", "mutant"):
        (tmp_path / place).mkdir()
    test(tmp_path / "sound", kind)
    assert_caught(targets_are_told_before_all_were_asked, test, tmp_path / "mutant", kind)


# -- what is whose fault --------------------------------------------------------------------------------------------


def an_outage_is_a_failure_of_user_code() -> AbstractContextManager[None]:  # G25
    return patched(hook_tests, "failure_of", _blaming)


def _blaming(error: BaseException) -> Failure:
    return dataclasses.replace(failure_of(error), kind=FailureKind.USER_CODE)


def test_who_is_to_blame_for_an_outage_is_told() -> None:
    test = hook_tests.test_storage_that_is_gone_for_a_while_is_no_failure_of_user_code
    assert_caught(an_outage_is_a_failure_of_user_code, test)
