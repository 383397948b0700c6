"""Pipelines with windows, joins, tables that change, and OVER aggregates, restored at any parallelism.

What each must have committed comes from plain Python over the records. Of records of one time it does not depend on
which comes first, and sessions that are updated take all that is late, so that only the last result of each counts.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

import headgate as hg
from headgate.dataclass import dataclass
from headgate.sim.product.settings import Exactly
from headgate.sim.product.steps import WINDOW_MS, Row
from headgate.sim.product.workloads import Job, Values, Workload
from headgate.sim.scenarios.timers import Timed, TimedRun

SLIDE_MS = 10
GAP_MS = 12
BEFORE_MS, AFTER_MS = 8, 5


def _sliding(rows: hg.Stream) -> hg.Stream:
    windows = rows.key_by("k").window(hg.Sliding(f"{WINDOW_MS}ms", f"{SLIDE_MS}ms"))
    found = windows.agg(n=pl.len(), v=pl.col("v").sum())
    return found.select("k", "n", "v", at=pl.col("window_start").dt.epoch("ms"))


def _slid(rows: Sequence[Row]) -> Counter[Values]:
    held: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in rows:
        first = row["t"] - row["t"] % SLIDE_MS
        for start in range(first, row["t"] - WINDOW_MS, -SLIDE_MS):
            held[row["k"], start].append(row["v"])
    return Counter((k, len(values), sum(values), start) for (k, start), values in held.items())


def _sessions(rows: hg.Stream) -> hg.Stream:
    windows = rows.key_by("k").window(hg.Session(f"{GAP_MS}ms"))
    found = windows.agg(n=pl.len(), v=pl.col("v").sum())
    return found.select(
        "k", "n", "v", at=pl.col("window_start").dt.epoch("ms"), end=pl.col("window_end").dt.epoch("ms")
    )


def sessions_of(rows: Sequence[Row]) -> Iterator[tuple[int, list[Row]]]:
    """Yield the sessions of each key, with their records by time."""
    by_key: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["t"])):
        by_key[row["k"]].append(row)
    for k, mine in by_key.items():
        sessions: list[list[Row]] = []
        for row in mine:
            if sessions and row["t"] < sessions[-1][-1]["t"] + GAP_MS:
                sessions[-1].append(row)
            else:
                sessions.append([row])
        yield from ((k, one) for one in sessions)


def _in_sessions(rows: Sequence[Row]) -> Counter[Values]:
    return Counter(
        (k, len(one), sum(row["v"] for row in one), one[0]["t"], one[-1]["t"] + GAP_MS) for k, one in sessions_of(rows)
    )


def _pairs(rows: hg.Stream) -> hg.Stream:
    left, right = rows.filter(pl.col("n") % 2 == 0), rows.filter(pl.col("n") % 2 == 1)
    found = left.join(right, on="k", how="full", within=(f"-{BEFORE_MS}ms", f"{AFTER_MS}ms"))
    return found.select("k", n=pl.col("n").fill_null(-1), other=pl.col("n_right").fill_null(-1))


def _paired(rows: Sequence[Row]) -> Counter[Values]:
    left, right = [r for r in rows if r["n"] % 2 == 0], [r for r in rows if r["n"] % 2 == 1]
    found: Counter[Values] = Counter()
    met: set[int] = set()
    for one in left:
        for other in right:
            if one["k"] == other["k"] and -BEFORE_MS <= other["t"] - one["t"] <= AFTER_MS:
                found[one["k"], one["n"], other["n"]] += 1
                met |= {one["n"], other["n"]}
    found.update((one["k"], one["n"], -1) for one in left if one["n"] not in met)
    found.update((other["k"], -1, other["n"]) for other in right if other["n"] not in met)
    return found


def _table(rows: hg.Stream) -> hg.Stream:
    highest = rows.select("k", "v", "n", part=pl.col("n") % 3).key_by("k", "part")
    table = highest.agg(v=pl.col("v").max(), n=pl.len(), retractions=True).key_by("k")
    return table.agg(v=pl.col("v").sum(), n=pl.col("n").sum(), retractions=True)


def _totals(rows: Sequence[Row]) -> Counter[Values]:
    highest: dict[tuple[int, int], int] = {}
    for row in rows:
        of = row["k"], row["n"] % 3
        highest[of] = max(highest.get(of, 0), row["v"])
    counts = Counter(row["k"] for row in rows)
    return Counter((k, sum(v for (of, _), v in highest.items() if of == k), counts[k]) for k in counts)


@dataclass
class TableJudge(Exactly):
    """Applies the changes of tables; what else is written is judged as always."""

    tables: frozenset[str]

    def problem(self, sink: str, found: Counter[Values], wanted: Counter[Values], *, has_failed: bool) -> str | None:
        if sink in self.tables:
            found, changes = Counter(), found
            for (*row, op), times in changes.items():
                found[tuple(row)] += times if op in ("insert", "update_after") else -times
            found = Counter({row: times for row, times in found.items() if times})
        return super().problem(sink, found, wanted, has_failed=has_failed)


WORKLOADS = (
    Workload("sliding", ("k", "n", "v", "at"), _sliding, _slid),
    Workload("sessions", ("k", "n", "v", "at", "end"), _sessions, _in_sessions),
    Workload("pairs", ("k", "n", "other"), _pairs, _paired),
    Workload("table", ("k", "v", "n", "op"), _table, _totals),
)

TABLES = frozenset({"table"})


class EventTimeRun(TimedRun):
    """The user of some such pipelines."""

    SUBJECT = "event time"

    def _draw_job(self, rng: random.Random) -> Job:
        self.settings.judge = TableJudge(TABLES)
        return Timed(tuple(rng.sample(WORKLOADS, rng.choice((1, 2, 3)))))

    def _is_of_interest(self, rows: Mapping[str, int]) -> bool:
        return any(rows.values())


REACH_MS = 25
ROWS = 3
EARLY_MS = 20
PARTS = 3
FRAMES, TIMES, CHANGES = ("k", "n", "size", "total"), ("k", "t", "size", "since"), ("k", "n", "v", "t", "op")


def _range(rows: hg.Stream) -> hg.Stream:
    found = rows.key_by("k").over(range=f"{REACH_MS}ms", size=pl.len(), total=pl.col("v").sum(), name="range-op")
    return found.select("k", "n", pl.col("size").cast(pl.Int64), "total")


def _in_range(rows: Sequence[Row]) -> Counter[Values]:
    return _recounted(rows, lambda row, other: row["t"] - REACH_MS <= other["t"] <= row["t"])


def _so_far(rows: hg.Stream) -> hg.Stream:
    found = rows.key_by("k").over(range="unbounded", size=pl.len(), total=pl.col("v").sum(), name="so-far-op")
    return found.select("k", "n", pl.col("size").cast(pl.Int64), "total")


def _until_each(rows: Sequence[Row]) -> Counter[Values]:
    return _recounted(rows, lambda row, other: other["t"] <= row["t"])


def _recounted(rows: Sequence[Row], is_in_frame: Callable[[Row, Row], bool]) -> Counter[Values]:
    found: Counter[Values] = Counter()
    for row in rows:
        frame = [other["v"] for other in rows if other["k"] == row["k"] and is_in_frame(row, other)]
        found[row["k"], row["n"], len(frame), sum(frame)] += 1
    return found


def _last_rows(rows: hg.Stream) -> hg.Stream:
    found = rows.key_by("k").over(rows=ROWS, size=pl.len(), since=pl.col("t").min(), name="rows-op")
    return found.select("k", "t", pl.col("size").cast(pl.Int64), "since")


def _numbers(rows: hg.Stream) -> hg.Stream:
    found = rows.key_by("k").over(rows="unbounded", size=pl.len(), since=pl.col("t").min(), name="numbers-op")
    return found.select("k", "t", pl.col("size").cast(pl.Int64), "since")


def _times(preceding: int | None) -> Callable[[Sequence[Row]], Counter[Values]]:
    def expected(rows: Sequence[Row]) -> Counter[Values]:
        by_key: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            by_key[row["k"]].append(row["t"])
        found: Counter[Values] = Counter()
        for k, times in by_key.items():
            times.sort()
            for i, time in enumerate(times):
                first = 0 if preceding is None else max(i - preceding, 0)
                found[k, time, i + 1 - first, times[first]] += 1
        return found

    return expected


def _hurried(rows: hg.Stream) -> hg.Stream:
    """Records of which some are late, and all of them."""
    timed = rows.with_timestamps("t", name="hurried-over")
    found = timed.key_by("k").over(range=f"{REACH_MS}ms", size=pl.len(), late_output="late", name="hurried-op")
    return found.select("k", "n").union(found.side_output("late").select("k", "n"))


def _updated(rows: hg.Stream, name: str, **options: Any) -> hg.WindowedStream[hg.Stream]:
    """Return sessions that take all records, however late."""
    timed = rows.select("k", "n", "v", "t").with_timestamps("t", name=f"{name}-times")
    return timed.key_by("k").window(hg.Session(f"{GAP_MS}ms"), allowed_lateness="1h", retractions=True, **options)


def _add(total: Row, row: Row) -> Row:
    return {"k": row["k"], "n": total["n"] + row["n"], "v": total["v"] + row["v"], "t": max(total["t"], row["t"])}


def _reduced(rows: hg.Stream) -> hg.Stream:
    return _updated(rows, "reduced").reduce(_add, name="reduced-op").select(*CHANGES)


def _reduced_early(rows: hg.Stream) -> hg.Stream:
    windows = _updated(rows, "reduced-early", early=f"{EARLY_MS}ms")
    return windows.reduce(_add, name="reduced-early-op").select(*CHANGES)


def _sums(rows: Sequence[Row]) -> Counter[Values]:
    return Counter(
        (k, sum(row["n"] for row in one), sum(row["v"] for row in one), max(row["t"] for row in one))
        for k, one in sessions_of(rows)
    )


def _by_part(key: int, rows: pl.DataFrame) -> list[Row]:
    """Several rows for a session, or none."""
    parts: Counter[int] = Counter(n % PARTS for n in rows["n"])
    return [{"part": part, "size": size} for part, size in sorted(parts.items()) if part]


def _applied(rows: hg.Stream) -> hg.Stream:
    found = _updated(rows, "applied", early=f"{EARLY_MS}ms").apply(
        _by_part, {"part": int, "size": int}, name="applied-op"
    )
    return found.select("k", "part", "size", "op", at=pl.col("window_start").dt.epoch("ms"))


def _parts(rows: Sequence[Row]) -> Counter[Values]:
    found: Counter[Values] = Counter()
    for k, one in sessions_of(rows):
        parts = Counter(row["n"] % PARTS for row in one)
        found.update((k, part, size, min(row["t"] for row in one)) for part, size in parts.items() if part)
    return found


OVER_WORKLOADS = (
    Workload("range", FRAMES, _range, _in_range),
    Workload("so-far", FRAMES, _so_far, _until_each),
    Workload("last-rows", TIMES, _last_rows, _times(ROWS)),
    Workload("numbers", TIMES, _numbers, _times(None)),
    Workload("hurried", ("k", "n"), _hurried, lambda rows: Counter((row["k"], row["n"]) for row in rows)),
    Workload("reduced", CHANGES, _reduced, _sums),
    Workload("reduced-early", CHANGES, _reduced_early, _sums),
    Workload("applied", ("k", "part", "size", "at", "op"), _applied, _parts),
)

OVER_TABLES = frozenset({"reduced", "reduced-early", "applied"})


class OverRun(TimedRun):
    """The user of some such pipelines."""

    SUBJECT = "over"

    def _draw_job(self, rng: random.Random) -> Job:
        self.settings.judge = TableJudge(OVER_TABLES)
        return Timed(tuple(rng.sample(OVER_WORKLOADS, rng.choice((1, 2, 3)))))

    def _is_of_interest(self, rows: Mapping[str, int]) -> bool:
        return any(rows.values())
