"""Tables of SQLite and DuckDB as sinks."""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
import sqlalchemy as sa
from tests.conftest import IS_DEEP
from tests.connectors.committing import commit, records, recovered, write, written

import headgate as hg
from headgate.connectors.sql import sink as sql_sinks
from headgate.errors import FencedError
from headgate.model.ids import CheckpointId
from headgate.testing.sink_kit import check_sink
from headgate.testing.sinks.fake_pipeline import Target

each = pytest.mark.parametrize("kind", ["sqlite", "duckdb"])


def url(tmp_path: Path, kind: str) -> str:
    return f"{kind}:///{tmp_path}/t.db"


@functools.lru_cache(maxsize=16)
def engine_of(url: str) -> sa.Engine:
    return sa.create_engine(url, poolclass=sa.pool.NullPool)


def read(url: str, query: str) -> list[Any]:
    with engine_of(url).connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(query)]


@pytest.mark.long
@pytest.mark.usefixtures("some_interruptions")
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("duckdb", marks=pytest.mark.deep)])
def test_it_passes_the_conformance_kit(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sa.event.listen(sa.pool.Pool, "checkout", no_disk)
    numbers = itertools.count()
    rescales, rows = (((1, 1), (1, 2), (3, 2)), (0, 1, 12)) if IS_DEEP else (((3, 2),), (1,))

    def fresh() -> Target:
        place = f"{kind}:///{tmp_path}/{next(numbers)}.db"
        names = ("number", "text")
        return Target(
            hg.SqlSink(place, "numbers", create=True),
            lambda: [dict(zip(names, row, strict=True)) for row in read(place, "select number, text from numbers")],
        )

    try:
        check_sink(fresh, rescales=rescales, rows=rows)
    finally:
        sa.event.remove(sa.pool.Pool, "checkout", no_disk)


def no_disk(connection: Any, *_: object) -> None:
    """No power is cut here, so nothing has to reach the disk."""
    if "sqlite" in type(connection).__module__:
        connection.execute("pragma synchronous = off")


VALUES = {
    "id": 1,
    "sel\"e'ct:a %s": "\\ 'q'",
    "V é": "é\n",
    "flag": True,
    "data": b"\0\1",
    "share": 0.5,
    "at": dt.datetime(2024, 1, 2, 3, 4, 5, 6),
    "moment": dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
    "day": dt.date(2024, 1, 2),
    "time": dt.time(1, 2, 3, 4),
    "tags": ["a", None],
    "place": {"x": 1, "y": "é"},
}


@each
def test_values_arrive_in_columns_of_odd_names(tmp_path: Path, kind: str) -> None:
    place = url(tmp_path, kind)
    batch = records([VALUES, dict.fromkeys(VALUES) | {"id": 2}])
    write(hg.SqlSink(place, "odd Table", create=True), batch)
    ((*found,), (*empty,)) = read(place, 'select * from "odd Table" order by id')
    assert empty == [2] + [None] * (len(VALUES) - 1)
    texts = {name: str(value) for name, value in zip(VALUES, found, strict=True)}
    assert found[:6] == [1, "\\ 'q'", "é\n", True, b"\0\1", 0.5]
    assert [texts["at"], texts["day"], texts["time"]] == ["2024-01-02 03:04:05.000006", "2024-01-02", "01:02:03.000004"]
    assert texts["moment"].startswith("2024-01-02 00:00:00")
    nested = [json.loads(one) if isinstance(one, str) else one for one in found[-2:]]
    assert nested == [VALUES["tags"], VALUES["place"]]


def test_duckdb_takes_decimals_and_large_numbers_and_sqlite_does_not(tmp_path: Path) -> None:
    batch = records([{"price": Decimal("1.50")}]).append_column("n", pa.array([2**64 - 1], pa.uint64()))
    write(hg.SqlSink(url(tmp_path, "duckdb"), "t", create=True), batch)
    assert read(url(tmp_path, "duckdb"), "select * from t") == [(Decimal("1.50"), 2**64 - 1)]
    with pytest.raises(
        hg.UsageError, match=r"'price' has type decimal128\(3, 2\), which SqlSink does not write to sqlite"
    ):
        hg.SqlSink(f"sqlite:///{tmp_path}/other.db", "t", create=True).check(batch.schema)


@each
def test_of_the_changes_of_a_key_the_last_one_counts(tmp_path: Path, kind: str) -> None:
    changes = [
        *({"op": "insert", "id": one, "n": 1} for one in (1, 2, 3)),
        {"op": "update_before", "id": 1, "n": 1},
        {"op": "update_after", "id": 1, "n": 2},
        {"op": "delete", "id": 2, "n": 1},
        {"op": "delete", "id": 3, "n": 1},
        {"op": "insert", "id": 3, "n": 3},
    ]
    sink = hg.SqlSink(url(tmp_path, kind), "t", create=True, upsert="id")
    write(sink.for_changes(("id",), retractions=True), records(changes), records([{"op": "delete", "id": 1, "n": 2}]))
    assert read(url(tmp_path, kind), "select * from t order by id") == [(3, 3)]


@each
def test_records_replace_rows_of_their_key(tmp_path: Path, kind: str) -> None:
    rows = [{"a": n % 3, "b": "x", "n": n} for n in range(10)]
    write(
        hg.SqlSink(url(tmp_path, kind), "t", create=True, upsert=("a", "b")),
        records(rows),
        records([rows[0] | {"n": 99}]),
    )
    assert read(url(tmp_path, kind), "select a, n from t order by a") == [(0, 99), (1, 7), (2, 8)]


@each
def test_an_older_generation_writes_nothing(tmp_path: Path, kind: str) -> None:
    sink = hg.SqlSink(url(tmp_path, kind), "t", create=True)
    batch = records([{"id": 1}])
    sink.make_target(batch.schema)
    old = recovered(sink, 1)
    one = written(sink, batch, 1)
    new = recovered(sink, 2, [one])
    with pytest.raises(FencedError):
        commit(old, one)
    assert read(url(tmp_path, kind), "select * from t") == []
    commit(new, one)
    assert read(url(tmp_path, kind), "select * from t") == [(1,)]


@each
def test_names_that_no_checkpoint_asks_for_are_forgotten(tmp_path: Path, kind: str) -> None:
    sink = hg.SqlSink(url(tmp_path, kind), "t", create=True)
    write(sink, *(records([{"id": n}]) for n in range(3)))
    recovered(sink).forget(CheckpointId(3), list)
    assert read(url(tmp_path, kind), "select checkpoint from headgate_commits") == [(3,)]


@each
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, kind: str) -> None:
    place = url(tmp_path, kind)
    engine = sa.create_engine(place, poolclass=sa.pool.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("create table texts (id varchar)")
        connection.exec_driver_sql("create table more (id integer, needed integer not null)")
        connection.exec_driver_sql("create table loose (id bigint)")
    schema = records([{"id": 1}]).schema
    for options, said in (
        ({"table": "nowhere"}, "there is no table nowhere"),
        ({"table": "texts"}, "in 'id', and the records have int64; cast"),
        ({"table": "more"}, "needs a value in 'needed'" if kind == "sqlite" else "has type INTEGER in 'id'"),
        ({"table": "loose", "upsert": "id"}, "no primary key or unique constraint of exactly id"),
        ({"table": "loose", "upsert": "key"}, "there is no column 'key'"),
    ):
        with pytest.raises(hg.UsageError, match=said):
            hg.SqlSink(place, **options).check(schema)
    with pytest.raises(hg.UsageError, match="has no column 'other'; it has id"):
        hg.SqlSink(place, "loose").check(records([{"other": 1}]).schema)


def test_what_cannot_be_is_refused_when_the_pipeline_is_built(tmp_path: Path) -> None:
    for given, said in (
        ("mysql+pymysql://me:secret@host/shop", "has a password in it"),
        ("postgresql://me@host/shop", "use headgate.PostgresSink"),
        ("sqlite://", "is in memory"),
        ("nothing", "cannot use its URL"),
    ):
        with pytest.raises(hg.UsageError, match=said) as caught:
            hg.SqlSink(given, "t")
        assert "me:secret" not in str(caught.value)
    p = hg.Pipeline("p")
    rows = p.source(hg.FromRows([{"id": 1, "group": 2, "share": 0.5}]))
    counts = rows.key_by("id").agg(n=pl.len())
    place = url(tmp_path, "sqlite")
    for sink, said in (
        (hg.SqlSink(place, "t", create=True), r"without upsert= appends rows.*give upsert=\('id',\)"),
        (hg.SqlSink(place, "t", create=True, upsert="n"), "the key of the changes is id"),
    ):
        with pytest.raises(hg.UsageError, match=said):
            counts.sink(sink)
    with pytest.raises(hg.UsageError, match="'share' has type double, which cannot be a key"):
        rows.sink(hg.SqlSink(place, "t", create=True, upsert="share"))
    counts.changes_as_records().sink(hg.SqlSink(place, "log", create=True))


def test_a_key_that_is_null_is_refused_before_the_checkpoint(tmp_path: Path) -> None:
    sink = hg.SqlSink(url(tmp_path, "sqlite"), "t", create=True, upsert="id")
    with pytest.raises(hg.UsageError, match="a record has a null in 'id'"):
        written(sink, records([{"id": 1}, {"id": None}]), 1)


def test_a_refusal_of_the_database_says_what_to_do(tmp_path: Path) -> None:
    place = url(tmp_path, "sqlite")
    with sa.create_engine(place, poolclass=sa.pool.NullPool).begin() as connection:
        connection.exec_driver_sql("create table t (id bigint check (id < 5))")
    sink = hg.SqlSink(place, "t")
    one = written(sink, records([{"id": 7}]), 1)
    with pytest.raises(
        hg.UsageError, match=r"refuses to write to table t in sqlite:.*CHECK constraint failed.*start again"
    ):
        commit(recovered(sink, keep=[one]), one)


def test_a_table_that_is_dropped_meanwhile_is_missed_at_once(tmp_path: Path) -> None:
    place = url(tmp_path, "sqlite")
    sink = hg.SqlSink(place, "t", create=True)
    batch = records([{"id": 7}])
    write(sink, batch)
    with sa.create_engine(place, poolclass=sa.pool.NullPool).begin() as connection:
        connection.exec_driver_sql("drop table t")
    one = written(sink, batch, 2)
    with pytest.raises(hg.UsageError, match=r"refuses to write to table t in sqlite:.*no such table: t.*start again"):
        commit(recovered(sink, keep=[one]), one)


def test_commits_of_sqlite_outlast_a_power_cut_without_its_last_entry_of_a_directory(tmp_path: Path) -> None:
    """SQLite commits by removing its journal, which is back after a power cut unless its directory is synced, too."""
    extra, found = 3, set()

    def look(connection: Any, *_: object) -> None:
        found.add(connection.execute("pragma synchronous").fetchone()[0])

    sa.event.listen(sa.pool.Pool, "checkout", look)
    try:
        write(hg.SqlSink(url(tmp_path, "sqlite"), "t", create=True), records([{"id": 7}]))
    finally:
        sa.event.remove(sa.pool.Pool, "checkout", look)
    assert found == {extra}


def test_many_records_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_sinks, "CHUNK_ROWS", 3)
    batches = [records([{"id": n}, {"id": n + 1}]) for n in range(0, 10, 2)]
    found = list(sql_sinks.chunks(batches))
    assert [len(one) for one in found] == [2] * 5
    assert pa.Table.from_batches(found).column("id").to_pylist() == list(range(10))
