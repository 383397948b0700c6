"""Output that a real PostgreSQL server prepares, and what a driver finds there later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from tests.connectors.committing import commit, records, recovered, written
from tests.servers.postgres import PostgresServer, postgres_server

import headgate as hg
from headgate.connectors.base import SinkContext
from headgate.errors import FencedError, StorageError
from headgate.model.ids import CheckpointId, Generation

Execute = Callable[[str], list[Any]]


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
