"""Changes of PostgreSQL go to tables of Delta and Iceberg, and from there back, while everything is killed."""

# Rules: F3

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers.postgres import PostgresServer, postgres_server

from crash.support.chains import TABLES_PROGRAM, Chain
from crash.support.processes import STARTED_S, kill, until
from crash.support.results import assert_clean
from crash.support.standing import MINUTES

pytestmark = [
    pytest.mark.crash,
    pytest.mark.deep,
    pytest.mark.timeout(1_800 + 120 * MINUTES),
    pytest.mark.skipif("HEADGATE_TEST_MINUTES" not in os.environ, reason="make kill-chain runs it"),
]

SETTINGS = "wal_level = logical\nmax_prepared_transactions = 50\n"
PAUSE_S = 0.05
COLUMNS = '"table", op, id, n'

AUDIT = """
create function note() returns trigger language plpgsql as $$
begin
    if tg_op <> 'INSERT' then
        insert into audit values ('public.' || tg_table_name,
        case tg_op when 'UPDATE' then 'update_before' else 'delete' end, old.id, old.n);
    end if;
    if tg_op <> 'DELETE' then
        insert into audit values ('public.' || tg_table_name,
        case tg_op when 'UPDATE' then 'update_after' else 'insert' end, new.id, new.n);
    end if;
    return null;
end $$
"""
"""Every transaction also writes down what it changes."""


class Tables:
    """Two tables that change all the time, and a third one with all that has changed."""

    def __init__(self, server: PostgresServer) -> None:
        self.server, self.url = server, server.url().partition("?")[0]
        for table in ("audit", "log"):
            self.execute(f'create table {table} ("table" text, op text, id int, n int)')
        self.execute(AUDIT)
        for table in ("orders", "customers"):
            self.execute(f"create table {table} (id int primary key, n int)")
            self.execute(f"alter table {table} replica identity full")
            self.execute(
                f"create trigger note after insert or update or delete on {table} for each row execute function note()"
            )

    def execute(self, *statements: str) -> list[Any]:
        """Execute statements in one transaction; return the rows of the last one."""
        with psycopg.connect(self.url) as connection:
            for statement in statements:
                found = connection.execute(statement.encode())
            return found.fetchall() if found.description else []

    def changes(self, table: str = "audit") -> Counter[Any]:
        return Counter(self.execute(f"select {COLUMNS} from {table}"))

    @contextmanager
    def flowing(self, dice: random.Random) -> Iterator[None]:
        """Change rows all the time; a transaction that a kill of the server takes is none."""
        is_over, seed = threading.Event(), dice.randrange(1 << 32)

        def write() -> None:
            own, number = random.Random(seed), 0
            while not is_over.wait(PAUSE_S):
                number += 1
                table = own.choice(["orders", "customers"])
                try:
                    self.execute(
                        f"insert into {table} select g, 0 from generate_series({10 * number}, {10 * number + 9}) g",
                        f"update {table} set n = n + 1 where id > {10 * (number - own.randrange(20))}",
                        f"delete from {table} where id % 7 = 3 and id < {10 * (number - own.randrange(40))}",
                        "update customers set n = n + 1 where id = 10",
                    )
                except psycopg.Error:
                    continue

        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield
        finally:
            is_over.set()
            writer.join()


@pytest.fixture
def tables() -> Iterator[Tables]:
    with postgres_server(settings=SETTINGS) as server:
        yield Tables(server)


@pytest.fixture
def chain(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Chain]:
    with closing(Chain(tmp_path, TABLES_PROGRAM, with_spark=request.param)) as made:
        yield made


def delta_changes(lake: Path) -> Counter[Any]:
    from deltalake import DeltaTable

    rows = DeltaTable(str(lake / "changes")).to_pyarrow_table().to_pylist()
    return Counter((row["table"], row["op"], row["id"], row["n"]) for row in rows)


def iceberg_changes(lake: Path) -> Counter[Any]:
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("default", uri=f"sqlite:///{lake}/catalog.db", warehouse=f"file://{lake}/warehouse")
    rows = catalog.load_table("lake.changes").scan().to_arrow().to_pylist()
    catalog.close()
    return Counter((row["table"], row["op"], row["id"], row["n"]) for row in rows)


def difference(found: Counter[Any], expected: Counter[Any]) -> str:
    """Say what was lost and what came too often."""
    lost, extra = expected - found, found - expected
    return f"{lost.total()} lost: {list(lost)[:5]}; {extra.total()} too many: {list(extra)[:5]}"


@pytest.mark.parametrize(
    "chain",
    [pytest.param(False, id="processes"), pytest.param(True, id="spark", marks=pytest.mark.spark)],
    indirect=True,
)
def test_a_chain_over_tables_is_exactly_once_from_end_to_end_whoever_is_killed(
    chain: Chain, tables: Tables, dice: random.Random, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    lake, server = tmp_path / "lake", tables.server
    lake.mkdir()
    chain.start("first", tables.url, str(lake))
    until(lambda: (lake / "changes" / "_delta_log").exists(), "the table of Delta", STARTED_S)
    chain.start("second", tables.url, str(lake))

    def restart_server(link: Any = None) -> None:
        server.kill()
        if link is not None:
            kill(link.driver().pid)
        server.start()

    chain.other_strikes = [
        ("the server", restart_server),
        ("the server and a driver", lambda: restart_server(dice.choice(chain.links))),
        *chain.stops(dice),
    ]
    chain.checkpoint(STARTED_S)  # the snapshot was read: all changes from now on come as such
    with tables.flowing(dice):
        told = chain.strike_until_time_is_up(dice)
    expected = tables.changes()
    until(lambda: tables.changes("log").total() >= expected.total(), "all changes at the end of the chain", STARTED_S)
    until(lambda: iceberg_changes(lake).total() >= expected.total(), "all changes in Iceberg", STARTED_S)
    for link in list(chain.links):
        chain.stop(link)
    for where, found in (
        ("Delta", delta_changes(lake)),
        ("Iceberg", iceberg_changes(lake)),
        ("PostgreSQL", tables.changes("log")),
    ):
        assert found == expected, f"{where}: {difference(found, expected)}"
    assert tables.execute("select gid from pg_prepared_xacts") == []
    assert_clean(tmp_path)
    kills = ", ".join(f"{count} x {what}" for what, count in told.most_common())
    record_property("kills", kills)
    print(f"{expected.total():,} changes; {told.total()} kills and stops: {kills}")
