"""SIGKILL of workers, of drivers and of the server, in a pipeline from tables of PostgreSQL to tables of PostgreSQL."""

# Rules: F1, F3

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers.postgres import PostgresServer, postgres_server

from crash.support.processes import STARTED_S, Life, kill, until
from crash.support.results import assert_clean

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800), pytest.mark.xdist_group("postgres")]

Spec = Callable[..., dict[str, Any]]
Launch = Callable[..., Life]

SETTINGS = "wal_level = logical\nmax_prepared_transactions = 50\n"
ROWS = 150_000
"""Enough for three batches of the snapshot of ``orders``."""


class Tables:
    """Two tables that are changed step by step, and what a pipeline makes of their changes."""

    def __init__(self, server: PostgresServer) -> None:
        self.server, self.url = server, server.url().partition("?")[0]
        for table in ("orders", "customers"):
            self.execute(f"create table {table} (id int primary key, n int)")
            self.execute(f"alter table {table} replica identity full")
        self.execute('create table log (at bigserial, "table" text, op text, id int, n int)')
        self.execute("create table copied (id int primary key, n int)")
        self.changes_count, self._steps = 0, 0

    def execute(self, *statements: str) -> list[Any]:
        """Execute statements in one transaction; return the rows of the last one."""
        with psycopg.connect(self.url) as connection:
            for statement in statements:
                found = connection.execute(statement.encode())
            return found.fetchall() if found.description else []

    def fill(self, orders: int) -> None:
        """Write the first rows, before there is a slot."""
        self.execute(
            f"insert into orders select g, 0 from generate_series(1, {orders}) g",
            "insert into customers select g, 0 from generate_series(1, 10) g",
        )
        self.changes_count += orders + 10

    def change(self) -> None:
        """Change both tables in one transaction."""
        self._steps += 1
        first = 1_000_000 + 10 * self._steps
        self.execute(
            "update orders set n = n + 1 where id <= 200",
            f"insert into orders select g, 0 from generate_series({first}, {first + 9}) g",
            f"delete from orders where id in ({first - 10}, {300 + self._steps})",
            "update customers set n = n + 1",
        )
        self.changes_count += 2 * 200 + 10 + (2 if self._steps > 1 else 1) + 2 * 10

    def logged_count(self) -> int:
        return int(self.execute("select count(*) from log")[0][0])

    def until_logged(self) -> None:
        """Wait until all changes are in the log."""
        until(lambda: self.logged_count() >= self.changes_count, "the log of all changes", 3 * STARTED_S)

    def assert_exactly_once(self) -> None:
        """Every change was logged once, in its order, and the copy is the table."""
        state: dict[tuple[str, int], int] = {}
        for table, op, id_, n in self.execute('select "table", op, id, n from log order by at'):
            key = (table, id_)
            if op in ("insert", "update_after"):
                assert key not in state, f"{op} of {key}, which is there"
                state[key] = n
            else:
                assert state.pop(key, None) == n, f"{op} of {key} with another row"
        assert self.logged_count() == self.changes_count
        for table in ("orders", "customers"):
            found = {id_: n for (name, id_), n in state.items() if name == f"public.{table}"}
            assert found == dict(self.execute(f"select id, n from {table}")), table
        assert Counter(self.execute("select id, n from copied")) == Counter(self.execute("select id, n from orders"))
        until(lambda: not self.execute("select gid from pg_prepared_xacts"), "the end of all transactions")


@pytest.fixture
def tables() -> Iterator[Tables]:
    with postgres_server(settings=SETTINGS) as server:
        yield Tables(server)


def test_nothing_is_lost_or_doubled_when_workers_driver_and_server_are_killed(
    spec: Spec, launch: Launch, tmp_path: Path, tables: Tables
) -> None:
    what = spec("tables", url=tables.url, gate=None)
    tables.fill(ROWS)
    life = launch(what, HEADGATE_KILL_AT=f"in-table-snapshot:2:{tmp_path / 'in-snapshot'}")
    life.running()
    life.restart()
    assert (tmp_path / "in-snapshot").exists(), "it was killed while it read the rows"
    assert tables.logged_count() == 0, "rows of a snapshot that was not read to its end are not shown"
    life.running()
    tables.until_logged()

    tables.change()
    life.checkpoint(2)
    tables.change()
    running = life.seen("running")[-1]
    for pid in running["workers"].values():
        kill(pid)
    life.restart()
    life.running(after=running["generation"])
    tables.change()
    life.checkpoint()

    tables.change()
    life.child.kill()
    life.child.assert_gone()
    tables.change()
    life = launch(what)
    life.running()
    tables.change()
    life.checkpoint()

    tables.change()
    tables.server.kill()
    tables.server.start()
    tables.change()
    tables.until_logged()
    life.child.signal(signal.SIGTERM)
    assert life.child.exit_code(STARTED_S) == 0
    tables.assert_exactly_once()
    assert_clean(tmp_path)


POINTS = ("before-manifest", "after-manifest", "in-recover", "in-commit", "after-commit")


@pytest.mark.deep
@pytest.mark.parametrize("with_spark", [False, True], ids=["processes", "spark"])
def test_nothing_is_lost_or_doubled_wherever_in_a_commit_the_driver_is_killed(
    spec: Spec, launch: Launch, tmp_path: Path, tables: Tables, with_spark: bool
) -> None:
    what = spec("tables", url=tables.url, gate=None)
    tables.fill(1_000)
    life = launch(what, with_spark=with_spark)
    tables.until_logged()  # a change is counted as one if it comes after the snapshot
    life.child.kill()
    life.child.assert_gone()
    for point in POINTS:
        tables.change()
        life = launch(what, with_spark=with_spark, HEADGATE_KILL_AT=f"{point}:1:{tmp_path / point}")
        assert life.child.exit_code(3 * STARTED_S) == -9, life.child.tale("it was not killed")
        life.child.assert_gone()
    life = launch(what, with_spark=with_spark)
    life.running()
    tables.until_logged()
    life.child.signal(signal.SIGTERM)
    assert life.child.exit_code(STARTED_S) == 0
    tables.assert_exactly_once()
    assert_clean(tmp_path)
