"""One record per key in RocksDB: see ``backend.RecordBackend``. Counterpart: ``operators.reduce``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headgate.state.backend import Ownership, Record
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.files import StoredFiles
from headgate.state.frozen import FrozenState
from headgate.state.rocksdb.frozen import Beside
from headgate.state.rocksdb.room import LocalDatabase
from headgate.state.rocksdb.rows import CachedObjects
from headgate.state.rocksdb.tables import record_table


class RocksRecords:
    """See ``backend.RecordBackend``."""

    def __init__(self, place: LocalDatabase, section: Section, max_parallelism: int) -> None:
        table = record_table(section)
        self._objects = CachedObjects(place, KeyColumns(section.key_names, table.outer), max_parallelism, [table])
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
        return self._objects.freeze(Beside())

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``."""
        self._objects.restore(sections, path, owner)

    def go_on_with(self, stored: StoredFiles, owner: Ownership) -> bool:
        """See ``ContinuingBackend``."""
        return self._objects.go_on_with(stored, owner)
