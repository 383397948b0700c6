"""State in RocksDB with a TTL.

The sweep through expired rows, and caches that drop what has expired.

The sweep removes no row: keys with expired rows come into the cache in front, which drops them as state in memory
does, and writes that back. So there is one place that knows what a key has, and the cache and the database agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import KeyColumns, StateKind
from headgate.state.key_index import Slots
from headgate.state.memory.column_states import MemoryMaps, MemoryValues
from headgate.state.memory.ttl import ExpiringLists, ExpiringMaps, ExpiringValues
from headgate.state.rocksdb.column_cache import ENTRY_BYTES, CachedLists, CachedMaps, CachedValues, KeysOf, ListChanges
from headgate.state.rocksdb.database import Changes, Database, Rows
from headgate.state.rocksdb.row_encoding import EncodedKeys, decode_columns, expiries_of, expiring_at, runs, timed
from headgate.state.rocksdb.tables import Table, load_entries
from headgate.state.ttl import TTL, StateTime
from headgate.state.values import to_numpy
from headgate.state.vectors import SlotArray

SWEEP_ROWS = 512
"""So many rows are looked at in a turn, two more for each that was written since: a round ends before they doubled."""


class ExpiringTables:
    """The tables of one database with rows that expire."""

    def __init__(self, database: Database, keys: KeyColumns, tables: Sequence[Table], time: StateTime) -> None:
        self._database = database
        self._keys = keys
        self._ttls: dict[int, tuple[Table, TTL]] = {t.number: (t, t.ttl) for t in tables if t.ttl is not None}
        self._time = time
        self._at = b""
        self._written = 0
        self._latest_ms = dict.fromkeys(self._ttls, self._time.now_ms)
        """When the last of what was restored expires."""

    def sweep(self) -> Iterator[tuple[Table, list[pa.Array]]]:
        """Look at some rows; yield the keys, by table, of those that have expired, perhaps more than once."""
        if not self._ttls:
            return
        written, self._written = self._written, self._database.rows_written
        count = SWEEP_ROWS + 2 * (self._written - written)
        rows, values = self._database.some(self._at, count)
        # at the end of a round it begins with the first row again
        self._at = rows[-1] + b"\0" if len(rows) == count else b""
        for number, start, end in runs(rows) if rows else ():
            if number in self._ttls:
                expired = np.flatnonzero(expiries_of(values[start:end]) <= self._time.now_ms) + start
                if len(expired):
                    found = [rows[at] for at in expired.tolist()]
                    yield self._ttls[number][0], decode_columns(found, self._keys.types)[0]

    def restored(self, table: Table, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return what is to be kept of rows that are restored, and take note of them."""
        if table.ttl is not None:
            batch = table.living(batch, self._time.now_ms)
            latest_ms = batch.columns[-1].to_numpy().max(initial=self._latest_ms[table.number])
            self._latest_ms[table.number] = int(latest_ms)
        return batch

    def continue_from(self, latest_ms: Mapping[int, int]) -> None:
        """The database has rows now, of which the last ones of each table expire at ``latest_ms`` at the latest."""
        for number, found_ms in latest_ms.items():
            self._latest_ms[number] = max(self._latest_ms[number], found_ms)

    def end_restore(self) -> None:
        """Nothing lives longer than its TTL from now on. Reads the database only if something would."""
        limits = {number: self._time.now_ms + ttl.duration_ms for number, (_, ttl) in self._ttls.items()}
        limits = {number: limit_ms for number, limit_ms in limits.items() if self._latest_ms[number] > limit_ms}
        if not limits:
            return
        # it may write while it scans: no row comes or goes, only its expiry becomes another one
        for rows, values in self._database.scan(b"", None):
            changes = Changes()
            for number, start, end in runs(rows):
                if number in limits:
                    longer = np.flatnonzero(expiries_of(values[start:end]) > limits[number]) + start
                    kept = [values[at] for at in longer.tolist()]
                    changes.put([rows[at] for at in longer.tolist()], expiring_at(kept, limits[number]))
            self._database.write(changes)


class CachedExpiringValues(CachedValues, ExpiringValues):
    """See ``Cached`` and ``backend.ValueColumns``."""

    def __init__(self, table: Table, keys_count: Callable[[], int], ttl: TTL, time: StateTime) -> None:
        ExpiringValues.__init__(self, table.dtype, keys_count, ttl, time)
        self.table = table
        self._differs = SlotArray(np.bool_)

    def _mark(self, slots: Slots, changed: Slots | None = None) -> None:
        super()._mark(slots, changed)
        self._touch(slots)

    def _renewed(self, slots: Slots) -> None:
        self._touch(slots)

    def fill(self, slots: Slots, stored: pa.Array) -> None:
        """Have what the database has of ``slots``."""
        values, expires_ms = stored.flatten()
        # ``put`` marks them as changed and renews them: both is set right below
        MemoryValues.put(self, slots, values)
        self._expiries.restore(slots, expires_ms, self._size)
        self.wrote(slots)

    def _stored(self, slots: Slots) -> pa.Array:
        return timed(super()._stored(slots), pa.array(self._expiries.read(self._size)[slots]))

    def drop_expired(self) -> None:
        """Forget what has expired, here and with the next write in the database."""
        self._drop(0, self._size)

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        # what has expired is not worth writing, and must not be in a snapshot
        self.drop_expired()
        super().write_back(changes, keys_of)


class CachedExpiringLists(ExpiringLists):
    """See ``Cached`` and ``backend.ListColumns``. A list that lost elements, or was renewed, is rewritten."""

    row_bytes = ENTRY_BYTES

    def __init__(self, table: Table, keys_count: Callable[[], int], ttl: TTL, time: StateTime) -> None:
        super().__init__(table.dtype, keys_count, ttl, time)
        self.table = table
        self._changes = ListChanges(table)

    @property
    def _size(self) -> int:
        return self._keys_count()

    @property
    def changed_rows(self) -> int:
        return self._changes.count

    def append(self, slots: Slots, values: pa.Array) -> None:
        super().append(slots, values)
        self._changes.appended(slots, self._size)

    def clear(self, slots: Slots) -> None:
        super().clear(slots)
        self._changes.rewritten(slots, self._size)

    def _renewed(self, slots: Slots) -> None:
        self._changes.rewritten(slots[self._values.counts(slots) > 0], self._size)

    def _drop_first(self, slots: Slots, counts: Slots) -> None:
        super()._drop_first(slots, counts)
        self._changes.rewritten(slots, self._size)

    def load(self, rows: Rows, slots: Slots, keys: EncodedKeys) -> int:
        entries = load_entries(self.table, rows, keys)
        self.restore(np.repeat(slots, entries.counts), entries.values.flatten())
        self._changes.loaded(slots, entries.counts, self._size)
        return len(entries.suffixes)

    def drop_expired(self) -> None:
        """Forget what has expired, here and with the next write in the database."""
        self._drop_expired(np.arange(self._size))

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        self.drop_expired()
        slots = self._changes.differing(self._size)
        if len(slots):
            slots, keys = keys_of(slots)
            numbers, values = self._values.explode(slots)
            _, at = self._at.explode(slots)
            until = self._read_until.read(self._size)[slots][numbers]
            stored = timed(values, pa.array(np.maximum(to_numpy(at), until)))
            self._changes.write(changes, slots, keys, (numbers, stored), self._size)

    @property
    def held_rows(self) -> int:
        return self.rows_count()

    def rows_count(self) -> int:
        return int(self.rows_of().sum())

    def rows_of(self) -> Slots:
        return self._values.counts(np.arange(self._size))

    def drop(self, slots: Slots) -> None:
        super().clear(slots)

    def renumber(self, old: Slots) -> None:
        super().renumber(old)
        self._changes.renumber(old)


class CachedExpiringMaps(CachedMaps, ExpiringMaps):
    """See ``Cached`` and ``backend.MapColumns``."""

    def __init__(self, table: Table, keys_count: Callable[[], int], ttl: TTL, time: StateTime) -> None:
        ExpiringMaps.__init__(self, table.outer[-1], table.dtype, keys_count, ttl, time)
        self.table = table
        self.changed_rows = 0
        self._noted = []

    def _renewed(self, entries: Slots) -> None:
        self._note_entries(entries)

    def _fill(self, slots: Slots, map_keys: pa.Array, stored: pa.Array) -> None:
        values, expires_ms = stored.flatten()
        MemoryMaps.put(self, slots, map_keys, values)
        self._expiries.restore(self._numbered(slots, map_keys), expires_ms, len(self._pairs))

    def _stored(self, entries: Slots) -> pa.Array:
        return timed(super()._stored(entries), pa.array(self._expiries.read(len(self._pairs))[entries]))

    def _drop(self, start: int, end: int) -> None:
        # before they go: they have to go from the database, too
        self._note_entries(self._expired(start, end))
        super()._drop(start, end)

    def _rebuild(self, old: Slots) -> None:
        self._note_entries(self._expired(0, len(self._pairs)))  # they are left out
        super()._rebuild(old)

    def drop_expired(self) -> None:
        """Forget what has expired, here and with the next write in the database."""
        self._drop(0, len(self._pairs))

    def write_back(self, changes: Changes, keys_of: KeysOf) -> None:
        self.drop_expired()
        super().write_back(changes, keys_of)

    def drop(self, slots: Slots) -> None:
        super().drop(slots)
        # what had expired may have been noted meanwhile: it stays in the database, where a sweep finds it
        self._noted, self.changed_rows = [], 0


CachedState: TypeAlias = CachedValues | CachedLists | CachedMaps | CachedExpiringLists
CachedExpiring: TypeAlias = CachedExpiringValues | CachedExpiringLists | CachedExpiringMaps


def make_cache(table: Table, keys_count: Callable[[], int], time: StateTime) -> CachedState:
    """Return the empty cache of ``table``."""
    match table.kind, table.ttl:
        case StateKind.VALUE, None:
            return CachedValues(table, keys_count)
        case StateKind.LIST, None:
            return CachedLists(table, keys_count)
        case StateKind.MAP, None:
            return CachedMaps(table, keys_count)
    assert table.ttl is not None
    made: dict[StateKind, type[CachedExpiring]] = {
        StateKind.VALUE: CachedExpiringValues,
        StateKind.LIST: CachedExpiringLists,
        StateKind.MAP: CachedExpiringMaps,
    }
    return made[table.kind](table, keys_count, table.ttl, time)
