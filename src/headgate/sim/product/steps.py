"""The kinds of steps of random graphs: each in the public API, and as plain Python without time or subtasks.

Whether a record goes round a loop again is a pure function of it, and steps with state count in ways that no order can
change. So a step may be fed any part of its input at a time, and what it makes of all of it is always the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import polars as pl
import pyarrow as pa

import headgate as hg
from headgate.dataclass import dataclass

WINDOW_MS = 40
OUT_OF_ORDER_MS = 15
KEYS = 5
VALUES = 1009

Row: TypeAlias = dict[str, Any]


class Record(NamedTuple):
    """``left``: trips through loops, at most; -1: made by a window or a round. ``round`` is 0 outside loops."""

    k: int
    n: int
    v: int
    t: int
    left: int
    round: int = 0


Records: TypeAlias = Counter[Record]


class Plain:
    """What one step does."""

    def feed(self, records: Records) -> Records:
        """Return what the step makes of more input."""
        raise NotImplementedError

    def finish(self) -> Records:
        """Return what the end of all input makes it emit."""
        return Counter()


class Each(Plain):
    """A step without state: each record becomes some others."""

    def __init__(self, function: Callable[[Record], list[Record]]) -> None:
        self._function = function

    def feed(self, records: Records) -> Records:
        found: Records = Counter()
        for record, times in records.items():
            for made in self._function(record):
                found[made] += times
        return found


class Numbered(Plain):
    """Numbers records that are equal in ``what``, from 1 on."""

    def __init__(self, what: Callable[[Record], object], made: Callable[[Record, int], Record]) -> None:
        self._what, self._made = what, made
        self._seen: Counter[object] = Counter()

    def feed(self, records: Records) -> Records:
        found: Records = Counter()
        for record, times in records.items():
            what = self._what(record)
            for _ in range(times):
                self._seen[what] += 1
                found[self._made(record, self._seen[what])] += 1
        return found


class First(Plain):
    """Passes on the first of equal records."""

    def __init__(self) -> None:
        self._seen: set[Record] = set()

    def feed(self, records: Records) -> Records:
        new = [record for record in records if record not in self._seen]
        self._seen.update(new)
        return Counter(new)


class Sums(Plain):
    """Counts and sums per key and group of records: windows, or rounds, which are passed on, too."""

    def __init__(
        self, group: Callable[[Record], int], made: Callable[[int, int, int, int], Record], *, passes: bool = False
    ) -> None:
        """``made``: of key, count, sum and group."""
        self._group, self._made, self._passes = group, made, passes
        self._counts: Counter[tuple[int, int]] = Counter()
        self._sums: Counter[tuple[int, int]] = Counter()

    def feed(self, records: Records) -> Records:
        for record, times in records.items():
            at = record.k, self._group(record)
            self._counts[at] += times
            self._sums[at] += record.v * times
        return records if self._passes else Counter()

    def finish(self) -> Records:
        found = Counter(self._made(k, count, self._sums[k, group], group) for (k, group), count in self._counts.items())
        self._counts.clear()
        return found


def summed(k: int, count: int, total: int, start_ms: int) -> Record:
    """What a window becomes."""
    return Record(k, count, total % VALUES, start_ms, -1)


def mapped(record: Record, salt: int) -> Record:
    """What a map makes of a record."""
    return record._replace(v=(record.v * 31 + salt) % VALUES)


def passes(record: Record) -> bool:
    """Whether a filter keeps it."""
    return (record.n + record.v) % 3 != 0


def split(record: Record) -> list[Record]:
    """What a flat map makes of it."""
    twin = record._replace(v=(record.v * 17 + 3) % VALUES)
    return [record, twin] if record.v % 4 == 0 else [record]


def rekeyed(record: Record) -> Record:
    """It moves on to another key."""
    return record._replace(k=(record.k * 3 + 1) % KEYS)


def is_refused(record: Record) -> bool:
    """Whether a picky map makes a bad record of it."""
    return record.n % 5 == 0


def goes_again(record: Record, modulus: int) -> bool:
    """Whether it goes round once more."""
    return record.left > 0 and (record.n * 7 + record.v) % modulus != 0


class Step(Protocol):
    """One operator, or a few."""

    def build(self, stream: hg.Stream, name: str) -> hg.Stream:
        """Add it after ``stream``."""

    def plain(self) -> Plain:
        """Return the same in plain Python, before its first record."""


@dataclass(frozen=True, slots=True)
class Map:
    """``how``: by row, by expression or by batch. A flat map, a filter or a new key if ``kind`` says so."""

    kind: str
    how: str
    salt: int = 0

    def build(self, stream: hg.Stream, name: str) -> hg.Stream:
        if self.kind == "filter":
            is_kept = (pl.col("n") + pl.col("v")) % 3 != 0
            return stream.filter(is_kept if self.how == "expression" else _row_filter, name=name)
        if self.kind == "split":
            return stream.flat_map(_split_row, name=name)
        if self.how == "expression":
            return stream.with_columns(**_columns(self), name=name)
        if self.how == "batch":
            return stream.map_batches(lambda frame: frame.with_columns(**_columns(self)), name=name)
        return stream.map(lambda row: _row_map(self, row), name=name)

    def plain(self) -> Plain:
        match self.kind:
            case "filter":
                return Each(lambda record: [record] if passes(record) else [])
            case "split":
                return Each(split)
            case "rekey":
                return Each(lambda record: [rekeyed(record)])
            case _:
                return Each(lambda record: [mapped(record, self.salt)])


def _columns(step: Map) -> dict[str, pl.Expr]:
    if step.kind == "rekey":
        return {"k": (pl.col("k") * 3 + 1) % KEYS}
    return {"v": (pl.col("v") * 31 + step.salt) % VALUES}


def _row_map(step: Map, row: Row) -> Row:
    if step.kind == "rekey":
        return {**row, "k": (row["k"] * 3 + 1) % KEYS}
    return {**row, "v": (row["v"] * 31 + step.salt) % VALUES}


def _row_filter(row: Row) -> bool:
    return bool((row["n"] + row["v"]) % 3)


def _split_row(row: Row) -> list[Row]:
    twin = {**row, "v": (row["v"] * 17 + 3) % VALUES}
    return [row, twin] if row["v"] % 4 == 0 else [row]


@dataclass(frozen=True, slots=True)
class Picky:
    """Refuses some records, which go to the dead letters."""

    def build(self, stream: hg.Stream, name: str) -> hg.Stream:
        return stream.map(lambda row: {**row, "v": "no number"} if row["n"] % 5 == 0 else row, name=name)

    def plain(self) -> Plain:
        return Each(lambda record: [] if is_refused(record) else [record])


@dataclass(frozen=True, slots=True)
class Everywhere:
    """Every record goes to every subtask, and the copies become one again, whatever the parallelism is."""

    def build(self, stream: hg.Stream, name: str) -> hg.Stream:
        copies = stream.broadcast().with_columns(v=pl.col("v"), name=f"{name}-copies")
        return copies.key_by("k", name=f"{name}-by").process(FirstOfEqual(), name=name)

    def plain(self) -> Plain:
        return First()


@dataclass(frozen=True, slots=True)
class Count:
    """Numbers the records of each key: by a process function by ``row``, by ``batch``, or by ``reduce``.

    ``parts`` are numbers of their own within a key, distinguished by a text: the key has two columns then.
    """

    how: str
    parts: int = 1

    def build(self, stream: hg.Stream, name: str) -> hg.Stream:
        if self.how != "reduce":
            function = Counting() if self.how == "row" else CountingBatches()
            if self.parts == 1:
                return stream.key_by("k", name=f"{name}-by").process(function, name=name)
            part = (pl.col("n") % self.parts).cast(pl.String)
            parted = stream.with_columns(part=pl.lit("part ") + part, name=f"{name}-parts")
            counted = parted.key_by("part", "k", name=f"{name}-by").process(function, name=name)
            return counted.select("k", "n", "v", "t", "left", name=f"{name}-done")
        ones = stream.select("k", n=pl.lit(1, pl.Int64), v=_zero(), t=_zero(), left=_zero(), name=f"{name}-ones")
        return ones.key_by("k", name=f"{name}-by").reduce(_add, name=name)

    def plain(self) -> Plain:
        parts = self.parts
        return Numbered(
            lambda record: (record.k, record.n % parts), lambda record, number: Record(record.k, number, 0, 0, 0)
        )


def _zero() -> pl.Expr:
    return pl.lit(0, pl.Int64)


def _add(so_far: Row, row: Row) -> Row:
    return {**so_far, "n": so_far["n"] + row["n"]}


@dataclass(frozen=True, slots=True)
class Tally:
    """Adds to each record how often one like it has come to its key."""

    def build(self, stream: hg.Stream, name: str) -> hg.Stream:
        return stream.key_by("k", name=f"{name}-by").process(Tallying(), name=name)

    def plain(self) -> Plain:
        return Numbered(lambda record: record, lambda record, number: record._replace(v=(record.v + number) % VALUES))


@dataclass(frozen=True, slots=True)
class Window:
    """Tumbling windows. ``is_early``: event time is where the source gives it; else nothing fires before the end."""

    is_early: bool = False
    idle_timeout_ms: int | None = None

    def build(self, stream: hg.Stream, name: str) -> hg.Stream:
        late_ms = OUT_OF_ORDER_MS if self.is_early else 3_600_000
        idle = None if self.idle_timeout_ms is None else f"{self.idle_timeout_ms}ms"
        timed = stream.with_timestamps("t", out_of_orderness=f"{late_ms}ms", idle_timeout=idle, name=f"{name}-times")
        windows = timed.key_by("k", name=f"{name}-by").window(hg.Tumbling(f"{WINDOW_MS}ms"))
        sums = windows.agg(n=pl.len(), v=pl.col("v").sum(), name=name)
        return sums.select(
            "k",
            n=pl.col("n").cast(pl.Int64),
            v=pl.col("v") % VALUES,
            t=pl.col("window_start").dt.epoch("ms"),
            left=pl.lit(-1, pl.Int64),
            name=f"{name}-sums",
        )

    def plain(self) -> Plain:
        return Sums(lambda record: record.t - record.t % WINDOW_MS, summed)


@dataclass(frozen=True, slots=True)
class RoundSum:
    """Sums each round of the loop around it up."""

    def build(self, stream: hg.Stream, name: str) -> hg.Stream:
        return stream.key_by("k", name=f"{name}-by").process(SummingRounds(), name=name)

    def plain(self) -> Plain:
        return Sums(
            lambda record: record.round, lambda k, n, v, round_: Record(k, n, v % VALUES, 0, -1, round_), passes=True
        )


class Counting(hg.ProcessFunction):
    """Numbers the records of each key, in three kinds of state that must agree."""

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.kept = state.list("kept", pa.int64())
        self.entries = state.map("entries", pa.int64(), pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Count in each state."""
        number = self.count.get(0) + 1
        self.count.put(number)
        self.kept.append(row["n"])
        self.entries.put(number, row["n"])
        assert number == len(self.kept) == len(self.entries), "the states of a key do not agree"
        yield {**row, "n": number, "v": 0, "t": 0, "left": 0}


class CountingBatches(hg.BatchProcessFunction):
    """The same, many keys at a time."""

    def open(self, state: hg.BatchStateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.kept = state.list("kept", pa.int64())
        self.entries = state.map("entries", pa.int64(), pa.string())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        """Number the records of the batch after those before."""
        keys = [name for name in ("part", "k") if name in batch.columns]
        within = batch.select(pl.int_range(1, pl.len() + 1, dtype=pl.Int64).over(keys)).to_series()
        numbers = self.count.get().fill_null(0) + within
        assert (self.kept.counts() == self.count.get().fill_null(0)).all(), "the states of a key do not agree"
        assert not self.entries.contains(numbers).any(), "the states of a key do not agree"
        self.count.put(numbers)
        self.kept.append(batch["n"])
        self.entries.put(numbers, batch["n"].cast(pl.String))
        zero = pl.lit(0, pl.Int64)
        return batch.with_columns(n=numbers, v=zero, t=zero, left=zero)


class Tallying(hg.ProcessFunction):
    """Counts equal records of a key."""

    def open(self, state: hg.StateHandle) -> None:
        self.visits = state.map("visits", pa.string(), pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """A record that came twice by the same way, or lost one, shows in what it brings home."""
        what = ",".join(str(value) for value in row.values())
        number = self.visits.get(what, 0) + 1
        self.visits.put(what, number)
        yield {**row, "v": (row["v"] + number) % VALUES}


class FirstOfEqual(hg.ProcessFunction):
    """Drops copies."""

    def open(self, state: hg.StateHandle) -> None:
        self.seen = state.map("seen", pa.string(), pa.bool_())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Pass on what is new."""
        what = ",".join(str(value) for value in row.values())
        if not self.seen.contains(what):
            self.seen.put(what, True)
            yield row


class SummingRounds(hg.ProcessFunction):
    """Count and sum of each round, when it has ended everywhere."""

    def open(self, state: hg.StateHandle) -> None:
        self.counts = state.map("counts", pa.int64(), pa.int64())
        self.sums = state.map("sums", pa.int64(), pa.int64())

    def process(self, row: Row, context: hg.ProcessContext) -> Iterator[Row]:
        """Count it with its round, and pass it on."""
        at = row["round"]
        self.counts.put(at, self.counts.get(at, 0) + 1)
        self.sums.put(at, self.sums.get(at, 0) + row["v"])
        yield row

    def on_round(self, round: int, context: hg.ProcessContext) -> Iterator[Row]:
        """Emit what the round had."""
        count = self.counts.get(round, 0)
        if count:
            total = self.sums.get(round, 0)
            self.counts.remove(round)
            self.sums.remove(round)
            yield {"k": context.key, "n": count, "v": total % VALUES, "t": 0, "left": -1, "round": round}
