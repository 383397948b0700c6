"""Tables of a real MariaDB server as sinks, with settings and columns that lose data where a client lets them."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from tests.conftest import IS_DEEP
from tests.connectors.committing import commit, records, recovered, write, written
from tests.servers.mariadb import MariaDbServer, mariadb_server

import headgate as hg
from headgate.errors import FencedError, StorageError
from headgate.testing.sink_kit import check_sink
from headgate.testing.sinks.fake_pipeline import Target
from headgate.testing.sinks.scenarios import KillPoint, check_kill

pytestmark = pytest.mark.long

Execute = Callable[[str], list[tuple[Any, ...]]]
_databases = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDbServer]:
    with mariadb_server() as made:
        yield made


def executed(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Execute a statement on a connection of its own."""
    with sa.create_engine(url, poolclass=sa.pool.NullPool).connect() as connection:
        connection.exec_driver_sql("set names utf8mb4")
        found = connection.exec_driver_sql(statement)
        rows = [tuple(row) for row in found] if found.returns_rows else []
        connection.commit()
        return rows


def new_database(server: MariaDbServer) -> str:
    """Return the URL of a new database."""
    name = f"d{next(_databases)}"
    executed(server.url(), f"create database {name}")
    return server.url(name)


@pytest.fixture
def url(server: MariaDbServer) -> str:
    return new_database(server)


@pytest.fixture
def execute(url: str) -> Execute:
    return lambda statement: executed(url, statement)


def target(server: MariaDbServer, *, is_killed: bool = False) -> Target:
    place = new_database(server)

    def read() -> list[dict[str, Any]]:
        rows = executed(place, "select number, text from numbers")
        return [{"number": number, "text": text} for number, text in rows]

    def crash() -> None:
        server.kill()
        server.start()

    return Target(hg.SqlSink(place, "numbers", create=True), read, crash=crash if is_killed else None)


@pytest.mark.deep
def test_it_passes_the_conformance_kit(server: MariaDbServer) -> None:
    rescales, rows = (((1, 1), (1, 2), (3, 2)), (0, 1, 12)) if IS_DEEP else (((3, 2),), (1,))
    check_sink(lambda: target(server), rescales=rescales, overlaps=(1, 3) if IS_DEEP else (1,), rows=rows)


@pytest.mark.parametrize("point", KillPoint if IS_DEEP else [KillPoint.COMPLETED, KillPoint.COMMITTED])
def test_nothing_is_lost_or_doubled_when_the_server_is_killed_with_the_pipeline(
    server: MariaDbServer, point: KillPoint
) -> None:
    check_kill(target(server, is_killed=True), point, 2, 1, 1, 3)


def test_a_server_that_loses_what_it_has_committed_is_refused(url: str, execute: Execute) -> None:
    sink = hg.SqlSink(url, "t", create=True)
    for lasting in (0, 2):
        execute(f"set global innodb_flush_log_at_trx_commit = {lasting}")
        try:
            with pytest.raises(hg.UsageError, match=rf"innodb_flush_log_at_trx_commit is {lasting}; SET GLOBAL .* = 1"):
                write(sink, records([{"n": 1}]))
        finally:
            execute("set global innodb_flush_log_at_trx_commit = 1")


def test_a_server_that_syncs_more_often_than_needed_is_fine(url: str, execute: Execute) -> None:
    execute("set global innodb_flush_log_at_trx_commit = 3")
    try:
        write(hg.SqlSink(url, "t", create=True), records([{"n": 1}]))
    finally:
        execute("set global innodb_flush_log_at_trx_commit = 1")
    assert execute("select * from t") == [(1,)]


def test_a_url_that_commits_each_statement_commits_all_of_a_checkpoint_or_nothing(url: str, execute: Execute) -> None:
    execute("create table t (n bigint unique) engine = InnoDB")
    sink = hg.SqlSink(f"{url}?autocommit=true", "t")
    one, same = (written(sink, records([{"n": 1}]), 1, subtask=subtask) for subtask in range(2))
    committer = recovered(sink, keep=[one, same])
    with pytest.raises(hg.UsageError, match=r"refuses to write to table t .*Duplicate"):
        commit(committer, one, same)
    assert execute("select * from t") == []


VALUES = {
    "id": 0,
    'sel"e`ct:a %s (b)': "\\ 'q' %",
    "V é": "\U0001f600 é\n ",
    "flag": True,
    "data": b"\0\xff'",
    "share": 0.1,
    "at": dt.datetime(2024, 1, 2, 3, 4, 5, 6),
    "moment": dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
    "day": dt.date(2024, 1, 2),
    "time": dt.time(1, 2, 3, 4),
    "price": Decimal("-1.50"),
    "tags": ["a", None],
    "place": {"x": 1, "y": "é"},
}


def test_values_arrive_in_columns_of_odd_names(url: str, execute: Execute) -> None:
    batch = records([VALUES, dict.fromkeys(VALUES) | {"id": 1}])
    batch = batch.append_column("many", pa.array([2**64 - 1, None], pa.uint64()))
    write(hg.SqlSink(url, "odd Table", create=True), batch)
    ((*found,), (*empty,)) = execute("select * from `odd Table` order by id")
    assert empty == [1] + [None] * len(VALUES)
    values = dict(zip([*VALUES, "many"], found, strict=True))
    expected = {name: value for name, value in VALUES.items() if name not in ("tags", "place")}
    expected |= {"moment": VALUES["moment"].replace(tzinfo=None), "many": 2**64 - 1, "flag": 1}  # type: ignore[attr-defined]
    expected["time"] = dt.timedelta(hours=1, minutes=2, seconds=3, microseconds=4)
    assert {name: values[name] for name in expected} == expected
    assert [json.loads(values[name]) for name in ("tags", "place")] == [VALUES["tags"], VALUES["place"]]
    assert execute("select distinct engine from information_schema.tables where table_schema = database()") == [
        ("InnoDB",)
    ]


def test_keys_that_differ_in_case_or_spaces_are_two_rows(url: str, execute: Execute) -> None:
    keys = ["a", "A", "a ", "ä", "a"]
    sink = hg.SqlSink(url, "t", create=True, upsert="key")
    write(sink, records([{"key": key, "n": n} for n, key in enumerate(keys)]))
    assert sorted(execute("select * from t")) == [("A", 1), ("a", 4), ("a ", 2), ("ä", 3)]
    gone = records([{"op": "delete", "key": "A", "n": 0}])
    later = sink.for_changes(("key",), retractions=False)
    one = written(later, gone, 2, generation=2)
    commit(recovered(later, 2, [one]), one)
    assert sorted(execute("select * from t")) == [("a", 4), ("a ", 2), ("ä", 3)]


def test_keys_of_two_columns_and_of_bytes_are_replaced(url: str, execute: Execute) -> None:
    rows = [{"a": bytes([n % 3]), "b": n % 2, "n": n} for n in range(10)]
    write(hg.SqlSink(url, "t", create=True, upsert=("a", "b")), records(rows), records([rows[0] | {"n": 99}]))
    found = sorted(execute("select * from t"))
    assert found == [(b"\0", 0, 99), (b"\0", 1, 9), (b"\1", 0, 4), (b"\1", 1, 7), (b"\2", 0, 8), (b"\2", 1, 5)]


@pytest.mark.parametrize(
    ("table", "value", "problem"),
    [
        ("(v char(9))", pa.array(["a "], pa.large_string()), "cuts off spaces at the end"),
        ("(v varchar(9) character set latin1)", pa.array(["a"], pa.large_string()), "character set latin1"),
        ("(v int unsigned)", pa.array([1], pa.int32()), "not all numbers fit"),
        ("(v tinyint(1))", pa.array([1], pa.int16()), "not all numbers fit"),
        ("(v mediumint)", pa.array([1], pa.int32()), "not all numbers fit"),
        ("(v decimal(18))", pa.array([1], pa.int64()), "not all numbers fit"),
        ("(v decimal(10, 1))", pa.array([Decimal("1.25")]), "rounds numbers"),
        ("(v decimal(2, 2))", pa.array([Decimal("1.25")]), "rounds numbers"),
        ("(v float)", pa.array([0.1]), "rounds numbers"),
        ("(v datetime)", pa.array([1], pa.timestamp("us")), r"cuts off parts of seconds; DATETIME\(6\) has them"),
        ("(v timestamp(3) null)", pa.array([1], pa.timestamp("us", tz="UTC")), r"TIMESTAMP\(6\) has them"),
        ("(v time)", pa.array([1], pa.time64("us")), r"TIME\(6\) has them"),
        ("(v binary(4))", pa.array([b"a"], pa.large_binary()), "fills up bytes with zeros"),
        ("(v bigint as (1) virtual)", pa.array([1]), "the database fills it by itself"),
        ("(v bigint) engine = MyISAM", pa.array([1]), "engine MyISAM, which has no transactions"),
    ],
)
def test_a_table_that_would_change_values_is_refused(
    url: str, execute: Execute, table: str, value: pa.Array, problem: str
) -> None:
    execute(f"create table t {table}{'' if 'engine' in table else ' engine = InnoDB'}")
    with pytest.raises(hg.UsageError, match=problem):
        hg.SqlSink(url, "t").check(pa.schema([("v", value.type)]))


def test_columns_with_room_take_the_values(url: str, execute: Execute) -> None:
    execute(
        "create table t (flag tinyint(1), small int unsigned, big decimal(20), price decimal(9, 3), share float, "
        "at datetime(6), moment timestamp(6) null, kind enum('a', 'b'), note varchar(20) character set utf8mb4, "
        "own int not null auto_increment primary key) engine = InnoDB"
    )
    row = {"flag": True, "big": 2**62, "price": Decimal("1.25"), "at": VALUES["at"], "moment": VALUES["moment"]}
    batch = records([row | {"kind": "b", "note": "\U0001f600 "}])
    batch = batch.append_column("small", pa.array([2**32 - 1], pa.uint32()))
    batch = batch.append_column("share", pa.array([0.5], pa.float32()))
    write(hg.SqlSink(url, "t"), batch)
    expected = (
        1,
        2**32 - 1,
        2**62,
        Decimal("1.250"),
        0.5,
        VALUES["at"],
        "2024-01-02 05:00:00.000000",
        "b",
        "\U0001f600 ",
        1,
    )
    assert execute("select flag, small, big, price, share, at, cast(moment as char), kind, note, own from t") == [
        expected
    ]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("(k varchar(9) character set utf8mb4 primary key)", "compares 'k' by utf8mb4_general_ci, for which texts"),
        ("(k varchar(9) collate utf8mb4_bin primary key)", "VARCHAR.255. COLLATE utf8mb4_nopad_bin NOT NULL"),
        ("(k varchar(9) collate utf8mb4_nopad_bin primary key, v int unique)", "is unique in v as well"),
        ("(k varchar(9) collate utf8mb4_nopad_bin, v int)", "no primary key or unique constraint of exactly k"),
    ],
)
def test_a_table_whose_keys_are_other_keys_is_refused(url: str, execute: Execute, table: str, problem: str) -> None:
    execute(f"create table t {table} engine = InnoDB")
    with pytest.raises(hg.UsageError, match=problem):
        hg.SqlSink(url, "t", upsert="k").check(pa.schema([("k", pa.large_string())]))


def test_what_does_not_fit_is_an_error_also_where_the_server_cuts_it_off(url: str, execute: Execute) -> None:
    execute("create table t (v varchar(3) character set utf8mb4) engine = InnoDB")
    sink = hg.SqlSink(url, "t")
    one = written(sink, records([{"v": "abcd"}]), 1)
    with pytest.raises(hg.UsageError, match=r"refuses to write to table t in mysql:.*Data too long.*start again"):
        commit(recovered(sink, keep=[one]), one)
    execute("create table c (v bigint check (v < 5)) engine = InnoDB")
    sink = hg.SqlSink(url, "c")
    one = written(sink, records([{"v": 7}]), 1)
    with pytest.raises(hg.UsageError, match=r"CONSTRAINT .* failed"):
        commit(recovered(sink, 2, keep=[one]), one)
    with pytest.raises(hg.UsageError, match="a number in 'v' is NaN or infinite"):
        written(hg.SqlSink(url, "n", create=True), records([{"v": float("nan")}]), 1)


def test_a_server_that_is_away_or_locks_may_come_back_and_a_wrong_database_may_not(
    url: str, server: MariaDbServer
) -> None:
    with pytest.raises(hg.UsageError, match="Unknown database 'nowhere'"):
        hg.SqlSink(server.url("nowhere"), "t").claimed("p")
    with pytest.raises(StorageError) as caught:
        hg.SqlSink("mysql+pymysql://writer@127.0.0.1:1/d", "t").claimed("p")
    assert caught.value.is_transient


def test_an_older_generation_writes_nothing(url: str, execute: Execute) -> None:
    sink = hg.SqlSink(url, "t", create=True)
    batch = records([{"id": 1}])
    sink.make_target(batch.schema)
    old = recovered(sink, 1)
    one = written(sink, batch, 1)
    new = recovered(sink, 2, [one])
    with pytest.raises(FencedError):
        commit(old, one)
    assert execute("select * from t") == []
    commit(new, one)
    assert execute("select * from t") == [(1,)]
