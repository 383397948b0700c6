"""Runs operators by hand: one, one in several subtasks, or the two of a windowed aggregation with the shuffle between.

What a runtime would do, with a clock that the test sets; and what a stream with changes means, in plain Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
from tests.conftest import IS_DEEP
from tests.state.backends import Chosen, Moved

from headgate.errors import BadRecord
from headgate.model.graph import OutputTag
from headgate.operators.base import LazyRows, Operator, OperatorContext, OperatorSpec, RestoredState, as_batch
from headgate.operators.keys import partition
from headgate.operators.windows.aligned_windows import WindowOperators
from headgate.state.worker_backends import WorkerStates

BORN_MS = 1_700_000_000_000
"""The date when the clock of a harness says 0."""


class Recorder:
    """An ``Output`` that keeps everything, and can pass it on to another operator."""

    def __init__(self, diverts: bool = False) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.log: list[tuple[str, Any]] = []
        self.bad: list[dict[str, Any]] = []
        self.tagged: dict[OutputTag, list[pa.RecordBatch]] = {}
        self._diverts = diverts
        self.target: Operator | None = None

    def emit(self, rows: pa.RecordBatch | LazyRows) -> None:
        batch = as_batch(rows)
        batch.validate(full=True)
        if batch.num_rows == 0:
            return
        self.batches.append(batch)
        self.log.append(("batch", batch.num_rows))
        if self.target is not None:
            self.target.process(batch)

    def emit_to(self, tag: OutputTag, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        self.tagged.setdefault(tag, []).append(batch)

    def emit_watermark(self, watermark_ms: int) -> None:
        self.log.append(("watermark", watermark_ms))
        if self.target is not None:
            self.target.on_watermark(watermark_ms)

    def emit_idle(self, is_idle: bool) -> None:
        self.log.append(("idle", is_idle))

    def divert(self, bad: pa.RecordBatch) -> None:
        for row in bad.to_pylist():
            if not self._diverts:
                raise BadRecord(row["node"], row["problem"], row["position"], row["record"])
            self.bad.append(row)

    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch.to_pylist()]

    def watermarks(self) -> list[int]:
        return [value for kind, value in self.log if kind == "watermark"]


class Harness:
    """One operator in one subtask."""

    def __init__(
        self,
        spec: OperatorSpec,
        states: Sequence[RestoredState | Moved] = (),
        *,
        subtask: tuple[int, int] = (0, 1),
        diverts: bool = False,
        begun_ms: int = 1_000,
        worker: WorkerStates | None = None,
    ) -> None:
        self.now_ms = begun_ms
        self.out = Recorder(diverts)
        self.context = OperatorContext("p", "node", subtask[0], subtask[1], 128, lambda: self.now_ms)
        self.context.diverts = diverts
        if worker is not None:
            self.context.states = worker.of("node", subtask[0], 128)
        self.context.wall_ms = lambda: BORN_MS + self.now_ms
        self.operator = spec.build()
        self.operator.open(self.context, self.out)
        if states:
            self.operator.restore([state for one in states for state in _states_of(one, subtask)])

    def send(self, batch: pa.RecordBatch, origin: str = "split-0") -> None:
        self.context.origin = origin
        self.operator.process(batch)

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms
        due = self.operator.next_tick_ms()
        if due is not None and due <= self.now_ms:
            self.operator.on_tick(self.now_ms)

    def snapshot(self) -> Any:
        self.operator.before_barrier()
        return encoded(self.operator, self.context)


def _states_of(state: RestoredState | Moved, subtask: tuple[int, int]) -> list[RestoredState]:
    return state.states(*subtask) if isinstance(state, Moved) else [state]


def encoded(operator: Operator, context: OperatorContext) -> Any:
    frozen = operator.freeze()
    assert frozen is not None
    if Chosen.in_files:
        return Moved(frozen, context.subtask_index, context.parallelism, context.max_parallelism)
    payload = b"".join(bytes(memoryview(buffer)) for buffer in frozen.encode())
    return RestoredState(context.subtask_index, context.parallelism, memoryview(payload))


EACH_PAIR = (1, 1, 2, 2, 3, 3, 5, 5, 1, 3, 1, 5, 2, 5, 3, 2, 1)
"""Each of these numbers of subtasks follows on each."""

EACH_WAY = (1, 1, 3, 3, 5, 2, 3, 1)
"""As many again, more and fewer, also where neither number divides the other."""

assert len(set(pairwise(EACH_PAIR))) == 16


PARALLELISMS = EACH_PAIR if IS_DEEP else EACH_WAY
"""Numbers of subtasks that follow on each other; tests of backends try each pair."""


class Subtasks:
    """As many harnesses as ``parallelism`` says; ``states`` are snapshots of any number of former ones."""

    def __init__(
        self,
        spec: OperatorSpec,
        keys: Sequence[str],
        parallelism: int,
        states: Sequence[Any] = (),
        *,
        begun_ms: int = 1_000,
    ) -> None:
        self._keys = keys
        self.harnesses = [
            Harness(spec, states, subtask=(i, parallelism), worker=Chosen.worker, begun_ms=begun_ms)
            for i in range(parallelism)
        ]

    def send(self, batch: pa.RecordBatch) -> None:
        for harness, part in zip(self.harnesses, partition(batch, self._keys, 128, len(self.harnesses)), strict=True):
            if part is not None:
                harness.send(part)

    def watermark(self, watermark_ms: int) -> None:
        for harness in self.harnesses:
            harness.operator.on_watermark(watermark_ms)

    def owner(self, batch: pa.RecordBatch) -> int:
        """Return which of them gets the first row of ``batch``."""
        parts = partition(batch.slice(0, 1), self._keys, 128, len(self.harnesses))
        return next(i for i, part in enumerate(parts) if part is not None)

    def rows(self) -> list[dict[str, Any]]:
        return [row for harness in self.harnesses for row in harness.out.rows()]

    def take(self) -> list[dict[str, Any]]:
        """Return the results since the last call."""
        found = self.rows()
        for harness in self.harnesses:
            harness.out.batches.clear()
        return found

    def snapshot(self) -> list[Any]:
        return [harness.snapshot() for harness in self.harnesses]


class Shuffled:
    """Operators before (if there is one) and after the shuffle, in ``parallelism`` subtasks."""

    def __init__(
        self, operators: WindowOperators, parallelism: int, states: Sequence[Any] = (), *, begun_ms: int = 1_000
    ) -> None:
        self._operators = operators
        self.parallelism = parallelism
        places = [(i, parallelism) for i in range(parallelism)]
        self.before = [Harness(operators.combine, subtask=at) for at in places] if operators.combine else []
        self.windows = [
            Harness(operators.window, states, subtask=at, worker=Chosen.worker, begun_ms=begun_ms) for at in places
        ]

    def send(self, sender: int, batch: pa.RecordBatch) -> None:
        if not self.before:
            self._deliver([batch])
            return
        self.before[sender].send(batch)
        self._shuffle(sender)

    def _shuffle(self, sender: int) -> None:
        out = self.before[sender].out
        batches, out.batches = out.batches, []
        self._deliver(batches)

    def _deliver(self, batches: Sequence[pa.RecordBatch]) -> None:
        for one in batches:
            for window, part in zip(
                self.windows, partition(one, self._operators.keys, 128, self.parallelism), strict=True
            ):
                if part is not None:
                    window.send(part)

    def watermark(self, watermark_ms: int) -> None:
        for sender, before in enumerate(self.before):
            before.operator.on_watermark(watermark_ms)
            self._shuffle(sender)
        for one in self.windows:
            one.operator.on_watermark(watermark_ms)

    def flush(self) -> None:
        """Send what the operators before the shuffle hold, as a barrier does."""
        for sender, combine in enumerate(self.before):
            combine.operator.before_barrier()
            self._shuffle(sender)

    def snapshot(self) -> list[Any]:
        self.flush()
        return [one.snapshot() for one in self.windows]

    def results(self) -> list[pa.RecordBatch]:
        """Return all batches of results that were not taken."""
        return [batch for one in self.windows for batch in one.out.batches]

    def take(self) -> list[dict[str, Any]]:
        """Return the results since the last call."""
        rows = [row for one in self.windows for row in one.out.rows()]
        for one in self.windows:
            one.out.batches.clear()
        return rows

    def late(self) -> int:
        return sum(one.context.metrics.counters.get("late", 0) for one in self.windows)


def applied(
    changes: Iterable[dict[str, Any]], keys: Sequence[str], *, retractions: bool, strict: bool = False
) -> list[dict[str, Any]]:
    """Return the table that the changes make, in the order of its keys.

    With retractions, each row that goes must be there as it is. ``strict``: so must every insert be new, every update
    be one, and every delete be of a row.
    """
    table: dict[Any, dict[str, Any]] = {}
    there: Counter[Any] = Counter()
    for change in changes:
        row = {name: value for name, value in change.items() if name != "op"}
        key = tuple(row[name] for name in keys)
        if change["op"] in ("update_before", "delete"):
            if retractions:
                there[repr(row)] -= 1
                assert there[repr(row)] >= 0, f"{change} takes back what was not there"
            assert change["op"] == "delete" or retractions
            if strict:
                assert key in table, f"{change} is of no row"
            if table.get(key) == row or not retractions:
                table.pop(key, None)
            if change["op"] == "update_before":
                table[key] = {}
        else:
            there[repr(row)] += 1
            if strict:
                assert (key in table) == (change["op"] == "update_after"), f"{change} comes when {table.get(key)} is"
                assert not retractions or not table.get(key), (
                    f"{change} comes without {table.get(key)} being taken back"
                )
            table[key] = row
    assert all(row for row in table.values()), "an update has no new row"
    return [table[key] for key in sorted(table)]
