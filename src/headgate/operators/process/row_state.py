"""State of the current key as functions by row see it.

Value, list, map, reducing and aggregating.

With a TTL the handles are the same (docs/spec/ttl.md). Reducing and aggregating state are a value per
key to a backend and a checkpoint. Counterpart: a ``state.backend.RowBackend`` holds what the handles show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from headgate.errors import UsageError
from headgate.state.backend import RowCells
from headgate.state.descriptors import StateDescriptor
from headgate.state.ttl import TTL, StateTime, Timed, live_elements, live_entries, live_value
from headgate.state.values import Conversion, conversion, mismatch


class NoKey:
    """The key while there is none: its use as a key raises, at no cost where there is one."""

    def __hash__(self) -> NoReturn:
        raise UsageError(
            "state belongs to a key, and there is none in open(), in process_broadcast() or without key_by; use it in "
            "process(), on_timer() and on_round()"
        )


class CurrentKey:
    """The current key; shared by the context and all states of one operator."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Any = NoKey()


class _State:
    """What the kinds of state share."""

    def __init__(self, node: str, descriptor: StateDescriptor, cursor: CurrentKey, cells: RowCells) -> None:
        """For Headgate only; declare states with ``StateHandle``."""
        self._node = node
        self._descriptor = descriptor
        self._current = cursor
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
        return self._cells.get(self._current.key) is not None

    def clear(self) -> None:
        """Forget what the key has in this state; nothing of it remains in snapshots."""
        self._cells.remove(self._current.key)


class ValueState(_State):
    """One value of the current key."""

    def get(self, default: Any = None) -> Any:
        """Return the value, or ``default``. Changing a returned dict or list does not change the state."""
        stored = self._cells.get(self._current.key)
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
        self._cells.put(self._current.key, stored)


class ListState(_State):
    """A list of elements of the current key, in the order in which they were appended."""

    def get(self) -> list[Any]:
        """Return a new list of the elements; changing it does not change the state."""
        stored = self._cells.get(self._current.key)
        if stored is None:
            return []
        return list(stored) if self._load is None else [self._load(element) for element in stored]

    def __len__(self) -> int:
        return len(self._cells.get(self._current.key) or ())

    def append(self, value: Any) -> None:
        """Add one element at the end.

        Raises:
            UsageError: the element does not fit the state's type, or is None.
        """
        self._add([self._stored(value)])

    def extend(self, values: Iterable[Any]) -> None:
        """Add elements at the end. If one of them does not fit, none is added."""
        stored = [self._stored(value) for value in values]
        if stored:
            self._add(stored)

    def put(self, values: Iterable[Any]) -> None:
        """Replace all elements. Without any elements, this is the same as ``clear()``."""
        stored = [self._stored(value) for value in values]
        if stored:
            self._cells.put(self._current.key, stored)
        else:
            self.clear()

    def _add(self, stored: list[Any]) -> None:
        found = self._cells.writable(self._current.key)
        if found is None:
            self._cells.put(self._current.key, stored)
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
    """A map of entries of the current key."""

    def __init__(self, node: str, descriptor: StateDescriptor, cursor: CurrentKey, cells: RowCells) -> None:
        """For Headgate only; declare states with ``StateHandle``."""
        super().__init__(node, descriptor, cursor, cells)
        self._store_key: Callable[[Any], Any] = conversion(descriptor.key_type).store

    def get(self, map_key: Any, default: Any = None) -> Any:
        """Return the value of ``map_key``, or ``default``."""
        found = self._cells.get(self._current.key)
        stored = None if found is None else found.get(self._key(map_key))
        if stored is None:
            return default
        return stored if self._load is None else self._load(stored)

    def contains(self, map_key: Any) -> bool:
        """Return whether the map has a value for ``map_key``."""
        found = self._cells.get(self._current.key)
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
        found = self._cells.writable(self._current.key)
        if found is None:
            self._cells.put(self._current.key, {own_key: stored})
        else:
            found[own_key] = stored

    def remove(self, map_key: Any) -> None:
        """Remove ``map_key``, if it is there."""
        own_key = self._key(map_key)
        found = self._cells.get(self._current.key)
        if found is None or own_key not in found:
            return
        if len(found) == 1:
            self.clear()  # an empty map is no map
        else:
            del self._cells.writable(self._current.key)[own_key]

    def keys(self) -> list[Any]:
        """Return the map's keys in a new list."""
        return list(self._cells.get(self._current.key) or ())

    def items(self) -> list[tuple[Any, Any]]:
        """Return pairs of map key and value in a new list, so that you can change the map while you iterate."""
        found = self._cells.get(self._current.key) or {}
        return [(map_key, self._conversion.loaded(stored)) for map_key, stored in found.items()]

    def __len__(self) -> int:
        return len(self._cells.get(self._current.key) or ())

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


def first_key(state: MapState) -> Any:
    """Return a map key that the current key has, expired or not, or None; for Headgate only."""
    return next(iter(state._cells.get(state._current.key) or ()), None)


Value = TypeVar("Value")
Accumulator = TypeVar("Accumulator")
Result_co = TypeVar("Result_co", covariant=True)


class AggregateFunction(Generic[Value, Accumulator, Result_co]):
    """Base class of functions that combine values into one result through an accumulator, which the state holds.

    Headgate calls the methods for the current key. The function itself has no state.
    """

    def initial(self) -> Accumulator:
        """Return the accumulator of a key to which nothing has been added yet."""
        raise NotImplementedError

    def add(self, accumulator: Accumulator, value: Value) -> Accumulator:
        """Return the accumulator with ``value`` added. It may be the given object, changed, but not None."""
        raise NotImplementedError

    def result(self, accumulator: Accumulator) -> Result_co:
        """Return the result of all values that were added so far."""
        raise NotImplementedError


class _OneValue(Protocol):
    """What is asked of a value state (``functions.ValueState``)."""

    @property
    def exists(self) -> bool: ...

    def get(self, default: Any = None) -> Any: ...

    def put(self, value: Any) -> None: ...

    def clear(self) -> None: ...


class _Combined:
    """What both kinds share."""

    def __init__(self, node: str, name: str, value: _OneValue) -> None:
        """For Headgate only; declare states with ``StateHandle``."""
        self._node = node
        self._name = name
        self._value = value

    @property
    def exists(self) -> bool:
        """Whether anything was added for the key since it was cleared."""
        return self._value.exists

    def clear(self) -> None:
        """Forget what the key has in this state; nothing of it remains in snapshots."""
        self._value.clear()

    def _put(self, combined: Any) -> None:
        if combined is None:  # ``put(None)`` would clear: whatever was added so far would be gone without a word
            self._refuse("its function returned None instead of what it has so far; return that, or call clear()")
        self._value.put(combined)

    def _refuse_none(self, value: Any) -> None:
        if value is None:
            self._refuse("None cannot be added; leave it out")

    def _refuse(self, problem: str) -> NoReturn:
        raise UsageError(f"state '{self._name}' of operator '{self._node}': {problem}")


class ReducingState(_Combined):
    """One value of the current key: the first value that was added, combined with each later one."""

    def __init__(self, node: str, name: str, value: _OneValue, combine: Callable[[Any, Any], Any]) -> None:
        """For Headgate only; declare states with ``StateHandle``."""
        super().__init__(node, name, value)
        self._combine = combine

    def add(self, value: Any) -> None:
        """Combine ``value`` with the present value, if there is one.

        Raises:
            UsageError: ``value`` or the result is None, or the result does not fit the state's type.
        """
        self._refuse_none(value)
        found = self._value.get()
        self._put(value if found is None else self._combine(found, value))

    def get(self, default: Any = None) -> Any:
        """Return the combined value, or ``default`` if nothing was added."""
        return self._value.get(default)


class AggregatingState(_Combined):
    """An accumulator of the current key. Reading it returns the result of its ``AggregateFunction``."""

    def __init__(self, node: str, name: str, value: _OneValue, function: AggregateFunction[Any, Any, Any]) -> None:
        """For Headgate only; declare states with ``StateHandle``."""
        super().__init__(node, name, value)
        self._function = function

    def add(self, value: Any) -> None:
        """Add ``value`` to the accumulator.

        Raises:
            UsageError: ``value`` or the accumulator is None, or the accumulator does not fit the state's type.
        """
        self._refuse_none(value)
        found = self._value.get()
        self._put(self._function.add(self._function.initial() if found is None else found, value))

    def get(self, default: Any = None) -> Any:
        """Return the result, or ``default`` if nothing has been added."""
        found = self._value.get()
        return default if found is None else self._function.result(found)


class _TtlState:
    """What the expiring kinds of state share: what they store are pairs with an expiry."""

    _cells: RowCells
    _current: CurrentKey
    _store: Callable[[Any], Any]
    _time: StateTime
    _ttl_ms: int
    _is_renewed_by_reads: bool

    def expire(self, ttl: TTL, time: StateTime) -> None:
        """For Headgate only; called once, before anything else."""
        store, ttl_ms = self._store, ttl.duration_ms
        self._time = time
        self._ttl_ms = ttl_ms
        self._is_renewed_by_reads = ttl.is_renewed_by_reads
        self._store = lambda value: (store(value), time.now_ms + ttl_ms)

    def _now(self, stored: Any) -> Timed:
        """Return what was stored as it is kept when it is written now."""
        return stored, self._time.now_ms + self._ttl_ms

    def _must_renew(self, oldest: Timed) -> bool:
        """Whether a read has to renew, where ``oldest`` is the first that expires of what was read."""
        return self._is_renewed_by_reads and oldest[1] != self._time.now_ms + self._ttl_ms


class TtlValueState(_TtlState, ValueState):
    """One value of the current key."""

    @property
    def exists(self) -> bool:
        return self._read() is not None

    def get(self, default: Any = None) -> Any:
        found = self._read()
        if found is None:
            return default
        return found[0] if self._load is None else self._load(found[0])

    def _read(self) -> Timed | None:
        found = live_value(self._cells, self._current.key, self._time.now_ms)
        if self._is_renewed_by_reads and found is not None and self._must_renew(found):
            self._cells.put(self._current.key, self._now(found[0]))
        return found


class TtlListState(_TtlState, ListState):
    """A list of elements of the current key; each expires by itself, the first one first."""

    @property
    def exists(self) -> bool:
        return bool(self._read())

    def get(self) -> list[Any]:
        return [self._conversion.loaded(stored) for stored, _ in self._read()]

    def __len__(self) -> int:
        return len(self._read())

    def _read(self) -> list[Timed]:
        key = self._current.key
        found = live_elements(self._cells, key, self._time.now_ms)
        if found is None:
            return []
        if self._must_renew(found[0]):
            self._cells.put(key, [self._now(stored) for stored, _ in found])
        return found


class TtlMapState(_TtlState, MapState):
    """A map of the current key; each entry expires by itself."""

    @property
    def exists(self) -> bool:
        return bool(self._read())

    def get(self, map_key: Any, default: Any = None) -> Any:
        found = self._read_one(map_key)
        return default if found is None else self._conversion.loaded(found[0])

    def contains(self, map_key: Any) -> bool:
        return self._read_one(map_key) is not None

    def keys(self) -> list[Any]:
        return list(self._read())

    def items(self) -> list[tuple[Any, Any]]:
        return [(map_key, self._conversion.loaded(stored)) for map_key, (stored, _) in self._read().items()]

    def __len__(self) -> int:
        return len(self._read())

    def _read_one(self, map_key: Any) -> Timed | None:
        own_key = self._key(map_key)
        entries: dict[Any, Timed] = self._cells.get(self._current.key) or {}
        found = entries.get(own_key)
        if found is None or found[1] <= self._time.now_ms:
            return None
        if self._must_renew(found):
            self._set(own_key, self._now(found[0]))
        return found

    def _read(self) -> dict[Any, Timed]:
        key = self._current.key
        found = live_entries(self._cells, key, self._time.now_ms)
        if found is None:
            return {}
        if self._must_renew(next(iter(found.values()))):
            self._cells.put(key, {map_key: self._now(stored) for map_key, (stored, _) in found.items()})
        return found

    def _set(self, own_key: Any, stored: Any) -> None:
        """The entry moves to the end: the first ones are those that expire first."""
        found = self._cells.writable(self._current.key)
        if found is not None:
            found.pop(own_key, None)
        super()._set(own_key, stored)


StateT = TypeVar("StateT", ValueState, ListState, MapState)


class RowHandleFactory:
    """Makes the states of one operator (``declaring.HandleFactory``)."""

    def __init__(
        self, node: str, cursor: CurrentKey, cells: Callable[[StateDescriptor], RowCells], time: StateTime
    ) -> None:
        """``cells`` returns those of the descriptor's state, and ``time`` says what of them has expired."""
        self._node = node
        self._current = cursor
        self._cells = cells
        self._time = time

    def value(self, descriptor: StateDescriptor) -> ValueState:
        return self._made(ValueState if descriptor.ttl is None else TtlValueState, descriptor)

    def list(self, descriptor: StateDescriptor) -> ListState:
        return self._made(ListState if descriptor.ttl is None else TtlListState, descriptor)

    def map(self, descriptor: StateDescriptor) -> MapState:
        return self._made(MapState if descriptor.ttl is None else TtlMapState, descriptor)

    def _made(self, kind: type[StateT], descriptor: StateDescriptor) -> StateT:
        state = kind(self._node, descriptor, self._current, self._cells(descriptor))
        if isinstance(state, _TtlState):
            assert descriptor.ttl is not None
            state.expire(descriptor.ttl, self._time)
        return state
