"""Runs one operator by hand: what a runtime would do, with a clock that the test sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from tests.state.backends import Chosen
from tests.state.moved import Moved

from headgate.errors import BadRecord
from headgate.model.graph import OutputTag
from headgate.operators.base import Operator, OperatorContext, OperatorSpec, RestoredState
from headgate.operators.lazy_rows import LazyRows, as_batch
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
