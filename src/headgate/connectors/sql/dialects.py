"""What dialects of SQL have of their own: types of columns, and statements that replace and delete rows by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from headgate.connectors.sql import mysql as mysqls


def sql_type(dialect: str, dtype: pa.DataType) -> sa.types.TypeEngine[Any] | None:
    """Return the type of a column with values of a canonical type; None: there is none."""
    is_mysql = dialect in mysqls.BACKENDS
    if pa.types.is_boolean(dtype):
        return sa.Boolean()
    if pa.types.is_integer(dtype):
        bits = dtype.bit_width + pa.types.is_unsigned_integer(dtype)
        if bits <= 16:
            return sa.SmallInteger()
        if bits <= 32:
            return sa.Integer()
        if bits <= 64:
            return sa.BigInteger()
        return None if dialect == "sqlite" else sa.Numeric(20, 0)
    if pa.types.is_decimal(dtype):
        return None if dialect == "sqlite" else sa.Numeric(dtype.precision, dtype.scale)
    if pa.types.is_floating(dtype):
        return sa.REAL() if dtype.bit_width <= 32 and not is_mysql else sa.Double()
    if pa.types.is_large_string(dtype):
        return mysql.LONGTEXT() if is_mysql else sa.Text()
    if pa.types.is_large_binary(dtype):
        return mysql.LONGBLOB() if is_mysql else sa.LargeBinary()
    if pa.types.is_date(dtype):
        return sa.Date()
    if pa.types.is_time(dtype):
        return mysql.TIME(fsp=6) if is_mysql else sa.Time()
    if pa.types.is_timestamp(dtype):
        return mysql.DATETIME(fsp=6) if is_mysql else sa.DateTime(timezone=dtype.tz is not None)
    if pa.types.is_nested(dtype):
        return sa.JSON()
    return None


DUCKDB_TYPES: dict[str, sa.types.TypeEngine[Any]] = {
    "BOOLEAN": sa.Boolean(),
    "SMALLINT": sa.SmallInteger(),
    "INTEGER": sa.Integer(),
    "BIGINT": sa.BigInteger(),
    "FLOAT": sa.REAL(),
    "DOUBLE": sa.Double(),
    "DECIMAL": sa.Numeric(),
    "VARCHAR": sa.Text(),
    "BLOB": sa.LargeBinary(),
    "DATE": sa.Date(),
    "TIME": sa.Time(),
    "TIMESTAMP": sa.DateTime(),
    "TIMESTAMP WITH TIME ZONE": sa.DateTime(timezone=True),
    "JSON": sa.JSON(),
}


def fits(dtype: pa.DataType, theirs: sa.types.TypeEngine[Any], dialect: str) -> bool:
    """Whether a column of type ``theirs`` takes all values of ``dtype``; one that is not known may."""
    kinds: list[tuple[Any, tuple[Any, ...]]] = [
        (pa.types.is_boolean, (sa.Boolean, sa.Integer)),
        (pa.types.is_integer, (sa.Integer, sa.Numeric)),
        (pa.types.is_decimal, (sa.Numeric,)),
        (pa.types.is_floating, (sa.Float,)),
        (pa.types.is_large_string, (sa.String, sa.JSON)),
        (pa.types.is_large_binary, (sa.LargeBinary, sa.types._Binary)),
        (pa.types.is_date, (sa.Date,)),
        (pa.types.is_time, (sa.Time,)),
        (pa.types.is_timestamp, (sa.DateTime,)),
        (pa.types.is_nested, (sa.JSON, sa.String)),
    ]
    known = tuple({kind for _, those in kinds for kind in those})
    if not isinstance(theirs, known):
        return True
    if not any(is_kind(dtype) and isinstance(theirs, those) for is_kind, those in kinds):
        return False
    if pa.types.is_decimal(dtype) and isinstance(theirs, sa.Float):
        return False
    if pa.types.is_integer(dtype) and dialect != "sqlite" and isinstance(theirs, sa.Integer):
        bits = 16 if isinstance(theirs, sa.SmallInteger) else 64 if isinstance(theirs, sa.BigInteger) else 32
        return bool(dtype.bit_width + pa.types.is_unsigned_integer(dtype) <= bits)
    return True


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
