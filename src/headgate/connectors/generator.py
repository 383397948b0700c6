"""A source of generated records at a chosen rate, reproducible from any position.

Counterpart: benchmarks, examples and tests. Source: docs/spec/connectors.md.
Never computes a value while it runs: columns are slices of a pool made once from the seed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader, SplitPosition, owner_of_split
from headgate.environment import SYSTEM_CLOCK, Clock
from headgate.errors import CorruptionError, UsageError
from headgate.model.state_schema import Form

POOL_ROWS = 1 << 20
"""Values repeat after so many rows; enough that 100,000 uniform keys all occur."""

BATCH_ROWS = 65_536

BURST_MS_MAX = 1_000
"""After a pause (backpressure) at most so much of the missed input is made up for."""

FLUSH_MS = 5
"""At a low rate, records are handed over this often."""

_POSITION = struct.Struct("<Q")
_SPLITS_MAX = 65_536


class Column(Protocol):
    """How the values of one column are made."""

    def pool(self, rows: int, seed: int) -> pa.Array:
        """Return ``rows`` values that depend on nothing but the seed."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """A column of random integers, each equally likely, with ``low`` ≤ value < ``high``."""

    low: int
    high: int

    def pool(self, rows: int, seed: int) -> pa.Array:
        """Return ``rows`` int64 values."""
        if not self.low < self.high:
            raise UsageError(f"Uniform({self.low}, {self.high}) is empty; low must be less than high")
        spread = np.uint64(self.high - self.low)
        numbers = (splitmix(rows, seed) % spread).astype(np.int64) + self.low
        return pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(numbers)])


@dataclass(frozen=True, slots=True)
class Choice:
    """A column that takes one of ``values`` (all of one type) at random, each equally likely."""

    values: tuple[Any, ...]

    def pool(self, rows: int, seed: int) -> pa.Array:
        """Return ``rows`` of the values; text is large_string."""
        if not self.values:
            raise UsageError("Choice needs at least one value")
        values = pa.array(list(self.values))
        if pa.types.is_string(values.type):
            values = values.cast(pa.large_string())
        return values.take(pa.array(splitmix(rows, seed) % np.uint64(len(self.values))))


@dataclass(frozen=True, slots=True)
class RowNumber:
    """A column with the number of the record, from 0; unique over all splits."""

    def pool(self, rows: int, seed: int) -> pa.Array:
        """Return the type only: row numbers do not repeat, so there is no pool."""
        return pa.nulls(0, pa.int64())


def _two_columns() -> dict[str, Column]:
    return {"key": Uniform(0, 1_000), "value": Uniform(0, 1_000)}


@dataclass(frozen=True, slots=True)
class Generator(Source):
    """A source of generated records with the given ``columns`` and a time column.

    Record n is the same in every run. With s splits, split i delivers the records i, i + s, i + 2s, …

    Attributes:
        columns: maps the name of each column to ``Uniform``, ``Choice`` or ``RowNumber``.
        rows_per_second: the rate of all subtasks together. None: as fast as possible.
        rows: the number of records of all subtasks together, after which the source ends. None: it never ends.
        timestamp: the name of the time column (``timestamp[us]``). None: no time column.
        time: ``"processing"`` or ``"deterministic"``. With ``"processing"``, the time of a record is the moment at
            which it was made, in whole milliseconds, so it differs after a replay. The generator reads the date once,
            at the start; setting the date later changes nothing. With ``"deterministic"``, the time is
            ``start_ms`` + record number · ``step_us``.
        start_ms: with ``time="deterministic"``, the time of the first record in milliseconds since 1970.
        step_us: with ``time="deterministic"``, the microseconds between the times of two successive records.
        seed: determines the values; another seed makes other values.
        splits: a fixed number of splits. None: as many as the first start has subtasks.
        batch_rows: the number of records in a batch.
        pool_rows: the number of values that are made in advance for each column. Records take them in turn.
    """

    columns: Mapping[str, Column] = field(default_factory=_two_columns)
    rows_per_second: float | None = None
    rows: int | None = None
    timestamp: str | None = "ts"
    time: Literal["processing", "deterministic"] = "processing"
    start_ms: int = 1_700_000_000_000
    step_us: int = 1_000
    seed: int = 0
    splits: int | None = None
    batch_rows: int = BATCH_ROWS
    pool_rows: int = POOL_ROWS

    def schema(self) -> pa.Schema:
        """Return the columns' types, then the time's.

        Raises:
            UsageError: a number is out of range, or two columns have one name.
        """
        rate = self.rows_per_second
        if rate is not None and not (_is_number(rate, int | float) and 0 < rate < math.inf):
            raise UsageError(f"Generator(rows_per_second={rate!r}) must be positive")
        for name in ("splits", "batch_rows", "pool_rows"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value, int) or value <= 0):
                raise UsageError(f"Generator({name}={value!r}) must be positive, a whole number")
        if self.rows is not None and (not _is_number(self.rows, int) or self.rows < 0):
            raise UsageError(f"Generator(rows={self.rows!r}) must not be negative, and a whole number")
        if self.time not in ("processing", "deterministic"):
            raise UsageError(f"Generator(time={self.time!r}) must be 'processing' or 'deterministic'")
        if self.timestamp in self.columns:
            raise UsageError(f"Generator has two columns '{self.timestamp}'; rename one or set timestamp=None")
        for name, column in self.columns.items():
            if not callable(getattr(column, "pool", None)):
                raise UsageError(
                    f"Generator: column '{name}' must be Uniform(...), Choice(...) or RowNumber(), not {column!r}"
                )
        fields = [pa.field(name, column.pool(1, self.seed).type) for name, column in self.columns.items()]
        if self.timestamp is not None:
            fields.append(pa.field(self.timestamp, pa.timestamp("us")))
        if not fields:
            raise UsageError("Generator has no column; give columns or a timestamp")
        return pa.schema(fields)

    def identity(self) -> str:
        """Positions are record numbers: they mean the same only for the same values."""
        columns = ", ".join(f"{name}={column!r}" for name, column in self.columns.items())
        times = f"{self.time} {self.start_ms} {self.step_us}" if self.timestamp is not None else "no time"
        return f"{Form.GENERATOR.value}: {columns}; {times}; seed {self.seed}; pool {self.pool_rows}"

    def how_to_end(self) -> str | None:
        return "give Generator(rows=...)" if self.rows is None else None

    def open(self, context: SourceContext) -> SourceReader:
        """Return a reader of the splits that this subtask owns."""
        return GeneratorReader(self, context)

    def split_at(self, index: int, count: int, restored: int | None) -> GeneratedSplit:
        """Return one of ``count`` splits, which has delivered ``restored`` records."""
        return _Split(self, index, count, restored)


class _Split:
    """The records ``index``, ``index`` + ``count``, … of a generator."""

    def __init__(self, config: Generator, index: int, count: int, restored: int | None) -> None:
        self.name = f"{index} of {count}"
        self.position = restored or 0
        self.rows: int | None = None
        if config.rows is not None:
            self.rows = max(0, -(-(config.rows - index) // count))
        self.is_ended = self.rows is not None and restored is not None and restored >= self.rows
        self._config, self._index, self._count = config, index, count
        self._pools: list[pa.Array | None] = []
        reach = config.pool_rows + config.batch_rows  # no slice wraps around
        order = (np.arange(reach, dtype=np.int64) * count + index) % config.pool_rows
        for place, column in enumerate(config.columns.values()):
            pool = column.pool(config.pool_rows, config.seed + place * 7_919)
            self._pools.append(pool.take(pa.array(order)) if len(pool) else None)

    def remaining(self) -> int:
        """Return how many records are left, or a batch's worth when there is no end."""
        return self._config.batch_rows if self.rows is None else self.rows - self.position

    def take(self, rows: int, now_us: int, schema: pa.Schema) -> pa.RecordBatch:
        """Return the next ``rows`` ≤ ``batch_rows`` records."""
        at = self.position % self._config.pool_rows
        arrays = [self._numbers(rows) if pool is None else pool.slice(at, rows) for pool in self._pools]
        if self._config.timestamp is not None:
            arrays.append(self._times(rows, now_us))
        self.position += rows
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _numbers(self, rows: int) -> pa.Array:
        first = self.position * self._count + self._index
        return pa.array(np.arange(rows, dtype=np.int64) * self._count + first)

    def _times(self, rows: int, now_us: int) -> pa.Array:
        if self._config.time == "processing":
            times = np.full(rows, now_us, np.int64)
        else:
            first = (self.position * self._count + self._index) * self._config.step_us
            step = self._count * self._config.step_us
            times = np.arange(rows, dtype=np.int64) * step + (first + self._config.start_ms * 1_000)
        return pa.Array.from_buffers(pa.timestamp("us"), rows, [None, pa.py_buffer(times)])


class Splitting(Protocol):
    """The configuration of a source that generates records, as ``Generator`` is."""

    @property
    def rows(self) -> int | None:
        """The number of records of all subtasks together; None: it never ends."""

    @property
    def rows_per_second(self) -> float | None:
        """The rate of all subtasks together; None: as fast as possible."""

    @property
    def splits(self) -> int | None:
        """A fixed number of splits; None: as many as the first start has subtasks."""

    @property
    def batch_rows(self) -> int:
        """The number of records in a batch."""

    def schema(self) -> pa.Schema:
        """Return the schema of the records."""

    def split_at(self, index: int, count: int, restored: int | None) -> GeneratedSplit:
        """Return one of ``count`` splits, which has delivered ``restored`` records."""


class GeneratedSplit(Protocol):
    """One split of a source that generates records.

    Attributes:
        name: ``"<index> of <count>"``.
        position, rows: how many records it has delivered, and will in all (None: without end).
        is_ended: whether it has delivered its end.
    """

    name: str
    position: int
    rows: int | None
    is_ended: bool

    def remaining(self) -> int:
        """Return how many records are left, or a batch's worth when there is no end."""

    def take(self, rows: int, now_us: int, schema: pa.Schema) -> pa.RecordBatch:
        """Return the next ``rows`` records, which are made now."""


class GeneratorReader:
    """Delivers the splits of one subtask in turn, as fast as the rate allows."""

    def __init__(
        self,
        config: Splitting,
        context: SourceContext,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._config, self._clock = config, clock
        self._schema = config.schema()
        positions = context.positions or {}
        count = config.splits or _splits_count(positions) or context.parallelism
        self._splits = [
            config.split_at(index, count, _decoded(positions, f"{index} of {count}"))
            for index in range(count)
            if owner_of_split(index, context.parallelism) == context.subtask_index
        ]
        self._turn = 0
        rate = config.rows_per_second
        self._rows_per_ms = None if rate is None else rate / 1_000 * len(self._splits) / count
        self._due = 0.0
        self._counted_at_ms = clock.monotonic_ms()
        self._date_offset_ms = clock.wall_ms() - self._counted_at_ms  # looked at once

    def splits(self) -> Sequence[str]:
        """Return the splits that have not ended."""
        return [split.name for split in self._splits if not split.is_ended]

    def is_finished(self) -> bool:
        """Whether all splits have ended."""
        return all(split.is_ended for split in self._splits) and self._config.rows is not None

    def positions(self) -> dict[str, bytes]:
        """Return the number of records delivered by each split."""
        return {split.name: _POSITION.pack(split.position) for split in self._splits}

    def progress(self) -> Mapping[str, SplitPosition]:
        """See ``SourceReader``: what is generated without an end has no lag."""
        return {split.name: SplitPosition(split.position, split.rows) for split in self._splits}

    def wakeup_ms(self) -> int:
        """Return the time until the rate allows the next batch."""
        if self._rows_per_ms is None or not self._splits:
            return 0 if self._splits else BURST_MS_MAX
        return min(int(max(self._least() - self._due, 0.0) / self._rows_per_ms) + 1, BURST_MS_MAX)

    def close(self) -> None:
        """Drop the pools."""
        self._splits.clear()

    def poll(self) -> SourceBatch | None:
        """Return the next records of one split, if the rate allows any."""
        allowed = self._allowed()
        if not allowed or not self._splits:
            return None
        for _ in range(len(self._splits)):
            split = self._splits[self._turn]
            self._turn = (self._turn + 1) % len(self._splits)
            if not split.is_ended:
                return self._next(split, allowed)
        return None

    def _next(self, split: GeneratedSplit, allowed: int) -> SourceBatch:
        rows = min(allowed, self._config.batch_rows, split.remaining())
        now_us = (self._clock.monotonic_ms() + self._date_offset_ms) * 1_000
        batch = split.take(rows, now_us, self._schema)
        self._due -= rows
        split.is_ended = split.rows is not None and split.position >= split.rows
        return SourceBatch(split.name, batch, is_split_finished=split.is_ended)

    def _least(self) -> float:
        """Return the number of records worth handing over: those of ``FLUSH_MS``, at most a batch."""
        assert self._rows_per_ms is not None
        return min(max(self._rows_per_ms * FLUSH_MS, 1.0), float(self._config.batch_rows))

    def _allowed(self) -> int:
        if self._rows_per_ms is None:
            return self._config.batch_rows
        now_ms = self._clock.monotonic_ms()
        self._due += (now_ms - self._counted_at_ms) * self._rows_per_ms
        # after a pause not everything is made up for at once
        self._due = min(self._due, max(self._rows_per_ms * BURST_MS_MAX, 1.0))
        self._counted_at_ms = now_ms
        return int(self._due) if self._due >= self._least() else 0


def _splits_count(positions: Mapping[str, bytes]) -> int | None:
    """Return the number of splits of the first start: it outlives a change of the parallelism."""
    for name in positions:
        _, _, count = name.partition(" of ")
        if not count.isdecimal() or not 0 < int(count) <= _SPLITS_MAX:
            raise CorruptionError("position of a generator", 0, "a split such as '0 of 4'", repr(name))
        return int(count)
    return None


def _decoded(positions: Mapping[str, bytes], name: str) -> int | None:
    encoded = positions.get(name)
    if encoded is None:
        return None
    if len(encoded) != _POSITION.size:
        raise CorruptionError(f"position of generator split {name}", 0, "8 bytes", f"{len(encoded)} bytes")
    return int(_POSITION.unpack(encoded)[0])


def _is_number(value: object, kind: type | UnionType) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def splitmix(rows: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return SplitMix64 of ``rows`` consecutive counters: frozen, the same on every machine and numpy."""
    with np.errstate(over="ignore"):
        z = (np.arange(rows, dtype=np.uint64) + np.uint64(seed % 2**40 * 2**20 + 1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
