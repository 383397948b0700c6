"""What operators keep goes on at each number of subtasks after each: against a recount of all records."""

from __future__ import annotations

import random
from collections import Counter
from datetime import datetime, timedelta
from functools import reduce
from itertools import product
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.conftest import few
from tests.operators.harness import PARALLELISMS, Harness, Shuffled, Subtasks
from tests.state.backends import IN_FILES, choose

from headgate.operators.base import WATERMARK_MAX_MS
from headgate.operators.changes import DELETE, UPDATE_BEFORE
from headgate.operators.reduction import ReduceSpec
from headgate.operators.row_order import LEFT_OUT, WindowCandidatesSpec, order_of
from headgate.operators.timestamps import event_time
from headgate.operators.top_rows import WindowTopSpec
from headgate.operators.windows.session_windows import session_operators
from headgate.operators.windows.window_assigner import FixedWindows, tumbling
from headgate.operators.windows.window_function import WindowFunctionSpec, rows_of_window
from headgate.operators.windows.window_plan import Emission, WindowedAggregate
from headgate.state.ttl import TTL

Row = dict[str, Any]

SCHEMA = pa.schema([("k", pa.large_string()), ("t", pa.timestamp("us")), ("v", pa.int64()), ("n", pa.int64())])
EPOCH = datetime(1970, 1, 1)
KEYS = "abcdefg"

BACKENDS = ["memory", IN_FILES]
"""What differs by an option is tried on the first and on the last of them."""


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def row(n: int, t_ms: int, rng: random.Random) -> Row:
    at = EPOCH + timedelta(milliseconds=t_ms)
    return {"k": rng.choice(KEYS), "t": at, "v": rng.choice([None, 1, 2, 5]), "n": n}


def add(total: Row, row: Row) -> Row:
    both = (total["v"] or 0) + (row["v"] or 0)
    return {"k": total["k"], "t": max(total["t"], row["t"]), "v": both, "n": total["n"] + row["n"]}


@pytest.mark.parametrize(("backend", "ttl_ms"), few(product(BACKENDS, (None, 40)), 2))
def test_reduce(backend: str, ttl_ms: int | None) -> None:
    spec = ReduceSpec(("k",), add, SCHEMA, ttl=None if ttl_ms is None else TTL(f"{ttl_ms}ms"))
    rng, now_ms, found, expected = random.Random(1), 1_000, Counter[str](), Counter[str]()
    totals: dict[str, tuple[Row, int]] = {}
    with choose(backend):
        subtasks = Subtasks(spec, ["k"], 1)
        for i, parallelism in enumerate(PARALLELISMS):
            for rows in ([row(8 * i + n, n, rng) for n in range(4)], [row(8 * i + n, n, rng) for n in range(4, 8)]):
                for harness in subtasks.harnesses:
                    harness.now_ms = now_ms
                subtasks.send(batch_of(rows))
                for one in rows:
                    total, until_ms = totals.get(one["k"], (None, 0))
                    is_new = total is None or (ttl_ms is not None and until_ms <= now_ms)
                    total = one if is_new else add(total or one, one)
                    totals[one["k"]] = total, now_ms + (ttl_ms or 0)
                    expected[repr(total)] += 1
                now_ms += rng.choice([0, 10, 30])
            found.update(map(repr, subtasks.take()))
            subtasks = Subtasks(spec, ["k"], parallelism, subtasks.snapshot(), begun_ms=now_ms)
    assert found == expected


@pytest.mark.parametrize(("backend", "ties"), few(product(BACKENDS, (False, True)), 2))
def test_the_top_of_records_in_windows(backend: str, ties: bool) -> None:
    windows, order, keys = FixedWindows(20, 10), order_of("node", "v", True), ("k", "window_start", "window_end")
    before = Harness(WindowCandidatesSpec(("k",), windows, event_time("node", SCHEMA, "t"), 2, order, ties=ties))
    bounds = [pa.field(name, pa.timestamp("us")) for name in keys[1:]]
    spec = WindowTopSpec(keys, pa.schema([*SCHEMA, *bounds]), 2, order, "rank", ties, windows)
    rng, rows, found = random.Random(2), list[Row](), list[Row]()
    with choose(backend):
        subtasks = Subtasks(spec, keys, 1)
        for i, parallelism in enumerate(PARALLELISMS):
            more = [row(12 * i + n, 10 * i + rng.randrange(20), rng) for n in range(12)]
            rows += more
            for start in (0, 5):
                before.send(batch_of(more[start : start + 5 if start == 0 else 12]))
                for batch in before.out.batches:
                    subtasks.send(batch)
                before.out.batches.clear()
            subtasks.watermark(10 * i + 9)
            found += subtasks.take()
            subtasks = Subtasks(spec, keys, parallelism, subtasks.snapshot())
        subtasks.watermark(WATERMARK_MAX_MS)
        found += subtasks.take()
    assert LEFT_OUT not in found[0]
    expected = set()
    for start_ms in range(-10, 10 * len(PARALLELISMS) + 20, 10):
        at = EPOCH + timedelta(milliseconds=start_ms)
        for key in KEYS:
            inside = [one for one in rows if one["k"] == key and at <= one["t"] < at + timedelta(milliseconds=20)]
            for place, one in enumerate(sorted(inside, key=lambda one: (one["v"] is None, -(one["v"] or 0)))):
                better = sum((other["v"] or 0) > (one["v"] or 0) for other in inside)
                rank = better if ties else place
                if rank < 2:
                    expected.add((at, one["n"], rank + 1))
    assert len(found) == len(expected)
    assert {(one["window_start"], one["n"], one["rank"]) for one in found} == expected


def by_value(key: Any, rows: pl.DataFrame) -> list[Row]:
    """Several rows for a session, or none."""
    counts = Counter(rows["v"].drop_nulls())
    return [{"value": value, "count": count} for value, count in sorted(counts.items())]


def sessions(rows: list[Row], gap: timedelta) -> list[list[Row]]:
    """The sessions of all keys, with the records of each as they came."""
    found: list[list[Row]] = []
    for key in KEYS:
        last: list[Row] = []
        for one in sorted((one for one in rows if one["k"] == key), key=lambda one: (one["t"], one["n"])):
            if not last or one["t"] >= last[-1]["t"] + gap:
                last = []
                found.append(last)
            last.append(one)
    return [sorted(one, key=lambda row: int(row["n"])) for one in found]


@pytest.mark.parametrize(("backend", "verb"), few(product(BACKENDS, ("reduce", "apply")), 2))
def test_functions_over_sessions_that_are_updated(backend: str, verb: str) -> None:
    emission = Emission(10_000, None, 50, retractions=True)
    aggregate = WindowedAggregate(("k",), "t", tumbling(4), (rows_of_window(SCHEMA),), emission)
    operators = session_operators(aggregate, SCHEMA, "node")
    values = pa.schema(list(SCHEMA)[1:] if verb == "reduce" else [("value", pa.int64()), ("count", pa.int64())])
    function = add if verb == "reduce" else by_value
    after = Harness(WindowFunctionSpec(("k",), function, values, verb == "reduce", True, True))
    rng, rows, table, gone = random.Random(3), list[Row](), Counter[str](), Counter[int]()

    def take() -> None:
        for window in pipeline.windows:
            for batch in window.out.batches:
                after.send(batch)
            window.out.batches.clear()
        for one in after.out.rows():
            goes = one.pop("op") in (DELETE, UPDATE_BEFORE)
            gone[parallelism] += goes
            table[repr(one)] += -1 if goes else 1
        after.out.batches.clear()
        assert min(table.values(), default=0) >= 0, "what was not there went"

    with choose(backend):
        pipeline = Shuffled(operators, 1)
        for i, parallelism in enumerate(PARALLELISMS):
            more = [row(10 * i + n, 10 * i + rng.randrange(-20, 10), rng) for n in range(10)]
            rows += more
            pipeline.send(0, batch_of(more[:5]))
            if i % 3 == 0:
                for window in pipeline.windows:
                    window.advance(50)
            pipeline.send(0, batch_of(more[5:]))
            pipeline.watermark(10 * i)
            take()
            pipeline = Shuffled(operators, parallelism, pipeline.snapshot())
        pipeline.watermark(WATERMARK_MAX_MS)
        take()
    assert set(gone) == set(PARALLELISMS), "sessions were updated"
    expected = Counter[str]()
    for session in sessions(rows, timedelta(milliseconds=4)):
        start, end = min(one["t"] for one in session), max(one["t"] for one in session) + timedelta(milliseconds=4)
        bounds = {"k": session[0]["k"], "window_start": start, "window_end": end}
        made = [reduce(add, session)] if verb == "reduce" else by_value(None, pl.DataFrame(batch_of(session)))
        for one in made:
            expected[repr(bounds | {name: one[name] for name in values.names})] += 1
    assert +table == expected
