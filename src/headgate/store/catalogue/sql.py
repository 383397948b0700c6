"""The verbs of a catalogue in SQL: each is one database transaction around one function of the tables.

Counterparts: ``base.Catalogue`` declares the verbs; the functions that implement them are in the modules of the tables,
each under ``tables.implements``. Source: docs/spec/stream-store.md §3. Never decides: that is ``protocol.store``, asked
inside the transaction that applies its answer.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headgate.store.catalogue import (
    audit,
    chunk_index,
    group_rows,
    markers,
    ownership,
    scaling,
    shared_transaction_rows,
    stream_rows,
    transaction_rows,
    truncation,
)
from headgate.store.catalogue.audit import SqlAudit
from headgate.store.catalogue.base import VERBS, Catalogue, Verb
from headgate.store.catalogue.opening import open_database
from headgate.store.catalogue.sqlite import Database, MemoryDatabase
from headgate.store.catalogue.tables import IMPLEMENTATIONS, make_tables

_IMPLEMENTED_IN = (
    *(audit, chunk_index, group_rows, markers, ownership, scaling, shared_transaction_rows, stream_rows),
    *(transaction_rows, truncation),
)

assert IMPLEMENTATIONS.keys() == VERBS.keys(), f"{_IMPLEMENTED_IN} implement {sorted(IMPLEMENTATIONS)}"


class SqlCatalogue(Catalogue):
    """A catalogue whose tables are in ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, path: Path) -> SqlCatalogue:
        """Open the SQLite file at ``path``, creating it when there is none; see ``opening.open_database``."""
        return cls(open_database(path))

    @property
    def path(self) -> str:
        """See ``Catalogue``."""
        return self._database.path

    @property
    def is_untouched(self) -> bool:
        """See ``Catalogue``."""
        return self._database.is_untouched

    def close(self) -> None:
        """See ``Catalogue``."""
        self._database.close()

    def changes(self) -> int:
        """See ``Catalogue``."""
        return self._database.changes()

    def carry_out(self, verb: Verb, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See ``Catalogue``."""
        database = self._database
        with database.read() if verb.is_reading else database.write() as connection:
            return IMPLEMENTATIONS[verb.name](connection, *arguments, **named)

    @contextlib.contextmanager
    def audit(self) -> Iterator[SqlAudit]:
        """See ``Catalogue``."""
        with self._database.read() as connection, self._database.readable_part(connection) as (sound, damage):
            yield SqlAudit(sound, [(self.path, problem) for problem in damage])


def memory_catalogue(name: str) -> SqlCatalogue:
    """Return a new, empty catalogue in memory, called ``name`` in messages. For the simulator and for tests."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    database = MemoryDatabase(name, connection, name)
    with database.write() as tables:
        make_tables(tables)
    return SqlCatalogue(database)
