"""Queries over a small data set with results that others computed: those of RisingWave's own tests.

It is where ``HEADGATE_TEST_DATA`` says, or beside the project in ``shared/data``; elsewhere the test is skipped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.nexmark.oracles import table_of

import headgate as hg
from headgate.nexmark.events import SCHEMAS, Kind
from headgate.nexmark.queries import QUERIES, Tables
from headgate.testing import Collect, run

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("HEADGATE_TEST_DATA", ROOT.parent / "shared" / "data")) / "nexmark"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the data set with results is not here: HEADGATE_TEST_DATA")

SQL = {name: QUERIES[name].sql or "" for name in ("q0", "q1", "q4", "q5")} | {
    "q2": "SELECT auction, price FROM bid WHERE auction IN (1007, 1020, 2001, 2019, 2087)",
    "q3": "SELECT name, city, state, a.id FROM auction AS a JOIN person AS p ON a.seller = p.id "
    "WHERE category = 10 AND state IN ('or', 'id', 'ca')",
}


def given(kind: Kind) -> hg.FromRows:
    texts = pl.read_csv(DATA / f"{kind}.csv", infer_schema=False)
    times = [name for name in texts.columns if name in ("date_time", "expires")]
    numbers = [field.name for field in SCHEMAS[kind] if field.type == "int64"]
    parsed = pl.col(times).str.replace(r"(:\d\d)$", "$1.000").str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="us")
    return hg.FromRows(texts.with_columns(pl.col(numbers).cast(pl.Int64), parsed), batch_rows=7)


def comparable(frame: pl.DataFrame) -> list[tuple[Any, ...]]:
    times = pl.col(pl.Datetime).dt.to_string("%Y-%m-%d %H:%M:%S%.f")
    texts = frame.with_columns(times).cast(pl.String)
    numbers = (
        pl.col(name).cast(pl.Float64, strict=False).round(4).alias(f"{name} as number") for name in frame.columns
    )
    return sorted(
        texts.select(*numbers, pl.col("^(name|city|state|date_time)$").str.replace(r"\.000$", "")).rows(), key=str
    )


def test_results_are_the_given_ones(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("given", parallelism=2)
    tables, sinks, keys = Tables(pipeline, given, out_of_orderness="1h"), {}, {}
    for name, query in SQL.items():
        stream = tables.sql(query)
        sinks[name], keys[name] = Collect(tmp_path / name), stream._change_keys
        stream.sink(sinks[name])
    run(pipeline, timeout_s=300)
    for name in SQL:
        expected = pl.read_csv(DATA / "expected" / f"{name}.csv", infer_schema=False)
        rows, key = sinks[name].rows(), keys[name]
        found = pl.DataFrame(rows if key is None else table_of(rows, key), infer_schema_length=None)
        found = found.select(column for column in found.columns if column != "extra").rename(
            dict(zip([column for column in found.columns if column != "extra"], expected.columns, strict=True))
        )
        assert comparable(found) == comparable(expected), name
