"""Interprets the ``Coordinator`` of one generation, as ``runtime.driver.driver`` does.

Orders about storage and targets take time and may fail before or after they took effect. What is under way when the
generation ends still happens; only nobody hears of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from headgate.errors import FencedError, StorageError
from headgate.model.failure import FailureKind
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Claim, Manifest, SubtaskEntry
from headgate.protocol.checkpoints import coordinator as machine
from headgate.protocol.checkpoints.commit import Commit
from headgate.protocol.checkpoints.reasons import AbortReason
from headgate.protocol.machine import Ignored
from headgate.protocol.supervision.supervisor import AttemptId
from headgate.sim import history, network
from headgate.sim.faults import Fault
from headgate.sim.looptraffic import LoopTraffic
from headgate.sim.marks import Mark
from headgate.sim.storemodel import Undecidable
from headgate.sim.world import Process, Violation

if TYPE_CHECKING:
    from headgate.sim.claiming import Claimed
    from headgate.sim.driver import Driver
    from headgate.sim.env import Env


class GenerationHost:
    """The coordinator of one generation and everything it ordered."""

    def __init__(self, driver: Driver, claimed: Claimed, attempt: AttemptId) -> None:
        self.driver = driver
        self.env = driver.env
        self._claimed = claimed
        self.attempt = attempt
        self.generation = claimed.generation
        self._next_sequence = claimed.next_sequence
        self._lineage = claimed.lineage
        self._timers: dict[machine.Timer, int] = {}
        self._timer_token = 0
        self.is_over = False
        self.is_started = False
        self.loops = LoopTraffic(self, driver.plan)
        self._coordinator = machine.Coordinator(
            claimed.generation,
            driver.plan.subtasks(),
            self.env.options.checkpoints,
            claimed.first_checkpoint,
            claimed.retained,
        )

    @property
    def timers_count(self) -> int:
        """Timers that are armed."""
        return len(self._timers)

    def handle(self, event: machine.Event) -> None:
        """Give ``event`` to the coordinator and run its effects, in order; the driver may die between any two."""
        if self.is_over:
            return
        effects = self._coordinator.handle(event)
        if isinstance(event, machine.Acknowledged) and any(isinstance(e, machine.DeleteHandles) for e in effects):
            self.env.marks.reach(Mark.LATE_ACK_DELETED)
        self.driver.tell(f"coordinator g{self.generation} {short(event)} → {', '.join(short(e) for e in effects)}")
        for effect in effects:
            self.env.faults.crash_point(self.driver, Fault.DRIVER_CRASH)
            self._run(effect)

    def on_message(self, message: network.ToDriver) -> None:
        """Translate a worker's message."""
        if message.__class__ is network.Acked:
            assert isinstance(message, network.Acked)
            if message.generation != self.generation:
                self.env.marks.reach(Mark.STALE_ACK)
            self.handle(
                machine.Acknowledged(
                    message.generation,
                    message.checkpoint,
                    SubtaskEntry(message.subtask, message.handle, message.committables),
                )
            )
        elif isinstance(message, network.Declined):
            self.env.marks.reach(Mark.DECLINED)
            self.handle(machine.Declined(message.generation, message.subtask, message.checkpoint, message.reason))
        elif isinstance(message, network.FinishedInput):
            if not self.is_started:
                self.env.marks.reach(Mark.FINISHED_BEFORE_STARTED)
            self.handle(machine.FinishReported(message.generation, message.subtask))
        elif isinstance(message, network.EntranceEnded | network.ProbeReturned):
            self.loops.on_message(message)

    # -- effects ------------------------------------------------------------------------------------------------

    def _run(self, effect: machine.Effect) -> None:
        env, driver = self.env, self.driver
        match effect:
            case machine.ArmTimer():
                self._arm(effect.timer, effect.after_ms)
            case machine.CancelTimer():
                if env.rng.random() < 0.7:  # firing it anyway is harmless
                    self._timers.pop(effect.timer, None)
            case machine.ReserveId():
                driver.post(env.faults.delay_ms(5), self._reserve, effect.checkpoint)
            case machine.TriggerSources():
                env.note(history.Triggered(self.generation, effect.checkpoint))
                self.send_all(network.Trigger(self.generation, effect.checkpoint))
            case machine.DrainSources():
                self.send_all(network.Drain(self.generation))
            case machine.WriteManifest():
                oldest = self._coordinator.checkpoints.retention.oldest_with(effect.checkpoint)
                slow = 250 if env.faults.strikes(Fault.MANIFEST_SLOW) else 10
                driver.post(env.faults.delay_ms(slow), driver.interruptible, self._write_manifest, effect, oldest)
            case machine.NotifyComplete():
                self.send_all(network.Complete(self.generation, effect.checkpoint))
            case machine.NotifyAbort():
                self._mark_abort(effect)
                self.send_all(network.Abort(self.generation, effect.checkpoint))
            case machine.DeleteHandles():
                for handle in effect.handles:
                    env.disk.delete(handle.path)
            case machine.DropCheckpoint():
                self._drop(effect.checkpoint)
            case Commit():
                driver.post(env.faults.delay_ms(15), driver.interruptible, self._commit, effect)
            case machine.FailGeneration():
                if effect.failure.kind is FailureKind.REPLACED:
                    env.marks.reach(Mark.GENERATION_REPLACED)
                driver.post(0, driver.on_generation_failed, self.generation, effect.failure)
            case machine.GenerationDone():
                self._sweep()
                driver.post(0, driver.on_generation_done, self.generation, effect.is_final)
            case Ignored():
                if effect.reason == "duplicate acknowledgement":
                    env.marks.reach(Mark.DUPLICATE_ACK)

    def _mark_abort(self, effect: machine.NotifyAbort) -> None:
        marks = self.env.marks
        match effect.reason:
            case AbortReason.SUBSUMED:
                marks.reach(Mark.SUBSUMED)
            case AbortReason.EXPIRED:
                marks.reach(Mark.EXPIRED)
            case _:
                pass
        if self._coordinator.phase is machine.Phase.ENDING:
            marks.reach(Mark.FINAL_CHECKPOINT_FAILED)

    def _arm(self, timer: machine.Timer, after_ms: int) -> None:
        self._timer_token += 1
        self._timers[timer] = self._timer_token
        self.driver.post(after_ms, self._fire, timer, self._timer_token)
        limit = 40 + self.env.options.checkpoints.timeout_ms // 20  # some that were cancelled fire anyway
        self.env.level("coordinator timers", len(self._timers), limit)

    def _fire(self, timer: machine.Timer, token: int) -> None:
        if self._timers.get(timer) == token:
            del self._timers[timer]
            self.handle(machine.TimerFired(timer))

    def send_all(self, message: network.ToWorker) -> None:
        """Send ``message`` to every worker of this generation."""
        for link in self.driver.links_of(self.attempt):
            link.to_worker(message)

    # -- storage ------------------------------------------------------------------------------------------------

    def _reserve(self, checkpoint: CheckpointId) -> None:
        try:
            self.env.disk.reserve(checkpoint)
        except StorageError:
            self.handle(machine.ReserveFailed(checkpoint))
            return
        self.driver.look_later(True, self._look_after_reserve, checkpoint)

    def _look_after_reserve(self, checkpoint: CheckpointId) -> None:
        """Whoever claims looks at the ids afterwards, and this looks at the claims: no id is used twice (R42)."""
        try:
            newer = self.env.disk.newer_generation(self._next_sequence - 1, self.generation)
        except StorageError:
            self.handle(machine.ReserveFailed(checkpoint))
            return
        if newer is not None:
            self.env.marks.reach(Mark.ID_REFUSED)
            self.handle(machine.GenerationReplaced(newer))
            return
        self.handle(machine.IdReserved(checkpoint))

    def _write_manifest(self, order: machine.WriteManifest, oldest_retained: CheckpointId) -> None:
        env, disk = self.env, self.env.disk
        if order.carried:
            env.marks.reach(Mark.CARRIED)
        manifest = Manifest(
            checkpoint=order.checkpoint,
            generation=self.generation,
            parallelism=self.driver.plan.parallelism,
            max_parallelism=env.plan.max_parallelism,
            entries=order.entries,
            carried=order.carried,
            state_texts=env.plan.state_texts(),
            is_final=order.is_final,
            is_draining=order.is_draining,
        )
        manifest = self._lineage.placed(manifest, self._next_sequence, oldest_retained)
        if env.faults.strikes(Fault.MANIFEST_FAILS) or env.faults.is_storage_gone(env.world.now_ms):
            self.handle(machine.ManifestFailed(order.checkpoint))
            return
        if env.faults.strikes(Fault.MANIFEST_UNKNOWN):
            self._lose_answer(manifest)
            return
        try:
            is_written = disk.put_if_absent(self._next_sequence, manifest)
        except StorageError:
            self._look_up(manifest)
            return
        if is_written:
            self._after_append(manifest)
        else:
            self._on_conflict(manifest)

    def _look_up(self, manifest: Manifest) -> None:
        """It can be read, which does not prove that it is durable: put it again (O11)."""
        self.env.marks.reach(Mark.SYNC_FAILED)
        try:
            self.env.disk.put_if_absent(self._next_sequence, manifest)
        except StorageError:
            self.env.marks.reach(Mark.MANIFEST_UNKNOWN)
            self.handle(machine.ManifestUnknown(manifest.checkpoint))
            return
        self._on_conflict(manifest)

    def _lose_answer(self, manifest: Manifest) -> None:
        """The write reported an error: it took effect, did not, or will (X10)."""
        env, sequence = self.env, self._next_sequence
        fate = env.rng.randrange(4)
        if fate == 0:
            env.marks.reach(Mark.MANIFEST_LATE)
            env.world.at(env.rng.randint(1, 300), self._land, sequence, manifest)
        elif fate >= 2:
            with contextlib.suppress(StorageError):
                env.disk.put_if_absent(sequence, manifest)
        if fate == 3 and env.disk.log.get(sequence) is manifest:
            env.marks.reach(Mark.MANIFEST_READ_BACK)
            self._look_up(manifest)
            return
        env.marks.reach(Mark.MANIFEST_UNKNOWN)
        self.handle(machine.ManifestUnknown(manifest.checkpoint))

    def _land(self, sequence: int, manifest: Manifest) -> None:
        """A write that was given up reaches the storage after all: nobody looks behind it."""
        with contextlib.suppress(StorageError):
            self.env.disk.put_if_absent(sequence, manifest)

    def _after_append(self, manifest: Manifest) -> None:
        self.driver.look_later(self.env.disk.is_tail(self._next_sequence), self._look, manifest)

    def _look(self, manifest: Manifest) -> None:
        """Whether anything follows what was just put (X8)."""
        disk, sequence = self.env.disk, self._next_sequence
        try:
            newer = disk.newer_generation(sequence, self.generation)
        except StorageError:
            self.env.marks.reach(Mark.MANIFEST_UNKNOWN)
            self.handle(machine.ManifestUnknown(manifest.checkpoint))
            return
        if newer is None:
            self._on_written(manifest)
            return
        self.env.marks.reach(Mark.PRUNED_NUMBER)
        disk.take_back(sequence)
        self.handle(machine.GenerationReplaced(newer))

    def _on_written(self, manifest: Manifest) -> None:
        if self.loops.is_draining:
            self.env.marks.reach(Mark.COMPLETED_WHILE_DRAINING)
        if (self.generation, manifest.checkpoint) in self.env.logged_inside:
            self.env.marks.reach(Mark.COMPLETED_IN_INNER_LOOP)
        if (self.generation, manifest.checkpoint) in self.env.logged and self.env.faults.strikes(Fault.LOG_CRASH):
            self._crash_one()
        self.env.disk.write_hint(self._next_sequence)
        self._lineage = self._lineage.completed(manifest.checkpoint, self._next_sequence)
        self._next_sequence += 1
        self.handle(machine.ManifestWritten(manifest.checkpoint))

    def _on_conflict(self, manifest: Manifest) -> None:
        found = self.env.disk.log[self._next_sequence]
        if found == manifest:
            self._after_append(manifest)
            return
        newest = found.generation
        if newest <= self.generation:
            kind = "claim" if isinstance(found, Claim) else "manifest"
            raise Violation("I7", f"generation {self.generation} met the {kind} of generation {newest} in its way")
        self.handle(machine.GenerationReplaced(newest))

    def _crash_one(self) -> None:
        """Kill a worker or the driver soon: what the log of a loop holds, only a replay brings back."""
        victims: list[Process] = [*(link.worker for link in self.driver.links_of(self.attempt)), self.driver]
        victim = self.env.rng.choice(victims)
        self.env.world.at(self.env.rng.randint(0, 60), victim.kill, "after a checkpoint with a loop log")

    def _drop(self, checkpoint: CheckpointId) -> None:
        oldest = CheckpointId(checkpoint + 1)
        self._lineage = self._lineage.dropped(oldest)
        self.env.disk.drop(checkpoint, self._lineage.start(oldest, 0))

    def _sweep(self) -> None:
        """Remove what late writes of aborted checkpoints left: nothing else will, when no generation follows."""
        retained = self._coordinator.retained
        if retained:
            self.env.disk.sweep(retained, retained[-1])

    # -- targets ------------------------------------------------------------------------------------------------

    def _commit(self, order: Commit) -> None:
        """Commit sink by sink, checkpoint by checkpoint; anything may go wrong in between."""
        env, checkpoint = self.env, order.permit.checkpoint
        if len({c.checkpoint for c in order.committables}) > 1:
            env.marks.reach(Mark.SEVERAL_CHECKPOINTS_COMMITTED)
        try:
            commit_all(env, order, self._commit_point)
        except FencedError as error:
            env.marks.reach(Mark.COMMIT_REFUSED_FENCED)
            self.handle(machine.GenerationReplaced(Generation(error.newest)))
            return
        except Undecidable as error:  # K5
            env.marks.reach(Mark.TARGET_DENIED)
            self.driver.was_denied = self.driver.was_denied or not self.is_over
            self.handle(machine.CommitFailed(checkpoint, str(error), is_transient=False))
            return
        except StorageError as error:
            self.handle(machine.CommitFailed(checkpoint, str(error), is_transient=True))
            return
        self.handle(machine.CommitSucceeded(checkpoint))

    def _commit_point(self) -> None:
        self.env.faults.crash_point(self.driver, Fault.DRIVER_CRASH)


def commit_all(env: Env, order: Commit, point: Callable[[], None]) -> None:
    """Run a commit at its targets.

    Raises:
        StorageError: before or after it took effect.
        Undecidable: the target denies, though it should not.
        FencedError
    """
    for sink in sorted({c.sink for c in order.committables}):  # K19: all that the permit covers at once
        mine = sorted((c for c in order.committables if c.sink == sink), key=lambda c: (c.checkpoint, c.subtask_index))
        point()
        if env.faults.strikes(Fault.COMMIT_FAILS):
            raise StorageError("commit", sink, "injected before effect")
        if env.faults.strikes(Fault.TARGET_DENIES):
            raise Undecidable("injected")
        try:
            env.store.commit(sink, order.permit, mine)
        except Undecidable as error:
            raise Violation("I1", f"a completed checkpoint promised what cannot be committed: {error}") from error
        if env.faults.strikes(Fault.COMMIT_UNKNOWN):
            env.marks.reach(Mark.COMMIT_REPEATED_AFTER_UNKNOWN)
            raise StorageError("commit", sink, "injected after effect")


def short(thing: object) -> str:
    """Return a name for the story."""
    checkpoint = getattr(thing, "checkpoint", None)
    text = type(thing).__name__
    for name in ("subtask", "timer", "reason", "attempt", "worker", "phase"):
        value = getattr(thing, name, None)
        if value is not None:
            text += f" {type(value).__name__ if name == 'timer' else value}"
    return text if checkpoint is None else f"{text} {checkpoint}"
