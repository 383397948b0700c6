"""Bugs that the simulator found, kept as scenarios, because seeds rot when code changes."""

from __future__ import annotations

from headgate.model.config import FixedDelay
from headgate.model.ids import CheckpointId, Generation, WorkerIndex
from headgate.model.manifest import StateHandle
from headgate.protocol.subtasks import subtask
from headgate.protocol.supervision import supervisor as machine
from headgate.protocol.supervision.supervisor import AttemptId, Supervisor
from headgate.sim.run import run_seed

FIRST, RETRY = AttemptId(1, 0), AttemptId(1, 1)


def running(workers: int = 2) -> Supervisor:
    """A supervisor whose generation 1 runs on the first attempt."""
    supervisor = Supervisor(workers, FixedDelay(None, 10))
    supervisor.handle(machine.Begin())
    supervisor.handle(machine.GenerationReady(Generation(1)))
    for index in range(workers):
        supervisor.handle(machine.WorkerRegistered(FIRST, WorkerIndex(index)))
    for index in range(workers):
        supervisor.handle(machine.WorkerReady(Generation(1), WorkerIndex(index)))
    assert supervisor.phase is machine.Phase.RUNNING
    return supervisor


def lost(attempt: AttemptId, index: int = 0) -> machine.WorkerLost:
    return machine.WorkerLost(attempt, WorkerIndex(index), "process died", 0, 0.5)


def test_a_retry_that_registers_first_does_not_hide_the_loss_of_the_deployed_worker() -> None:  # G4
    supervisor = running()
    supervisor.handle(machine.WorkerRegistered(RETRY, WorkerIndex(0)))
    effects = supervisor.handle(lost(FIRST))
    assert machine.EndGeneration(Generation(1), is_done=False) in effects
    assert supervisor.phase is machine.Phase.BACKOFF


def test_a_retry_that_registered_early_serves_the_next_generation() -> None:  # G4, G5
    supervisor = running()
    for index in (0, 1):
        supervisor.handle(machine.WorkerRegistered(RETRY, WorkerIndex(index)))
    supervisor.handle(lost(FIRST))
    effects = supervisor.handle(machine.TimerFired(machine.RestartTimer(), 10, 0.5))
    assert machine.ClaimGeneration() in effects
    assert supervisor.handle(machine.GenerationReady(Generation(2))) == [machine.Deploy(Generation(2), RETRY)]


def test_the_loss_of_a_waiting_retry_does_not_end_the_running_generation() -> None:  # G4
    supervisor = running()
    supervisor.handle(machine.WorkerRegistered(RETRY, WorkerIndex(0)))
    supervisor.handle(lost(RETRY))
    assert supervisor.phase is machine.Phase.RUNNING


def test_a_retry_that_waits_when_all_is_done_is_sent_away() -> None:  # G11
    supervisor = running(1)
    supervisor.handle(machine.WorkerRegistered(RETRY, WorkerIndex(0)))
    effects = supervisor.handle(machine.GenerationDone(Generation(1), is_final=True))
    assert machine.RefuseWorker(RETRY, WorkerIndex(0)) in effects


def test_the_file_of_a_snapshot_that_was_written_too_late_is_reported() -> None:  # C10
    source = subtask.Subtask(0)
    source.handle(subtask.TriggerReceived(CheckpointId(1)))
    source.handle(subtask.AbortReceived(CheckpointId(1)))
    handle = StateHandle(1, 1, "chk-0000000001/s-0.g1")
    effects = source.handle(subtask.SnapshotWritten(CheckpointId(1), handle))
    assert effects == [subtask.Acknowledge(CheckpointId(1), handle, ())]


def test_a_driver_stopped_during_its_claim_does_not_report_damage() -> None:  # X11
    assert run_seed(3134, loops=False).violation is None


def test_operators_of_a_keyed_loop_that_were_finished_in_some_subtasks_only_do_not_emit_their_rest_twice() -> None:
    # R17: the driver ends the heads of a loop, some before a barrier and some behind it; then another parallelism
    assert run_seed(334, loops=True).violation is None


def test_a_zombie_that_is_told_of_the_end_of_its_loop_meets_the_fence_and_leaves() -> None:
    assert run_seed(7026, loops=True).violation is None
