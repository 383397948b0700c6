"""Keyed state by row in RocksDB: see ``backend.RowBackend`` and ``backend.RecordBackend``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from headgate.state.backend import Ownership, Record, restored_batches, restored_states, restored_timers
from headgate.state.descriptors import KeyColumns, Section, StateDescriptor
from headgate.state.memory.timers import key_arrays, timer_batches, timers_count
from headgate.state.rocksdb.database import Changes
from headgate.state.rocksdb.database_restore import continue_from
from headgate.state.rocksdb.database_snapshot import ExtraSections, FrozenDatabase
from headgate.state.rocksdb.file_manifest import AnyTable
from headgate.state.rocksdb.local_databases import LocalDatabase
from headgate.state.rocksdb.row_cache import RocksCells, StoredObjects, stored_objects
from headgate.state.rocksdb.row_encoding import EncodedKeys, encoded_keys
from headgate.state.rocksdb.tables import Table, distinct_keys, record_table, restore_rows, tables_of
from headgate.state.rocksdb.timers import RocksRowTimers, StoredTimers
from headgate.state.rocksdb.ttl import ExpiringTables
from headgate.state.row_values import keys_of
from headgate.state.snapshot import FrozenState, StoredFiles
from headgate.state.timers import TIMERS, RowTimers, TimeKind, TimersByKind, timers_by_kind, timers_of_each_kind
from headgate.state.ttl import TTL_SECTION, StateTime, TtlMeta, drop_expired

CHANGES_MAX = 16_384
"""So many keys may differ from the database: the pause of a checkpoint is bounded by it (RB4)."""

CACHE_ROW_BYTES = 512
"""A row in the cache, Python objects with their places in dicts, is taken to be so large, beside its value."""

_COPIES = 2
"""An object is larger than the bytes that it is stored as."""

_ENCODE_TIMES = 16_384


class CachedObjects:
    """The cells of the states of one database, and what of them is written back and given up."""

    def __init__(
        self,
        local: LocalDatabase,
        keys: KeyColumns,
        max_parallelism: int,
        tables: Sequence[Table],
        time: StateTime | None = None,
    ) -> None:
        self._local = local
        self._keys = keys
        self._max_parallelism = max_parallelism
        self.time = StateTime() if time is None else time
        self._expiring = ExpiringTables(local.database, keys, tables, self.time)
        self._stored: list[tuple[RocksCells, StoredObjects]] = []
        for table in tables:
            stored = stored_objects(table, local.database, self._encoded)
            self._stored.append((RocksCells(stored, self._keys_in((table,))), stored))

    @property
    def cells(self) -> list[RocksCells]:
        """The cells of each table, in their order."""
        return [cells for cells, _ in self._stored]

    def _encoded(self, keys: Sequence[Any]) -> EncodedKeys:
        return encoded_keys(key_arrays(self._keys, keys), self._keys, self._max_parallelism)

    def _keys_in(self, tables: Sequence[Table]) -> Callable[[], list[Any]]:
        def found() -> list[Any]:
            self.write_back()
            columns = distinct_keys(self._local.database, tables, self._keys, self.time.now_ms)
            return keys_of(columns)

        return found

    def all_keys(self) -> list[Any]:
        """Return the keys that have anything, from the database."""
        return self._keys_in([stored.table for _, stored in self._stored])()

    def tidy(self) -> None:
        """Write back what is much, and give up what does not fit. Called when no object is in use."""
        changed = sum(cells.changed_count for cells, _ in self._stored)
        if self._local.needs_write_back(changed, changed * self._row_bytes(), CHANGES_MAX):
            self.write_back()
        row_bytes = self._row_bytes()
        if 2 * sum(cells.young_rows for cells, _ in self._stored) * row_bytes > self._local.cache_bytes:
            self.write_back()
            for cells, _ in self._stored:
                cells.age()

    def drop_some_that_expired(self) -> None:
        """Go on through the database; what has expired of the keys that are met goes with the next write (TL8)."""
        cells = {stored.table.number: cells for cells, stored in self._stored}
        for table, columns in list(self._expiring.sweep()):
            keys, found = dict.fromkeys(keys_of(columns)), cells[table.number]
            found.fetch(keys)
            for key in keys:
                drop_expired(found, key, self.time.now_ms)

    def _row_bytes(self) -> int:
        return self._local.row_bytes(CACHE_ROW_BYTES, _COPIES)

    def write_back(self) -> None:
        """Have everything in the database."""
        changes = Changes()
        for cells, stored in self._stored:
            found = cells.take_changes()
            if found:
                stored.write(changes, found)
        self._local.database.write(changes)

    def freeze(self, beside: ExtraSections, timers: Sequence[StoredTimers] = ()) -> FrozenState:
        """Return everything as it is now. ``timers``: those in the database."""
        self.write_back()
        tables: list[AnyTable] = [stored.table for _, stored in self._stored]
        tables += [one.table for one in timers]
        counts = {stored.table.section.name: cells.rows_count for cells, stored in self._stored}
        counts |= {one.table.section.name: one.count for one in timers}
        return FrozenDatabase(self._local, self._local.checkpoint(), tables, counts, beside)

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``. What is restored goes to the database; nothing is in the cache yet."""
        for cells, stored in self._stored:
            read = restored_batches if stored.table.is_record else restored_states
            for found in read(sections, stored.table.section, path, owner):
                batch = self._expiring.restored(stored.table, found)
                restore_rows(stored.table, self._local.database, self._keys, self._max_parallelism, batch)
                cells.rows_count += batch.num_rows

    def end_restore(self) -> None:
        """See ``TimedBackend``."""
        self._expiring.end_restore()

    def continue_from(self, stored: StoredFiles, owner: Ownership, timers: Sequence[RocksRowTimers] = ()) -> bool:
        """See ``ContinuingBackend``. ``timers``: those in the database."""
        if any(cells.rows_count for cells in self.cells) or any(map(len, timers)):
            return False
        tables: list[AnyTable] = [found.table for _, found in self._stored]
        tables += [one.stored.table for one in timers]
        continued = continue_from(self._local, stored, tables, owner)
        if continued is None:
            return False
        for cells, found in self._stored:
            cells.rows_count = continued.rows[found.table.section.name]
        for one in timers:
            one.continue_from(continued.rows[one.stored.table.section.name], continued.groups)
        self._expiring.continue_from(continued.latest_ms)
        return True


class RocksRowBackend:
    """See ``backend.RowBackend``."""

    timers: TimersByKind[RowTimers] | None

    def __init__(
        self,
        local: LocalDatabase,
        keys: KeyColumns,
        descriptors: Sequence[StateDescriptor],
        max_parallelism: int,
        *,
        has_timers: bool = False,
    ) -> None:
        self._keys = keys
        self.time = StateTime()
        tables = tables_of(keys, descriptors)
        self._objects = CachedObjects(local, keys, max_parallelism, list(tables.values()), self.time)
        self._has_ttl = any(descriptor.ttl is not None for descriptor in descriptors)
        self._cells = dict(zip(tables, self._objects.cells, strict=True))

        def timers(kind: TimeKind) -> RocksRowTimers:
            return RocksRowTimers(keys, StoredTimers(local.database, kind, keys, max_parallelism), local, self._load)

        self._timers = timers_of_each_kind(timers) if has_timers else {}
        self.timers = timers_by_kind(self._timers)

    def cells(self, descriptor: StateDescriptor) -> RocksCells:
        """See ``RowBackend``."""
        return self._cells[descriptor]

    def end_restore(self) -> None:
        """See ``TimedBackend``."""
        self._objects.end_restore()

    def expect(self, columns: Sequence[pa.Array]) -> None:
        """See ``RowBackend``: what the keys have is read at once."""
        self._load(list(dict.fromkeys(keys_of(columns))))

    def _load(self, keys: list[Any]) -> None:
        for cells in self._cells.values():
            cells.fetch(keys)

    def all_keys(self) -> list[Any]:
        """See ``RowBackend``. Reads the whole database."""
        return self._objects.all_keys()

    def absorb(self) -> None:
        """See ``RowBackend``."""
        self._objects.drop_some_that_expired()
        self._objects.tidy()
        for timers in self._timers.values():
            timers.tidy()

    def freeze(self) -> FrozenState:
        """See ``StateBackend``."""
        for timers in self._timers.values():
            timers.write_back()
        return self._objects.freeze(self._extra(), [timers.stored for timers in self._timers.values()])

    def _extra(self) -> ExtraSections:
        meta = {TTL_SECTION: TtlMeta(self.time.now_ms).encode()} if self._has_ttl else {}
        if self.timers is None:
            return ExtraSections(meta=meta, now_ms=self.time.now_ms)
        frozen = [(found.stored.table.section, found.front.cells.freeze()) for found in self._timers.values()]

        def forget() -> None:
            for _, cells in frozen:
                cells.release()

        return ExtraSections(
            lambda: [(one, list(timer_batches(one, self._keys, cells, _ENCODE_TIMES))) for one, cells in frozen],
            lambda: {section.name: timers_count(cells) for section, cells in frozen},
            {TIMERS: self.timers.meta.encode(), **meta},
            self.time.now_ms,
            forget,
        )

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``."""
        self._objects.restore(sections, path, owner)
        for timers, batch in restored_timers(sections, self._keys, self._timers, path, owner):
            timers.restore(batch.columns[:-1], batch.columns[-1].to_numpy())

    def continue_from(self, stored: StoredFiles, owner: Ownership) -> bool:
        """See ``ContinuingBackend``."""
        return self._objects.continue_from(stored, owner, list(self._timers.values()))


class RocksRecords:
    """See ``backend.RecordBackend``."""

    def __init__(self, local: LocalDatabase, section: Section, max_parallelism: int) -> None:
        table = record_table(section)
        self._objects = CachedObjects(local, KeyColumns(section.key_names, table.outer), max_parallelism, [table])
        (self._cells,) = self._objects.cells

    def load(self, keys: Iterable[Any]) -> dict[Any, Record]:
        """See ``RecordBackend``."""
        self._objects.tidy()
        return self._cells.get_all(keys)

    def store(self, records: Mapping[Any, Record]) -> None:
        """See ``RecordBackend``."""
        for key, record in records.items():
            self._cells.put(key, record)

    def freeze(self) -> FrozenState:
        """See ``StateBackend``."""
        return self._objects.freeze(ExtraSections())

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``."""
        self._objects.restore(sections, path, owner)

    def continue_from(self, stored: StoredFiles, owner: Ownership) -> bool:
        """See ``ContinuingBackend``."""
        return self._objects.continue_from(stored, owner)
