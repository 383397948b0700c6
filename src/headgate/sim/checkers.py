"""Judges a history by the invariants I1–I10 of the reference; reads nothing but what an observer can see.

One small class per promise, each with its own idea of what happened. Every checker rejects hand-made bad histories
in tests/sim/test_checkers.py: one that never fails would prove nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import StateHandle
from headgate.model.plan import Plan
from headgate.sim import history
from headgate.sim.history import HistoryEvent, Record, TransactionId
from headgate.sim.storemodel import payload_of
from headgate.sim.workload import Workload
from headgate.sim.world import Violation


class Checker(Protocol):
    """Watches a history."""

    def observe(self, event: HistoryEvent) -> None:
        """Look at one event.

        Raises:
            Violation
        """

    def at_end(self) -> None:
        """Look back when everything is over.

        Raises:
            Violation
        """


class ExactlyOnce:
    """I1: what is committed is what a fault-free run commits, as a multiset, and in order per key where promised.

    When a damaged checkpoint forced the pipeline back, what was committed after the restored one is produced again
    (K18); the checker forgets it, so that everything else must still be exact.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._committed: dict[TransactionId, history.Committed] = {}
        self._counts: dict[str, Counter[Record]] = {sink: Counter() for sink in workload.expected}
        self._last: dict[tuple[str, str, int], int] = {}
        self._has_damage = False

    def observe(self, event: HistoryEvent) -> None:
        """Count what becomes visible."""
        match event:
            case history.Committed():
                self._commit(event)
            case history.Damage():
                self._has_damage = True
            case history.Chosen():
                self._rewind(event)
            case _:
                pass

    def _commit(self, event: history.Committed) -> None:
        sink = event.transaction.sink
        if event.transaction in self._committed:
            raise Violation("I1", f"{event.transaction} was committed twice")
        self._committed[event.transaction] = event
        counts, expected = self._counts[sink], self._workload.expected[sink]
        for record in event.records:
            counts[record] += 1
            if counts[record] > expected[record]:
                raise Violation(
                    "I1", f"{sink} shows {record} {counts[record]} times, {expected[record]} are expected"
                )
            self._order(sink, record)

    def _order(self, sink: str, record: Record) -> None:
        origin, number, key = record[:3]
        if origin not in self._workload.ordered[sink]:
            return
        last = self._last.get((sink, origin, key), -1)
        if number < last:
            raise Violation("I1", f"{sink} shows {origin} key {key}: number {number} after {last}")
        self._last[sink, origin, key] = number

    def _rewind(self, event: history.Chosen) -> None:
        floor = event.checkpoint or 0
        again = [c for c in self._committed.values() if c.checkpoint > floor]
        if again and not self._has_damage:
            raise Violation(
                "I1", f"generation {event.generation} starts from {floor}, but {again[0].transaction} of checkpoint "
                f"{again[0].checkpoint} is committed"
            )
        for committed in again:
            del self._committed[committed.transaction]
            self._counts[committed.transaction.sink].subtract(committed.records)
        if again:
            self._last.clear()

    def at_end(self) -> None:
        """Compare with the plain model."""
        for sink, expected in self._workload.expected.items():
            missing = expected - self._counts[sink]
            if missing:
                record, times = next(iter(missing.items()))
                raise Violation("I1", f"{sink} lost {sum(missing.values())} records, for example {record} ×{times}")


class CompletedOnly:
    """I1, K1: only what the manifest of a completed checkpoint promised is committed, and nothing else."""

    def __init__(self) -> None:
        self._promised: dict[bytes, CheckpointId] = {}

    def observe(self, event: HistoryEvent) -> None:
        """Remember promises, judge commits."""
        if isinstance(event, history.ManifestAppended):
            for committable in event.manifest.committables:
                self._promised.setdefault(committable.payload, event.manifest.checkpoint)
        elif isinstance(event, history.Committed) and payload_of(event.transaction) not in self._promised:
            raise Violation("I1", f"{event.transaction} was committed, but no completed checkpoint contains it")
        elif isinstance(event, history.Chosen):  # a damaged checkpoint's promises go with it
            self._promised = {p: c for p, c in self._promised.items() if c <= (event.checkpoint or 0)}
        elif isinstance(event, history.Aborted) and payload_of(event.transaction) in self._promised:
            raise Violation("I1", f"{event.transaction} was aborted, but a completed checkpoint promised it")

    def at_end(self) -> None:
        """Nothing to add."""


class NothingWithdrawn:
    """I2, I3: what a reader has seen it sees for ever, in place; and it never sees part of a transaction."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[tuple[TransactionId, int, Record], ...]] = {}
        self._committed: set[TransactionId] = set()

    def observe(self, event: HistoryEvent) -> None:
        """Compare a read with the one before it."""
        if isinstance(event, history.Committed):
            self._committed.add(event.transaction)
        if not isinstance(event, history.Read):
            return
        before = self._seen.get(event.sink, ())
        if event.rows[: len(before)] != before:
            raise Violation("I2", f"{event.sink} no longer shows what a reader has seen")
        self._seen[event.sink] = event.rows
        sizes = Counter(name for name, _, _ in event.rows)
        for name, size in dict.fromkeys((name, size) for name, size, _ in event.rows):
            if name not in self._committed:
                raise Violation("I3", f"a reader sees {name}, which is not committed")
            if sizes[name] != size:
                raise Violation("I3", f"a reader sees {sizes[name]} of the {size} records of {name}")

    def at_end(self) -> None:
        """Nothing to add."""


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
        self._subtasks = plan.subtasks()
        self._wrote: dict[tuple[Generation, SubtaskId, CheckpointId], set[StateHandle]] = {}
        self._finished: dict[Generation, set[SubtaskId]] = {}
        self._restored_finished: set[SubtaskId] = set()

    def observe(self, event: HistoryEvent) -> None:
        """Compare a manifest with the snapshots that were written."""
        if isinstance(event, history.SnapshotWrote):
            key = (event.generation, event.subtask, event.checkpoint)
            self._wrote.setdefault(key, set()).add(event.handle)
        if not isinstance(event, history.ManifestAppended):
            return
        manifest = event.manifest
        if tuple(e.subtask for e in manifest.entries) != self._subtasks:
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
        self._passed: dict[tuple[Generation, SubtaskId], CheckpointId] = {}
        self._cancelled: dict[tuple[Generation, SubtaskId], set[CheckpointId]] = {}
        self._watermarks: dict[tuple[Generation, SubtaskId], int] = {}
        self._deployed: set[tuple[str, tuple[int, int]]] = set()
        self._has_lost_entry = False

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


class Checkers:
    """All checkers of one run."""

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self._checkers: tuple[Checker, ...] = (
            ExactlyOnce(workload),
            CompletedOnly(),
            NothingWithdrawn(),
            NewestSound(),
            WholeCheckpoints(plan),
            Monotone(),
            StaleChangesNothing(),
            FinishOnce(),
            Bounded(),
        )

    def observe(self, event: HistoryEvent) -> None:
        """Show ``event`` to every checker."""
        for checker in self._checkers:
            checker.observe(event)

    def at_end(self) -> None:
        """Let every checker look back."""
        for checker in self._checkers:
            checker.at_end()
