"""State of the current key as functions by row see it: a value, a list or a map (ST6 to ST8).

Counterparts: ``functions``, whose ``StateHandle`` declares them; a ``state.backend.RowBackend``, which holds what they
show; ``expiring``, the same with a TTL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headgate.errors import UsageError
from headgate.operators.process.cursor import Cursor
from headgate.state.backend import RowCells
from headgate.state.descriptors import StateDescriptor
from headgate.state.row_values import Conversion, conversion, mismatch


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
    """A map of entries of the current key."""

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
        """Return whether the map has a value for ``map_key``."""
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
        """Remove ``map_key``, if it is there."""
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
        """Return pairs of map key and value in a new list, so that you can change the map while you iterate."""
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


def first_key(state: MapState) -> Any:
    """Return a map key that the current key has, expired or not, or None; for Headgate only."""
    return next(iter(state._cells.get(state._cursor.key) or ()), None)
