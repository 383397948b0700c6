"""The tables of the catalogue as PostgreSQL has them.

Counterpart: ``catalogue.tables`` says what they are. Source: DB3 of docs/spec/shared-store.md. Adds nothing to them.
"""

from __future__ import annotations

import functools

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.store.catalogue import tables as t

_TEXT = sa.Text(collation="C")
"""Compared as bytes, as everywhere (CT10): the order of the database may be that of some language."""


@functools.cache
def tables() -> sa.MetaData:
    """Return the tables, to be made in the schema that comes first."""
    made = sa.MetaData()
    for table in t.metadata.sorted_tables:
        for column in table.to_metadata(made).columns:
            if isinstance(column.type, sa.String):
                column.type = _TEXT
    return made


def compare_texts_as_bytes(connection: Connection) -> None:
    """Give the columns that a step between versions has made what they have in new tables."""
    quoted = connection.dialect.identifier_preparer.quote
    for table in tables().sorted_tables:
        changes = [f'ALTER COLUMN {quoted(c.name)} TYPE TEXT COLLATE "C"' for c in table.columns if c.type is _TEXT]
        if changes:
            connection.exec_driver_sql(f"ALTER TABLE {quoted(table.name)} {', '.join(changes)}")
