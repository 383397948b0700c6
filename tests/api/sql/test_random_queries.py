"""Random queries against DuckDB, also where a pipeline stops in the middle and goes on at another parallelism."""

from __future__ import annotations

import datetime as dt
import math
import random
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from tests.api.sql.random_queries import Queries, Query, expression
from tests.api.sql.test_query import ROWS, bids, normal
from tests.conftest import IS_DEEP
from tests.nexmark.oracles import table_of

import headgate as hg
from headgate.errors import UsageError
from headgate.testing import Collect, run, running

SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "i": pa.int64(),
        "j": pa.int32(),
        "x": pa.float64(),
        "y": pa.float64(),
        "m": pa.decimal128(10, 2),
        "s": pa.string(),
        "t": pa.string(),
        "b": pa.bool_(),
        "c": pa.bool_(),
        "ts": pa.timestamp("us"),
        "d": pa.date32(),
    }
)
TIMES = [dt.datetime(2020, 2, 29, 23, 59, 59, 999_999), dt.datetime(1999, 12, 31), dt.datetime(2021, 5, 31, 4, 5, 6)]
CHOICES: dict[str, list[Any]] = {
    "i": [0, 1, -1, 7, 900, -33],
    "j": [0, 2, -3, 49],
    "x": [0.0, -0.0, 0.5, -2.5, 1.5, 77.7],
    "y": [1.0, -7.25, 0.1],
    "m": [Decimal("0.00"), Decimal("-1.50"), Decimal("2.25"), Decimal("99.99")],
    "s": ["", "abc", "a/b/c", "  pad ", "É ä", "%_x", "abcabc"],
    "t": ["", "a", "b", "/", "c", "bc", " "],
    "b": [True, False],
    "c": [True, False],
    "ts": TIMES,
    "d": [one.date() for one in TIMES],
}
EXPRESSIONS = 2_000 if IS_DEEP else 80
SOME = ROWS.slice(0, 200)
QUERIES = 5
SEEDS = range(60 if IS_DEEP else 1)


def scalars(rng: random.Random) -> pa.Table:
    rows = [{name: rng.choice([None, *values]) for name, values in CHOICES.items()} for _ in range(40)]
    return pa.Table.from_pylist([{**row, "id": number} for number, row in enumerate(rows)], SCHEMA)


def accepted(make: Callable[[], Any]) -> bool:
    try:
        make()
    except UsageError:
        return False
    return True


def is_same(one: Any, other: Any) -> bool:
    """Whether two results are the same, but for the last digits."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def test_expressions_are_those_of_duckdb(tmp_path: Path) -> None:
    rng = random.Random(1)
    rows, connection, wanted = scalars(rng), duckdb.connect(), dict[str, list[Any]]()
    connection.execute("SET ieee_floating_point_ops = false")
    connection.register("rows", rows)
    while len(wanted) < EXPRESSIONS:
        text = expression(rng, rng.choice([1, 1, 2, 3]))
        try:
            found = connection.execute(f"SELECT {text} FROM rows ORDER BY id").fetchall()
        except duckdb.Error:
            continue  # an overflow, or a text that is no number
        table = hg.Pipeline("judged").source(hg.FromRows(rows))
        if accepted(lambda text=text, table=table: hg.sql(f"SELECT {text} AS c FROM rows", rows=table)):  # type: ignore[misc]
            wanted[text] = [row[0] for row in found]

    pipeline, sink = hg.Pipeline("expressions"), Collect(tmp_path)
    listed = ", ".join(f"{text} AS c{number}" for number, text in enumerate(wanted))
    stream = pipeline.source(hg.FromRows(rows, batch_rows=7))
    hg.sql(f"SELECT id, {listed} FROM rows", rows=stream).sink(sink)
    run(pipeline, timeout_s=900)

    found_rows = {row["id"]: row for row in sink.rows()}
    differences = [
        (text, number, found_rows[number][f"c{place}"], value)
        for place, (text, values) in enumerate(wanted.items())
        for number, value in enumerate(values)
        if not is_same(found_rows[number][f"c{place}"], value)
    ]
    assert differences == []


def drawn(rng: random.Random) -> list[Query]:
    """Return queries that Headgate accepts."""
    queries, found = Queries(rng), list[Query]()
    while len(found) < QUERIES:
        one = queries.query(rng.choice([1, 2, 2, 3]))
        table = bids(hg.Pipeline("judged"))
        if accepted(lambda one=one, table=table: hg.sql(one.text, bids=table)):  # type: ignore[misc]
            found.append(one)
    return found


def slowed(frame: pl.DataFrame) -> pl.DataFrame:
    time.sleep(0.02)  # not a wait for anything: so slow is the input
    return frame


def newest_checkpoint(directory: Path) -> int:
    return max((int(found.name.removeprefix("chk-")) for found in directory.glob("queries/chk-*")), default=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_queries_go_on_from_where_they_stopped(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    queries = drawn(rng)

    def made(*, is_slow: bool) -> tuple[hg.Pipeline, list[Callable[[], list[dict[str, Any]]]]]:
        state = rng.choice([hg.Memory(), hg.RocksDB(dir=str(tmp_path / "state"))])
        checkpointing = hg.Checkpointing("100ms", dir=tmp_path / "checkpoints")
        pipeline = hg.Pipeline("queries", state=state, checkpointing=checkpointing)
        source = hg.FromRows(SOME, splits=2, batch_rows=7)
        stream = pipeline.source(source, name="bids").map_batches(
            slowed if is_slow else pl.DataFrame.clone, name="slow"
        )
        stream = stream.with_timestamps("ts", out_of_orderness="5s")
        results = []
        for number, query in enumerate(queries):
            found, sink = hg.sql(query.text, bids=stream), Collect(tmp_path / f"results-{number}")
            found.sink(sink, name=f"results-{number}")
            key = found._change_keys
            results.append(lambda sink=sink, key=key: sink.rows() if key is None else table_of(sink.rows(), key))
        return pipeline, results

    savepoint = tmp_path / "savepoint"
    pipeline, _ = made(is_slow=True)
    with running(pipeline, parallelism=rng.choice([1, 2, 3])) as handle:
        wanted = rng.choice([1, 2, 5])
        while handle.wait(0) is None and newest_checkpoint(tmp_path / "checkpoints") < wanted:
            time.sleep(0.02)
        if rng.random() < 0.5:
            handle.stop(savepoint=savepoint)
    pipeline, results = made(is_slow=False)
    restore = {"restore": savepoint} if (savepoint / "savepoint").exists() else {}
    run(pipeline, timeout_s=900, parallelism=rng.choice([1, 2, 3]), **restore)

    connection = duckdb.connect(config={"error_on_division_by_zero": "false"})
    connection.register("bids", SOME)
    for query, result in zip(queries, results, strict=True):
        expected = connection.sql(query.text).pl()
        assert normal(pl.DataFrame(result(), infer_schema_length=None)) == normal(expected), query.text
