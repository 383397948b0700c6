"""Statements that replace and delete rows by key, as each dialect has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from headgate.connectors.sql import mysql as mysqls


def upsert_statement(
    dialect: str, target: sa.FromClause, names: Sequence[str], keys: Sequence[str], staged: sa.Select[Any] | None = None
) -> sa.Executable:
    """Return the statement that replaces rows by key, of values or of a query."""
    table: Any = target
    others = [name for name in names if name not in keys]
    if dialect in mysqls.BACKENDS:
        made: Any = mysql.insert(table)
        return made.on_duplicate_key_update({name: made.inserted[name] for name in others or keys})  # type: ignore[no-any-return]
    made = sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)
    if staged is not None:
        made = made.from_select(list(names), staged)
    if not others:
        return made.on_conflict_do_nothing(index_elements=list(keys))  # type: ignore[no-any-return]
    changed = {name: made.excluded[name] for name in others}
    return made.on_conflict_do_update(index_elements=list(keys), set_=changed)  # type: ignore[no-any-return]


def delete_statement(target: sa.FromClause, keys: Sequence[str], gone: sa.FromClause) -> sa.Executable:
    """Return the statement that deletes the rows with the keys in another table."""
    table: Any = target
    same = sa.and_(*(table.c[key] == gone.c[key] for key in keys))
    return sa.delete(table).where(sa.exists(sa.select(sa.literal(1)).select_from(gone).where(same)))


def quoted_table(name: str, names: Sequence[str], schema: str | None = None) -> sa.TableClause:
    """Return a table with columns of these names, whatever they are."""
    columns: list[Any] = [sa.column(sa.quoted_name(one, quote=True)) for one in names]
    place = None if schema is None else sa.quoted_name(schema, quote=True)
    return sa.table(sa.quoted_name(name, quote=True), *columns, schema=place)
