"""State and timers under the names of PySpark's ``StatefulProcessorHandle``, with schemas and values converted.

Each class has the methods of PySpark's class of that name in ``pyspark.sql.streaming.stateful_processor``, and no
others. Structs are dicts to Headgate, and tuples or Rows to Spark, where numpy's and pandas' scalars
may be in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from datetime import datetime
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import Row, StructType

from headgate.codec.exact_values import elements_of, exact_array
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.state_schema import inner_paths
from headgate.operators.process.key_process import KeyContext
from headgate.operators.process.row_process import StateHandle
from headgate.operators.process.row_state import ListState as Elements
from headgate.operators.process.row_state import MapState as Entries
from headgate.operators.process.row_state import ValueState as Single
from headgate.operators.process.row_state import first_key
from headgate.operators.schemas import as_schema, canonical_schema, has_map
from headgate.state.backend import TimeKind
from headgate.state.descriptors import Evolution, value_type
from headgate.state.ttl import TTL

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
    """Return what becomes of a state that an older version of a processor wrote: what Spark makes of it."""
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
    """The keys of a map: tuples for users; for Headgate one value, or several packed into bytes."""

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
        # checked now, as a column of its type would be: packed bytes take any value
        checked = [exact_array([value], dtype)[0].as_py() for value, dtype in zip(values, self._types, strict=True)]
        return msgspec.msgpack.encode(checked)

    def check(self, stored: bytes | None) -> None:
        """Make sure that a key that is there has fields of these types: bytes do not tell before.

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


class ValueState:
    """One value of the current key, a tuple."""

    def __init__(self, state: Single, fields: Fields) -> None:
        self._state = state
        self._fields = fields

    def exists(self) -> bool:
        """Whether there is a value."""
        return self._state.exists

    def get(self) -> tuple[Any, ...] | None:
        """Return the value, or None."""
        found = self._state.get()
        return None if found is None else self._fields.tuple_of(found)

    def update(self, newValue: Any) -> None:
        """Set the value."""
        self._state.put(self._fields.dict_of(newValue))

    def clear(self) -> None:
        """Forget the value."""
        self._state.clear()


class ListState:
    """A list of tuples of the current key."""

    def __init__(self, state: Elements, fields: Fields) -> None:
        self._state = state
        self._fields = fields

    def exists(self) -> bool:
        """Whether there is any element."""
        return self._state.exists

    def get(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the elements that there are now."""
        return iter([self._fields.tuple_of(element) for element in self._state.get()])

    def put(self, newState: Iterable[Any]) -> None:
        """Replace all elements."""
        self._state.put([self._fields.dict_of(element) for element in newState])

    def appendValue(self, newState: Any) -> None:
        """Add an element at the end."""
        self._state.append(self._fields.dict_of(newState))

    def appendList(self, newState: Iterable[Any]) -> None:
        """Add elements at the end."""
        self._state.extend([self._fields.dict_of(element) for element in newState])

    def clear(self) -> None:
        """Forget the list."""
        self._state.clear()


class MapState:
    """A map from tuples to tuples of the current key."""

    def __init__(self, state: Entries, keys: MapKeys, fields: Fields) -> None:
        self._state = state
        self._keys = keys
        self._fields = fields

    def exists(self) -> bool:
        """Whether there is any entry."""
        return self._state.exists

    def getValue(self, key: Any) -> Any:
        """Return the value of ``key`` as a Row, or None."""
        found = self._state.get(self._stored(key))
        return None if found is None else self._fields.row_of(list(found.values()))

    def containsKey(self, key: Any) -> bool:
        """Return whether there is a value of ``key``."""
        return self._state.contains(self._stored(key))

    def updateValue(self, key: Any, value: Any) -> None:
        """Set the value of ``key``."""
        self._state.put(self._stored(key), self._fields.dict_of(value))

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Iterate over the entries that there are now."""
        return iter([(self._keys.shown(key), self._fields.tuple_of(value)) for key, value in self._items()])

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the map's keys that there are now."""
        return iter([self._keys.shown(key) for key, _ in self._items()])

    def values(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the values that there are now."""
        return iter([self._fields.tuple_of(value) for _, value in self._items()])

    def removeKey(self, key: Any) -> None:
        """Remove ``key``; nothing happens if it is not there."""
        self._state.remove(self._stored(key))

    def clear(self) -> None:
        """Forget the map."""
        self._state.clear()

    def _stored(self, key: Any) -> Any:
        self._keys.check(first_key(self._state))
        return self._keys.stored(key)

    def _items(self) -> list[tuple[Any, Any]]:
        self._keys.check(first_key(self._state))
        return self._state.items()


class ProcessorHandle:
    """What ``init`` of a stateful processor is given, and keeps: PySpark's ``StatefulProcessorHandle``."""

    def __init__(self, node: str, kind: TimeKind | None, declarations: StateHandle) -> None:
        self._node = node
        self._kind = kind
        self._declarations = declarations
        self._context: KeyContext | None = None

    def begin(self, context: KeyContext) -> None:
        """There are keys and times from now on; for Headgate only."""
        self._context = context

    def getValueState(self, stateName: str, schema: SparkSchema, ttlDurationMs: int | None = None) -> ValueState:
        """Declare one value per key."""
        columns = self._columns(stateName, "the schema", schema)
        dtype, ttl = pa.struct(list(columns)), self._ttl(stateName, ttlDurationMs)
        state = self._declarations.value(stateName, dtype, ttl=ttl, evolution=evolution_of(dtype))
        return ValueState(state, Fields(columns))

    def getListState(self, stateName: str, schema: SparkSchema, ttlDurationMs: int | None = None) -> ListState:
        """Declare a list per key; each element lives by itself."""
        columns = self._columns(stateName, "the schema", schema)
        dtype, ttl = pa.struct(list(columns)), self._ttl(stateName, ttlDurationMs)
        state = self._declarations.list(stateName, dtype, ttl=ttl, evolution=evolution_of(dtype))
        return ListState(state, Fields(columns))

    def getMapState(
        self, stateName: str, userKeySchema: SparkSchema, valueSchema: SparkSchema, ttlDurationMs: int | None = None
    ) -> MapState:
        """Declare a map per key; each entry lives by itself."""
        keys = MapKeys(self._node, stateName, self._columns(stateName, "the schema of the keys", userKeySchema))
        columns = self._columns(stateName, "the schema of the values", valueSchema)
        dtype, ttl = pa.struct(list(columns)), self._ttl(stateName, ttlDurationMs)
        state = self._declarations.map(stateName, keys.type, dtype, ttl=ttl, evolution=evolution_of(dtype))
        return MapState(state, keys, Fields(columns))

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Have ``handleExpiredTimer`` called for the key at this time; if it has passed, after this batch."""
        self._with_timers().timers.register(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Remove the key's timer of this time."""
        self._with_timers().timers.delete(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """Iterate over the times of the key's timers."""
        return iter(self._with_timers().timers.times())

    def deleteIfExists(self, stateName: str) -> None:
        """Drop a state that older checkpoints have and that is not declared any more.

        Raises:
            UsageError: it is called outside ``init``.
        """
        if self._context is not None:
            raise UsageError(
                f"operator '{self._node}': deleteIfExists('{stateName}') can only be called in init(); to empty a "
                "state of the current key, call its clear()"
            )
        self._declarations.forget(stateName)

    def _with_timers(self) -> KeyContext:
        if self._kind is None:
            raise UsageError(
                f'operator \'{self._node}\': there are no timers with time_mode="none"; give "eventTime" or '
                '"processingTime"'
            )
        if self._context is None:
            raise UsageError(f"operator '{self._node}': timers belong to a key, and there is none in init()")
        return self._context

    def _columns(self, name: str, what: str, given: SparkSchema) -> pa.Schema:
        return arrow_schema_of(self._node, f"{what} of state '{name}'", given)

    def _ttl(self, name: str, duration_ms: int | None) -> TTL | None:
        """Only with processing time, as in Spark."""
        if duration_ms is None:
            return None
        if self._kind is not TimeKind.PROCESSING_TIME:
            raise UsageError(
                f"operator '{self._node}': state '{name}' has a ttlDurationMs, which needs time_mode=\"processingTime\""
            )
        if type(duration_ms) is not int or duration_ms <= 0:
            raise UsageError(
                f"operator '{self._node}': the ttlDurationMs of state '{name}' must be a whole number of milliseconds, "
                f"at least 1, not {duration_ms!r}"
            )
        return TTL(f"{duration_ms}ms")
