"""What is special about MySQL and MariaDB: sessions, keys that are compared as they are, and which columns fit.

Both change values without an error where other databases refuse them: they round numbers and times, cut spaces off,
and take texts that differ in case for one key. Such tables are refused at the start. Counterpart: ``sql.sink``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from headgate.dataclass import dataclass

BACKENDS = ("mysql", "mariadb")
"""Names of both in URLs."""

SESSION = (
    "set session sql_mode = 'STRICT_ALL_TABLES,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00', "
    "autocommit = 0"
)
"""What does not fit is an error, 0 is 0 in a column that counts, and moments are in UTC. No statement commits itself,
also if the URL says so."""

TEXT_OF_NAMES = sa.String(255, collation="utf8mb4_bin")
"""Names of pipelines: those that differ in case are two."""

KEY_SIZE_MAX = 255
_NO_PADDING = {"mariadb": "utf8mb4_nopad_bin", "mysql": "utf8mb4_0900_bin"}
"""Collations in which texts are one only if they have the same characters, spaces at their ends included."""

_PASSING = {
    *(1020, 1021, 1040, 1041, 1053, 1114, 1129, 1135, 1158, 1159, 1160, 1161, 1180, 1181, 1203, 1205, 1206, 1213),
    *(1226, 1290, 1317, 1836, 1927, 3024, 3032),
}
"""Errors after which the same may succeed: no room, locked, a deadlock, the server stops. From 2000: no connection."""

_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
_TEXTS = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "json", "uuid")
_BYTES = ("varbinary", "tinyblob", "blob", "mediumblob", "longblob")
_FRACTION_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 6}

_COLUMNS = sa.text(
    "select column_name, data_type, column_type, numeric_precision, numeric_scale, datetime_precision, "
    "character_set_name, collation_name, extra, is_nullable = 'YES', column_default from information_schema.columns "
    "where table_schema = coalesce(:schema, database()) and table_name = :name order by ordinal_position"
)
_UNIQUE = sa.text(
    "select index_name, column_name from information_schema.statistics where non_unique = 0 "
    "and table_schema = coalesce(:schema, database()) and table_name = :name"
)
_ENGINE = sa.text(
    "select t.engine, e.transactions from information_schema.tables t join information_schema.engines e "
    "on e.engine = t.engine where t.table_schema = coalesce(:schema, database()) and t.table_name = :name"
)
_DURABILITY = sa.text("show global variables like 'innodb_flush_log_at_trx_commit'")
_DURABLE = ("1", "3")
"""Each commit waits for the disk; 3, which MariaDB has, syncs before it as well."""


def prepare_session(connection: Any, _: object) -> None:
    """Set a new connection up."""
    cursor = connection.cursor()
    cursor.execute(SESSION)
    cursor.close()


def kind_of(connection: sa.Connection) -> str:
    """Return the name of the database: a URL of MySQL may lead to MariaDB."""
    dialect: Any = connection.dialect
    return "mariadb" if getattr(dialect, "is_mariadb", False) else str(dialect.name)


def passes(error: sa.exc.DBAPIError) -> bool:
    """Whether the same may succeed later."""
    arguments = getattr(error.orig, "args", ())
    code = arguments[0] if arguments and isinstance(arguments[0], int) else 0
    return code == 0 or code in _PASSING or 2_000 <= code < 3_000


def key_type(kind: str, found: sa.types.TypeEngine[Any]) -> sa.types.TypeEngine[Any]:
    """Return the type of a column of a key that is created, in place of one that has no bounds."""
    if isinstance(found, mysql.LONGTEXT):
        return sa.String(KEY_SIZE_MAX, collation=_NO_PADDING[kind])
    if isinstance(found, mysql.LONGBLOB):
        return mysql.VARBINARY(KEY_SIZE_MAX)
    return found


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a table, as the catalogue has it."""

    name: str
    data_type: str
    column_type: str
    precision: int | None
    scale: int | None
    fraction_digits: int | None
    charset: str | None
    collation: str | None
    extra: str
    is_nullable: bool
    default: str | None

    @property
    def is_unsigned(self) -> bool:
        return "unsigned" in self.column_type

    def problem(self, dtype: pa.DataType) -> str:
        """Return what would become of values of ``dtype`` without an error, or why none fits; "": all fit."""
        kind = self.data_type
        if "generated" in self.extra.lower():
            return "the database fills it by itself"
        if pa.types.is_boolean(dtype):
            return "" if kind in _BITS else "no truth values fit"
        if pa.types.is_integer(dtype):
            return "" if self._has_room_for(dtype) else "not all numbers fit"
        if pa.types.is_decimal(dtype):
            return "" if kind == "decimal" and self._has_digits(dtype.precision, dtype.scale) else "it rounds numbers"
        if pa.types.is_floating(dtype):
            if kind == "double" or (kind == "float" and dtype.bit_width <= 32):
                return "negative numbers do not fit" if self.is_unsigned else ""
            return "it rounds numbers"
        if pa.types.is_large_string(dtype) or pa.types.is_nested(dtype):
            if kind not in _TEXTS:
                return "no texts fit"
            if kind == "char":
                return "it cuts off spaces at the end of a text"
            is_unicode = self.charset in (None, "utf8mb4") or kind in ("enum", "set")
            return "" if is_unicode else f"its character set {self.charset} does not have all characters"
        if pa.types.is_large_binary(dtype):
            return "" if kind in _BYTES else "it fills up bytes with zeros" if kind == "binary" else "no bytes fit"
        if pa.types.is_date(dtype):
            return "" if kind in ("date", "datetime") else "no days fit"
        if pa.types.is_time(dtype):
            return self._fraction(dtype, ("time",))
        if pa.types.is_timestamp(dtype):
            return self._fraction(dtype, ("datetime", "timestamp"))
        return "it has no such values"

    def _has_room_for(self, dtype: pa.DataType) -> bool:
        is_signed = pa.types.is_signed_integer(dtype)
        if is_signed and self.is_unsigned:
            return False
        if self.data_type == "decimal":
            return self._has_digits(len(str(2 ** (dtype.bit_width - is_signed))), 0)
        bits = _BITS.get(self.data_type, 0)
        return bool(bits >= dtype.bit_width + (not is_signed and not self.is_unsigned))

    def _has_digits(self, precision: int, scale: int) -> bool:
        mine, mine_after = self.precision or 0, self.scale or 0
        return mine_after >= scale and mine - mine_after >= precision - scale and not self.is_unsigned

    def _fraction(self, dtype: pa.DataType, kinds: Sequence[str]) -> str:
        if self.data_type not in kinds:
            return "no such times fit"
        needed = _FRACTION_DIGITS[dtype.unit]
        if (self.fraction_digits or 0) < needed:
            return f"it cuts off parts of seconds; {self.data_type.upper()}({needed}) has them"
        return ""

    def key_problem(self, kind: str) -> str:
        """Return why values that differ may be one in a key."""
        if self.collation is None or self.data_type == "enum":
            return ""
        if self.collation.endswith(("nopad_bin", "0900_bin")) and self.data_type != "char":
            return ""
        return (
            f"compares '{self.name}' by {self.collation}, for which texts that differ in case or in spaces at their "
            f"end may be one key; ALTER TABLE ... MODIFY `{self.name}` VARCHAR({KEY_SIZE_MAX}) COLLATE "
            f"{_NO_PADDING[kind]} NOT NULL"
        )


def reflected(connection: sa.Connection, schema: str | None, table: str) -> list[dict[str, Any]]:
    """Return the columns of a table as SQLAlchemy describes them, which does not take all names for what they are."""
    rows = connection.execute(_COLUMNS, {"schema": schema, "name": table})
    return [
        {
            "name": column.name,
            "type": sa.types.NULLTYPE,
            "nullable": column.is_nullable,
            "default": column.default,
            "autoincrement": "auto_increment" in column.extra.lower(),
            "computed": "generated" in column.extra.lower(),
        }
        for column in (_Column(*row) for row in rows)
    ]


def unique(connection: sa.Connection, schema: str | None, table: str) -> list[Sequence[str]]:
    """Return the sets of columns that are unique."""
    found: dict[str, list[str]] = {}
    for index, column in connection.execute(_UNIQUE, {"schema": schema, "name": table}):
        found.setdefault(index, []).append(column)
    return list(found.values())


def table_problem(
    connection: sa.Connection, schema: str | None, table: str, columns: pa.Schema, keys: Sequence[str]
) -> str:
    """Return why a table is not written to, in words that follow its name; "": it is.

    ``columns``: those that records fill, which the table has.
    """
    place = {"schema": schema, "name": table}
    kind = kind_of(connection)
    for engine, transactions in connection.execute(_ENGINE, place):
        if transactions != "YES":
            return f"is kept by the engine {engine}, which has no transactions; ALTER TABLE ... ENGINE = InnoDB"
    for name, value in connection.execute(_DURABILITY):
        if value not in _DURABLE:
            return (
                f"is on a server that may lose transactions after it has committed them, because {name} is {value}; "
                f"SET GLOBAL {name} = 1"
            )
    found = {row[0]: _Column(*row) for row in connection.execute(_COLUMNS, place)}
    for field in columns:
        if problem := found[field.name].problem(field.type):
            return (
                f"has type {found[field.name].column_type} in '{field.name}', and the records have {field.type}: "
                f"{problem}; cast the column before the sink, or change the table"
            )
    for key in keys:
        if problem := found[key].key_problem(kind):
            return problem
    return ""


def others_problem(unique: Sequence[Sequence[str]], keys: Sequence[str]) -> str:
    """Return why rows may replace rows of another key; "": they do not."""
    for columns in unique:
        if columns and set(columns) != set(keys):
            return (
                f"is unique in {', '.join(columns)} as well, and an upsert would replace the row that has the same "
                "values there; remove that index"
            )
    return ""
