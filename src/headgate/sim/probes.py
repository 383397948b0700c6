"""Smallest scenarios for rules whose violation a time-out or a repetition makes good again in a whole run."""

from __future__ import annotations

from headgate.model.config import CheckpointConfig, FixedDelay
from headgate.model.ids import ChannelIndex, CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Manifest, StateHandle, SubtaskEntry
from headgate.protocol import watermarks
from headgate.protocol.checkpoints import align, coordinator, recovery
from headgate.protocol.checkpoints.reasons import AbortReason
from headgate.protocol.subtasks import subtask as subtasks
from headgate.protocol.supervision.restart import GiveUp, RestartPolicy

HANDLE = StateHandle(0, 0, "", b"")
SUBTASKS = (SubtaskId(VertexId("v"), 0), SubtaskId(VertexId("v"), 1))
ONE, TWO = CheckpointId(1), CheckpointId(2)


def cancel_is_forwarded() -> None:
    """A5: an abandoned checkpoint is cancelled downstream."""
    aligner = align.Aligner(2)
    aligner.handle(align.BarrierReceived(ChannelIndex(0), ONE))
    assert align.EmitCancel(ONE) in aligner.handle(align.CancelReceived(ChannelIndex(1), ONE))


def abort_is_remembered() -> None:
    """A8: no snapshot of a checkpoint that was aborted before its barrier came."""
    aligner = align.Aligner(1)
    aligner.handle(align.AbortReceived(ONE))
    effects = aligner.handle(align.BarrierReceived(ChannelIndex(0), ONE))
    assert not any(isinstance(e, align.TakeSnapshot) for e in effects)


def generation_is_checked() -> None:
    """C9: an acknowledgement of an older generation completes nothing and deletes nothing."""
    machine = _running(CheckpointConfig())
    old = Generation(1)
    for subtask in SUBTASKS:
        effects = machine.handle(coordinator.Acknowledged(old, ONE, SubtaskEntry(subtask, StateHandle(1, 1, "path"))))
        assert not any(isinstance(e, coordinator.WriteManifest | coordinator.DeleteHandles) for e in effects)
    assert machine.missing(ONE) == SUBTASKS


def decline_aborts() -> None:
    """A declined checkpoint is aborted at once."""
    machine = _running(CheckpointConfig(tolerable_failures=5))
    machine.handle(coordinator.Declined(Generation(2), SUBTASKS[0], ONE, AbortReason.SNAPSHOT_FAILED))
    assert not machine.pending


def drain_is_remembered() -> None:
    """E7: a drain before every participant runs is carried out when they do."""
    machine = coordinator.Coordinator(Generation(2), SUBTASKS, CheckpointConfig(), ONE)
    machine.handle(coordinator.DrainRequested())
    assert coordinator.DrainSources() in machine.handle(coordinator.Started(1))


def drain_is_marked() -> None:
    """E9: a checkpoint that began after the sources were told to end says so."""
    machine = coordinator.Coordinator(Generation(2), SUBTASKS, CheckpointConfig(), ONE)
    for event in (coordinator.Started(1), coordinator.DrainRequested()):
        machine.handle(event)
    _trigger(machine, ONE)
    effects = []
    for subtask in SUBTASKS:
        effects += machine.handle(coordinator.Acknowledged(Generation(2), ONE, SubtaskEntry(subtask, HANDLE)))
    assert [e.is_draining for e in effects if isinstance(e, coordinator.WriteManifest)] == [True]


def restored_operators_do_not_finish_again() -> None:
    """T8: operators that had finished do not finish again, unless there is more input."""
    machine = subtasks.Subtask(1, is_restored_finished=True)
    assert subtasks.FinishOperators() not in machine.handle(subtasks.EndReceived(ChannelIndex(0)))


def resumed_operators_finish() -> None:
    """T10: what operators hold of the input that came after their end is emitted at the next end."""
    machine = subtasks.Subtask(1, is_restored_finished=True)
    machine.handle(subtasks.InputResumed())
    assert subtasks.FinishOperators() in machine.handle(subtasks.EndReceived(ChannelIndex(0)))


def success_resets() -> None:
    """C22: only failures in a row count."""
    machine = _running(CheckpointConfig(tolerable_failures=1))
    machine.handle(coordinator.Declined(Generation(2), SUBTASKS[0], ONE, AbortReason.SNAPSHOT_FAILED))
    _trigger(machine, TWO)
    for subtask in SUBTASKS:
        machine.handle(coordinator.Acknowledged(Generation(2), TWO, SubtaskEntry(subtask, HANDLE)))
    machine.handle(coordinator.ManifestWritten(TWO))
    three = CheckpointId(3)
    _trigger(machine, three)
    declined = coordinator.Declined(Generation(2), SUBTASKS[0], three, AbortReason.SNAPSHOT_FAILED)
    effects = machine.handle(declined)
    assert not any(isinstance(e, coordinator.FailGeneration) for e in effects)


def restarts_are_limited() -> None:
    """C40: the third failure is one too many when two restarts are allowed."""
    policy = RestartPolicy(FixedDelay(2, 10))
    decisions = [policy.on_failure(at, 0.5) for at in (0, 100, 200)]
    assert isinstance(decisions[-1], GiveUp)


def idle_does_not_hold_back() -> None:
    """W11: an idle channel does not stop event time."""
    merger = watermarks.WatermarkMerger(2)
    merger.handle(watermarks.WatermarkReceived(ChannelIndex(0), 5))
    assert merger.handle(watermarks.IdleReceived(ChannelIndex(1), True)) == [watermarks.EmitWatermark(5)]


def ids_are_not_reused() -> None:
    """R7: an id that was reserved is used up, completed or not."""
    log = recovery.ObservedLog((), CheckpointId(5))
    assert recovery.first_checkpoint(log, CheckpointId(0)) == 6
    assert recovery.first_checkpoint(log, CheckpointId(7)) == 8


def what_was_left_is_passed() -> None:
    """R41: a manifest at a number that was pruned is no candidate."""
    left, newest = (
        Manifest(CheckpointId(9), Generation(1), 1, 8, (), follows=0, log_start=2),
        Manifest(CheckpointId(7), Generation(2), 1, 8, (), follows=6, log_start=7),
    )
    entries = tuple(recovery.ObservedEntry(at, f"log/{at}", m) for at, m in ((2, left), (7, newest)))
    log = recovery.ObservedLog(entries, CheckpointId(9))
    assert recovery.candidates(log) == (newest,)
    assert log.lost() == ()


def a_manifest_tells_who_was_replaced() -> None:
    """R40: the heir has pruned its claim; what it completed says that it was there."""
    manifest = Manifest(CheckpointId(7), Generation(2), 1, 8, (), follows=6, log_start=7)
    log = recovery.ObservedLog((recovery.ObservedEntry(7, "log/7", manifest),), CheckpointId(7))
    assert recovery.replaced_by(log, Generation(1), "sleeper") == 2
    assert recovery.replaced_by(log, Generation(2), "heir") is None


def _running(config: CheckpointConfig) -> coordinator.Coordinator:
    """A coordinator of generation 2 whose checkpoint 1 is pending."""
    machine = coordinator.Coordinator(Generation(2), SUBTASKS, config, ONE)
    machine.handle(coordinator.Started(0))
    _trigger(machine, ONE)
    return machine


def _trigger(machine: coordinator.Coordinator, checkpoint: CheckpointId) -> None:
    machine.handle(coordinator.CheckpointRequested())
    machine.handle(coordinator.IdReserved(checkpoint))
