"""How fast ``PostgresChanges`` reads rows and changes, as shares of what server and client do without it.

The server is on this machine. Rows are compared with a query through ADBC, and changes with
``pg_logical_slot_peek_binary_changes`` that counts them, in which the server decodes and nothing is sent. Each change
is an insert, or an update with its old row. Settings: ``rows``, ``repetitions``.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import psycopg
from adbc_driver_postgresql import dbapi

from bench.harness import Options, Result
from headgate.connectors.base import SourceContext
from headgate.connectors.postgres.changes import PostgresChanges

NAME = "postgres_changes"

SETTINGS = "wal_level = logical\nmax_replication_slots = 20\nlogical_decoding_work_mem = 256MB\n"
COLUMNS = "id int8 primary key, label text, share float8, at timestamp"
IDLE_S = 0.001


def run(options: Options) -> Result:
    """Measure both in turns."""
    from tests.servers.postgres import postgres_server

    rows = int(options.number("rows", 500_000, quick=50_000))
    repetitions = int(options.number("repetitions", 3, quick=1))
    found: dict[str, list[float]] = {}
    with postgres_server(settings=SETTINGS) as server:
        url = server.url().partition("?")[0]
        for turn in range(repetitions):
            for name, rate in measured(url, f"t{turn}", rows).items():
                found.setdefault(name, []).append(rate)
    rates: dict[str, Any] = {name: statistics.median(values) for name, values in found.items()}
    figures = {
        "snapshot_to_query": rates["snapshot_per_s"] / rates["query_per_s"],
        "inserts_to_decoded": rates["inserts_per_s"] / rates["decoded_inserts_per_s"],
        "updates_to_decoded": rates["updates_per_s"] / rates["decoded_updates_per_s"],
        "load_1m": os.getloadavg()[0],
    }
    return Result(rates | figures, {})


def measured(url: str, table: str, rows: int) -> dict[str, float]:
    """Return rows per second of each step."""
    filled = "select g, 'text ' || g % 1000, g / 7.0, 'epoch'::timestamp + g * interval '1 us' from generate_series"
    with psycopg.connect(url, autocommit=True) as database:

        def execute(statement: str) -> Any:
            return database.execute(statement.encode())

        execute(f"create table {table} ({COLUMNS})")
        execute(f"alter table {table} replica identity full")
        execute(f"insert into {table} {filled}(1, {rows}) g")
        execute(f"analyze {table}")
        rates = {"query_per_s": rows / queried(url, table)}
        reader = PostgresChanges(url, table).open(SourceContext("bench", table, 0, 1, None, life="bench"))
        rates["snapshot_per_s"] = rows / reading(reader, rows)
        for what, statement, count in (
            ("inserts", f"insert into {table} {filled}({rows + 1}, {2 * rows}) g", rows),
            ("updates", f"update {table} set share = share + 1 where id <= {rows}", 2 * rows),
        ):
            slot = f"bare_{table}_{what}"
            execute(f"select pg_create_logical_replication_slot('{slot}', 'pgoutput')")
            execute(statement)
            rates[f"{what}_per_s"] = rows / reading(reader, count)
            (publication,) = execute("select pubname from pg_publication order by oid desc limit 1").fetchone()
            begin_s = time.perf_counter()
            execute(
                f"select count(*) from pg_logical_slot_peek_binary_changes('{slot}', null, null, 'proto_version', '1', "
                f"'publication_names', '{publication}')"
            )
            rates[f"decoded_{what}_per_s"] = rows / (time.perf_counter() - begin_s)
            execute(f"select pg_drop_replication_slot('{slot}')")
        reader.close()
    return rates


def queried(url: str, table: str) -> float:
    """Return the seconds of a query of all rows."""
    with dbapi.connect(url) as connection, connection.cursor() as cursor:
        begin_s = time.perf_counter()
        cursor.execute(f"select * from {table}")
        cursor.fetch_arrow_table()
        return time.perf_counter() - begin_s


def reading(reader: Any, records: int) -> float:
    """Return the seconds until so many records were read."""
    begin_s = time.perf_counter()
    while records > 0:
        found = reader.poll()
        if found is None:
            time.sleep(IDLE_S)
        else:
            records -= len(found.batch)
    return time.perf_counter() - begin_s
