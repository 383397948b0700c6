"""A catalogue whose tables are in memory: it ends with the process. For the simulator and for tests.

Counterpart: ``sql`` runs the same verbs in it as in a file. Source: CT7 of docs/spec/stream-store.md.
"""

from __future__ import annotations

import sqlite3

from headgate.store.catalogue.private import PrivateDatabase
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.store.catalogue.versions import make_tables


def memory_catalogue(name: str) -> SqlCatalogue:
    """Return a new, empty catalogue, called ``name`` in messages."""
    database = PrivateDatabase(name, sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
    with database.write() as connection:
        make_tables(connection, name)
    return SqlCatalogue(database, name)
