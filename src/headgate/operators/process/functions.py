"""Process functions by row: what users derive from, and the state that they see (ST6 to ST9).

Counterpart: ``operators.process.by_row`` calls them. Modelled on Flink's ``KeyedProcessFunction`` and PySpark's
``StatefulProcessor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headgate.errors import UsageError
from headgate.operators.process.combining import AggregateFunction, AggregatingState, ReducingState
from headgate.operators.process.cursor import Cursor
from headgate.operators.process.declaring import Declarations
from headgate.operators.process.timers import Timer, Timers
from headgate.operators.rows import Row
from headgate.operators.schemas import SchemaLike
from headgate.state.backend import RowCells
from headgate.state.descriptors import StateDescriptor
from headgate.state.evolution import NO_EVOLUTION, Evolution
from headgate.state.row_values import Conversion, conversion, mismatch
from headgate.state.ttl import TTL


class _State:
    """What the kinds of state share."""

    def __init__(self, node: str, descriptor: StateDescriptor, cursor: Cursor, cells: RowCells) -> None:
        """For Headgate only; declare states with ``StateHandle``."""
        self._node = node
        self._descriptor = descriptor
        self._cursor = cursor
        self._cells = cells
        self._conversion: Conversion = conversion(descriptor.type)
        self._store = self._conversion.store
        self._load = self._conversion.load

    def _refuse(self, value: object, error: Exception) -> UsageError:
        descriptor = self._descriptor
        return UsageError(
            f"state '{descriptor.name}' of operator '{self._node}' holds {descriptor.type}, "
            f"but was given {mismatch(value, error)}"
        )

    @property
    def exists(self) -> bool:
        """Whether the key has anything in this state."""
        return self._cells.get(self._cursor.key) is not None

    def clear(self) -> None:
        """Forget what the key has in this state; nothing of it remains in snapshots."""
        self._cells.remove(self._cursor.key)


class ValueState(_State):
    """One value of the current key."""

    def get(self, default: Any = None) -> Any:
        """Return the value, or ``default``. Changing a returned dict or list does not change the state."""
        stored = self._cells.get(self._cursor.key)
        if stored is None:
            return default
        return stored if self._load is None else self._load(stored)

    def put(self, value: Any) -> None:
        """Set the value; None clears it.

        Raises:
            UsageError: the value does not fit the state's type.
        """
        if value is None:
            self.clear()
            return
        try:
            stored = self._store(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise self._refuse(value, error) from None
        self._cells.put(self._cursor.key, stored)


class ListState(_State):
    """A list of elements of the current key, in the order in which they were appended."""

    def get(self) -> list[Any]:
        """Return a new list of the elements; changing it does not change the state."""
        stored = self._cells.get(self._cursor.key)
        if stored is None:
            return []
        return list(stored) if self._load is None else [self._load(element) for element in stored]

    def __len__(self) -> int:
        return len(self._cells.get(self._cursor.key) or ())

    def append(self, value: Any) -> None:
        """Add one element at the end.

        Raises:
            UsageError: it does not fit the state's type, or is None.
        """
        self._add([self._stored(value)])

    def extend(self, values: Iterable[Any]) -> None:
        """Add elements at the end; all of them or, if one does not fit, none."""
        stored = [self._stored(value) for value in values]
        if stored:
            self._add(stored)

    def put(self, values: Iterable[Any]) -> None:
        """Replace all elements; without any it is ``clear()``."""
        stored = [self._stored(value) for value in values]
        if stored:
            self._cells.put(self._cursor.key, stored)
        else:
            self.clear()

    def _add(self, stored: list[Any]) -> None:
        found = self._cells.writable(self._cursor.key)
        if found is None:
            self._cells.put(self._cursor.key, stored)
        else:
            found.extend(stored)

    def _stored(self, value: Any) -> Any:
        try:
            if value is None:
                raise ValueError("an element cannot be null")
            return self._store(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise self._refuse(value, error) from None


class MapState(_State):
    """A map of the current key."""

    def __init__(self, node: str, descriptor: StateDescriptor, cursor: Cursor, cells: RowCells) -> None:
        """For Headgate only; declare states with ``StateHandle``."""
        super().__init__(node, descriptor, cursor, cells)
        self._store_key: Callable[[Any], Any] = conversion(descriptor.key_type).store

    def get(self, map_key: Any, default: Any = None) -> Any:
        """Return the value of ``map_key``, or ``default``."""
        found = self._cells.get(self._cursor.key)
        stored = None if found is None else found.get(self._key(map_key))
        if stored is None:
            return default
        return stored if self._load is None else self._load(stored)

    def contains(self, map_key: Any) -> bool:
        """Return whether there is a value for ``map_key``."""
        found = self._cells.get(self._cursor.key)
        return found is not None and self._key(map_key) in found

    def put(self, map_key: Any, value: Any) -> None:
        """Set the value of ``map_key``; None removes it.

        Raises:
            UsageError: the key or value does not fit the state's types.
        """
        if value is None:
            self.remove(map_key)
            return
        own_key = self._key(map_key)
        try:
            stored = self._store(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise self._refuse(value, error) from None
        self._set(own_key, stored)

    def _set(self, own_key: Any, stored: Any) -> None:
        found = self._cells.writable(self._cursor.key)
        if found is None:
            self._cells.put(self._cursor.key, {own_key: stored})
        else:
            found[own_key] = stored

    def remove(self, map_key: Any) -> None:
        """Remove ``map_key``; nothing happens if it is not there."""
        own_key = self._key(map_key)
        found = self._cells.get(self._cursor.key)
        if found is None or own_key not in found:
            return
        if len(found) == 1:
            self.clear()  # ST7: an empty map is no map
        else:
            del self._cells.writable(self._cursor.key)[own_key]

    def keys(self) -> list[Any]:
        """Return the map's keys in a new list."""
        return list(self._cells.get(self._cursor.key) or ())

    def items(self) -> list[tuple[Any, Any]]:
        """Return the pairs of map key and value in a new list, so that the map may be changed meanwhile."""
        found = self._cells.get(self._cursor.key) or {}
        return [(map_key, self._conversion.loaded(stored)) for map_key, stored in found.items()]

    def __len__(self) -> int:
        return len(self._cells.get(self._cursor.key) or ())

    def _key(self, map_key: Any) -> Any:
        try:
            if map_key is None or map_key != map_key:
                raise ValueError("null and NaN cannot be keys")
            return self._store_key(map_key)
        except (ValueError, TypeError, OverflowError) as error:
            raise UsageError(
                f"map state '{self._descriptor.name}' of operator '{self._node}' has keys of type "
                f"{self._descriptor.key_type}, but was given the key {mismatch(map_key, error)}"
            ) from None


class StateHandle(Declarations[ValueState, ListState, MapState]):
    """What ``ProcessFunction.open`` declares its state with.

    To a checkpoint reducing and aggregating states are values (ST19): a function may change between them.
    """

    def reducing(
        self,
        name: str,
        type: Any,
        combine: Callable[[Any, Any], Any],
        *,
        ttl: TTL | None = None,
        evolution: Evolution = NO_EVOLUTION,
    ) -> ReducingState:
        """Declare one value per key with which what is added is combined.

        ``combine(so_far, value)`` returns the new value; the first one that is added is taken as it is.
        """
        value = self.value(name, type, ttl=ttl, evolution=evolution)
        if not callable(combine):
            raise UsageError(
                f"operator '{self._node}': reducing state '{name}' needs a function of two values, not {combine!r}"
            )
        return ReducingState(self._node, name, value, combine)

    def aggregating(
        self,
        name: str,
        type: Any,
        function: AggregateFunction[Any, Any, Any],
        *,
        ttl: TTL | None = None,
        evolution: Evolution = NO_EVOLUTION,
    ) -> AggregatingState:
        """Declare one accumulator of ``type`` per key, to which ``function`` adds and of which it makes a result."""
        value = self.value(name, type, ttl=ttl, evolution=evolution)
        if not isinstance(function, AggregateFunction):
            raise UsageError(
                f"operator '{self._node}': aggregating state '{name}' needs a headgate.AggregateFunction, "
                f"not {function!r}"
            )
        return AggregatingState(self._node, name, value, function)


class ProcessContext:
    """What a process function may know beside its record."""

    __slots__ = ("_cursor", "_timers")

    def __init__(self, cursor: Cursor, timers: Timers) -> None:
        """For Headgate only."""
        self._cursor = cursor
        self._timers = timers

    @property
    def key(self) -> Any:
        """The key of the record, or of the call of ``on_timer`` or ``on_round``.

        A tuple if ``key_by`` named several columns.
        """
        return self._cursor.key

    @property
    def timers(self) -> Timers:
        """Timers of this key, and what time it is."""
        return self._timers


class ProcessFunction:
    """A function with state for each key. Derive from it and give an instance to ``KeyedStream.process``.

    Every subtask works on a copy of the instance; what must survive a failure belongs into state, not into
    attributes.

    Attributes:
        schema: of the records that it returns; None: as its input.
    """

    schema: SchemaLike | None = None

    def open(self, state: StateHandle) -> None:
        """Declare state: ``self.label = state.value("label", pa.int64())``.

        Called once per subtask, and once when the pipeline is built. State has no key yet and cannot be used here.
        """

    def process(self, row: Row, context: ProcessContext) -> Iterable[Row] | None:
        """Process one record (a dict of its own); return or yield the results, None for none."""
        raise NotImplementedError

    def on_timer(self, timer: Timer, context: ProcessContext) -> Iterable[Row] | None:
        """Called when a timer of ``context.key`` fires, which is gone then; return or yield results, None for none.

        It may use state, and register and delete timers.
        """
        return None

    def on_round(self, round: int, context: ProcessContext) -> Iterable[Row] | None:
        """Called once for each key that has any state, when a round of the loop around it is globally finished."""
        return None
