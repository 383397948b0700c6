"""Pipelines with functions that have state with a TTL, restored at another parallelism, on other machines.

What a function sees depends on when it sees it, so its results say what time it was. The judge replays the results of
each key, as they are numbered, against plain dicts with that clock: what was committed must be what such state shows
(TL2 to TL7 of docs/spec/ttl.md), once for each record, and its time never goes back. What is drawn comes from a
generator of its own. Rule SM61 of docs/spec/simulator.md. Counterpart: ``sim.scenarios.timers``, with runs that these
are.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.sim.product.records import Row
from headgate.sim.product.settings import Exactly
from headgate.sim.product.workloads import Branches, Job, Values, Workload
from headgate.sim.scenarios.timers import TimedRun

SLOTS = 3
"""Entries of each key's map."""

COLUMNS = ("k", "number", "n", "size", "now", "value", "elements", "total", "entries", "entry")
SCHEMA = {name: pa.int64() for name in COLUMNS}
NONE = -1


class Fading(hg.ProcessFunction):
    """Tells with each record what its key still has, then adds to it."""

    schema = SCHEMA

    def __init__(self, ttl: hg.TTL) -> None:
        self.ttl = ttl

    def open(self, state: hg.StateHandle) -> None:
        """Declare."""
        self.count = state.value("count", pa.int64())
        self.value = state.value("value", pa.int64(), ttl=self.ttl)
        self.list = state.list("list", pa.int64(), ttl=self.ttl)
        self.map = state.map("map", pa.int64(), pa.int64(), ttl=self.ttl)

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Look, then write."""
        number, n = self.count.get(0) + 1, row["n"]
        self.count.put(number)
        elements, slot = self.list.get(), n % SLOTS
        entries = len(self.map) if number % 2 else NONE
        seen = {"value": self.value.get(NONE), "elements": len(elements), "total": sum(elements)}
        seen |= {"entries": entries, "entry": self.map.get(slot, NONE)}
        self.value.put(n)
        self.list.append(n)
        self.map.put(slot, n)
        now = context.timers.processing_time_ms
        yield {"k": context.key, "number": number, "n": n, "size": 1, "now": now, **seen}


class FadingByBatch(hg.BatchProcessFunction):
    """The same for the records of each key in a batch together."""

    schema = SCHEMA

    def __init__(self, ttl: hg.TTL) -> None:
        self.ttl = ttl

    def open(self, state: hg.BatchStateHandle) -> None:
        """Declare."""
        self.count = state.value("count", pa.int64())
        self.value = state.value("value", pa.int64(), ttl=self.ttl)
        self.list = state.list("list", pa.int64(), ttl=self.ttl)
        self.map = state.map("map", pa.int64(), pa.int64(), ttl=self.ttl)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Look, then write."""
        parts = batch.group_by("k", maintain_order=True).agg(pl.col("n").sum(), size=pl.len().cast(pl.Int64))
        keys, n = context.lookup(parts), parts["n"]
        self.count.update(1, "add", keys=keys)
        slots, number = n % SLOTS, self.count.get(keys=keys)
        seen = parts.with_columns(
            number=number,
            now=context.timers.processing_time_ms,
            value=self.value.get(keys=keys).fill_null(NONE),
            elements=self.list.counts(keys=keys).cast(pl.Int64),
            total=self.list.get(keys=keys).list.sum(),
            entries=self._entries(number % 2 == 1, keys),
            entry=self.map.get(slots, keys=keys).fill_null(NONE),
        )
        self.value.update(n, "last", keys=keys)
        self.list.append(n, keys=keys)
        self.map.put(slots, n, keys=keys)
        return seen

    def _entries(self, where: pl.Series, keys: hg.Keys) -> pl.Series:
        rows, _, _ = self.map.items(where, keys=keys)
        counts = Counter(rows.to_list())
        return pl.Series([counts[row] if is_asked else NONE for row, is_asked in enumerate(where)], dtype=pl.Int64)


def _totals(rows: Sequence[Row]) -> Counter[Values]:
    """Return, for each key, how many records it has and what they add up to."""
    counts = Counter(row["k"] for row in rows)
    totals: Counter[int] = Counter()
    for row in rows:
        totals[row["k"]] += row["n"]
    return Counter((k, counts[k], totals[k]) for k in counts)


class KeyModel:
    """What one key has: pairs of what was written and when it expires."""

    def __init__(self, ttl_ms: int, *, is_renewed: bool) -> None:
        self._ttl_ms = ttl_ms
        self._is_renewed = is_renewed
        self._value: tuple[int, int] | None = None
        self._list: list[tuple[int, int]] = []
        self._map: dict[int, tuple[int, int]] = {}

    def look(self, now_ms: int, slot: int, *, is_counting: bool) -> tuple[int, ...]:
        """Return what a function sees: value, elements, their sum, entries if they are counted, one entry."""
        self._value = self._value if self._value is not None and self._value[1] > now_ms else None
        self._list = [pair for pair in self._list if pair[1] > now_ms]
        self._map = {key: pair for key, pair in self._map.items() if pair[1] > now_ms}
        if self._is_renewed:
            expires = now_ms + self._ttl_ms
            self._value = None if self._value is None else (self._value[0], expires)
            self._list = [(stored, expires) for stored, _ in self._list]
            renewed = set(self._map) if is_counting else {slot} & self._map.keys()
            self._map |= {key: (self._map[key][0], expires) for key in renewed}
        value, entry = self._value or (NONE, 0), self._map.get(slot, (NONE, 0))
        total = sum(stored for stored, _ in self._list)
        return value[0], len(self._list), total, len(self._map) if is_counting else NONE, entry[0]

    def write(self, now_ms: int, slot: int, n: int) -> None:
        """Do what a function does after that."""
        self._value = n, now_ms + self._ttl_ms
        self._list.append(self._value)
        self._map[slot] = self._value


@dataclass
class Judge(Exactly):
    """Replays the results of each key.

    Attributes:
        ttls: of each sink that is judged so.
        expired, lived: how often state was seen to be gone, and to be there.
    """

    ttls: Mapping[str, hg.TTL]
    expired: int = 0
    lived: int = 0

    def problem(self, sink: str, found: Counter[Values], wanted: Counter[Values], *, has_failed: bool) -> str | None:
        """See ``settings.Judge``."""
        by_key: dict[int, list[Values]] = {}
        for record in sorted(found.elements()):
            by_key.setdefault(record[0], []).append(record)
        totals = Counter((k, sum(r[3] for r in rows), sum(r[2] for r in rows)) for k, rows in by_key.items())
        told = super().problem(sink, totals, wanted, has_failed=has_failed)
        for k, rows in by_key.items():
            told = told or self._wrong(k, rows, self.ttls[sink])
        return told

    def _wrong(self, key: int, rows: Sequence[Values], ttl: hg.TTL) -> str | None:
        model = KeyModel(ttl.duration_ms, is_renewed=ttl.update == "read_and_write")
        before_ms = 0
        for at, (_, number, n, _, now_ms, *seen) in enumerate(rows, start=1):
            if number != at or now_ms < before_ms:
                return f"key {key} has number {number} at {now_ms} ms where {at} is due, behind {before_ms} ms"
            due = model.look(now_ms, n % SLOTS, is_counting=number % 2 == 1)
            if tuple(seen) != due:
                return f"key {key} saw {seen} with number {number} at {now_ms} ms, and had {due}, by {ttl}"
            if at > 1:
                self.expired += due[0] == NONE
                self.lived += due[0] != NONE
            model.write(now_ms, n % SLOTS, n)
            before_ms = now_ms
        return None


def _fading(ttl: hg.TTL, *, is_by_row: bool) -> Workload:
    name = f"fading-{'row' if is_by_row else 'batch'}-{ttl.update.replace('_', '-')}"
    function = Fading(ttl) if is_by_row else FadingByBatch(ttl)
    return Workload(
        name, COLUMNS, lambda rows: rows.key_by("k").process(function, name=f"{name}-op"), _totals, rises=True
    )


class ExpiringRun(TimedRun):
    """The user of one such pipeline."""

    SUBJECT = "ttl"

    def _draw_job(self, rng: random.Random) -> Job:
        updates: tuple[Literal["write", "read_and_write"], ...] = ("write", "read_and_write")
        drawn = rng.sample(
            [(update, is_by_row) for update in updates for is_by_row in (True, False)], rng.choice((1, 2))
        )
        ttls = [hg.TTL(f"{rng.choice((3, 10, 25, 60, 150))}ms", update) for update, _ in drawn]
        workloads = [_fading(ttl, is_by_row=by_row) for ttl, (_, by_row) in zip(ttls, drawn, strict=True)]
        self.settings.judge = Judge({workload.name: ttl for workload, ttl in zip(workloads, ttls, strict=True)})
        return Branches(workloads)

    def start(self) -> None:
        """See ``Run``. The workers of each start may be on machines with dates that differ from those before."""
        self.clock_shift_ms += self._rng.choice((0, 0, -40, 40, -3_600_000, 5_000))
        super().start()

    def _is_of_interest(self, rows: Mapping[str, int]) -> bool:
        return bool(rows.get("map"))
