"""Cache of objects by key in front of a database: what is used stays in memory, what changed is written back (RB4).

Two generations of a dict make the cache: what is used moves to the young one, and the old one is given up when the
young one is full. Objects are read and written thousands at once; of a list or map only the elements and entries that
differ from before are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import StateKind
from headgate.state.rocksdb.database import Changes, Rows
from headgate.state.rocksdb.row_encoding import EncodedKeys, decode_columns, encode_columns, places, timed
from headgate.state.rocksdb.tables import Table, entry_rows, load_entries, load_values, store_heads, store_values
from headgate.state.row_values import conversion, python_values

_ABSENT = object()
"""In the cache: the database has nothing for this key."""


class Stored(Protocol):
    """The objects of one state in the database."""

    def load(self, keys: Sequence[Any]) -> Mapping[Any, Any]:
        """Return the objects of those of ``keys`` that have one; they become the cache's."""

    def size(self, stored: Any) -> int:
        """Return how many rows an object is."""


class RocksCells:
    """One state: see ``backend.RowCells``.

    Attributes:
        rows_count: how many rows there are in all, as far as changes were taken (``take_changes``).
        young_rows: about how many rows the young generation holds; what is known to be absent counts as one.
    """

    def __init__(self, stored: Stored, all_keys: Callable[[], Iterable[Any]]) -> None:
        self._stored = stored
        self._all_keys = all_keys
        self._young: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}
        self._changed: dict[Any, Any] = {}
        self.rows_count = 0
        self.young_rows = 0

    @property
    def changed_count(self) -> int:
        """How many keys differ from the database, perhaps."""
        return len(self._changed)

    def get(self, key: Any) -> Any:
        """See ``RowCells``."""
        found = self._young.get(key)
        if found is None:
            self.fetch((key,))
            found = self._young[key]
        return None if found is _ABSENT else found

    def get_all(self, keys: Iterable[Any]) -> dict[Any, Any]:
        """Return the objects of those of ``keys`` that have one."""
        wanted = list(keys)
        self.fetch(wanted)
        young = self._young
        return {key: found for key in wanted if (found := young[key]) is not _ABSENT}

    def writable(self, key: Any) -> Any:
        """See ``RowCells``."""
        found = self.get(key)
        if found is not None and key not in self._changed:
            self._changed[key] = found.copy()
        return found

    def put(self, key: Any, value: Any) -> None:
        """See ``RowCells``."""
        if key not in self._changed:
            self._changed[key] = self.get(key)
        self._young[key] = value

    def remove(self, key: Any) -> None:
        """See ``RowCells``."""
        if self.get(key) is not None:
            self.put(key, _ABSENT)

    def keys(self) -> Iterable[Any]:
        """See ``RowCells``."""
        return self._all_keys()

    def fetch(self, keys: Iterable[Any]) -> None:
        """Have ``keys`` in the young generation: those that are not in the cache are read together."""
        young, old, size = self._young, self._old, self._stored.size
        missing: dict[Any, None] = {}
        for key in keys:
            if key in young:
                continue
            found = old.pop(key, None)
            if found is None:
                missing[key] = None
                continue
            young[key] = found
            self.young_rows += 1 if found is _ABSENT else size(found)
        if missing:
            loaded = self._stored.load(list(missing))
            young.update({key: loaded.get(key, _ABSENT) for key in missing})
            self.young_rows += len(missing) - len(loaded) + sum(map(size, loaded.values()))

    def take_changes(self) -> list[tuple[Any, Any, Any]]:
        """Return what differs from the database: key, object there, object now (None: nothing). It is written now."""
        young, size = self._young, self._stored.size
        found = []
        for key, before in self._changed.items():
            now = young[key]
            now = None if now is _ABSENT else now
            found.append((key, before, now))
            had, has = (0 if one is None else size(one) for one in (before, now))
            self.rows_count += has - had
            assert self.rows_count >= 0, "each row is counted when it comes and when it goes"
            self.young_rows += max(1, has) - max(1, had)
        self._changed = {}
        return found

    def age(self) -> None:
        """Give up what was not used since the last time. Called when there is no change to be taken."""
        assert not self._changed, "a change would be lost"
        self._old, self._young, self.young_rows = self._young, {}, 0


Encode: TypeAlias = Callable[[Sequence[Any]], EncodedKeys]
Change: TypeAlias = tuple[Any, Any, Any]
"""A key, its object in the database, its object now; None: nothing."""


@dataclass(frozen=True)
class StoredObjects(Stored):
    """What the kinds share."""

    table: Table
    rows: Rows
    encode: Encode

    def write(self, changes: Changes, found: Sequence[Change]) -> None:
        """Add what has to be written."""
        raise NotImplementedError

    def _values(self, stored: Sequence[Any]) -> list[bytes]:
        return self.table.codec.encode(_column(self.table, stored))


class StoredValues(StoredObjects):
    """An object per key, which is one row: a value, or a record."""

    def load(self, keys: Sequence[Any]) -> Mapping[Any, Any]:
        """See ``Stored``."""
        has, column = load_values(self.table, self.rows, self.encode(keys))
        objects = iter(_objects(self.table, column))
        return {key: next(objects) for key, is_there in zip(keys, has.tolist(), strict=True) if is_there}

    def size(self, stored: Any) -> int:
        """See ``Stored``."""
        return 1

    def write(self, changes: Changes, found: Sequence[Change]) -> None:
        """See ``StoredObjects``."""
        has = np.array([now is not None for _, _, now in found], np.bool_)
        values = _column(self.table, [now for _, _, now in found if now is not None])
        store_values(self.table, changes, self.encode([key for key, _, _ in found]), has, values)


class _StoredEntries(StoredObjects):
    """Lists and maps: a row for each of several things of a key."""

    def size(self, stored: Any) -> int:
        """See ``Stored``."""
        return len(stored)

    def _loaded(self, keys: Sequence[Any]) -> Iterator[tuple[Any, list[bytes], list[Any]]]:
        """Yield each key that has anything, with suffixes and values."""
        entries = load_entries(self.table, self.rows, self.encode(keys))
        objects, at = _objects(self.table, entries.values), 0
        for key, count in zip(keys, entries.counts.tolist(), strict=True):
            if count:
                yield key, entries.suffixes[at : at + count], objects[at : at + count]
                at += count

    def _write(
        self,
        changes: Changes,
        found: Sequence[Change],
        put: Sequence[tuple[int, bytes, Any]],
        gone: Sequence[tuple[int, bytes]],
    ) -> None:
        """Write entries: the number of the key in ``found``, the suffix, and the value of what is put."""
        keys = self.encode([key for key, _, _ in found])
        changes.delete(entry_rows(self.table, keys, [number for number, _ in gone], [suffix for _, suffix in gone]))
        rows = entry_rows(self.table, keys, [number for number, _, _ in put], [suffix for _, suffix, _ in put])
        changes.put(rows, self._values([value for _, _, value in put]))
        store_heads(self.table, changes, keys, np.array([len(now or ()) for _, _, now in found], np.int64))


class StoredLists(_StoredEntries):
    """Lists: a row per element, in order."""

    def load(self, keys: Sequence[Any]) -> Mapping[Any, Any]:
        """See ``Stored``."""
        return {key: objects for key, _, objects in self._loaded(keys)}

    def write(self, changes: Changes, found: Sequence[Change]) -> None:
        """See ``StoredObjects``."""
        longest = max((len(one) for _, before, now in found for one in (before, now) if one), default=0)
        suffixes = places(longest)
        put: list[tuple[int, bytes, Any]] = []
        gone: list[tuple[int, bytes]] = []
        for number, (_, before, now) in enumerate(found):
            old, new = before or (), now or ()
            for at, element in enumerate(new):
                if at >= len(old) or old[at] is not element:
                    put.append((number, suffixes[at], element))
            gone += [(number, suffixes[at]) for at in range(len(new), len(old))]
        self._write(changes, found, put, gone)


class StoredMaps(_StoredEntries):
    """Maps: a row per entry, in the order of the map keys' bytes. Those with a TTL come in that of expiry (TL3)."""

    def load(self, keys: Sequence[Any]) -> Mapping[Any, Any]:
        """See ``Stored``."""
        return {key: self._map(suffixes, objects) for key, suffixes, objects in self._loaded(keys)}

    def _map(self, suffixes: list[bytes], objects: list[Any]) -> dict[Any, Any]:
        entries = zip(self._map_keys(suffixes), objects, strict=True)
        return dict(entries if self.table.ttl is None else sorted(entries, key=lambda entry: entry[1][1]))

    def _map_keys(self, suffixes: list[bytes]) -> list[Any]:
        (column,), _ = decode_columns(suffixes, self.table.outer[-1:], 0)
        return python_values(column)

    def write(self, changes: Changes, found: Sequence[Change]) -> None:
        """See ``StoredObjects``."""
        put: list[tuple[int, Any, Any]] = []
        gone: list[tuple[int, Any]] = []
        for number, (_, before, now) in enumerate(found):
            old, new = before or {}, now or {}
            put += [(number, key, value) for key, value in new.items() if old.get(key) is not value]
            gone += [(number, key) for key in old if key not in new]
        suffixes = iter(self._suffixes([key for _, key, _ in put] + [key for _, key in gone]))
        encoded = [(number, next(suffixes), value) for number, _, value in put]
        self._write(changes, found, encoded, [(number, next(suffixes)) for number, _ in gone])

    def _suffixes(self, map_keys: Sequence[Any]) -> list[bytes]:
        return encode_columns([pa.array(map_keys, self.table.outer[-1])]) if map_keys else []


def stored_objects(table: Table, rows: Rows, encode: Encode) -> StoredObjects:
    """Return the objects of ``table``."""
    match table.kind:
        case StateKind.VALUE:
            return StoredValues(table, rows, encode)
        case StateKind.LIST:
            return StoredLists(table, rows, encode)
        case StateKind.MAP:
            return StoredMaps(table, rows, encode)


def _column(table: Table, stored: Sequence[Any]) -> pa.Array:
    """Return objects as a column of the table's type."""
    if table.ttl is not None:
        plain = replace(table, ttl=None)
        return timed(_column(plain, [value for value, _ in stored]), pa.array([at for _, at in stored], pa.int64()))
    if table.is_record and stored:
        arrays = [pa.array(list(c), f.type) for c, f in zip(zip(*stored, strict=True), table.dtype, strict=True)]
        return pa.StructArray.from_arrays(arrays, fields=list(table.dtype))
    load = None if table.is_record else conversion(table.dtype).load
    return pa.array(stored if load is None else [load(one) for one in stored], table.dtype)


def _objects(table: Table, column: pa.Array) -> list[Any]:
    """Return a column of the table's type as objects."""
    if table.ttl is not None:
        values, expires_ms = column.flatten()
        return list(zip(_objects(replace(table, ttl=None), values), expires_ms.to_pylist(), strict=True))
    if table.is_record:
        return list(zip(*(python_values(field) for field in column.flatten()), strict=True))
    store = conversion(table.dtype).store
    return [store(value) for value in python_values(column)]
