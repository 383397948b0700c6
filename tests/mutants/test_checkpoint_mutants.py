"""Planted bugs of barriers, checkpoints, hooks and markers, and what is restored of them.

Each is a patch of the product, a run of the simulator, and a seed that finds it.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
from tests.conftest import few
from tests.mutants.harness import Mutant, around, patched, skipped
from tests.mutants.seeds import Finder, assert_found, found_by, plain

from headgate.codec import messages
from headgate.codec.frames import Barrier, BatchElement
from headgate.errors import StorageError
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest
from headgate.operators.loop_head import LoopHeadOperator
from headgate.operators.process import row_process
from headgate.protocol.checkpoints import completion
from headgate.protocol.checkpoints.checkpoint_requests import Requests
from headgate.protocol.checkpoints.coordinator_events import AnswerRequest
from headgate.protocol.checkpoints.retention import FileRetention
from headgate.protocol.subtasks.alignment import BarrierTracker, ReadAhead
from headgate.protocol.subtasks.externally_induced import InducedCut
from headgate.protocol.supervision import restart_policy
from headgate.runtime.checkpoints.snapshot_files import SnapshotFiles
from headgate.runtime.checkpoints.snapshot_writer import SubtaskTarget
from headgate.runtime.driver.coordinator_host import RoundCallbacks
from headgate.runtime.driver.hook_calls import HookCalls
from headgate.runtime.driver.supervisor_host import LiveGeneration
from headgate.runtime.wire.channels import InputChannel
from headgate.runtime.wire.exchange import Exchange
from headgate.runtime.worker.chain import EdgeOutlet
from headgate.runtime.worker.loop_head import LoopLog
from headgate.runtime.worker.unaligned import ChannelRecorder
from headgate.sim.machine.storage import SimStorage


def a_channel_set_aside_is_read() -> AbstractContextManager[None]:
    return patched(InputChannel, "block", lambda self: None)


def a_channel_that_was_set_aside_stays_so() -> AbstractContextManager[None]:
    return skipped(InputChannel, "unblock")


def a_barrier_goes_out_on_one_channel_only() -> AbstractContextManager[None]:
    def send(call: Any, self: Any, element: Any) -> None:
        if isinstance(element, Barrier):
            self._channels[0].send(element)
        else:
            call(self, element)

    return around(EdgeOutlet, "send_element", send)


def the_log_is_overwritten() -> AbstractContextManager[None]:
    def put(original: Any, self: Any, path: str, parts: Any) -> None:
        (self.put if "/log/" in path else lambda *a: original(self, *a))(path, parts)

    return around(SimStorage, "put_if_absent", put)


def a_snapshot_that_was_not_stored_counts() -> AbstractContextManager[None]:
    def write(call: Any, self: Any) -> None:
        with contextlib.suppress(StorageError):
            call(self)

    return around(SubtaskTarget, "_write_file", write)


def too_much_is_dropped() -> AbstractContextManager[None]:
    return around(SnapshotFiles, "drop", lambda call, self, checkpoint: call(self, CheckpointId(checkpoint + 1)))


def the_restored_checkpoint_is_swept() -> AbstractContextManager[None]:
    return around(FileRetention, "narrowed", lambda call, self, retained: call(self, ()))


def who_finishes_early_is_not_heard() -> AbstractContextManager[None]:
    def report(call: Any, self: Any, message: Any) -> None:
        if self.is_started or not isinstance(message, messages.Finished):
            call(self, message)

    return around(LiveGeneration, "on_report", report)


def a_worker_leaves_its_connections_open() -> AbstractContextManager[None]:
    return skipped(Exchange, "close")


def what_waits_is_not_recorded() -> AbstractContextManager[None]:  # UA7
    return skipped(ChannelRecorder, "record")


def what_is_behind_a_barrier_is_recorded_too() -> AbstractContextManager[None]:  # UA7
    def waiting(self: Any, checkpoint: Any) -> list[BatchElement]:
        return [element for element in self._queue if isinstance(element, BatchElement)]

    return patched(InputChannel, "waiting_before", waiting)


def the_first_barrier_completes() -> AbstractContextManager[None]:  # GM11
    return skipped(BarrierTracker, "_is_complete", True)


def what_is_read_is_processed_at_once() -> AbstractContextManager[None]:  # GM30
    return patched(ReadAhead, "may_take", property(lambda self: self.held > 0))


def positions_are_in_front_of_what_is_held() -> AbstractContextManager[None]:
    return around(ReadAhead, "cut", lambda call, self, *a, **options: call(self, *a, **options) and False)


def a_hook_goes_back_to_an_id_of_which_it_never_heard() -> AbstractContextManager[None]:
    return patched(Manifest, "hooks_as_called", lambda self: self.hooks)


def any_marker_cuts_the_oldest_checkpoint() -> AbstractContextManager[None]:  # EI23
    def met(call: Any, self: Any, split: str, checkpoint: Any) -> Any:
        return call(self, split, min(self._announced, default=checkpoint))

    return around(InducedCut, "met", met)


def hooks_are_not_awaited() -> AbstractContextManager[None]:  # EI4
    def is_full(self: Any, checkpoint: Any) -> bool:
        return len(self._pending[checkpoint].acks) == len(self._participants)

    return patched(completion.PendingCheckpoints, "is_full", is_full)


def hooks_get_the_data_of_no_checkpoint() -> AbstractContextManager[None]:
    def begin(call: Any, self: Any, pipeline: Any, generation: Any, restored: Any) -> None:
        call(self, pipeline, generation, None if restored is None else replace(restored, hooks=()))

    return around(HookCalls, "begin", begin)


def splits_are_not_read_on_behind_an_abort() -> AbstractContextManager[None]:  # EI27
    def aborted(call: Any, self: Any, checkpoint: Any) -> list[Any]:
        call(self, checkpoint)
        return []

    return around(InducedCut, "aborted", aborted)


def what_was_given_up_is_told_as_completed() -> AbstractContextManager[None]:  # C61
    def failed(call: Any, self: Any, checkpoint: Any, reason: str) -> Any:
        return [AnswerRequest(effect.request, checkpoint) for effect in call(self, checkpoint, reason)]

    return around(Requests, "failed", failed)


def every_failure_is_restarted() -> AbstractContextManager[None]:  # R2
    return patched(restart_policy, "StayDown", lambda reason: restart_policy.RestartAfter(20))


def users_are_told_of_every_other_round() -> AbstractContextManager[None]:
    def submit(call: Any, self: Any, loop: Any, callback: Any, round_: int) -> None:
        if round_ % 2 == 0:
            call(self, loop, callback, round_)

    return around(RoundCallbacks, "submit", submit)


def loops_log_nothing() -> AbstractContextManager[None]:
    return patched(LoopLog, "append", lambda self, batch, checkpoints: None)


def a_record_is_logged_twice() -> AbstractContextManager[None]:
    return around(LoopLog, "append", lambda call, self, batch, pending: call(self, batch, [*completion, *completion]))


def functions_forget_their_state_at_a_round() -> AbstractContextManager[None]:
    return skipped(row_process.ProcessOperator, "on_round")


def no_sentinels() -> AbstractContextManager[None]:
    def send(call: Any, self: Any, element: Any) -> None:
        if not (self.edge.is_feedback and isinstance(element, Barrier)):
            call(self, element)

    return around(EdgeOutlet, "send_element", send)


def what_comes_back_keeps_its_round() -> AbstractContextManager[None]:
    return patched(LoopHeadOperator, "returning", lambda self, batch: (batch, self.highest_round(batch)))


MUTANTS: list[tuple[Mutant, Finder, int]] = [
    (a_channel_set_aside_is_read, plain, 11),
    (a_channel_that_was_set_aside_stays_so, plain, 6),
    (a_barrier_goes_out_on_one_channel_only, plain, 0),
    (the_log_is_overwritten, plain, 26),
    (a_snapshot_that_was_not_stored_counts, plain, 10),
    (too_much_is_dropped, plain, 0),
    (the_restored_checkpoint_is_swept, plain, 0),
    (who_finishes_early_is_not_heard, plain, 48),
    (a_worker_leaves_its_connections_open, plain, 56),
    (what_waits_is_not_recorded, found_by("unaligned"), 2),
    (what_is_behind_a_barrier_is_recorded_too, found_by("unaligned"), 37),
    (the_first_barrier_completes, found_by("guarantees"), 4),
    (what_is_read_is_processed_at_once, found_by("guarantees"), 3),
    (positions_are_in_front_of_what_is_held, found_by("induced-modes"), 0),
    (a_hook_goes_back_to_an_id_of_which_it_never_heard, found_by("induced-modes"), 1),
    (any_marker_cuts_the_oldest_checkpoint, found_by("induced"), 0),
    (hooks_are_not_awaited, found_by("induced"), 1),
    (hooks_get_the_data_of_no_checkpoint, found_by("induced"), 1),
    (splits_are_not_read_on_behind_an_abort, found_by("induced"), 3),
    (what_was_given_up_is_told_as_completed, found_by("checkpoint-requests"), 10),
    (every_failure_is_restarted, found_by("checkpoint-requests"), 1),
    (users_are_told_of_every_other_round, plain, 17),
    (loops_log_nothing, plain, 9),
    (a_record_is_logged_twice, plain, 9),
    (functions_forget_their_state_at_a_round, plain, 4),
    (no_sentinels, plain, 62),
    (what_comes_back_keeps_its_round, plain, 4),
]


@pytest.mark.parametrize(("mutant", "run", "seed"), few(MUTANTS, 9), ids=[mutant.__name__ for mutant, _, _ in MUTANTS])
def test_a_planted_bug_of_checkpoints_is_found(mutant: Mutant, run: Finder, seed: int) -> None:
    assert_found(mutant, run, seed)
