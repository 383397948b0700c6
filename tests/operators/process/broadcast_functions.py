"""Functions with a broadcast side, by row and by batch, that do the same: limits by name, and what exceeds them."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.model.graph import BROADCAST_INPUT, MAIN_INPUT
from headgate.operators.base import OperatorSpec, RestoredState
from headgate.operators.process.connected_process import broadcast_spec

READING = pa.schema([("key", pa.int64()), ("name", pa.large_string()), ("value", pa.int64())])
LIMIT = pa.schema([("name", pa.large_string()), ("limit", pa.int64())])
RESULT = {"key": pa.int64(), "value": pa.int64(), "limit": pa.int64(), "number": pa.int64()}


class Limits(hg.BroadcastProcessFunction):
    """Every reading with its limit, numbered by key; a limit of 0 is taken back, and one without a name takes all."""

    schema = RESULT

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.limits = state.broadcast("limits", str, pa.int64())
        self.changes = state.broadcast("changes", pa.int64(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        number = self.count.get(0) + 1
        self.count.put(number)
        return [{"key": row["key"], "value": row["value"], "limit": self.limits.get(row["name"]), "number": number}]

    def process_broadcast(self, row: dict[str, Any], context: hg.BroadcastContext) -> list[dict[str, Any]]:
        if not row["name"]:
            self.limits.clear()
        elif row["limit"]:
            self.limits.put(row["name"], row["limit"])
        else:
            self.limits.remove(row["name"])
        self.changes.put(0, self.changes.get(0, 0) + 1)
        if context.subtask_index:
            return []
        return [{"key": -1, "value": len(self.limits), "limit": None, "number": self.changes.get(0)}]


class Unkeyed(Limits):
    def open(self, state: hg.StateHandle) -> None:
        self.limits = state.broadcast("limits", str, pa.int64())
        self.changes = state.broadcast("changes", pa.int64(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        return [{"key": row["key"], "value": row["value"], "limit": self.limits.get(row["name"]), "number": 0}]


class BatchLimits(hg.BatchBroadcastProcessFunction):
    """The same by batch."""

    schema = RESULT

    def open(self, state: hg.BatchStateHandle) -> None:
        self.changes = state.broadcast("changes", pa.int64(), pa.int64())
        self.limits = state.broadcast("limits", str, pa.int64())
        self.count = state.value("count", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        before = self.count.get().fill_null(0)
        numbers = before + batch.select(pl.int_range(1, pl.len() + 1).over("key")).to_series()
        self.count.put(numbers)
        return batch.with_columns(limit=self.limits.get(batch["name"]), number=numbers)

    def process_broadcast(self, batch: pl.DataFrame, context: hg.BroadcastContext) -> pl.DataFrame | None:
        results = []
        zero = pl.Series([0])
        for row in batch.iter_slices(1):
            if row["name"][0] == "":
                self.limits.clear()
            elif row["limit"][0]:
                self.limits.put(row["name"], row["limit"])
            else:
                self.limits.remove(row["name"])
            self.changes.put(zero, self.changes.get(zero).fill_null(0) + 1)
            results.append({"key": -1, "value": len(self.limits), "limit": None, "number": self.changes.get(zero)[0]})
        return None if context.subtask_index else pl.DataFrame(results, schema=dict.fromkeys(RESULT, pl.Int64))


class UnkeyedBatches(BatchLimits):
    def open(self, state: hg.BatchStateHandle) -> None:
        self.changes = state.broadcast("changes", pa.int64(), pa.int64())
        self.limits = state.broadcast("limits", str, pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        return batch.with_columns(limit=self.limits.get(batch["name"]), number=0)


def spec_of(function: object, *keys: str) -> OperatorSpec:
    return broadcast_spec("node", keys, function, READING)


def readings(*rows: tuple[int, str, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(READING.names, row, strict=True)) for row in rows], READING)


def limits(*rows: tuple[str, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(LIMIT.names, row, strict=True)) for row in rows], LIMIT)


def send(harness: Any, batch: pa.RecordBatch) -> None:
    """Give an operator records of the side that they are for."""
    harness.operator.process_input(BROADCAST_INPUT if batch.schema.equals(LIMIT) else MAIN_INPUT, batch)


def written(harness: Any, *, is_own: bool = False) -> RestoredState | None:
    """Return what is in a snapshot of the broadcast side, encoded twice."""
    frozen = harness.operator.freeze_broadcast(is_own=is_own)
    if frozen is None:
        return None
    first, again = (b"".join(bytes(memoryview(part)) for part in frozen.encode()) for _ in range(2))
    assert first == again
    context = harness.context
    return RestoredState(context.subtask_index, context.parallelism, memoryview(first))
