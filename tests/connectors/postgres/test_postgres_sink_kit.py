"""Tables of a real PostgreSQL server pass the conformance kit for sinks, also when the server is killed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import psycopg
import pytest
from tests.conftest import IS_DEEP
from tests.connectors.postgres.conftest import SETTINGS
from tests.servers.postgres import PostgresServer, postgres_server

from headgate.connectors.postgres.sink import PostgresSink, PreparedTransactions
from headgate.testing.sink_kit import check_sink
from headgate.testing.sinks.fake_pipeline import Target
from headgate.testing.sinks.scenarios import KillPoint, check_kill

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
