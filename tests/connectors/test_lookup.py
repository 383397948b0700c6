"""Lookups in tables of SQLite and PostgreSQL: what records get, how often a database is asked, and what is refused."""

from __future__ import annotations

import asyncio
import datetime
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers.postgres import postgres_server

import headgate as hg
from headgate import testing
from headgate.connectors.lookup import Lookup, LookupTable
from headgate.errors import StorageError, UsageError

PATIENCE_S = 300.0
ROWS = [
    {"id": 1, "who": "a"},
    {"id": 2, "who": "b"},
    {"id": 3, "who": None},
    {"id": 4, "who": "z"},
    {"id": 5, "who": "a"},
]


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = tmp_path / "people.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE people (name TEXT PRIMARY KEY, age INTEGER, id INTEGER)")
        connection.execute("CREATE TABLE pets (owner TEXT, pet TEXT)")
        connection.executemany("INSERT INTO people VALUES (?, ?, ?)", [("a", 10, 100), ("b", None, 200)])
        connection.executemany("INSERT INTO pets VALUES (?, ?)", [("a", "cat"), ("a", "dog")])
    return f"sqlite:///{path}"


def results(tmp_path: Path, *arguments: Any, rows: list[dict[str, Any]] = ROWS, **options: Any) -> list[dict[str, Any]]:
    pipeline = hg.Pipeline("p")
    collected = testing.Collect(tmp_path / "out")
    pipeline.source(hg.FromRows(rows)).lookup(*arguments, **options).sink(collected)
    testing.run(pipeline, timeout_s=PATIENCE_S, parallelism=1)
    return collected.rows()


def test_records_get_the_columns_of_their_row(database: str, tmp_path: Path) -> None:
    found = results(tmp_path, database, "people", {"who": "name"})
    assert found == [
        {"id": 1, "who": "a", "age": 10, "id_right": 100},
        {"id": 2, "who": "b", "age": None, "id_right": 200},
        {"id": 3, "who": None, "age": None, "id_right": None},
        {"id": 4, "who": "z", "age": None, "id_right": None},
        {"id": 5, "who": "a", "age": 10, "id_right": 100},
    ]


def test_several_rows_give_several_records_and_inner_drops_the_others(database: str, tmp_path: Path) -> None:
    found = results(tmp_path, database, "pets", {"who": "owner"}, how="inner", ordered=False)
    pairs = sorted((row["id"], row["pet"]) for row in found)
    assert pairs == [(1, "cat"), (1, "dog"), (5, "cat"), (5, "dog")]


def test_a_table_without_further_columns_keeps_the_records_that_it_has(database: str, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "people.db") as connection:
        connection.execute("CREATE TABLE known (who TEXT)")
        connection.execute("INSERT INTO known VALUES ('a')")
    assert [row["id"] for row in results(tmp_path, database, "known", "who", how="inner")] == [1, 5]


def test_keys_of_several_columns(database: str, tmp_path: Path) -> None:
    rows = [{"who": "a", "id": 100}, {"who": "a", "id": 200}]
    found = results(tmp_path, database, "people", {"who": "name", "id": "id"}, columns=["age"], rows=rows)
    assert [row["age"] for row in found] == [10, None]


@pytest.mark.parametrize("cache", [0, 10])
def test_one_query_asks_for_many_keys_and_a_cache_for_none(
    database: str, tmp_path: Path, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    lock, fetch = threading.Lock(), Lookup._fetch

    def counted(self: Lookup, keys: Any) -> Any:
        with lock:
            asked.append(len(keys))
        return fetch(self, keys)

    monkeypatch.setattr(Lookup, "_fetch", counted)
    rows = [{"id": n, "who": "ab"[n % 2]} for n in range(2_000)]
    found = results(tmp_path, database, "people", {"who": "name"}, rows=rows, cache=cache, columns=["age"], limit=500)
    assert [row["age"] for row in found] == [10, None] * 1_000
    assert sum(asked) == 2 if cache else 4 <= sum(asked) < 200


@pytest.mark.parametrize(("connections", "limit"), [(1, 10_000), (3, 40), (2, 1)])
def test_many_keys_are_asked_for_over_few_connections(tmp_path: Path, connections: int, limit: int) -> None:
    path = tmp_path / "squares.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE squares (n INTEGER PRIMARY KEY, square INTEGER)")
        connection.executemany("INSERT INTO squares VALUES (?, ?)", [(n, n * n) for n in range(0, 6_000, 2)])
    rows = [{"n": n % 6_000} for n in range(0, 7 * min(300 * limit, 8_000), 7)]
    options: dict[str, Any] = {"connections": connections, "limit": limit, "cache": 50}
    found = results(tmp_path, f"sqlite:///{path}", "squares", "n", rows=rows, **options)
    assert found == [row | {"square": None if row["n"] % 2 else row["n"] ** 2} for row in rows]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_value_that_does_not_fit_is_a_bad_record_and_the_others_go_on(
    database: str, tmp_path: Path, ordered: bool
) -> None:
    with sqlite3.connect(tmp_path / "people.db") as connection:
        connection.execute("INSERT INTO people VALUES ('c', 'old', 300)")
    rows = [{"n": n, "who": "abc"[n % 3]} for n in range(12)]
    collected, letters = testing.Collect(tmp_path / "out"), testing.Collect(tmp_path / "letters")
    pipeline = hg.Pipeline("p", bad_records=hg.DeadLetter(letters, exceptions=True))
    options: dict[str, Any] = {"retries": 0, "ordered": ordered, "columns": ["age"], "limit": 16}
    pipeline.source(hg.FromRows(rows)).lookup(database, "people", {"who": "name"}, **options).sink(collected)
    testing.run(pipeline, timeout_s=PATIENCE_S, parallelism=1)
    numbers = [row["n"] for row in collected.rows()]
    assert (numbers if ordered else sorted(numbers)) == [n for n in range(12) if n % 3 < 2]
    problems = [row["problem"] for row in letters.rows()]
    assert len(problems) == 4
    assert all("table people has str 'old' in column 'age', which is int64" in problem for problem in problems)


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        (("people", "nobody"), {}, "the records have no column 'nobody'"),
        (("people", {"who": "nobody"}), {}, "table people has no column 'nobody'"),
        (("nothing", "who"), {}, "there is no table nothing"),
        (("people", {"who": "name"}), {"columns": ["size"]}, "no column 'size'"),
        (("people", {"who": "name"}), {"suffix": ""}, "two columns 'id'"),
        (("people", {"who": "name"}), {"how": "outer"}, "'left' or 'inner'"),
        (("people", {"who": "name"}), {"cache": -1}, "cache=-1"),
        (("people", ()), {}, "needs on="),
        (("people", {"tags": "name"}), {}, "column 'tags' is large_list"),
    ],
)
def test_a_lookup_that_cannot_be_is_refused(
    database: str, arguments: tuple[Any, ...], options: dict[str, Any], problem: str
) -> None:
    stream = hg.Pipeline("p").source(hg.FromRows([{"id": 1, "who": "a", "tags": ["x"]}]))
    with pytest.raises(UsageError, match=problem):
        stream.lookup(database, *arguments, **options)


def test_urls_that_are_none_or_have_a_password_are_refused() -> None:
    stream = hg.Pipeline("p").source(hg.FromRows(ROWS))
    with pytest.raises(UsageError, match="such as postgresql"):
        stream.lookup("people", "people", "who")
    with pytest.raises(UsageError, match="has a password") as refused:
        stream.lookup("postgresql://user:geheim@host/db", "people", "who")
    assert "geheim" not in str(refused.value)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres_server() as server:
        yield server.url().partition("?")[0]


def test_types_of_postgresql(url: str, tmp_path: Path) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE TABLE kinds (id bigint, n numeric(9,2), t timestamptz, b bytea, j jsonb, u uuid, ok bool)")
        db.execute("INSERT INTO kinds VALUES (1, 1.50, '2024-01-01 00:00+02', '\\x00', '{}', gen_random_uuid(), true)")
    row = results(tmp_path, url, "public.kinds", "id", rows=[{"id": 1}])[0]
    assert (str(row["n"]), row["t"].isoformat(), row["b"], row["j"], row["ok"]) == (
        "1.50",
        "2023-12-31T22:00:00+00:00",
        b"\0",
        "{}",
        True,
    )
    assert len(row["u"]) == 36


def test_a_database_that_cannot_be_asked_is_a_failure() -> None:
    pytest.importorskip("psycopg")
    stream = hg.Pipeline("p").source(hg.FromRows(ROWS))
    with pytest.raises(StorageError):
        stream.lookup("postgresql://nobody@127.0.0.1:1/nothing", "people", "who")


def test_a_database_that_is_away_when_a_subtask_begins_is_a_passing_error() -> None:
    pytest.importorskip("psycopg")
    table = LookupTable("postgresql://nobody@127.0.0.1:1/nothing", "people", {"who": "name"}, {})
    with pytest.raises(StorageError, match=r"cannot look at postgresql.*refused") as caught:
        asyncio.run(Lookup(table, "left", 0, 0, 1).open())
    assert caught.value.is_transient


@pytest.mark.parametrize(
    ("kind", "stored", "key", "other"),
    [
        ("char(5)", "ab", "ab", "abc"),
        ("uuid", "6f0c1a52-3c5e-4c6d-9a55-0d9b2a4e7f10", "6f0c1a52-3c5e-4c6d-9a55-0d9b2a4e7f10", None),
        ("numeric(10, 2)", "5", 5, 6),
        ("date", "2024-02-29", datetime.date(2024, 2, 29), datetime.date(2024, 3, 1)),
        ("timestamptz", "2024-02-29T12:00:00+02", datetime.datetime(2024, 2, 29, 10, tzinfo=datetime.UTC), None),
    ],
)
def test_keys_are_found_as_the_database_compares_them(
    url: str, tmp_path: Path, kind: str, stored: str, key: Any, other: Any
) -> None:
    import psycopg

    table = f"keys_{kind[:4]}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table} (k {kind}, v int)")
        connection.execute(f"INSERT INTO {table} VALUES (%s, 7)", (stored,))
    rows = [{"key": key}, {"key": other}]
    found = results(tmp_path, url, table, {"key": "k"}, rows=rows)
    assert [row["v"] for row in found] == [7, None]
