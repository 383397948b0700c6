"""Rows of a table or query of a real server: each once, whatever restarts, and however the rows change meanwhile."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few

import headgate as hg
from headgate import testing
from headgate.connectors.base import SourceBatch, SourceContext
from headgate.connectors.postgres.query import PostgresQuery, QueryReader, RangePosition
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.testing.source_kit import check_source

PATIENCE_S = 300.0


@pytest.fixture
def table(db: Any) -> str:
    name = f"q{uuid.uuid4().hex[:12]}"
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, grp text NOT NULL, amount numeric(10,2))")
    db.execute(f"INSERT INTO {name} SELECT g, chr(97 + g % 5), g * 1.5 FROM generate_series(1, 60) g")
    return name


class WaitingReader(QueryReader):
    """Waits for rows, so that the kit polls no more often than there are batches."""

    def poll(self) -> SourceBatch | None:
        until = time.monotonic() + PATIENCE_S
        while (found := super().poll()) is None and not self.is_finished():
            assert time.monotonic() < until
            time.sleep(0.001)  # lets the thread work
        return found


class WaitingQuery(PostgresQuery):
    def open(self, context: SourceContext) -> QueryReader:
        return WaitingReader(self, context)


@pytest.mark.long
@pytest.mark.parametrize(("key", "ranges"), [pytest.param("", 3, marks=pytest.mark.deep), ("grp", 2)])
def test_a_restart_anywhere_delivers_the_rows_that_followed(
    url: str, table: str, key: str, ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.connectors.postgres.query.BATCH_ROWS", 24)
    rows = check_source(WaitingQuery(url, table, key=key, ranges=ranges), parallelisms=(2,))
    assert sorted(row["id"] for row in rows) == list(range(1, 61))


def read(source: PostgresQuery, positions: dict[str, bytes] | None = None, batches: int = 1_000) -> Any:
    reader = source.open(SourceContext("p", "n", 0, 1, positions))
    rows: list[dict[str, Any]] = []
    while batches and not reader.is_finished():
        found = reader.poll()
        if found is not None:
            batches -= 1
            rows += found.batch.to_pylist()
    positions = reader.positions()
    reader.close()
    return rows, positions


def test_rows_that_change_between_two_starts_are_neither_skipped_nor_repeated(
    url: str, db: Any, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.connectors.postgres.query.BATCH_ROWS", 20)
    source = WaitingQuery(url, table)
    before, positions = read(source, batches=1)
    db.execute(f"DELETE FROM {table} WHERE id < 10")
    db.execute(f"INSERT INTO {table} VALUES (0, 'new', 0), (61, 'new', 0)")
    after, _ = read(source, positions)
    assert [row["id"] for row in before + after] == list(range(1, 62))


@pytest.mark.parametrize("ranges", few([3, 1], 1))
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("char(6)", "'k' || lpad(g::text, 3, '0')"),
        ("varchar(6)", "'k ' || g"),
        ("bit(8)", "g::bit(8)"),
        ("uuid", "md5(g::text)::uuid"),
        ("numeric(30, 10)", "g / 3.0"),
        ("float8", "g / 3.0"),
        ("timestamptz", "to_timestamp(g / 7.0)"),
        ("interval", "g * interval '1.5 hours'"),
        ("bytea", "decode(lpad(to_hex(g), 4, '0'), 'hex')"),
        ('"char"', 'chr(g + 40)::"char"'),
        ("inet", "'10.0.0.0'::inet + g"),
    ],
)
def test_a_key_of_any_type_goes_on_after_its_last_value(
    url: str, db: Any, kind: str, value: str, ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.connectors.postgres.query.BATCH_ROWS", 7)
    name = f"k{uuid.uuid4().hex[:12]}"
    db.execute(f"CREATE TABLE {name} (k {kind}, id int)")
    db.execute(f"INSERT INTO {name} SELECT {value}, g FROM generate_series(1, 40) g")
    source = WaitingQuery(url, name, key="k", ranges=ranges)
    before, positions = read(source, batches=2)
    after, _ = read(source, positions)
    assert sorted(row["id"] for row in before + after) == list(range(1, 41))


def test_rows_of_one_key_stay_together(url: str, db: Any, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.connectors.postgres.query.BATCH_ROWS", 5)
    reader = WaitingQuery(url, f"SELECT * FROM {table} WHERE id > 0", key="grp").open(
        SourceContext("p", "n", 0, 1, None)
    )
    seen: list[set[str]] = []
    while not reader.is_finished():
        found = reader.poll()
        if found is not None:
            seen.append({row["grp"] for row in found.batch.to_pylist()})
    reader.close()
    assert len(seen) > 3
    assert sum(map(len, seen)) == 5


@pytest.mark.run
def test_a_pipeline_reads_a_table_in_ranges(url: str, table: str, tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p")
    collected = testing.Collect(tmp_path / "out")
    pipeline.source(PostgresQuery(url, f"public.{table}", ranges=4)).select("id", "amount").sink(collected)
    testing.run(pipeline, timeout_s=PATIENCE_S, parallelism=2)
    assert sorted(row["id"] for row in collected.rows()) == list(range(1, 61))


@pytest.mark.parametrize(
    ("query", "options", "problem"),
    [
        ("SELECT 1 AS a", {}, "needs key="),
        ("SELECT 1 AS a", {"key": "b"}, "has no column 'b'; it has a"),
        ("SELECT NULL::int AS a", {"key": "a"}, "has nulls"),
        ("SELECT a FRM t", {"key": "a"}, "syntax error"),
        ("nothing", {}, "does not exist"),
        ("pg_class", {"ranges": 0}, "from 1 to 10,000"),
    ],
)
def test_a_query_that_cannot_be_read_is_refused(url: str, query: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        PostgresQuery(url, query, **options).schema()


def to_the_end(reader: QueryReader) -> None:
    while not reader.is_finished():
        reader.poll()


def test_a_connection_that_is_lost_among_the_rows_is_a_passing_error(url: str, db: Any) -> None:
    query = "SELECT g AS id, repeat('x', 1000000) AS text FROM generate_series(1, 80) g"
    reader = PostgresQuery(url, query, key="id").open(SourceContext("p", "n", 0, 1, None))
    try:
        while reader.poll() is None:
            pass
        ended = db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND state = 'active' "
            "AND query LIKE '%repeat%'"
        ).fetchall()
        assert len(ended) == 1
        with pytest.raises(StorageError, match=r"read rows of .*connection") as caught:
            to_the_end(reader)
        assert caught.value.is_transient
    finally:
        reader.close()


def test_a_row_that_the_server_cannot_compute_is_a_lasting_error(url: str) -> None:
    query = "SELECT g AS id, 1 / (2 - g) AS share FROM generate_series(1, 3) g"
    with pytest.raises(StorageError, match=r"read rows of .*division by zero") as caught:
        read(PostgresQuery(url, query, key="id"))
    assert not caught.value.is_transient


def test_an_empty_table_ends(url: str, db: Any, table: str) -> None:
    db.execute(f"DELETE FROM {table}")
    assert read(PostgresQuery(url, table, ranges=4))[0] == []


def test_damaged_positions_of_a_query_are_refused() -> None:
    with pytest.raises(CorruptionError):
        RangePosition.decode(b"{}")
