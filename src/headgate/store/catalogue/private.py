"""A database that only this process can see, behind one connection.

Counterparts: ``memory`` keeps a catalogue in one, ``untouched`` a copy of one; ``database.FileDatabase`` is the other
kind. Source: CT7 and CT8 of docs/spec/stream-store.md.
Never runs two transactions at a time.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.pool import StaticPool

from headgate.store.catalogue import soundness
from headgate.store.catalogue.database import TELL_CAPITALS, errors_of


class PrivateDatabase:
    """Tables behind one connection that everybody shares."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        """``path`` is where it is, or where it comes from, for messages; ``connection`` leaves BEGIN to us."""
        self._path = path
        self._lock = threading.RLock()
        self._writes_count = 0
        connection.execute(TELL_CAPITALS)
        self._engine = sa.create_engine("sqlite://", poolclass=StaticPool, creator=lambda: connection)
        event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))

    @property
    def path(self) -> str:
        """See ``Database``."""
        return self._path

    @property
    def is_untouched(self) -> bool:
        """See ``Database``."""
        return False

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """See ``Database``."""
        with self._telling("read"), self._lock, self._engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """See ``Database``."""
        with self._telling("write"), self._lock, self._engine.connect() as connection:
            with connection.begin():
                yield connection
            self._writes_count += 1

    @contextlib.contextmanager
    def _telling(self, operation: str) -> Iterator[None]:
        with errors_of(self._path, operation), soundness.told(self._path, self._alone):
            yield

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Connection]:
        with self._lock, self._engine.connect() as connection:
            yield connection

    def sound_part(self, connection: Connection) -> AbstractContextManager[tuple[Connection, list[str]]]:
        """See ``Database``."""
        return soundness.sound_part(connection)

    def changes(self) -> int:
        """See ``Database``."""
        return self._writes_count

    def close(self) -> None:
        """See ``Database``. What is in the tables stays, for others that share them."""
