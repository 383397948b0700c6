"""State and timers under the names of PySpark's ``StatefulProcessorHandle`` (SX5, SX6, SX9).

Each class has the methods of PySpark's class of that name in ``pyspark.sql.streaming.stateful_processor``, and no
others. Counterparts: ``operators.process.functions``, which holds the state; ``operators.process.key_timers``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.process.key_process import KeyContext
from headgate.operators.process.row_process import StateHandle
from headgate.operators.process.row_state import ListState as Elements
from headgate.operators.process.row_state import MapState as Entries
from headgate.operators.process.row_state import ValueState as Single
from headgate.operators.process.row_state import first_key
from headgate.spark.stateful_processor.conversion import Fields, MapKeys, SparkSchema, arrow_schema_of, evolution_of
from headgate.state.timers import TimeKind
from headgate.state.ttl import TTL


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
        """Leave behind what older checkpoints have of a state that is not declared any more (SX17).

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
        """Only with processing time, as in Spark (SX15)."""
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
