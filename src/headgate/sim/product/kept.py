"""Workloads whose functions keep values of every type, in every kind of state, by row and by batch.

All that a key keeps follows from how many of its records came, so each record can tell whether it agrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.sim.product.records import Row
from headgate.sim.product.workloads import Values, Workload

FIRST_DAY, FIRST_MOMENT = date(2024, 2, 28), datetime(2024, 2, 28, 23, 59, 58)
CYCLE = 7
"""After so many records of a key its lists and maps begin anew."""


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
        """Count, look whether everything agrees, and let some keys begin anew."""
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
