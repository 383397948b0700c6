"""Changes of a table of a real server: snapshot, then changes, once each, whatever ends in between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import psycopg
import pyarrow as pa
import pytest
import sqlalchemy as sa
from tests.servers.postgres import PostgresServer, postgres_server

import headgate as hg
from headgate import testing
from headgate.connectors.base import ASK_AGAIN, HoldContext, HookContext, SourceBatch, SourceContext
from headgate.connectors.postgres.changes import PostgresChanges
from headgate.connectors.postgres.changes_reader import SPLIT, ChangesReader
from headgate.connectors.postgres.slots import Position
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.ids import Generation
from headgate.testing.source_kit import check_source

PATIENCE_S = 300.0
SETTINGS = "wal_level = logical\nmax_wal_senders = 40\nmax_replication_slots = 60\n"


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """One that may be crashed, and has room for a slot of each test."""
    with postgres_server(settings=SETTINGS) as server:
        yield server


@pytest.fixture
def table(db: Any) -> str:
    """A new table with whole rows in its changes."""
    name = f"t{uuid.uuid4().hex[:12]}"
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, name text)")
    db.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    return name


def context(positions: dict[str, bytes] | None = None, index: int = 0, parallelism: int = 1) -> SourceContext:
    return SourceContext("p", uuid.uuid4().hex, index, parallelism, positions, life="life")


def take(reader: ChangesReader, count: int) -> list[dict[str, Any]]:
    """Read until there are so many rows, and for ``count`` 0 until the snapshot was read."""
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + PATIENCE_S
    while len(rows) < count or reader._position is None:
        assert time.monotonic() < until, f"{len(rows)} of {count} rows came"
        found = reader.poll()
        if found is None:
            time.sleep(0.001)  # lets the thread work
        else:
            rows += found.batch.to_pylist()
    return rows


def plain(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["op"], row["id"], row["name"]) for row in rows]


def test_rows_come_first_and_then_each_change(url: str, db: Any, table: str) -> None:
    db.execute(f"INSERT INTO {table} VALUES (1, 'a'), (2, NULL)")
    reader = PostgresChanges(url, table).open(context())
    try:
        assert sorted(plain(take(reader, 2))) == [("insert", 1, "a"), ("insert", 2, None)]
        db.execute(f"UPDATE {table} SET name = '' WHERE id = 2")
        with db.transaction():
            db.execute(f"DELETE FROM {table} WHERE id = 1")
            db.execute(f"INSERT INTO {table} VALUES (3, 'ü\n\\')")
        assert plain(take(reader, 4)) == [
            ("update_before", 2, None),
            ("update_after", 2, ""),
            ("delete", 1, "a"),
            ("insert", 3, "ü\n\\"),
        ]
    finally:
        reader.close()


class WaitingReader(ChangesReader):
    """Waits for changes, so that the kit polls no more often than there are batches."""

    def poll(self) -> SourceBatch | None:
        until = time.monotonic() + PATIENCE_S
        while (found := super().poll()) is None and not self.is_finished():
            assert time.monotonic() < until
            time.sleep(0.001)  # lets the thread work
        return found


class WaitingChanges(PostgresChanges):
    def open(self, context: SourceContext) -> ChangesReader:
        return WaitingReader(self, context)


@pytest.mark.long
def test_the_kit(url: str, db: Any, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.connectors.postgres.changes_reader.MESSAGES_MAX", 6)
    slot = f"kit_{table}"
    db.execute(f"CREATE PUBLICATION p_{table} FOR TABLE {table}")
    db.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    db.execute(f"INSERT INTO {table} SELECT g, 'n' || g FROM generate_series(1, 9) g")
    with db.transaction():
        db.execute(f"UPDATE {table} SET name = 'x' WHERE id < 4")
        db.execute(f"DELETE FROM {table} WHERE id > 7")
    source = WaitingChanges(url, table, slot=slot, publication=f"p_{table}", snapshot=False, end="latest")
    rows = check_source(source, parallelisms=(2,))
    assert Counter(row["op"] for row in rows) == {"insert": 9, "update_before": 3, "update_after": 3, "delete": 2}


def test_a_large_transaction_is_continued_in_its_middle(
    url: str, db: Any, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.connectors.postgres.changes_reader.MESSAGES_MAX", 7)
    source, positions = PostgresChanges(url, table), None
    reader = source.open(context())
    take(reader, 0)
    with db.transaction():
        db.execute(f"INSERT INTO {table} SELECT g, 'n' FROM generate_series(1, 30) g")
        db.execute(f"UPDATE {table} SET name = 'm' WHERE id <= 10")
    rows: list[dict[str, Any]] = []
    inside = 0
    while len(rows) < 50:
        rows += take(reader, 1)
        positions = reader.positions()
        inside += Position.decode(positions[SPLIT]).index > 0
        reader.close()
        reader = source.open(context(positions))
    reader.close()
    assert inside > 3
    assert Counter(plain(rows)) == Counter(
        [("insert", n, "n") for n in range(1, 31)]
        + [(op, n, name) for n in range(1, 11) for op, name in (("update_before", "n"), ("update_after", "m"))]
    )


def test_only_what_no_checkpoint_needs_is_confirmed(url: str, db: Any, table: str) -> None:
    source = PostgresChanges(url, table)
    reader = source.open(context())
    take(reader, 0)

    def confirmed() -> int:
        query = "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = %s"
        return int(db.execute(query, (slot,)).fetchone()[0])

    slot = Position.decode(reader.positions()[SPLIT]).slot
    first = confirmed()
    positions = []
    for number in range(3):
        db.execute(f"INSERT INTO {table} VALUES ({number}, 'a')")
        take(reader, 1)
        positions.append(reader.positions())
    held = HoldContext("p", "source", "life", Generation(1))
    source.hold(held, [])
    assert confirmed() == first
    source.hold(held, [positions[2], positions[1]])
    wanted = Position.decode(positions[1][SPLIT]).lsn
    until = time.monotonic() + PATIENCE_S
    while confirmed() != wanted:
        assert time.monotonic() < until, f"{confirmed()} is confirmed, not {wanted}"
        reader.poll()
    reader.close()
    with pytest.raises(UsageError, match="confirmed beyond the restored position"):
        fails(source.open(context(positions[0])))
    again = source.open(context(positions[1]))
    assert plain(take(again, 1)) == [("insert", 2, "a")]
    again.close()


def fails(reader: ChangesReader) -> None:
    """Poll until it raises."""
    until = time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < until:
            reader.poll()
    finally:
        reader.close()
    raise AssertionError("it did not fail")


def test_a_table_without_changes_advances(url: str, db: Any, table: str) -> None:
    other = f"other_{table}"
    db.execute(f"CREATE TABLE {other} (id int)")
    reader = PostgresChanges(url, table).open(context())
    take(reader, 0)
    before = Position.decode(reader.positions()[SPLIT]).lsn
    db.execute(f"INSERT INTO {other} SELECT generate_series(1, 1000)")
    end = int(db.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone()[0])
    assert end > before
    until = time.monotonic() + PATIENCE_S
    while Position.decode(reader.positions()[SPLIT]).lsn < end:
        assert time.monotonic() < until
        assert reader.poll() is None
    reader.close()


def test_a_connection_that_is_lost_in_the_snapshot_is_a_passing_error(url: str, db: Any, table: str) -> None:
    db.execute(f"INSERT INTO {table} SELECT g, repeat('x', 1000000) FROM generate_series(1, 80) g")
    reader = PostgresChanges(url, table).open(context())
    try:
        while reader.poll() is None:
            pass
        ended = db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND state = 'active' "
            f"AND query LIKE '%COPY%{table}%'"
        ).fetchall()
        assert len(ended) == 1
        with pytest.raises(StorageError, match=r"begin to read changes of .*connection") as caught:
            fails(reader)
        assert caught.value.is_transient
    finally:
        reader.close()


def test_a_server_that_crashes_is_waited_for(db: Any, url: str, table: str, postgres: PostgresServer) -> None:
    reader = PostgresChanges(url, table).open(context())
    take(reader, 0)
    db.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    assert plain(take(reader, 1)) == [("insert", 1, "a")]
    postgres.crash()
    postgres.start()
    with psycopg.connect(url, autocommit=True) as again:
        again.execute(f"INSERT INTO {table} VALUES (2, 'b')")
    assert plain(take(reader, 1)) == [("insert", 2, "b")]
    reader.close()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("TRUNCATE {}", "was truncated"),
        ("ALTER TABLE {} ADD more int; INSERT INTO {} VALUES (9, 'x', 1)", "has a new column 'more'"),
        ("ALTER TABLE {} ALTER name TYPE varchar(9); INSERT INTO {} VALUES (9, 'x')", "had another type"),
        ("ALTER TABLE {} REPLICA IDENTITY DEFAULT; INSERT INTO {} VALUES (9, 'x')", "is not what it was"),
    ],
)
def test_what_cannot_be_followed_is_an_error_with_a_remedy(
    url: str, db: Any, table: str, change: str, problem: str
) -> None:
    reader = PostgresChanges(url, table).open(context())
    take(reader, 0)
    db.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    take(reader, 1)
    for statement in change.split(";"):
        db.execute(statement.format(table))
    with pytest.raises(UsageError, match=problem):
        fails(reader)


def test_a_truncated_table_may_keep_its_rows(url: str, db: Any, table: str) -> None:
    reader = PostgresChanges(url, table, truncate="ignore").open(context())
    take(reader, 0)
    db.execute(f"TRUNCATE {table}")
    db.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    assert plain(take(reader, 1)) == [("insert", 1, "a")]
    reader.close()


def test_a_column_that_was_added_between_two_starts_is_read(url: str, db: Any, table: str) -> None:
    reader = PostgresChanges(url, table).open(context())
    take(reader, 0)
    positions = reader.positions()
    reader.close()
    db.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    db.execute(f"ALTER TABLE {table} ADD more int")
    db.execute(f"INSERT INTO {table} VALUES (2, 'b', 7)")
    db.execute(f"ALTER TABLE {table} DROP name")
    db.execute(f"INSERT INTO {table} VALUES (3, 8)")
    again = PostgresChanges(url, table).open(context(positions))
    with pytest.raises(UsageError, match="has a new column 'name'"):  # it was there when the first row was written
        fails(again)


def test_a_new_column_is_null_in_former_changes(url: str, db: Any, table: str) -> None:
    reader = PostgresChanges(url, table).open(context())
    take(reader, 0)
    positions = reader.positions()
    reader.close()
    db.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    db.execute(f"ALTER TABLE {table} ADD more int")
    db.execute(f"INSERT INTO {table} VALUES (2, 'b', 7)")
    again = PostgresChanges(url, table).open(context(positions))
    assert [(row["id"], row["more"]) for row in take(again, 2)] == [(1, None), (2, 7)]
    again.close()


def test_keys_are_enough_for_a_table_without_large_values(url: str, db: Any) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, amount bigint)")
    db.execute(f"INSERT INTO {name} VALUES (1, 5)")
    source = PostgresChanges(url, name)
    assert source.changes() == (("id",), False)
    reader = source.open(context())
    take(reader, 1)
    db.execute(f"UPDATE {name} SET amount = 6")
    db.execute(f"UPDATE {name} SET id = 2")
    db.execute(f"DELETE FROM {name}")
    assert [(row["op"], row["id"], row["amount"]) for row in take(reader, 4)] == [
        ("update_after", 1, 6),
        ("delete", 1, None),
        ("update_after", 2, 6),
        ("delete", 2, None),
    ]
    reader.close()


def test_large_values_that_an_update_leaves_come_from_the_old_row(url: str, db: Any, table: str) -> None:
    reader = PostgresChanges(url, table).open(context())
    take(reader, 0)
    db.execute(f"ALTER TABLE {table} ALTER name SET STORAGE EXTERNAL")
    db.execute(f"INSERT INTO {table} VALUES (1, repeat('x', 100000))")
    db.execute(f"UPDATE {table} SET id = 2")
    rows = take(reader, 3)
    assert [(row["op"], row["id"], len(row["name"])) for row in rows] == [
        ("insert", 1, 100_000),
        ("update_before", 1, 100_000),
        ("update_after", 2, 100_000),
    ]
    reader.close()


# -- several tables ---------------------------------------------------------------------------------------------------


@pytest.fixture
def other(db: Any) -> str:
    """A table with other columns, and keys in its changes."""
    name = f"o{uuid.uuid4().hex[:12]}"
    db.execute(f"CREATE TABLE {name} (number bigint PRIMARY KEY, id int)")
    return name


def by_table(rows: list[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    return [(row["table"][7], row["op"], *(row[name] for name in columns)) for row in rows]


def test_changes_of_several_tables_come_in_the_order_of_their_transactions(
    url: str, db: Any, table: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    db.execute(f"INSERT INTO {other} VALUES (1, 2)")
    source = PostgresChanges(url, [table, other], metadata=["lsn"])
    assert source.changes() is None
    assert source.schema().names == ["table", "id", "name", "number", "op", "lsn"]
    columns = ("id", "name", "number")
    reader = source.open(context())
    found = by_table(take(reader, 2), *columns)
    assert found == [("t", "insert", 1, "a", None), ("o", "insert", 2, None, 1)]
    with db.transaction():
        db.execute(f"UPDATE {table} SET name = 'b' WHERE id = 1")
        db.execute(f"UPDATE {other} SET id = 3 WHERE number = 1")
        db.execute(f"INSERT INTO {table} VALUES (2, 'c')")
        db.execute(f"DELETE FROM {other} WHERE number = 1")
    expected = [
        ("t", "update_before", 1, "a", None),
        ("t", "update_after", 1, "b", None),
        ("o", "update_after", 3, None, 1),
        ("t", "insert", 2, "c", None),
        ("o", "delete", None, None, 1),
    ]
    rows = take(reader, 5)
    assert by_table(rows, *columns) == expected
    assert len({row["lsn"] for row in rows}) == 1
    positions = reader.positions()
    reader.close()
    with db.transaction():
        db.execute(f"ALTER TABLE {other} DROP COLUMN id")
        for number in range(10, 20):
            db.execute(f"INSERT INTO {table} VALUES ({number}, 'd')")
            db.execute(f"INSERT INTO {other} VALUES ({number})")
    monkeypatch.setattr("headgate.connectors.postgres.changes_reader.MESSAGES_MAX", 3)
    rows = []
    while len(rows) < 20:  # a position in the middle of a transaction counts the changes of all tables
        reader = source.open(context(positions))
        rows += take(reader, 1)
        positions = reader.positions()
        reader.close()
    assert by_table(rows, *columns) == [
        one for n in range(10, 20) for one in (("t", "insert", n, "d", None), ("o", "insert", None, None, n))
    ]


def test_a_stream_of_each_table_is_made_of_one_source(
    url: str, db: Any, table: str, other: str, tmp_path: Path
) -> None:
    db.execute(f"INSERT INTO {table} SELECT g, 'n' || g FROM generate_series(1, 9) g")
    db.execute(f"INSERT INTO {other} SELECT g, g % 3 FROM generate_series(1, 5) g")
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path / "checkpoints"))
    both = p.source(PostgresChanges(url, [table, other], end="latest"), name="both")
    places = [f"sqlite:///{tmp_path}/{name}.db" for name in ("names", "numbers")]
    names = both.filter(pl.col("table") == f"public.{table}").select("op", "id", "name")
    names.records_as_changes("id", retractions=True).sink(hg.SqlSink(places[0], "t", upsert="id", create=True))
    numbers = both.filter(pl.col("table") == f"public.{other}").select("op", "number", "id")
    numbers.records_as_changes("number").sink(hg.SqlSink(places[1], "t", upsert="number", create=True))
    testing.run(p)
    found = []
    for place in places:
        with sa.create_engine(place, poolclass=sa.pool.NullPool).connect() as connection:
            found.append([tuple(row) for row in connection.exec_driver_sql("select * from t order by 1")])
    assert found == [[(n, f"n{n}") for n in range(1, 10)], [(n, n % 3) for n in range(1, 6)]]


def test_a_whole_publication_is_read_and_a_new_table_of_it_is_refused(
    url: str, db: Any, table: str, other: str
) -> None:
    publication = f"p_{table}"
    db.execute(f"CREATE PUBLICATION {publication} FOR TABLE {table}, {other}")
    db.execute(f"INSERT INTO {other} VALUES (1, 2)")
    source = PostgresChanges(url, publication=publication)
    assert [one.name for one in source.found_tables()] == sorted([table, other])
    reader = source.open(context())
    assert by_table(take(reader, 1), "number") == [("o", "insert", 1)]
    db.execute(f"CREATE TABLE new_{table} (id int PRIMARY KEY)")
    db.execute(f"ALTER PUBLICATION {publication} ADD TABLE new_{table}")
    db.execute(f"INSERT INTO new_{table} VALUES (1)")
    with pytest.raises(UsageError, match=f"has a new table public.new_{table}; start the pipeline over"):
        take(reader, 1)
    reader.close()


def test_a_table_that_left_its_publication_is_missed(url: str, db: Any, table: str) -> None:
    source = PostgresChanges(url, table)
    reader = source.open(context())
    take(reader, 0)
    positions = reader.positions()
    reader.close()
    db.execute(f"DROP TABLE {table}")
    db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, name text)")
    db.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    reader = source.open(context(positions))
    with pytest.raises(UsageError, match="was taken out, or dropped and made again, so changes are lost; start the"):
        take(reader, 1)
    reader.close()
    reader = source.open(context())
    take(reader, 0)
    db.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    assert plain(take(reader, 1)) == [("insert", 1, "a")]
    reader.close()


def test_columns_of_one_name_have_one_type(url: str, db: Any, table: str) -> None:
    db.execute(f"CREATE TABLE x{table} (id bigint PRIMARY KEY)")
    tables = [table, f"x{table}"]
    with pytest.raises(UsageError, match=r"'id' has type int32 in table .* and int64 in table .*as_text=\['id'\]"):
        PostgresChanges(url, tables).schema()
    assert PostgresChanges(url, tables, as_text=["id"]).schema().field("id").type == pa.large_string()


def test_metadata_says_which_transaction_made_a_change(url: str, db: Any, table: str) -> None:
    db.execute(f"INSERT INTO {table} VALUES (0, 'old')")
    source = PostgresChanges(url, table, metadata=["commit_time", "lsn", "transaction"])
    assert source.changes() is None
    reader = source.open(context())
    old = take(reader, 1)[0]
    assert old["transaction"] == 0
    with db.transaction():
        number = int(db.execute("SELECT pg_current_xact_id()::text").fetchone()[0])
        db.execute(f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b')")
    rows = take(reader, 2)
    assert [row["transaction"] for row in rows] == [number, number]
    assert len({(row["lsn"], row["commit_time"]) for row in rows}) == 1
    assert rows[0]["lsn"] > old["lsn"]
    reader.close()


def test_values_are_the_same_in_the_snapshot_and_in_changes(url: str, db: Any) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    db.execute("DO $$ BEGIN CREATE TYPE mood AS ENUM ('ok', 'bad'); EXCEPTION WHEN duplicate_object THEN END $$")
    columns = (
        "a bool, b int2, c int4, d int8, e float4, f float8, g numeric(12,3), h numeric, i text, j varchar(5), "
        "k char(4), l bytea, m date, n time, o timestamp, p timestamptz, q interval, r uuid, s json, t jsonb, u int[], "
        "v mood, w inet, x int4range, y numeric(3,-2), z oid"
    )
    db.execute(
        f"CREATE TABLE {name} (id int PRIMARY KEY, {columns}, gone int, made int GENERATED ALWAYS AS (1) STORED)"
    )
    db.execute(f"ALTER TABLE {name} DROP gone")
    db.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    values = (
        "true, -3, 4, 9223372036854775807, 0.1, 'NaN', -12.340, 1e30, 'ü', 'v', 'c', '\\x00ff', '0001-01-01', '12:30', "
        "'2024-02-29 23:59:59.999999', '1960-01-01 00:00+05:30', '1 mon 2 days', "
        "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{\"a\": 1}', '{\"b\":2}', '{1,NULL}', 'bad', '10.0.0.1', '[1,3)', "
        "12345, 7"
    )
    nulls = ", ".join(["NULL"] * 26)
    db.execute(f"INSERT INTO {name} VALUES (1, {values}), (2, {nulls})")
    source = PostgresChanges(url, name)
    reader = source.open(context())
    before = take(reader, 2)
    db.execute(f"INSERT INTO {name} VALUES (1001, {values}), (1002, {nulls})")
    after = take(reader, 2)
    reader.close()
    for row in after:
        row["id"] -= 1000
    assert repr(after) == repr(before)
    assert source.schema().field("g").type == pa.decimal128(12, 3)
    assert (before[0]["k"], before[0]["u"], before[0]["d"]) == ("c   ", "{1,NULL}", 9223372036854775807)


def test_a_value_that_arrow_cannot_hold_can_be_read_as_text(url: str, db: Any) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, day date)")
    db.execute(f"INSERT INTO {name} VALUES (1, 'infinity')")
    with pytest.raises(UsageError, match="as_text"):
        fails(PostgresChanges(url, name).open(context()))
    reader = PostgresChanges(url, name, as_text=["day"]).open(context())
    assert [row["day"] for row in take(reader, 1)] == ["infinity"]
    reader.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_position_of_another_slot_or_server_is_refused(url: str, db: Any, table: str) -> None:
    source = PostgresChanges(url, table)
    reader = source.open(context())
    take(reader, 0)
    found = Position.decode(reader.positions()[SPLIT])
    reader.close()

    def refuses(problem: str, **changed: Any) -> None:
        fields = {name: getattr(found, name) for name in ("slot", "system", "timeline", "lsn")} | changed
        with pytest.raises(UsageError, match=f"(?s){problem}.*start the pipeline over"):
            fails(source.open(context({SPLIT: Position(**fields).encode()})))

    refuses("is not in .* any more", slot="other")
    refuses("is another server", system="1")
    refuses("timeline", timeline=2)
    refuses("ends before the restored position", lsn=1 << 60)
    refuses("confirmed beyond", lsn=1)


def test_a_slot_that_was_invalidated_is_named() -> None:
    settings = f"{SETTINGS}max_slot_wal_keep_size = 1MB\nmin_wal_size = 32MB\nmax_wal_size = 32MB\n"
    with postgres_server(settings=settings) as server:
        url = server.url().partition("?")[0]
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("CREATE TABLE t (id int PRIMARY KEY, name int)")
            source = PostgresChanges(url, "t")
            reader = source.open(context())
            take(reader, 0)
            positions = reader.positions()
            reader.close()
            until = time.monotonic() + PATIENCE_S
            while db.execute("SELECT wal_status FROM pg_replication_slots").fetchone()[0] != "lost":
                assert time.monotonic() < until
                db.execute("SELECT pg_logical_emit_message(true, 'x', repeat('x', 5000000))")
                db.execute("SELECT pg_switch_wal()")
                db.execute("CHECKPOINT")
            with pytest.raises(UsageError, match="max_slot_wal_keep_size allows; start the pipeline over"):
                fails(source.open(context(positions)))


def test_a_standby_that_has_not_all_changes_that_were_read_is_refused() -> None:
    """A copy of the server is promoted, which lacks what was written later. Its catalogue says that slots go with it,
    as servers from 17 on can."""
    with postgres_server(settings=f"{SETTINGS}restore_command = 'false'\n") as server:
        url = f"{server.url().partition('?')[0]}?options=-csearch_path%3Dpublic,pg_catalog"
        promote_copy = copy_of(server, url)
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("CREATE TABLE t (id int PRIMARY KEY, name int)")
            db.execute(
                "CREATE VIEW pg_replication_slots AS SELECT *, true failover FROM pg_catalog.pg_replication_slots"
            )
        source = PostgresChanges(url, "t")
        early = positions_after(source, url, None, 1)
        promote = promote_copy()
        late = positions_after(source, url, early, 2)
        promote()
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("INSERT INTO t VALUES (3)")
            db.execute("SELECT pg_logical_emit_message(true, 'x', repeat('x', 5000000))")
            db.execute("INSERT INTO t VALUES (4)")
        reader = source.open(context(late))
        with pytest.raises(UsageError, match=r"did not have all changes that were read.*start the pipeline over"):
            take(reader, 1)
        reader.close()
        reader = source.open(context(early))
        assert [row["id"] for row in take(reader, 2)] == [3, 4]
        now = reader.positions()
        reader.close()
        positions_after(source, url, now, 5)


def positions_after(source: PostgresChanges, url: str, positions: dict[str, bytes] | None, id: int) -> dict[str, bytes]:
    """Insert a row, and return the positions with which it was read."""
    reader = source.open(context(positions))
    take(reader, 0)
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("INSERT INTO t VALUES (%s)", (id,))
    assert [row["id"] for row in take(reader, 1)] == [id]
    found = reader.positions()
    reader.close()
    return found


def copy_of(server: PostgresServer, url: str) -> Callable[[], Callable[[], None]]:
    """Return what copies the files of a server, and returns what puts the copy in place, as a new primary."""
    with psycopg.connect(url) as db:
        (place,) = db.execute("SHOW data_directory").fetchone() or ("",)

    def copy() -> Callable[[], None]:
        server.crash()
        subprocess.run(["cp", "-a", place, f"{place}.copy"], check=True)
        server.start()
        return promote

    def promote() -> None:
        server.crash()
        shutil.rmtree(place)
        Path(f"{place}.copy").rename(place)
        signal = Path(place, "recovery.signal")
        signal.touch()
        owner = Path(place).stat()
        os.chown(signal, owner.st_uid, owner.st_gid)
        server.start()
        until = time.monotonic() + PATIENCE_S
        with psycopg.connect(url, autocommit=True) as db:
            while db.execute("SELECT pg_is_in_recovery()").fetchone() == (True,):
                assert time.monotonic() < until

    return copy


def test_two_pipelines_on_one_slot_are_refused(url: str, db: Any, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.connectors.postgres.slots.PATIENCE_MS", 500)
    source = PostgresChanges(url, table)
    reader = source.open(context())
    take(reader, 0)
    db.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    take(reader, 1)
    with pytest.raises(UsageError, match="is being read by another process"):
        fails(source.open(context(reader.positions())))
    db.execute(f"INSERT INTO {table} VALUES (2, 'a')")
    take(reader, 1)
    reader.close()


@pytest.mark.parametrize(
    ("prepare", "options", "problem"),
    [
        ("", {"as_text": ["nothing"]}, "as_text names 'nothing'"),
        ("ALTER TABLE {} REPLICA IDENTITY DEFAULT", {}, "lack large values of column 'name'.*REPLICA IDENTITY FULL"),
        ("ALTER TABLE {} REPLICA IDENTITY NOTHING", {}, "do not say which row changes"),
        ("ALTER TABLE {} ADD op text", {}, "has a column 'op'"),
        ("ALTER TABLE {} SET UNLOGGED", {}, "is unlogged.*SET LOGGED"),
        ("", {"publication": "nothing"}, "there is no publication"),
        ("CREATE PUBLICATION e_{}", {"publication": "e_{}"}, "does not have table"),
        (
            "CREATE PUBLICATION o_{} FOR TABLE {} WITH (publish = 'insert')",
            {"publication": "o_{}"},
            "leaves out some operations",
        ),
        ("CREATE PUBLICATION c_{} FOR TABLE {} (id)", {"publication": "c_{}"}, "leaves out"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_when_the_pipeline_is_built(
    url: str, db: Any, table: str, prepare: str, options: dict[str, Any], problem: str
) -> None:
    if prepare:
        db.execute(prepare.replace("{}", table))
    options = {name: value.replace("{}", table) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(UsageError, match=problem):
        hg.Pipeline("p").source(PostgresChanges(url, table, **options))


def test_a_partition_that_is_not_in_the_log_is_refused(url: str, db: Any, table: str) -> None:
    db.execute(f"CREATE TABLE all_{table} (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    db.execute(f"CREATE TABLE low_{table} PARTITION OF all_{table} FOR VALUES FROM (0) TO (10)")
    PostgresChanges(url, f"all_{table}").schema()
    db.execute(f"CREATE UNLOGGED TABLE high_{table} PARTITION OF all_{table} FOR VALUES FROM (10) TO (20)")
    with pytest.raises(UsageError, match=rf"public.all_{table} .*public.high_{table}, which is unlogged"):
        PostgresChanges(url, f"all_{table}").schema()
    db.execute(f"DROP TABLE high_{table}")
    db.execute(f"CREATE FOREIGN DATA WRAPPER w_{table}; CREATE SERVER s_{table} FOREIGN DATA WRAPPER w_{table}")
    foreign = f"CREATE FOREIGN TABLE high_{table} PARTITION OF all_{table} FOR VALUES FROM (10) TO (20)"
    db.execute(f"ALTER TABLE all_{table} DROP CONSTRAINT all_{table}_pkey; {foreign} SERVER s_{table}")
    with pytest.raises(UsageError, match=rf"public.all_{table} .*public.high_{table}, which is foreign"):
        PostgresChanges(url, f"all_{table}").schema()


@pytest.mark.parametrize(
    ("given", "options", "problem"),
    [
        ("mysql://host/db", {}, "postgresql://user@host:5432/database"),
        ("postgresql://user:geheim@host/db", {}, "has a password"),
        ("postgresql://host/db?password=geheim", {}, "has a password"),
        ("postgresql://host/db", {"slot": "Ä"}, "small letters"),
        ("postgresql://host/db", {"snapshot": False}, "needs slot="),
        ("postgresql://host/db", {"metadata": ["offset"]}, "none of commit_time"),
        ("postgresql://host/db", {"truncate": "drop"}, "'error' or 'ignore'"),
        ("postgresql://host/db", {"end": "earliest"}, "'latest' or None"),
    ],
)
def test_options_that_cannot_be_are_refused(given: str, options: dict[str, Any], problem: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(UsageError, match=problem) as refused:
        PostgresChanges(given, "t", **options)
    assert "geheim" not in str(refused.value)


def test_a_server_that_does_not_answer_is_a_transient_failure() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError) as failed:
        PostgresChanges("postgresql://postgres@127.0.0.1:1/nothing", "t").schema()
    assert failed.value.is_transient


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"slot": 1}'])
def test_damaged_positions_of_changes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        Position.decode(data)


# -- in a pipeline -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_begins_when_the_subtask_has_taken_the_last_row(
    url: str, db: Any, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.connectors.postgres.changes_reader.MESSAGES_MAX", 1)
    db.execute(f"INSERT INTO {table} SELECT g, 'n' FROM generate_series(1, 10) g")
    source = PostgresChanges(url, table)
    hook = source.coordinator_hook()
    assert hook is not None
    hook.open(HookContext("p", "node", 1, "life"))
    hook.reset()
    reader = source.open(SourceContext("p", "node", 0, 1, None, life="life"))
    until, rows = time.monotonic() + PATIENCE_S, 0
    while hook.trigger(1) is ASK_AGAIN:
        assert time.monotonic() < until
        found = reader.poll()
        rows += 0 if found is None else len(found.batch)
    assert rows == 10
    assert Position.decode(reader.positions()[SPLIT]).index == 0
    reader.close()
    hook.reset()


def test_checkpoints_wait_for_the_snapshot_and_former_slots_go(url: str, db: Any, table: str) -> None:
    source = PostgresChanges(url, table, slot=f"s_{table}"[:30])
    hook = source.coordinator_hook()
    assert hook is not None
    hook.open(HookContext("p", "node", 1, "life"))
    hook.reset()
    assert hook.trigger(1) is ASK_AGAIN
    reader = source.open(SourceContext("p", "node", 0, 1, None, life="life"))
    take(reader, 0)
    until = time.monotonic() + PATIENCE_S
    while hook.trigger(1) is ASK_AGAIN:
        assert time.monotonic() < until
    reader.close()
    slots = "SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE %s"
    assert db.execute(slots, (f"{source.slot}%",)).fetchone()[0] == 1
    hook.open(HookContext("p", "node", 2, "another"))
    hook.reset()
    assert db.execute(slots, (f"{source.slot}%",)).fetchone()[0] == 0


@pytest.mark.run
def test_a_pipeline_has_each_change_once_although_workers_are_killed(
    url: str, db: Any, table: str, tmp_path: Path
) -> None:
    db.execute(f"INSERT INTO {table} SELECT g, 'n' || g FROM generate_series(1, 5000) g")
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="20ms", dir=tmp_path / "checkpoints"))
    stream = pipeline.source(PostgresChanges(url, table), name="orders")
    stream.changes_as_records().sink(hg.FileSink(tmp_path / "out", roll_interval=0), name="out")
    with testing.running(pipeline, kill_worker_after_checkpoint=(2, 5)) as handle:
        _grows(tmp_path / "out", 5_000)
        for number in range(6):
            with db.transaction():
                db.execute(f"UPDATE {table} SET name = 'v{number}' WHERE id <= 100")
                db.execute(f"DELETE FROM {table} WHERE id = {5_000 - number}")
            _grows(tmp_path / "out", 5_000 + 201 * (number + 1))
        handle.stop(timeout_s=PATIENCE_S)
    found = _written(tmp_path / "out")
    state: dict[int, str] = {}
    for row in found:
        if row["op"] in ("insert", "update_after"):
            state[row["id"]] = row["name"]
        else:
            assert state.pop(row["id"]) == row["name"]
    assert state == dict(db.execute(f"SELECT id, name FROM {table}").fetchall())
    assert len(found) == 5_000 + 201 * 6


def _written(directory: Path) -> list[dict[str, Any]]:
    files = sorted(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns) if directory.exists() else []
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def _grows(directory: Path, count: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while (found := len(_written(directory))) < count:
        assert time.monotonic() < until, f"{found} of {count} records were written"
        time.sleep(0.05)
    assert found == count
