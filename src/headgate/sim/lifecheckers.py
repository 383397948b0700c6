"""Checkers of checkpoints, generations, event time and leaks (I4, I6–I8, I10). Those of output are in ``checkers``."""

from __future__ import annotations

from dataclasses import replace

from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import StateHandle
from headgate.model.plan import Plan
from headgate.sim import history
from headgate.sim.history import HistoryEvent
from headgate.sim.world import Violation


class NewestSound:
    """I4: a generation starts from the newest completed checkpoint; only injected damage may make it an older one."""

    def __init__(self) -> None:
        self._completed: list[CheckpointId] = []
        self._damaged: set[CheckpointId] = set()
        self._passed: set[CheckpointId] = set()

    def observe(self, event: HistoryEvent) -> None:
        """Recompute each choice."""
        match event:
            case history.ManifestAppended():
                self._completed.append(event.manifest.checkpoint)
            case history.Damage():
                if event.what == "repaired":
                    self._damaged.discard(event.checkpoint)
                else:
                    self._damaged.add(event.checkpoint)
            case history.Chosen():
                self._judge(event)
            case _:
                pass

    def _judge(self, event: history.Chosen) -> None:
        whole = [c for c in self._completed if c not in self._damaged]
        newest = max(whole, default=None)
        if newest is not None and newest not in event.available:
            raise Violation("I4", f"checkpoint {newest} was completed, nothing damaged it, and it is not whole")
        if event.checkpoint != newest:
            raise Violation("I4", f"generation {event.generation} starts from {event.checkpoint}, not from {newest}")
        if event.checkpoint is None and self._completed:
            raise Violation("I4", f"generation {event.generation} starts empty after completed checkpoints")

    def at_end(self) -> None:
        """Nothing to add."""


class WholeCheckpoints:
    """C7–C9, C12: a manifest holds one snapshot of every subtask, written for it by its own generation."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._parallelism: dict[Generation, int] = {}
        self._wrote: dict[tuple[Generation, SubtaskId, CheckpointId], set[StateHandle]] = {}

    def observe(self, event: HistoryEvent) -> None:
        """Compare a manifest with the snapshots that were written."""
        if isinstance(event, history.SnapshotWrote):
            key = (event.generation, event.subtask, event.checkpoint)
            self._wrote.setdefault(key, set()).add(event.handle)
        if isinstance(event, history.Deployed):
            self._parallelism[event.generation] = event.parallelism
        if not isinstance(event, history.ManifestAppended):
            return
        manifest = event.manifest
        parallelism = self._parallelism.get(manifest.generation, self._plan.parallelism)
        subtasks = replace(self._plan, parallelism=parallelism).subtasks()
        if manifest.parallelism != parallelism or tuple(e.subtask for e in manifest.entries) != subtasks:
            raise Violation("I4", f"the manifest of {manifest.checkpoint} does not list every subtask once")
        for entry in manifest.entries:
            if entry.handle not in self._wrote.get((manifest.generation, entry.subtask, manifest.checkpoint), ()):
                raise Violation(
                    "I8",
                    f"checkpoint {manifest.checkpoint} of generation {manifest.generation} contains a snapshot of "
                    f"{entry.subtask} that was not written for it",
                )

    def at_end(self) -> None:
        """Nothing to add."""


class Monotone:
    """I7: ids, generations, sequences and watermarks never go back, and each subtask passes each barrier once."""

    def __init__(self) -> None:
        self._sequence = 0
        self._generation = Generation(0)
        self._completed = CheckpointId(0)
        self._triggered: dict[Generation, CheckpointId] = {}
        self._users: dict[CheckpointId, Generation] = {}
        self._passed: dict[tuple[Generation, SubtaskId], CheckpointId] = {}
        self._cancelled: dict[tuple[Generation, SubtaskId], set[CheckpointId]] = {}
        self._watermarks: dict[tuple[Generation, SubtaskId], int] = {}
        self._deployed: set[tuple[str, tuple[int, int]]] = set()

    def observe(self, event: HistoryEvent) -> None:
        """Compare with the value before."""
        match event:
            case history.ClaimAppended():
                self._rises("a claim's generation", event.generation, self._generation)
                self._rises("a log sequence", event.sequence, self._sequence)
                self._generation, self._sequence = event.generation, event.sequence
            case history.ManifestAppended():
                self._rises("a completed checkpoint's id", event.manifest.checkpoint, self._completed)
                self._rises("a log sequence", event.sequence, self._sequence)
                self._completed, self._sequence = event.manifest.checkpoint, event.sequence
            case history.Triggered():
                self._trigger(event)
            case history.BarrierPassed():
                self._pass(event)
            case history.WatermarkSent():
                before = self._watermarks.get((event.generation, event.subtask), event.watermark_ms)
                if event.watermark_ms < before:
                    raise Violation("I7", f"the watermark of {event.subtask} went back")
                self._watermarks[event.generation, event.subtask] = event.watermark_ms
            case history.Deployed():
                if (event.driver, event.attempt) in self._deployed:
                    raise Violation("I7", f"attempt {event.attempt} of {event.driver} was deployed twice")
                self._deployed.add((event.driver, event.attempt))
            case _:
                pass

    def _trigger(self, event: history.Triggered) -> None:
        user = self._users.setdefault(event.checkpoint, event.generation)
        if user != event.generation:
            raise Violation("I7", f"generations {user} and {event.generation} both use the id {event.checkpoint}")
        before = self._triggered.get(event.generation, CheckpointId(0))
        self._rises("a triggered id", event.checkpoint, before)
        if event.generation == self._generation:
            self._rises("a triggered id", event.checkpoint, self._completed)
        self._triggered[event.generation] = event.checkpoint

    def _pass(self, event: history.BarrierPassed) -> None:
        key = (event.generation, event.subtask)
        cancelled = self._cancelled.setdefault(key, set())
        if event.is_barrier:
            self._rises(f"a barrier of {event.subtask}", event.checkpoint, self._passed.get(key, CheckpointId(0)))
            if event.checkpoint in cancelled:
                raise Violation("I7", f"{event.subtask} took a snapshot of {event.checkpoint} after it gave it up")
            self._passed[key] = event.checkpoint
        elif event.checkpoint in cancelled:
            raise Violation("I7", f"{event.subtask} sent the cancel marker of {event.checkpoint} twice")
        else:
            cancelled.add(event.checkpoint)

    def _rises(self, what: str, now: int, before: int) -> None:
        if now <= before:
            raise Violation("I7", f"{what} is {now} after {before}")

    def at_end(self) -> None:
        """Nothing to add."""


class StaleChangesNothing:
    """I8: after a newer generation has claimed the log or fenced a sink, an older one changes nothing there."""

    def __init__(self) -> None:
        self._newest = Generation(0)
        self._fences: dict[str, Generation] = {}

    def observe(self, event: HistoryEvent) -> None:
        """Compare the actor's generation with the newest."""
        match event:
            case history.ClaimAppended():
                self._newest = max(self._newest, event.generation)
            case history.SinkFenced():
                self._fences[event.sink] = max(self._fences.get(event.sink, Generation(0)), event.generation)
            case history.ManifestAppended():
                self._refuse("completed a checkpoint", event.manifest.generation, self._newest)
            case history.Prepared():
                fence = self._fences.get(event.transaction.sink, Generation(0))
                self._refuse("prepared a transaction", event.transaction.generation, fence)
            case history.Committed():
                self._refuse("committed", event.by, self._fences.get(event.transaction.sink, Generation(0)))
            case _:
                pass

    def _refuse(self, what: str, generation: Generation, newest: Generation) -> None:
        if generation < newest:
            raise Violation("I8", f"generation {generation} {what} after generation {newest} had begun")

    def at_end(self) -> None:
        """Nothing to add."""


class ReplacedStaysAway:
    """I5: a driver that ran the pipeline and was replaced by another one never claims it again (X9)."""

    def __init__(self) -> None:
        self._ran: set[str] = set()
        self._replaced: set[str] = set()

    def observe(self, event: HistoryEvent) -> None:
        """Remember who ran, and who claimed behind it."""
        if isinstance(event, history.Deployed):
            self._ran.add(event.driver)
        elif isinstance(event, history.ClaimAppended):
            if event.owner in self._replaced:
                raise Violation("I5", f"{event.owner} was replaced and claims generation {event.generation}")
            self._replaced |= self._ran - {event.owner}

    def at_end(self) -> None:
        """Nothing to add."""


class FinishOnce:
    """T8: the operators of a subtask finish once in each history that counts (a restored one does not do it again)."""

    def __init__(self) -> None:
        self._finished: set[tuple[Generation, SubtaskId]] = set()

    def observe(self, event: HistoryEvent) -> None:
        """Count within a generation; across generations a second output shows in I1."""
        if isinstance(event, history.Finished):
            key = (event.generation, event.subtask)
            if key in self._finished:
                raise Violation("I1", f"{event.subtask} finished its operators twice")
            self._finished.add(key)
        elif isinstance(event, history.Resumed) and (event.generation, event.subtask) in self._finished:
            raise Violation("I1", f"{event.subtask} went on after it had finished its operators")  # T10

    def at_end(self) -> None:
        """Nothing to add."""


class Bounded:
    """I6, I10: nothing grows beyond its limit, and nothing is left at the end."""

    def observe(self, event: HistoryEvent) -> None:
        """Judge levels and the final inventory."""
        if isinstance(event, history.Level) and event.used > event.limit:
            raise Violation("I10", f"{event.name}: {event.used}, the limit is {event.limit}")
        if isinstance(event, history.Inventory):
            for what, left in (
                ("transactions undecided", event.transactions),
                ("files without a checkpoint", event.orphan_files),
                ("processes alive", event.processes),
            ):
                if left:
                    raise Violation("I6", f"{what}: {', '.join(left[:5])}")

    def at_end(self) -> None:
        """Nothing to add."""
