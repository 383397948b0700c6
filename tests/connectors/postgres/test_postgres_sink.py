"""A table of a real PostgreSQL server as sink."""

from __future__ import annotations

import datetime as dt
import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from typing import Any, Literal

import psycopg
import pyarrow as pa
import pytest
from tests.conftest import IS_DEEP
from tests.connectors.committing import commit, records, recovered, write, written
from tests.connectors.postgres.conftest import SETTINGS
from tests.docs.documentation import PREAMBLE, examples
from tests.servers.postgres import PostgresServer, postgres_server

import headgate as hg
from headgate.connectors.base import SinkContext
from headgate.connectors.postgres.sink import PostgresSink, PreparedTransactions
from headgate.errors import FencedError, StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.testing.sink_kit import check_sink
from headgate.testing.sinks.fake_pipeline import Target
from headgate.testing.sinks.scenarios import KillPoint, check_kill

Execute = Callable[[str], list[Any]]

VALUES = {
    "id": 1,
    "sel\"e'ct:a %s": "\\ 'q'",
    "V é": "é\n\\N\t",
    "flag": True,
    "data": b"\0\1",
    "share": math.inf,
    "at": dt.datetime(2024, 1, 2, 3, 4, 5, 6),
    "moment": dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
    "day": dt.date(1, 1, 2),
    "time": dt.time(1, 2, 3, 4),
    "span": dt.timedelta(days=1, microseconds=-1),
    "price": Decimal("-12345678901234567890.5"),
    "tags": ["a", None],
    "times": [dt.datetime(2024, 1, 2)],
    "place": {"x": 1, "y": 'é"\\u0000'},
    "places": [{"x": 1}, None],
}


def test_values_arrive_in_a_table_that_was_created_with_odd_names(url: str, execute: Execute) -> None:
    batch = records([VALUES, dict.fromkeys(VALUES) | {"id": 2}])
    batch = batch.append_column("large", pa.array([2**64 - 1, None], pa.uint64()))
    batch = batch.append_column("small", pa.array([-128, None], pa.int8()))
    for upsert in ((), ("id",)):
        schema = f"We:ird '\"{uuid.uuid4().hex[:8]}"
        quoted = '"' + schema.replace('"', '""') + '"'
        execute(f"create schema {quoted}")
        write(hg.PostgresSink(url, "odd Table", schema=schema, create=True, upsert=upsert), batch)
        found, empty = execute(f'select * from {quoted}."odd Table" order by id')
        assert list(found) == [*VALUES.values(), 2**64 - 1, -128]
        assert list(empty) == [2] + [None] * (batch.num_columns - 1)
    options = execute("select reloptions from pg_class where relname = 'odd Table' order by oid desc limit 2")
    assert options == [(["fillfactor=70"],), (None,)]
    columns = "select column_name, data_type from information_schema.columns where table_schema = "
    kinds = dict(execute(columns + "'" + schema.replace("'", "''") + "'"))
    assert [kinds[name] for name in ("small", "large", "place", "places", "tags", "span")] == [
        *("smallint", "numeric", "jsonb", "jsonb", "ARRAY", "interval")
    ]


def test_values_arrive_in_columns_of_a_table_that_was_there(url: str, schema: str, execute: Execute) -> None:
    execute(
        f"create type {schema}.mood as enum ('sad', 'happy'); create domain {schema}.short as varchar(5);"
        f"create table {schema}.t (id bigint, wide numeric, j jsonb, e json, u uuid, b uuid, m {schema}.mood, "
        f"s {schema}.short, f float8, n serial)"
    )
    one = uuid.uuid4()
    columns = {
        "id": pa.array([1, 2], pa.int32()),
        "wide": pa.array([7, None], pa.int64()),
        "j": pa.array(['{"a": [1]}', None], pa.large_string()),
        "e": pa.array(["[]", None], pa.large_string()),
        "u": pa.array([str(one).upper(), None], pa.large_string()),
        "b": pa.array([one.bytes, None], pa.large_binary()),
        "m": pa.array(["happy", None], pa.large_string()),
        "s": pa.array(["abc", None], pa.large_string()),
        "f": pa.array([1.5, math.nan], pa.float32()),
    }
    write(hg.PostgresSink(url, "t", schema=schema), pa.record_batch(columns))
    assert execute(f"select id, wide, j, e, u, b, m, s, f, n from {schema}.t order by id") == [
        (1, 7, {"a": [1]}, [], one, one, "happy", "abc", 1.5, 1),
        (2, None, None, None, None, None, None, None, pytest.approx(math.nan, nan_ok=True), 2),
    ]
    bad = pa.record_batch({"id": pa.array([1], pa.int32()), "u": pa.array(["1234"], pa.large_string())})
    sink = hg.PostgresSink(url, "t", schema=schema)
    with pytest.raises(hg.UsageError, match="column 'u' of the table has type uuid, and '1234' is none"):
        commit(recovered(sink), written(sink, bad, 9))


def test_of_the_changes_of_a_key_the_last_one_counts(url: str, schema: str, execute: Execute) -> None:
    changes = [
        *({"op": "insert", "id": one, "n": 1} for one in (1, 2, 3)),
        {"op": "update_before", "id": 1, "n": 1},
        {"op": "update_after", "id": 1, "n": 2},
        {"op": "delete", "id": 2, "n": 1},
        {"op": "delete", "id": 3, "n": 1},
        {"op": "insert", "id": 3, "n": 3},
    ]
    sink = hg.PostgresSink(url, "t", schema=schema, create=True, upsert="id")
    write(sink.for_changes(("id",), retractions=True), records(changes), records([{"op": "delete", "id": 1, "n": 2}]))
    assert execute(f"select * from {schema}.t") == [(3, 3)]


def test_a_table_of_keys_alone_is_kept(url: str, schema: str, execute: Execute) -> None:
    write(hg.PostgresSink(url, f"{schema}.t", create=True, upsert="id"), *[records([{"id": 1}, {"id": 1}])] * 2)
    assert execute(f"select * from {schema}.t") == [(1,)]


def test_an_older_generation_writes_nothing(url: str, schema: str, execute: Execute) -> None:
    sink = hg.PostgresSink(url, "t", schema=schema, create=True)
    batch = records([{"id": 1}])
    sink.make_target(batch.schema)
    old = recovered(sink, 1)
    one = written(sink, batch, 1)
    new = recovered(sink, 2, [one])
    with pytest.raises(FencedError):
        commit(old, one)
    assert execute(f"select * from {schema}.t") == []
    commit(new, one)
    new.forget(CheckpointId(2), list)
    assert execute(f"select * from {schema}.t") == [(1,)]
    assert execute(f"select * from {schema}.headgate_commits") == []


def test_a_table_that_does_not_fit_is_refused(url: str, schema: str, execute: Execute) -> None:
    execute(
        f"create table {schema}.t (id int4, g int8 generated always as identity, n int8 not null, u uuid[]);"
        f"create unique index on {schema}.t (n) where n > 5; create unique index on {schema}.t (id, n)"
    )
    n = {"n": 1}
    for rows, options, said in (
        ([n | {"id": 1}], {}, "has type integer in 'id', and the records have int64; cast"),
        ([n | {"g": 1}], {}, "fills 'g' by itself"),
        ([n | {"u": ["a"]}], {}, r"has type uuid\[\] in 'u'"),
        ([n | {"other": 1}], {}, "has no column 'other'; it has id, g, n, u"),
        ([n], {"upsert": "n"}, "no primary key or unique constraint of exactly n"),
    ):
        with pytest.raises(hg.UsageError, match=said):
            hg.PostgresSink(url, "t", schema=schema, **options).check(records(rows).schema)
    with pytest.raises(hg.UsageError, match="needs a value in 'n'"):
        hg.PostgresSink(url, "t", schema=schema).check(pa.schema([("id", pa.int32())]))
    with pytest.raises(hg.UsageError, match=f"there is no table {schema}.gone"):
        hg.PostgresSink(url, "gone", schema=schema).check(records([n]).schema)


def test_a_table_that_a_crash_of_the_server_empties_is_refused(url: str, schema: str, execute: Execute) -> None:
    execute(
        f"create unlogged table {schema}.t (id int8); create table {schema}.parts (id int8) partition by range (id);"
        f"create table {schema}.low partition of {schema}.parts for values from (0) to (10);"
        f"create unlogged table {schema}.high partition of {schema}.parts for values from (10) to (20)"
    )
    batch = records([{"id": 1}])
    for table, unlogged in (("t", "t"), ("parts", "high")):
        sink = hg.PostgresSink(url, table, schema=schema)
        with pytest.raises(hg.UsageError, match=f"is unlogged.*ALTER TABLE {schema}.{unlogged} SET LOGGED"):
            sink.check(batch.schema)
        execute(f"alter table {schema}.{unlogged} set logged")
        write(sink, batch)
    execute(f"alter table {schema}.headgate_commits set unlogged")
    with pytest.raises(hg.UsageError, match=f"ALTER TABLE {schema}.headgate_commits SET LOGGED"):
        sink.check(batch.schema)


def test_what_waiting_does_not_help_with_is_said_at_once(url: str, schema: str, execute: Execute) -> None:
    execute(
        f"create table {schema}.t (id int8 unique deferrable);"
        f"create table {schema}.p (id int8 not null); create unique index on {schema}.p (id);"
        f"create publication {schema} for table {schema}.p"
    )
    with pytest.raises(hg.UsageError, match="no primary key or unique constraint of exactly id"):
        hg.PostgresSink(url, "t", schema=schema, upsert="id").check(records([{"id": 1}]).schema)
    sink = hg.PostgresSink(url, "p", schema=schema, upsert="id", takes_changes=True)
    one = written(sink, records([{"id": 1, "op": "delete"}]), 1)
    with pytest.raises(hg.UsageError, match=r"refuses to write to table .*replica identity.*start again"):
        commit(recovered(sink, keep=[one]), one)
    execute(f"alter table {schema}.p replica identity full")
    commit(recovered(sink, 2, [one]), one)


@pytest.mark.parametrize(
    "row", [{"a": "x\0y"}, {"a": {"b": "x\0"}}, {"a": ["x\0"]}], ids=["text", "in a struct", "in a list"]
)
def test_a_text_that_it_cannot_store_is_refused_before_the_checkpoint(url: str, row: dict[str, Any]) -> None:
    sink = hg.PostgresSink(url, "t")
    with pytest.raises(hg.UsageError, match=r"a text in 'a' has the character U\+0000"):
        written(sink, records([row]), 1)


def test_a_refusal_of_the_server_says_what_to_do(url: str, schema: str, execute: Execute) -> None:
    execute(f"create table {schema}.t (id int8 check (id < 5))")
    sink = hg.PostgresSink(url, "t", schema=schema)
    one = written(sink, records([{"id": 7}]), 1)
    committer = recovered(sink, keep=[one])
    with pytest.raises(hg.UsageError, match=r"refuses to write to table .*violates check constraint.*start again"):
        commit(committer, one)
    execute(f"alter table {schema}.t drop constraint t_id_check")
    commit(committer, one)
    assert execute(f"select * from {schema}.t") == [(7,)]


def test_a_password_is_found_where_the_sink_says(
    url: str, schema: str, execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute("drop role if exists locked; create role locked login password 'it''s \\ secret'")
    execute(f"grant all on schema {schema} to locked")
    monkeypatch.setenv("SINK_PASSWORD", "it's \\ secret")
    place = url.replace("postgres@", "locked@")
    write(hg.PostgresSink(place, "t", schema=schema, create=True, secret="env:SINK_PASSWORD"), records([{"id": 1}]))
    assert execute(f"select * from {schema}.t") == [(1,)]
    with pytest.raises(StorageError, match="no password supplied") as caught:
        hg.PostgresSink(place, "t", schema=schema).check(records([{"id": 1}]).schema)
    assert not caught.value.is_transient


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("postgresql://me:secret@host/d", "the server at host/d has a password in it"),
        ("postgresql://host/d?password=secret", "has a password in it"),
        ("mysql://host/d", "needs a URL such as"),
    ],
)
def test_a_url_that_cannot_be_is_refused(given: str, said: str) -> None:
    with pytest.raises(hg.UsageError, match=said) as caught:
        hg.PostgresSink(given, "t")
    assert "secret@" not in str(caught.value)


def test_a_server_that_does_not_answer_may_come_back() -> None:
    with pytest.raises(StorageError, match="Connection refused") as caught:
        hg.PostgresSink("postgresql://me@127.0.0.1:1/d", "t").check(records([{"id": 1}]).schema)
    assert caught.value.is_transient


def test_the_example_of_the_page_builds_its_pipeline(url: str, schema: str) -> None:
    code = next(code for code in examples("docs/how-to/postgresql.md") if "PostgresSink" in code)
    names: dict[str, Any] = {}
    exec(
        PREAMBLE + code.replace("postgresql://writer@localhost/shop", url).replace('"totals",', f'"{schema}.t",'), names
    )
    assert len(names["p"].definition().plan.vertices) > 1


HOW = ("ledger", "prepared")
RESCALES, ROWS = (((1, 1), (1, 2), (3, 2)), (0, 1, 12)) if IS_DEEP else (((3, 2),), (1,))


class Targets:
    """Makes empty tables, one at a time: connections of ADBC take the longer, the more tables there are."""

    def __init__(self, server: PostgresServer, commit: Literal["ledger", "prepared"], *, is_killed: bool) -> None:
        self._server, self._commit, self._is_killed = server, commit, is_killed
        self._url = server.url().partition("?")[0]
        self._open = ExitStack()
        self._database: Any = None
        self._schema = ""

    def fresh(self) -> Target:
        self._remove()
        self._schema = schema = f"s{uuid.uuid4().hex[:12]}"
        self._execute(f"create schema {schema}; create table {schema}.numbers (number int8, text text, at serial)")
        crash = self._crash if self._is_killed else None

        def read() -> list[dict[str, Any]]:
            rows = self._execute(f"select number, text from {schema}.numbers order by at")
            return [{"number": number, "text": text} for number, text in rows]

        sink = PostgresSink(self._url, "numbers", schema=schema, commit=self._commit)
        if self._commit == "prepared":
            return Target(PreparedTransactions(sink), read, self._waiting, self._lose, crash=crash)
        return Target(sink, read, is_ordered=True, crash=crash)

    def close(self) -> None:
        self._remove()
        self._open.close()

    def _crash(self) -> None:
        self._open.close()
        self._server.kill()
        self._server.start()
        self._database = None

    def _execute(self, statement: str) -> list[Any]:
        if self._database is None:
            self._database = self._open.enter_context(psycopg.connect(self._url, autocommit=True))
        found = self._database.execute(statement.encode())
        return found.fetchall() if found.description else []

    def _waiting(self) -> list[str]:
        return [gid for (gid,) in self._execute("select gid from pg_prepared_xacts")]

    def _lose(self) -> None:
        for gid in self._waiting():
            self._execute(f"rollback prepared '{gid}'")

    def _remove(self) -> None:
        """Remove the last one, with what dead writers have left open there."""
        if self._schema:
            self._execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'headgate'")
            self._lose()
            self._execute(f"drop schema {self._schema} cascade")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One of its own, which is killed and has no other tables. It commits before the disk has it, unless asked."""
    with postgres_server(settings=f"{SETTINGS}synchronous_commit = off\nwal_writer_delay = 10s\n") as made:
        yield made


@pytest.mark.deep
@pytest.mark.parametrize("commit", HOW)
@pytest.mark.parametrize("is_killed", [False, True], ids=["", "killed"])
def test_it_passes_the_conformance_kit(
    server: PostgresServer, commit: Literal["ledger", "prepared"], is_killed: bool
) -> None:
    targets = Targets(server, commit, is_killed=is_killed)
    try:
        check_sink(targets.fresh, rescales=RESCALES, overlaps=(1, 3) if IS_DEEP else (1,), rows=ROWS)
    finally:
        targets.close()


@pytest.mark.long
@pytest.mark.parametrize("commit", HOW)
def test_nothing_is_lost_or_doubled_when_the_server_is_killed_with_the_pipeline(
    server: PostgresServer, commit: Literal["ledger", "prepared"]
) -> None:
    targets = Targets(server, commit, is_killed=True)
    points = KillPoint if IS_DEEP else (KillPoint.PREPARED_ALL, KillPoint.COMMITTED_SOME)
    try:
        for point in points:
            check_kill(targets.fresh(), point, 2, 1, 1, 3)
    finally:
        targets.close()


def waiting(execute: Execute) -> list[str]:
    return [gid for (gid,) in execute("select gid from pg_prepared_xacts where database = current_database()")]


@pytest.fixture
def sink(url: str, schema: str) -> hg.PostgresSink:
    found = hg.PostgresSink(url, "t", schema=schema, create=True, commit="prepared")
    found.make_target(records([{"id": 1}]).schema)
    recovered(found)
    return found


def test_rows_are_on_the_server_before_they_are_visible(sink: hg.PostgresSink, schema: str, execute: Execute) -> None:
    one = written(sink, records([{"id": 1}]), 1)
    assert execute(f"select * from {schema}.t") == []
    committer = recovered(sink, 2, [one])
    for _ in range(2):
        commit(committer, one)
    assert execute(f"select * from {schema}.t") == [(1,)]
    committer.forget(CheckpointId(2), list)
    assert execute(f"select * from {schema}.headgate_commits") == []


def test_what_no_checkpoint_has_is_rolled_back_at_the_next_start(
    sink: hg.PostgresSink, schema: str, execute: Execute
) -> None:
    execute(f"begin; create table {schema}.other (id int); prepare transaction '{schema}'")
    before = waiting(execute)
    one, _ = (written(sink, records([{"id": n}]), n, subtask=n) for n in (1, 2))
    later = hg.PostgresSink(sink.url, "t", schema=schema)  # which prepares nothing any more
    commit(recovered(later, 2, [one]), one)
    assert waiting(execute) == before, "what others prepared stays"
    assert execute(f"select * from {schema}.t") == [(1,)]
    execute(f"rollback prepared '{schema}'")


def test_a_transaction_that_is_gone_is_lost_unless_its_row_is_there(
    sink: hg.PostgresSink, schema: str, execute: Execute
) -> None:
    one, two = (written(sink, records([{"id": n}]), n, subtask=n) for n in (1, 2))
    committer = recovered(sink, 2, [one, two])
    first, second = sorted(waiting(execute))[-2:]
    execute(f"commit prepared '{first}'")
    execute(f"rollback prepared '{second}'")
    commit(committer, one)
    assert committer.denial(one) == ""
    assert "neither prepared nor known" in committer.denial(two)
    with pytest.raises(hg.UsageError, match="neither prepared nor committed in PostgreSQL at") as caught:
        commit(committer, two)
    assert caught.value.is_output_gone


def test_output_that_could_not_be_prepared_is_not_prepared_without_its_rows() -> None:
    """The server rolls the rows back; a later try would find the name of the output alone to prepare."""
    with postgres_server(settings="max_prepared_transactions = 1\n") as server:
        sink = hg.PostgresSink(server.url().partition("?")[0], "t", create=True, commit="prepared")
        batch = records([{"id": 1}])
        sink.make_target(batch.schema)
        committer = recovered(sink)
        one = written(sink, batch, 1)
        writer = sink.open(SinkContext("p", "out", 1, 2, Generation(1), batch.schema))
        writer.write(batch)
        sealed = writer.seal(CheckpointId(1))
        with pytest.raises(StorageError, match="maximum number of prepared transactions") as caught:
            sealed.prepare()
        assert caught.value.is_transient
        commit(committer, one)  # which makes room
        with pytest.raises(StorageError, match="was rolled back when that failed") as caught:
            sealed.prepare()
        assert not caught.value.is_transient
        writer.close()
        commit(recovered(sink, 2), written(sink, batch, 1, 2, 1))


def test_a_worker_and_a_driver_of_an_older_generation_do_nothing(
    sink: hg.PostgresSink, schema: str, execute: Execute
) -> None:
    old = recovered(sink, 1)
    one = written(sink, records([{"id": 1}]), 1)
    recovered(sink, 2, [one])
    with pytest.raises(FencedError):
        commit(old, one)
    with pytest.raises(FencedError):
        written(sink, records([{"id": 2}]), 2, generation=1)
    assert execute(f"select * from {schema}.t") == []
    commit(recovered(sink, 3, [one]), one)
    assert execute(f"select * from {schema}.t") == [(1,)]


def test_a_changed_option_commits_what_was_promised_before(url: str, schema: str, execute: Execute) -> None:
    ledger = hg.PostgresSink(url, "t", schema=schema, create=True)
    prepared = hg.PostgresSink(url, "t", schema=schema, commit="prepared")
    ledger.make_target(records([{"id": 1}]).schema)
    recovered(ledger, 1)
    both = [written(ledger, records([{"id": 1}]), 1)]
    recovered(prepared, 2, both)
    both.append(written(prepared, records([{"id": 2}]), 2, generation=2))
    commit(recovered(ledger, 3, both), *both)
    commit(recovered(prepared, 4, both), *both)
    assert execute(f"select * from {schema}.t order by id") == [(1,), (2,)]


def test_upserts_are_refused(url: str) -> None:
    with pytest.raises(hg.UsageError, match="appends records"):
        hg.PostgresSink(url, "t", upsert="id", commit="prepared")


@pytest.mark.long
def test_a_server_that_prepares_nothing_is_refused() -> None:
    with postgres_server() as server:
        url = server.url().partition("?")[0]
        sink = hg.PostgresSink(url, "t", create=True, commit="prepared")
        with pytest.raises(
            hg.UsageError, match="set max_prepared_transactions there to at least twice the parallelism"
        ):
            sink.make_target(records([{"id": 1}]).schema)


@pytest.mark.long
def test_prepared_output_outlives_a_crash_of_the_server() -> None:
    with postgres_server(settings="max_prepared_transactions = 10\n") as server:
        place = server.url().partition("?")[0]
        for commit_by in ("prepared", "ledger"):
            sink = hg.PostgresSink(place, f"{commit_by}_rows", create=True, commit=commit_by)  # type: ignore[arg-type]
            sink.make_target(records([{"id": 1}]).schema)
            committer = recovered(sink)
            first = written(sink, records([{"id": 1}]), 1)
            commit(committer, first)
            one = written(sink, records([{"id": 2}]), 2, subtask=1)
            crash_and_start(server)
            for _ in range(2):
                commit(committer, one)
            crash_and_start(server)
            commit(recovered(sink, 2, [first, one]), first, one)
            with psycopg.connect(place) as connection:
                assert connection.execute(f"select * from {commit_by}_rows order by id").fetchall() == [(1,), (2,)]
                connection.execute("drop table headgate_sinks, headgate_commits")


def crash_and_start(server: PostgresServer) -> None:
    server.crash()
    server.start()
