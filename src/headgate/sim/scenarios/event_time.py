"""Pipelines with windows that overlap or merge, joins, and tables that change, restored at any parallelism.

What each must have committed comes from plain Python over the records, as for every workload.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

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
