"""A catalogue whose tables are in memory: it ends with the process. For the simulator and for tests.

Counterpart: ``sql`` runs the same verbs in it as in a file. Source: CT7 of docs/spec/stream-store.md.
Never runs two transactions at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.pool import StaticPool

from headgate.store.catalogue.database import errors_of
from headgate.store.catalogue.opening import make_tables
from headgate.store.catalogue.sql import SqlCatalogue


def memory_catalogue(name: str) -> SqlCatalogue:
    """Return a new, empty catalogue, called ``name`` in messages."""
    return SqlCatalogue(MemoryDatabase(name), name)


class MemoryDatabase:
    """Tables behind one connection that everybody shares."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._writes_count = 0
        self._engine = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
        event.listen(self._engine, "connect", _leave_begin_to_us)
        event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        with self.write() as connection:
            make_tables(connection, name)

    @property
    def path(self) -> str:
        """See ``Database``."""
        return self._name

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """See ``Database``."""
        with errors_of(self._name, "read"), self._lock, self._engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """See ``Database``."""
        with errors_of(self._name, "write"), self._lock, self._engine.connect() as connection:
            with connection.begin():
                yield connection
            self._writes_count += 1

    def version(self) -> int:
        """See ``Database``."""
        return self._writes_count

    def close(self) -> None:
        """See ``Database``. What is in the tables stays, for others that share them."""


def _leave_begin_to_us(connection: Any, _: object) -> None:
    connection.isolation_level = None
