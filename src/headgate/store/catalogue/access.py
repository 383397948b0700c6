"""What every database with the tables of a catalogue promises.

Counterpart: ``database``, ``private`` and ``untouched`` are such databases; ``sql`` runs its verbs in one. What differs
between kinds of databases is behind it: transactions, locks, and how a database looks after its files. Source:
rules CT1, CT2 and CT4 of docs/spec/stream-store.md.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from sqlalchemy.engine import Connection


class Database(Protocol):
    """Where the tables are; safe from several threads."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    @property
    def is_untouched(self) -> bool:
        """Whether it is read from a copy, so that its file stays as it is until somebody writes."""

    def read(self) -> AbstractContextManager[Connection]:
        """Give a consistent view of one moment."""

    def write(self) -> AbstractContextManager[Connection]:
        """Give a transaction that is durable when the block ends, and undone when it raises.

        Raises:
            StorageError: nothing was changed (or, after an I/O error, perhaps everything: look it up).
        """

    def sound_part(self, connection: Connection) -> AbstractContextManager[tuple[Connection, list[str]]]:
        """Give what can be made sense of, within a transaction of ``read``, and what is wrong with the rest (S40)."""

    def changes(self) -> int:
        """See ``base.Catalogue.changes``."""

    def close(self) -> None:
        """Close all connections."""
