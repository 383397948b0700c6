"""State of every type: what functions keep in it, and what it must hold."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date, datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.sim.product.records import OUT_OF_ORDER_MS, WINDOW_MS, Row
from headgate.sim.product.workloads import Branches, Job, Values, Workload

FIRST_DAY, FIRST_MOMENT = date(2024, 2, 28), datetime(2024, 2, 28, 23, 59, 58)
CYCLE = 7
"""After so many records of a key its lists and maps begin again."""


class ByRow(hg.ProcessFunction):
    """Counts the records of each key in nine states."""

    schema = {"k": pa.int64(), "number": pa.int64(), "agrees": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
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
        """Declare."""
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
        """Declare."""
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
        """Declare."""
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


def _counted(rows: Sequence[Row]) -> Counter[Values]:
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
    Workload("odd-keys", ("n", "number"), _odd_keys(Number), _counted),
    Workload("odd-batches", ("n", "number"), _odd_keys(NumberBatches), _counted),
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
