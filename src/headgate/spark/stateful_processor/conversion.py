"""Convert schemas (also DDL text) and values between PySpark's stateful processors and Headgate (SX3, SX5, SX6, SX8).

Structs are dicts to Headgate, and tuples or Rows to Spark, where numpy's and pandas' scalars may be in them. Times
are UTC and have no zone in both directions. DDL text is read without a JVM: workers have none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import Row, StructType

from headgate.codec.exact_values import elements_of, exact_array
from headgate.errors import UsageError
from headgate.model.state_schema import inner_paths
from headgate.operators.schemas import as_schema, canonical_schema, has_map
from headgate.state.descriptors import Evolution, value_type

_ATOMIC: dict[str, type[types.DataType]] = {
    "boolean": types.BooleanType,
    "tinyint": types.ByteType,
    "byte": types.ByteType,
    "smallint": types.ShortType,
    "short": types.ShortType,
    "int": types.IntegerType,
    "integer": types.IntegerType,
    "bigint": types.LongType,
    "long": types.LongType,
    "float": types.FloatType,
    "real": types.FloatType,
    "double": types.DoubleType,
    "string": types.StringType,
    "varchar": types.StringType,
    "char": types.StringType,
    "character": types.StringType,
    "binary": types.BinaryType,
    "date": types.DateType,
    "timestamp": types.TimestampType,
    "timestamp_ltz": types.TimestampType,
    "timestamp_ntz": types.TimestampNTZType,
    "decimal": types.DecimalType,
    "dec": types.DecimalType,
    "numeric": types.DecimalType,
}
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\w+|[<>(),:])")


def struct_of(ddl: str) -> types.StructType:
    """Return the columns that ``ddl`` describes: ``"id STRING, seen ARRAY<INT>"``.

    Raises:
        ValueError: it is no such text, or one of a kind that is not known here.
    """
    parser = _Parser(_tokens(ddl))
    try:
        fields = parser.fields(end="")
    except IndexError:
        raise ValueError("it ends too early") from None
    if parser.tokens:
        raise ValueError(f"nothing was expected at '{parser.tokens[0]}'")
    return types.StructType(fields)


def _tokens(ddl: str) -> list[str]:
    found, place = [], 0
    text = ddl.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"'{text[place:].strip()[:20]}' is not understood")
        found.append(match[1])
        place = match.end()
    return found


@dataclass
class _Parser:
    """Recursive descent. ``tokens``: those that are left."""

    tokens: list[str] = field(default_factory=list)

    def fields(self, end: str) -> list[types.StructField]:
        """Return fields until ``end``, which stays."""
        found = [self._field()]
        while self._peek() == ",":
            self.tokens.pop(0)
            found.append(self._field())
        if self._peek() != end:
            raise ValueError(f"',' was expected at '{self._peek()}'" if self._peek() else "it ends too early")
        return found

    def _field(self) -> types.StructField:
        name = self.tokens.pop(0)
        if name.startswith("`"):
            name = name[1:-1].replace("``", "`")
        elif not (name[0].isalnum() or name[0] == "_"):
            raise ValueError(f"a name was expected at '{name}'")
        if self._peek() == ":":
            self.tokens.pop(0)
        dtype, is_nullable = self._type(), True
        if self._peek().lower() == "not":
            self.tokens.pop(0)
            self._take("null")
            is_nullable = False
        if self._peek().lower() == "comment":
            del self.tokens[:2]
        return types.StructField(name, dtype, is_nullable)

    def _type(self) -> types.DataType:
        word = self.tokens.pop(0).lower()
        if word == "array":
            return types.ArrayType(*self._inner(1))
        if word == "map":
            return types.MapType(*self._inner(2))
        if word == "struct":
            self._take("<")
            fields = self.fields(end=">")
            self._take(">")
            return types.StructType(fields)
        if word not in _ATOMIC:
            raise ValueError(f"there is no type '{word}'")
        numbers = self._numbers()
        return types.DecimalType(*numbers) if _ATOMIC[word] is types.DecimalType else _ATOMIC[word]()

    def _inner(self, count: int) -> list[types.DataType]:
        self._take("<")
        found = [self._type()]
        while len(found) < count:
            self._take(",")
            found.append(self._type())
        self._take(">")
        return found

    def _numbers(self) -> list[int]:
        if self._peek() != "(":
            return []
        self._take("(")
        found = [int(self.tokens.pop(0))]
        if self._peek() == ",":
            self.tokens.pop(0)
            found.append(int(self.tokens.pop(0)))
        self._take(")")
        return found

    def _peek(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def _take(self, wanted: str) -> None:
        found = self.tokens.pop(0)
        if found.lower() != wanted:
            raise ValueError(f"'{wanted}' was expected at '{found}'")


SparkSchema: TypeAlias = Any
"""A ``StructType`` or DDL text."""

Convert: TypeAlias = Callable[[Any], Any]


def arrow_schema_of(node: str, what: str, given: SparkSchema) -> pa.Schema:
    """Return a schema that a user gave as PySpark's, as DDL text or as Headgate's own, in canonical types.

    Raises:
        UsageError: it is none, or of a type that Headgate does not carry.
    """
    try:
        found = struct_of(given) if isinstance(given, str) else given
    except ValueError as error:
        raise UsageError(f"operator '{node}': {what} '{given}' cannot be read: {error}") from None
    if not isinstance(found, StructType):
        return as_schema(node, found)
    if not found.fields:
        raise UsageError(f"operator '{node}': {what} has no columns")
    try:
        schema = to_arrow_schema(found, timezone="UTC")
        for field in schema:
            if has_map(field.type):  # its values are dicts, and ours lists of entries
                raise UsageError(f"column '{field.name}' has type {field.type}; keep maps in map state instead")
        return canonical_schema(schema)
    except UsageError as error:
        raise UsageError(f"operator '{node}': {what}: {error.message}") from None
    except Exception as error:  # PySpark's own, of several trees
        raise UsageError(f"operator '{node}': {what} has a type that Headgate does not carry: {error}") from None


def evolution_of(dtype: pa.DataType) -> Evolution:
    """Return what becomes of a state that an older version of a processor wrote: what Spark makes of it (SX17)."""
    return Evolution(defaults=dict.fromkeys(path for path, _ in inner_paths(value_type(dtype))), starts_empty=True)


class Fields:
    """The columns of a state or of results: between tuples or Rows and dicts."""

    def __init__(self, schema: pa.Schema) -> None:
        self.names: list[str] = list(schema.names)
        self._plain = [plain(field.type) for field in schema]
        self._shown = [shown(field.type) for field in schema]
        self._row = Row(*self.names)

    def dict_of(self, value: Any, *, by_name: bool = False) -> dict[str, Any]:
        """Return what a user gave as a dict of plain values.

        Args:
            value: a tuple or list by position, or a dict.
            by_name: a Row that has names counts as a dict, as with results.

        Raises:
            TypeError, ValueError: it does not fit.
        """
        if by_name and isinstance(value, Row) and hasattr(value, "__fields__"):
            value = value.asDict()
        if isinstance(value, Mapping):
            unknown = [name for name in value if name not in self.names]
            if unknown:
                raise TypeError(f"there is no field {unknown[0]!r}; the fields are {self.names}")
            value = [value.get(name) for name in self.names]
        if not isinstance(value, tuple | list):
            raise TypeError(f"a tuple of {self.names} is needed, not {type(value).__name__}")
        if len(value) != len(self.names):
            raise TypeError(f"a tuple of {self.names} is needed, but was given {len(value)} values")
        return {name: convert(one) for name, convert, one in zip(self.names, self._plain, value, strict=True)}

    def tuple_of(self, stored: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the values of a dict in the order of the fields."""
        return tuple(
            value if show is None or value is None else show(value)
            for show, value in zip(self._shown, stored.values(), strict=True)
        )

    def row_of(self, values: Sequence[Any]) -> Row:
        """Return a Row of values in the order of the fields."""
        return self._row(
            *(
                value if show is None or value is None else show(value)
                for show, value in zip(self._shown, values, strict=True)
            )
        )


def plain(dtype: pa.DataType) -> Convert:
    """Return what makes a value of ``dtype`` plain: dicts, lists, and scalars that are neither numpy's nor pandas'."""
    if pa.types.is_struct(dtype):
        fields = Fields(pa.schema(list(dtype)))
        return lambda value: None if value is None else fields.dict_of(value)
    if pa.types.is_large_list(dtype):
        inner = plain(dtype.value_type)
        return lambda value: value if (given := elements_of(value)) is None else [inner(one) for one in given]
    return _scalar


def _scalar(value: Any) -> Any:
    if isinstance(value, np.datetime64 | np.timedelta64):
        return None if np.isnat(value) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, datetime) and value != value:  # pandas' NaT
        return None
    return value


def shown(dtype: pa.DataType) -> Convert | None:
    """Return what makes Rows of structs within a value, and takes the zone off moments; None where there are none."""
    if pa.types.is_timestamp(dtype) and dtype.tz is not None:
        return without_zone
    if pa.types.is_struct(dtype):
        fields = Fields(pa.schema(list(dtype)))
        return lambda value: fields.row_of(list(value.values()))
    if pa.types.is_large_list(dtype):
        inner = shown(dtype.value_type)
        if inner is not None:
            return lambda value: [None if one is None else inner(one) for one in value]
    return None


def without_zone(value: Any) -> Any:
    """Return a moment as Spark's users have it, without its zone, which is UTC; anything else as it is."""
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value


class MapKeys:
    """The keys of a map: tuples for users; for Headgate one value, or several packed into bytes (SX6)."""

    def __init__(self, node: str, name: str, schema: pa.Schema) -> None:
        """
        Raises:
            UsageError: several fields, and one of a type that cannot be packed.
        """
        self._fields = Fields(schema)
        self._is_packed = len(schema) > 1
        self.type: pa.DataType = pa.large_binary() if self._is_packed else schema.field(0).type
        if not self._is_packed:
            return
        for one in schema:
            if not _is_packable(one.type):
                raise UsageError(
                    f"operator '{node}': the keys of map state '{name}' have several fields, so field '{one.name}' "
                    f"must be an integer, a boolean, text or binary, but is {one.type}"
                )
        self._where = f"map state '{name}' of operator '{node}'"
        self._types = [one.type for one in schema]

    def stored(self, key: Any) -> Any:
        """Return a user's key as Headgate's.

        Raises:
            TypeError, ValueError: it does not fit, or has a null.
        """
        values = list(self._fields.dict_of(key).values())
        if any(value is None for value in values):
            raise ValueError("null cannot be a key")
        if not self._is_packed:
            return values[0]
        checked = [exact_array([value], dtype)[0].as_py() for value, dtype in zip(values, self._types, strict=True)]
        return msgspec.msgpack.encode(checked)

    def check(self, stored: bytes | None) -> None:
        """Make sure that a key that is there has fields of these types: bytes do not tell before (SX6).

        Raises:
            UsageError: an older version of the processor wrote others.
        """
        if not self._is_packed or stored is None:
            return
        found = msgspec.msgpack.decode(stored)
        if len(found) != len(self._types) or not all(map(_fits, found, self._types)):
            declared = ", ".join(
                f"{name}: {dtype}" for name, dtype in zip(self._fields.names, self._types, strict=True)
            )
            raise UsageError(
                f"{self._where} has the key {tuple(found)!r}, which an older version of the processor wrote, but its "
                f"keys are declared as ({declared}) now; give the state another name, or declare its keys as before"
            )

    def shown(self, stored: Any) -> tuple[Any, ...]:
        """Return Headgate's key as the user's."""
        return tuple(msgspec.msgpack.decode(stored)) if self._is_packed else (without_zone(stored),)


def _fits(value: Any, dtype: pa.DataType) -> bool:
    """Return whether a value out of a packed key is of ``dtype``."""
    if pa.types.is_integer(dtype):
        limits = np.iinfo(dtype.to_pandas_dtype())
        return type(value) is int and limits.min <= value <= limits.max
    if pa.types.is_boolean(dtype):
        return type(value) is bool
    return type(value) is (bytes if pa.types.is_large_binary(dtype) else str)


def _is_packable(dtype: pa.DataType) -> bool:
    kinds = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_large_string, pa.types.is_large_binary)
    return any(is_kind(dtype) for is_kind in kinds)
