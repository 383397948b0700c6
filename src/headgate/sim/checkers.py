"""Judges a history by the invariants I1–I10 of the reference; reads nothing but what an observer can see.

One small class per promise, each with its own idea of what happened. Every checker rejects hand-made bad histories
in tests/sim/test_checkers.py: one that never fails would prove nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from headgate.model.ids import CheckpointId, Generation
from headgate.model.plan import Plan
from headgate.sim import history
from headgate.sim.history import HistoryEvent, Record, TransactionId
from headgate.sim.lifecheckers import (
    Bounded,
    FinishOnce,
    Monotone,
    NewestSound,
    ReplacedStaysAway,
    StaleChangesNothing,
    WholeCheckpoints,
)
from headgate.sim.listing import folded, is_part
from headgate.sim.loopcheckers import LogHoldsWhatCirculated, ReplayFirst, RoundsInOrder
from headgate.sim.plainmodel import expected_of_prefixes
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

    After a drain only what was read is expected (E8): the model is run again on the prefixes that the final
    checkpoint names. Until then windows and sums may be about a part of the input, which no model knows yet.

    Where a list of splits grows, all of those are expected that the driver of the final checkpoint listed (N1), and
    sums may have come in parts (T10).
    """

    def __init__(self, workload: Workload, parallelism: int) -> None:
        self._workload = workload
        self._parallelism = parallelism
        self._expected = workload.expected
        self._is_drained = False
        self._grows = False
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
            case history.DrainAsked():
                self._is_drained = True
            case history.ListGrows():
                self._grows = True
            case history.Ended() if self._is_drained or self._grows:
                read = dict(event.positions if self._is_drained else event.listed)
                self._expected = expected_of_prefixes(self._workload.graph, self._parallelism, read)
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
            if self._grows and is_part(record):
                continue
            if counts[record] > expected[record] and not self._is_drained:
                raise Violation("I1", f"{sink} shows {record} {counts[record]} times, {expected[record]} are expected")
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
                "I1",
                f"generation {event.generation} starts from {floor}, but {again[0].transaction} of checkpoint "
                f"{again[0].checkpoint} is committed",
            )
        for committed in again:
            del self._committed[committed.transaction]
            self._counts[committed.transaction.sink].subtract(committed.records)
        if again:
            self._last.clear()

    def at_end(self) -> None:
        """Compare with the plain model."""
        for sink, expected in self._expected.items():
            counts = self._counts[sink]
            if self._grows:
                counts, expected = folded(counts), folded(expected)
            extra = counts - expected
            if extra:
                record, times = next(iter(extra.items()))
                raise Violation("I1", f"{sink} shows {sum(extra.values())} too many, for example {record} ×{times}")
            missing = expected - counts
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


class Checkers:
    """All checkers of one run."""

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self._newest = Generation(0)
        self._checkers: tuple[Checker, ...] = (
            ExactlyOnce(workload, plan.parallelism),
            CompletedOnly(),
            NothingWithdrawn(),
            NewestSound(),
            WholeCheckpoints(plan),
            Monotone(),
            StaleChangesNothing(),
            ReplacedStaysAway(),
            FinishOnce(),
            Bounded(),
            LogHoldsWhatCirculated(plan),
            ReplayFirst(),
            RoundsInOrder(plan),
        )

    def observe(self, event: HistoryEvent) -> None:
        """Show ``event`` to every checker."""
        if isinstance(event, history.ClaimAppended):
            self._newest = event.generation
        if isinstance(event, history.Chosen) and event.generation < self._newest:
            return  # it chose by what it saw before it was replaced; that it changes nothing is I8
        for checker in self._checkers:
            checker.observe(event)

    def at_end(self) -> None:
        """Let every checker look back."""
        for checker in self._checkers:
            checker.at_end()
