"""Stateful processors as users of Structured Streaming write them: nothing here knows Headgate."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructField, StructType

GAP_MS = 10_000
OUTPUT = "user STRING, what STRING, n BIGINT, pages STRING, total DOUBLE"


class Sessions(StatefulProcessor):
    """Sessions by event time with a gap: every kind of state, timers, and totals that keys may begin with."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.last = handle.getValueState("last", StructType([StructField("ms", LongType())]))
        self.pages = handle.getListState("pages", "page STRING, ms BIGINT")
        self.counts = handle.getMapState("counts", "page STRING", "n INT, first STRUCT<ms: BIGINT>")
        self.total = handle.getValueState("total", "amount DOUBLE")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield from self.record(key, row.page, int(row.ms), row.amount)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        assert timerValues.getCurrentWatermarkInMs() >= expiredTimerInfo.getExpiryTimeInMs()
        yield self.closed(key, "expired")

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        self.add(initialState.amount)

    def record(self, key: Any, page: str, ms: int, amount: float) -> Iterator[Row]:
        last = self.last.get()
        if last is not None and ms > last[0] + GAP_MS:
            yield self.closed(key, "passed")
            last = None
        if last is None or ms > last[0]:
            for time in list(self.handle.listTimers()):
                self.handle.deleteTimer(time)
            self.last.update((ms,))
            self.handle.registerTimer(ms + GAP_MS)
        self.pages.appendValue((page, ms))
        seen = self.counts.getValue((page,))
        self.counts.updateValue((page,), (1, (ms,)) if seen is None else (seen[0] + 1, seen[1]))
        self.add(amount)
        yield self.told(key, "seen")

    def add(self, amount: Any) -> None:
        self.total.update(((self.total.get() or (0.0,))[0] + amount,))

    def closed(self, key: Any, what: str) -> Row:
        told = self.told(key, what)
        for state in (self.last, self.pages, self.counts):
            state.clear()
        return told

    def told(self, key: Any, what: str) -> Row:
        pages = sorted((*page, value[0], value[1][0]) for page, value in self.counts.iterator())
        text = " ".join(f"{page}:{n}@{first}" for page, n, first in pages)
        return Row(
            user=key[0], what=what, n=len(list(self.pages.get())), pages=text, total=(self.total.get() or (0.0,))[0]
        )


class SessionsInPandas(Sessions):
    """The same with frames."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            found = [
                told.asDict()
                for page, ms, amount in zip(frame["page"], frame["ms"], frame["amount"], strict=True)
                for told in self.record(key, page, int(ms), amount)
            ]
            yield pd.DataFrame(found)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame([self.closed(key, "expired").asDict()])

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
        self.add(initialState["amount"].sum())


class Kinds(StatefulProcessor):
    """Says once for each key what the values that it is given look like, nested ones too."""

    COLUMNS = "i INT, d DOUBLE, s STRING, b BINARY, t TIMESTAMP, y DATE, l ARRAY<BIGINT>, r STRUCT<x: INT, z: STRING>"

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", self.COLUMNS)
        self.list = handle.getListState("list", self.COLUMNS)
        self.map = handle.getMapState("map", "a STRING, b INT", self.COLUMNS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        times = timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs()
        value = (1, 2.5, "ü", b"\x01", datetime(2024, 5, 1, 12), date(2024, 5, 1), [1, 2], Row(x=1, z=None))
        empty = [self.value.get(), list(self.list.get()), self.map.getValue(("k", 1)), list(self.map.keys())]
        row = next(iter(rows))
        if self.value.exists():
            return
        self.value.update(value)
        self.list.put([value, (None,) * 8])
        self.map.updateValue(("k", 1), value)
        full = [self.value.get(), list(self.list.get()), self.map.getValue(("k", 1)), list(self.map.iterator())]
        kinds = [[type(one).__name__ for one in (*found[:3], *found[3])] for found in (empty, full)]
        yield Row(user=key[0], said=repr([type(key), key, times, empty, full, kinds, row]))
