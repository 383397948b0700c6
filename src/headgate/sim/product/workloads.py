"""Pipelines of the public API, and what each must have committed at the end, whatever happened on the way.

A workload is a branch after the common source; a run draws some. Expected results come from plain Python over the
rows. They depend on no order that a pipeline does not promise.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.connectors.base import Sink
from headgate.sim.product.records import KEYS, OUT_OF_ORDER_MS, WINDOW_MS, Row

Values: TypeAlias = tuple[Any, ...]
Splits: TypeAlias = dict[str, list[Row]]


class Job(Protocol):
    """What a pipeline does between its sources and its sinks, and what must come of it."""

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """The columns of each sink that are compared; a sink writes to ``sim://<its name>``."""

    @property
    def rising(self) -> frozenset[str]:
        """Sinks with a second column that rises with every record of one key, the first column."""

    @property
    def is_picky(self) -> bool:
        """Whether some records are refused, and go to the sink ``bad-records``."""

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        """Add everything after ``sources``."""

    def expected(self, inputs: Sequence[Sequence[Row]]) -> dict[str, Counter[Values]]:
        """Return what each sink must have when ``inputs``, by source, were processed."""


def draw_splits(rng: random.Random, source: int, splits_count: int, rows_count: int) -> Splits:
    """Return the input of one source: key, unique number, value, event time that rises with some disorder, trips."""
    first = source * 1_000
    rows = [
        {
            "k": rng.randrange(KEYS),
            "n": first + n,
            "v": rng.randrange(100),
            "t": 1_000 + n * 7 - rng.randrange(OUT_OF_ORDER_MS),
            "left": rng.randrange(4),
        }
        for n in range(rows_count)
    ]
    bounds = [rows_count * i // splits_count for i in range(splits_count + 1)]
    return {f"s{source}-{i}": rows[bounds[i] : bounds[i + 1]] for i in range(splits_count)}


@dataclass(frozen=True, slots=True)
class Workload:
    """One branch of a pipeline.

    Attributes:
        name: of its sink; its files are at ``sim://<name>``.
        columns: of the result that are compared.
        build: from the source's stream to the stream that is written.
        expected: what must come out.
        rises: whether the second column rises with every record of one key, the first column.
    """

    name: str
    columns: tuple[str, ...]
    build: Callable[[hg.Stream], hg.Stream]
    expected: Callable[[Sequence[Row]], Counter[Values]]
    rises: bool = False


def _mapped(rows: hg.Stream) -> hg.Stream:
    doubled = rows.map(lambda row: {**row, "v": row["v"] * 2})
    return doubled.filter(pl.col("n") % 3 != 0)


def _reduced(rows: hg.Stream) -> hg.Stream:
    ones = rows.select("k", n=pl.lit(1, pl.Int64))
    return ones.key_by("k").reduce(lambda so_far, row: {"k": row["k"], "n": so_far["n"] + row["n"]})


def _windowed(rows: hg.Stream) -> hg.Stream:
    timed = rows.with_timestamps("t", out_of_orderness=f"{OUT_OF_ORDER_MS}ms")
    windows = timed.key_by("k").window(hg.Tumbling(f"{WINDOW_MS}ms"))
    return windows.agg(n=pl.len(), v=pl.col("v").sum())


class Numbering(hg.ProcessFunction):
    """Numbers the records of each key, in three kinds of state that must agree."""

    schema = {"k": pa.int64(), "number": pa.int64(), "kept": pa.int64(), "entries": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
        self.count = state.value("count", pa.int64())
        self.kept = state.list("kept", pa.int64())
        self.entries = state.map("entries", pa.int64(), pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Count in each state."""
        number = self.count.get(0) + 1
        self.count.put(number)
        self.kept.append(row["n"])
        self.entries.put(row["n"], number)
        yield {"k": row["k"], "number": number, "kept": len(self.kept), "entries": len(self.entries)}


def _numbered(rows: hg.Stream) -> hg.Stream:
    return rows.key_by("k").process(Numbering(), name="number")


class Once(hg.BatchProcessFunction):
    """Passes on the first record of each number: what came before is in a map, by batch."""

    def open(self, state: hg.BatchStateHandle) -> None:
        """Declare."""
        self.seen = state.map("seen", pa.int64(), pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Drop what was seen, also within the batch."""
        is_first = batch["n"].is_first_distinct() & ~self.seen.contains(batch["n"])
        self.seen.put(batch["n"], batch["v"])
        return batch.filter(is_first)


def _once(rows: hg.Stream) -> hg.Stream:
    return rows.union(rows.filter(pl.col("v") % 2 == 0)).key_by("k").process(Once(), name="first")


def _looped(rows: hg.Stream) -> hg.Stream:
    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        again = loop.filter(pl.col("left") > 0).with_columns(left=pl.col("left") - 1)
        return again, loop.filter(pl.col("left") == 0)

    done: hg.Stream = rows.iterate(body, name="trips")
    return done


def _circling(rows: hg.Stream) -> hg.Stream:
    """A loop with a shuffle in its body, so that records are on their way for a while, and with state."""

    def body(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
        step = loop.process(Trip(), name="trip")
        return step.filter(pl.col("left") > 0), step.filter(pl.col("left") == 0)

    trips = rows.select("k", "n", "v", left=pl.col("left") * 3 + 1)
    done: hg.Stream = trips.key_by("k").iterate(body, name="circle")
    return done


class Trip(hg.ProcessFunction):
    """Moves a record on to another key, one trip less; its value counts the trips by what the keys remember of it."""

    schema = {"k": pa.int64(), "n": pa.int64(), "v": pa.int64(), "left": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
        self.visits = state.map("visits", pa.int64(), pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """A record that came twice by the same way, or lost one, shows in what it brings home."""
        visits = self.visits.get(row["n"], 0) + 1
        self.visits.put(row["n"], visits)
        yield {"k": (row["k"] + 1) % KEYS, "n": row["n"], "v": row["v"] + visits, "left": row["left"] - 1}


def _brought_home(rows: Sequence[Row]) -> Counter[Values]:
    found: Counter[Values] = Counter()
    for row in rows:
        visits: Counter[int] = Counter()
        key, value = row["k"], row["v"]
        for _ in range(row["left"] * 3 + 1):
            visits[key] += 1
            value += visits[key]
            key = (key + 1) % KEYS
        found[key, row["n"], value] += 1
    return found


def _counted(rows: Sequence[Row]) -> Counter[Values]:
    per_key = Counter(row["k"] for row in rows)
    return Counter((k, number) for k, count in per_key.items() for number in range(1, count + 1))


def _sums(rows: Sequence[Row]) -> Counter[Values]:
    counts: Counter[tuple[int, int]] = Counter()
    totals: Counter[tuple[int, int]] = Counter()
    for row in rows:
        window = row["k"], row["t"] - row["t"] % WINDOW_MS
        counts[window] += 1
        totals[window] += row["v"]
    return Counter((k, counts[k, start], totals[k, start]) for k, start in counts)


def _all(*columns: str, where: Callable[[Row], bool] = lambda row: True) -> Callable[[Sequence[Row]], Counter[Values]]:
    return lambda rows: Counter(tuple(row[c] for c in columns) for row in rows if where(row))


WORKLOADS = (
    Workload(
        "mapped",
        ("n", "v"),
        _mapped,
        lambda rows: Counter((row["n"], row["v"] * 2) for row in rows if row["n"] % 3),
    ),
    Workload("reduced", ("k", "n"), _reduced, _counted, rises=True),
    Workload("windowed", ("k", "n", "v"), _windowed, _sums),
    Workload(
        "numbered",
        ("k", "number", "kept", "entries"),
        _numbered,
        lambda rows: Counter((k, number, number, number) for k, number in _counted(rows)),
        rises=True,
    ),
    Workload("once", ("n", "v"), _once, _all("n", "v")),
    Workload("circling", ("k", "n", "v"), _circling, _brought_home),
    Workload("looped", ("k", "n", "v"), _looped, _all("k", "n", "v")),
)


@dataclass(frozen=True, slots=True)
class Branches:
    """Some workloads side by side, after the first source."""

    workloads: Sequence[Workload]
    is_picky: bool = False

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """See ``Job``."""
        return {workload.name: workload.columns for workload in self.workloads}

    @property
    def rising(self) -> frozenset[str]:
        """See ``Job``."""
        return frozenset(workload.name for workload in self.workloads if workload.rises)

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        """See ``Job``."""
        for workload in self.workloads:
            workload.build(sources[0]).sink(sink_to(workload.name), name=workload.name)

    def expected(self, inputs: Sequence[Sequence[Row]]) -> dict[str, Counter[Values]]:
        """See ``Job``."""
        return {workload.name: workload.expected(inputs[0]) for workload in self.workloads}
