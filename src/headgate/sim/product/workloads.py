"""Pipelines of the public API, and what each must have committed at the end, whatever happened on the way.

A workload is a branch after the common source; a run draws some. Expected results come from plain Python over the
rows. They depend on no order that a pipeline does not promise. Some keep state of every type.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date, datetime, timedelta
from typing import Any, Protocol, TypeAlias

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.connectors.base import Sink
from headgate.dataclass import dataclass
from headgate.sim.product.steps import KEYS, OUT_OF_ORDER_MS, WINDOW_MS, Row

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
        return {workload.name: workload.columns for workload in self.workloads}

    @property
    def rising(self) -> frozenset[str]:
        return frozenset(workload.name for workload in self.workloads if workload.rises)

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        for workload in self.workloads:
            workload.build(sources[0]).sink(sink_to(workload.name), name=workload.name)

    def expected(self, inputs: Sequence[Sequence[Row]]) -> dict[str, Counter[Values]]:
        return {workload.name: workload.expected(inputs[0]) for workload in self.workloads}


FIRST_DAY, FIRST_MOMENT = date(2024, 2, 28), datetime(2024, 2, 28, 23, 59, 58)
CYCLE = 7
"""After so many records of a key its lists and maps begin again."""


class ByRow(hg.ProcessFunction):
    """Counts the records of each key in nine states."""

    schema = {"k": pa.int64(), "number": pa.int64(), "agrees": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.pair = state.value("pair", pa.struct([("n", pa.int64()), ("text", pa.string())]))
        self.parts = state.value("parts", pa.list_(pa.int32()))
        self.half = state.value("half", pa.float32())
        self.is_odd = state.value("is_odd", pa.bool_())
        self.day = state.value("day", pa.date32())
        self.moment = state.value("moment", pa.timestamp("us"))
        self.raw = state.value("raw", pa.binary())
        self.texts = state.list("texts", pa.string())
        self.marks = state.map("marks", pa.string(), pa.float64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Look whether everything agrees, then count."""
        number = self.pair.get({"n": 0, "text": ""})["n"]
        agrees = number == 0 or self._all() == _kept(number)
        number += 1
        self._keep(number)
        yield {"k": row["k"], "number": number, "agrees": int(agrees)}

    def _all(self) -> list[Any]:
        values = (self.pair, self.parts, self.half, self.is_odd, self.day, self.moment, self.raw)
        return [*(state.get() for state in values), self.texts.get(), sorted(self.marks.items())]

    def _keep(self, number: int) -> None:
        pair, parts, half, is_odd, day, moment, raw, texts, marks = _kept(number)
        self.pair.put(pair)
        self.parts.put(parts)
        self.half.put(half)
        self.is_odd.put(is_odd)
        self.day.put(day)
        self.moment.put(moment)
        self.raw.put(raw)
        if number % CYCLE == 0:
            self.texts.clear()
            self.marks.clear()
        elif number % CYCLE == 1:
            self.texts.put(texts)
            self.marks.put(*marks[0])
        else:
            self.texts.append(texts[-1])
            self.marks.remove(f"{number - 1}é")
            self.marks.put(*marks[-1])


def _kept(number: int) -> list[Any]:
    """Return what the states of a key hold after so many records."""
    since = number % CYCLE
    return [
        {"n": number, "text": f"{number}ß"},
        [number % 5] * (number % 3),
        number / 2,
        number % 2 == 1,
        FIRST_DAY + timedelta(days=number),
        FIRST_MOMENT + timedelta(microseconds=number * 700_001),
        bytes([number % 256, 0]),
        [f"{n}é" for n in range(number - since + 1, number + 1)],
        [(f"{number}é", number / 4)] if since else [],
    ]


class ByBatch(hg.BatchProcessFunction):
    """Counts the records of each key in states for whole batches."""

    schema = {"n": pa.int64(), "agrees": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.least = state.value("least", pa.int64())
        self.most = state.value("most", pa.float64())
        self.newest = state.value("newest", pa.string())
        self.numbers = state.list("numbers", pa.string())
        self.marks = state.map("marks", pa.int64(), pa.string())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Count, look whether everything agrees, and let some keys begin again."""
        text = batch["n"].cast(pl.String) + "é"
        self.count.update(1, "add")
        self.least.update(batch["v"], "min")
        self.most.update(batch["v"].cast(pl.Float64), "max")
        self.newest.update(text, "last")
        self.numbers.append(text)
        self.marks.put(batch["n"], text)
        rows, _, values = self.marks.items()
        of_row, elements = self.numbers.explode()
        agrees = (
            (self.numbers.counts().cast(pl.Int64) == self.count.get())
            & (self.least.get() <= batch["v"])
            & (self.most.get() >= batch["v"])
            & self.newest.exists()
            & self.marks.contains(batch["n"])
            & (self.marks.get(batch["n"]) == text)
            & pl.Series([len(rows) == len(of_row) and sorted(values) == sorted(elements)] * len(batch))
        )
        begins = batch["n"] % CYCLE == 0
        self.numbers.clear(where=begins)
        self.count.clear(where=begins)
        self.marks.clear(where=begins)
        return batch.select("n", agrees=agrees.cast(pl.Int64))


def _numbers(rows: Sequence[Row]) -> Counter[Values]:
    per_key = Counter(row["k"] for row in rows)
    return Counter((k, number, 1) for k, count in per_key.items() for number in range(1, count + 1))


KEPT = (
    Workload(
        "kept-by-row",
        ("k", "number", "agrees"),
        lambda rows: rows.key_by("k").process(ByRow(), name="by-row"),
        _numbers,
    ),
    Workload(
        "kept-by-batch",
        ("n", "agrees"),
        lambda rows: rows.key_by("k").process(ByBatch(), name="by-batch"),
        lambda rows: Counter((row["n"], 1) for row in rows),
    ),
)


TYPED_RATE = 0.6
"""Of the seeds with a pipeline that has branches, so many have one of these, too."""

FIRST_DATE = date(2023, 12, 31)


class Number(hg.ProcessFunction):
    """Numbers the records of each key."""

    schema = {"n": pa.int64(), "number": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Count."""
        number = self.count.get(0) + 1
        self.count.put(number)
        yield {"n": number, "number": number}


class NumberBatches(hg.BatchProcessFunction):
    """The same, with states of many types that come and go with their keys."""

    schema = Number.schema

    def open(self, state: hg.BatchStateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.pair = state.value("pair", pa.struct([("n", pa.int64()), ("text", pa.string())]))
        self.day = state.value("day", pa.date32())
        self.seen = state.map("seen", pa.string(), pa.struct([("at", pa.timestamp("us")), ("n", pa.int32())]))
        self.least = state.value("least", pa.float64())
        self.days = state.list("days", pa.date32())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Number the records of the batch after those before; every state must tell the same number."""
        keys = context.keys.frame()
        within = keys.select(pl.int_range(1, pl.len() + 1, dtype=pl.Int64).over(keys.columns)).to_series()
        before = self.count.get().fill_null(0)
        numbers = before + within
        pairs = self.pair.get()
        assert pairs.struct.field("n").fill_null(0).equals(before), "the states of a key do not agree"
        assert (self.days.counts() == before % 3).all(), "the states of a key do not agree"
        text = numbers.cast(pl.String)
        assert not self.seen.contains(text).any(), "the states of a key do not agree"
        frame = pl.DataFrame({"n": numbers, "text": pl.Series(text).set(numbers % 2 == 0, None)})
        moment = pl.Series(numbers * 1_000_003).cast(pl.Datetime("us"))
        day = pl.Series(numbers.cast(pl.Int32)).cast(pl.Date)
        self.count.put(numbers)
        self.pair.put(frame.select(pl.struct("n", "text")).to_series())
        self.day.put(day)
        self.least.update(numbers.cast(pl.Float64), "min")
        self.seen.put(text, pl.DataFrame({"at": moment, "n": numbers.cast(pl.Int32)}).to_struct("seen"))
        self._keep_days(numbers, day)
        assert self.least.get().equals(pl.Series([1.0] * len(batch)), null_equal=False)
        return pl.DataFrame({"n": numbers, "number": numbers})

    def _keep_days(self, numbers: pl.Series, day: pl.Series) -> None:
        """Of each key, as many days as its count is above a multiple of three: row by row, for keys may repeat."""
        for at in range(len(numbers)):
            is_mine = pl.int_range(len(numbers), eager=True) == at
            if numbers[at] % 3 == 0:
                self.days.clear(where=is_mine)
            else:
                self.days.append(day, where=is_mine)


def _odd_keys(make: Callable[[], Any]) -> Callable[[hg.Stream], hg.Stream]:
    def build(rows: hg.Stream) -> hg.Stream:
        keyed = rows.select(
            "n",
            part=pl.col("n") % 3 / 2.0,
            day=pl.lit(FIRST_DATE) + pl.duration(days=pl.col("k") % 2),
            size=(pl.col("k") % 2).cast(pl.UInt64),
            word=pl.col("k").cast(pl.String) + "ß",
            is_odd=pl.col("n") % 2 == 1,
        )
        return keyed.key_by("part", "day", "size", "word", "is_odd").process(make(), name="number-odd")

    return build


def _counted_odd(rows: Sequence[Row]) -> Counter[Values]:
    per_key: Counter[Any] = Counter()
    for row in rows:
        k, n = row["k"], row["n"]
        per_key[n % 3 / 2.0, FIRST_DATE + timedelta(days=k % 2), k % 2, f"{k}ß", n % 2] += 1
    return Counter((number, number) for count in per_key.values() for number in range(1, count + 1))


def _one_key(column: pl.Expr) -> Callable[[hg.Stream], hg.Stream]:
    """Records by a key of one column."""

    def build(rows: hg.Stream) -> hg.Stream:
        return rows.select("n", key=column).key_by("key").process(NumberBatches(), name="number-one")

    return build


def _counted_by(key: Callable[[Row], object]) -> Callable[[Sequence[Row]], Counter[Values]]:
    def counted(rows: Sequence[Row]) -> Counter[Values]:
        per_key = Counter(key(row) for row in rows)
        return Counter((number, number) for count in per_key.values() for number in range(1, count + 1))

    return counted


def _measured(rows: hg.Stream) -> hg.Stream:
    """Partial results of every kind, before and after the shuffle."""
    timed = rows.with_timestamps("t", out_of_orderness=f"{OUT_OF_ORDER_MS}ms")
    holes = pl.when(pl.col("v") % 3 == 0).then(None).otherwise(pl.col("v"))
    sums = timed.key_by("k").window(hg.Tumbling(f"{WINDOW_MS}ms"))
    return sums.agg(
        least=holes.min(),
        most=(holes / 2).max(),
        mean=pl.col("v").mean(),
        there=holes.count(),
        total=(pl.col("v") / 2).sum(),
        first_odd=(pl.col("v") % 2 == 1).min(),
    )


def _buffered(rows: hg.Stream) -> hg.Stream:
    """An aggregate that needs all records of a window."""
    timed = rows.with_timestamps("t", out_of_orderness=f"{OUT_OF_ORDER_MS}ms")
    return timed.key_by("k").window(hg.Tumbling(f"{WINDOW_MS}ms")).agg(middle=pl.col("v").median())


def _per_window(rows: Sequence[Row]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in rows:
        found[row["k"], row["t"] // WINDOW_MS].append(row["v"])
    return found


def _measures(rows: Sequence[Row]) -> Counter[Values]:
    found: Counter[Values] = Counter()
    for (k, _), values in _per_window(rows).items():
        there = [v for v in values if v % 3]
        least, most = min(there, default=None), max((v / 2 for v in there), default=None)
        mean, total = sum(values) / len(values), sum(values) / 2
        found[k, least, most, mean, len(there), total, all(v % 2 for v in values)] += 1
    return found


TYPED = (
    Workload("odd-keys", ("n", "number"), _odd_keys(Number), _counted_odd),
    Workload("odd-batches", ("n", "number"), _odd_keys(NumberBatches), _counted_odd),
    Workload("float-key", ("n", "number"), _one_key((pl.col("k") % 3) / 2.0), _counted_by(lambda row: row["k"] % 3)),
    Workload(
        "day-key",
        ("n", "number"),
        _one_key(pl.lit(FIRST_DATE) + pl.duration(days=pl.col("k"))),
        _counted_by(lambda row: row["k"]),
    ),
    Workload("measured", ("k", "least", "most", "mean", "there", "total", "first_odd"), _measured, _measures),
    Workload(
        "buffered",
        ("k", "middle"),
        _buffered,
        lambda rows: Counter((k, _median(values)) for (k, _), values in _per_window(rows).items()),
    ),
)


def _median(values: list[int]) -> float:
    ordered = sorted(values)  # ten times as quick as statistics.median, which asks what kinds of numbers they are
    upper, is_odd = divmod(len(ordered), 2)
    return float(ordered[upper] if is_odd else (ordered[upper - 1] + ordered[upper]) / 2)


def with_typed(seed: int, job: Job) -> Job:
    """Return ``job`` with one of these, if it has branches and the seed draws one."""
    rng = random.Random(f"types of seed {seed}")
    if not isinstance(job, Branches) or rng.random() >= TYPED_RATE:
        return job
    return replace(job, workloads=[*job.workloads, rng.choice(TYPED)])
