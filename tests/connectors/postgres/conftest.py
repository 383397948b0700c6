"""A server for the tests of this room, which all tests of one process of pytest share."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.servers.postgres import PostgresServer, postgres_server

SETTINGS = "wal_level = logical\nmax_prepared_transactions = 50\n"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server(settings=SETTINGS) as server:
        yield server


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """Of the database."""
    return postgres.url().partition("?")[0]


@pytest.fixture
def db(url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection without transactions."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def execute(url: str) -> Callable[[str], list[Any]]:
    """Executes a statement on a connection of its own; returns the rows, if there are any."""

    def execute(statement: str) -> list[Any]:
        with psycopg.connect(url, autocommit=True) as connection:
            found = connection.execute(statement.encode())
            return found.fetchall() if found.description else []

    return execute


@pytest.fixture
def schema(execute: Callable[[str], list[Any]]) -> str:
    """A new schema."""
    name = f"s{uuid.uuid4().hex[:12]}"
    execute(f"create schema {name}")
    return name
