"""State with a TTL as functions by row see it (rules TL2 to TL4 of docs/spec/ttl.md).

The same handles as without one. Counterparts: ``state.expiring_rows``, which says what is kept for a key; a
``state.backend.RowBackend``, which holds it and says what time it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from headgate.operators.process.cursor import Cursor
from headgate.operators.process.keyed_states import ListState, MapState, ValueState
from headgate.state.backend import RowCells
from headgate.state.descriptors import StateDescriptor
from headgate.state.expiring_rows import Timed, live_elements, live_entries, live_value
from headgate.state.ttl import TTL, StateTime


class _Expiry:
    """What the expiring kinds of state share: what they store are pairs with an expiry."""

    _cells: RowCells
    _cursor: Cursor
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
        """Whether a read has to renew, where ``oldest`` is the first that expires of what was read (TL4)."""
        return self._is_renewed_by_reads and oldest[1] != self._time.now_ms + self._ttl_ms


class ExpiringValueState(_Expiry, ValueState):
    """One value of the current key."""

    @property
    def exists(self) -> bool:
        """See ``ValueState``."""
        return self._read() is not None

    def get(self, default: Any = None) -> Any:
        """See ``ValueState``."""
        found = self._read()
        if found is None:
            return default
        return found[0] if self._load is None else self._load(found[0])

    def _read(self) -> Timed | None:
        found = live_value(self._cells, self._cursor.key, self._time.now_ms)
        if self._is_renewed_by_reads and found is not None and self._must_renew(found):
            self._cells.put(self._cursor.key, self._now(found[0]))
        return found


class ExpiringListState(_Expiry, ListState):
    """A list of elements of the current key; each expires by itself, the first one first."""

    @property
    def exists(self) -> bool:
        """See ``ListState``."""
        return bool(self._read())

    def get(self) -> list[Any]:
        """See ``ListState``."""
        return [self._conversion.loaded(stored) for stored, _ in self._read()]

    def __len__(self) -> int:
        return len(self._read())

    def _read(self) -> list[Timed]:
        key = self._cursor.key
        found = live_elements(self._cells, key, self._time.now_ms)
        if found is None:
            return []
        if self._must_renew(found[0]):
            self._cells.put(key, [self._now(stored) for stored, _ in found])
        return found


class ExpiringMapState(_Expiry, MapState):
    """A map of the current key; each entry expires by itself."""

    @property
    def exists(self) -> bool:
        """See ``MapState``."""
        return bool(self._read())

    def get(self, map_key: Any, default: Any = None) -> Any:
        """See ``MapState``."""
        found = self._read_one(map_key)
        return default if found is None else self._conversion.loaded(found[0])

    def contains(self, map_key: Any) -> bool:
        """See ``MapState``."""
        return self._read_one(map_key) is not None

    def keys(self) -> list[Any]:
        """See ``MapState``."""
        return list(self._read())

    def items(self) -> list[tuple[Any, Any]]:
        """See ``MapState``."""
        return [(map_key, self._conversion.loaded(stored)) for map_key, (stored, _) in self._read().items()]

    def __len__(self) -> int:
        return len(self._read())

    def _read_one(self, map_key: Any) -> Timed | None:
        own_key = self._key(map_key)
        entries: dict[Any, Timed] = self._cells.get(self._cursor.key) or {}
        found = entries.get(own_key)
        if found is None or found[1] <= self._time.now_ms:
            return None
        if self._must_renew(found):
            self._set(own_key, self._now(found[0]))
        return found

    def _read(self) -> dict[Any, Timed]:
        key = self._cursor.key
        found = live_entries(self._cells, key, self._time.now_ms)
        if found is None:
            return {}
        if self._must_renew(next(iter(found.values()))):
            self._cells.put(key, {map_key: self._now(stored) for map_key, (stored, _) in found.items()})
        return found

    def _set(self, own_key: Any, stored: Any) -> None:
        """The entry moves to the end: the first ones are those that expire first."""
        found = self._cells.writable(self._cursor.key)
        if found is not None:
            found.pop(own_key, None)
        super()._set(own_key, stored)


ExpiringT = TypeVar("ExpiringT", ExpiringValueState, ExpiringListState, ExpiringMapState)


def expiring(
    kind: type[ExpiringT], node: str, descriptor: StateDescriptor, cursor: Cursor, cells: RowCells, time: StateTime
) -> ExpiringT:
    """Return the handle of a state with a TTL."""
    assert descriptor.ttl is not None
    state = kind(node, descriptor, cursor, cells)
    state.expire(descriptor.ttl, time)
    return state
