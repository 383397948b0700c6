"""Workloads over keys and measures of many types: floats, dates, texts, unsigned numbers; values may be null.

Drawn from a generator of its own, so that seeds without them stay what they are.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.sim.product.records import OUT_OF_ORDER_MS, WINDOW_MS, Row
from headgate.sim.product.workloads import Branches, Job, Values, Workload

TYPED_RATE = 0.6
"""Of the seeds whose pipeline has branches, so many have one of these, too."""

FIRST_DAY = date(2023, 12, 31)


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
        """Number the records of the batch behind those before; every state must tell the same number."""
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
            day=pl.lit(FIRST_DAY) + pl.duration(days=pl.col("k") % 2),
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
        per_key[n % 3 / 2.0, FIRST_DAY + timedelta(days=k % 2), k % 2, f"{k}ß", n % 2] += 1
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
    """Partial results of every kind, before and behind the shuffle."""
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
        _one_key(pl.lit(FIRST_DAY) + pl.duration(days=pl.col("k"))),
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
