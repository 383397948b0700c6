"""State in RocksDB, as operators ask for it: see ``backend.StateFactory``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa

from headgate.state.backend import ColumnBackend, RowBackend, WindowBackend, WindowRows
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.memory.column_backend import MemoryColumnBackend
from headgate.state.memory.row_backend import MemoryRowBackend
from headgate.state.rocksdb.column_backend import RocksColumnBackend
from headgate.state.rocksdb.database import Use
from headgate.state.rocksdb.local_databases import LocalDatabase, LocalDatabases
from headgate.state.rocksdb.row_backend import RocksRowBackend
from headgate.state.rocksdb.window_backend import RocksMergedRows, RocksWindowRows
from headgate.state.values import is_fixed
from headgate.state.window_aggregates import Accumulator, MergedRows


class RocksStates:
    """The state of one operator in one subtask: a database for each call."""

    def __init__(self, databases: LocalDatabases, name: str, max_parallelism: int) -> None:
        """``name``: of the operator and its subtask, for people."""
        self._databases = databases
        self._name = name
        self._max_parallelism = max_parallelism

    def by_row(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False
    ) -> RowBackend:
        if not descriptors and not has_timers:
            return MemoryRowBackend(keys, ())
        local = self._new_database(keys, descriptors, has_timers=has_timers)
        return RocksRowBackend(local, keys, descriptors, self._max_parallelism, has_timers=has_timers)

    def by_column(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False
    ) -> ColumnBackend:
        if not descriptors and not has_timers:
            return MemoryColumnBackend(keys, ())
        local = self._new_database(keys, descriptors, has_timers=has_timers)
        return RocksColumnBackend(local, keys, descriptors, self._max_parallelism, has_timers=has_timers)

    def _new_database(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool
    ) -> LocalDatabase:
        """Return a new database; values alone are looked up, everything else is searched for."""
        if has_timers or any(descriptor.kind is not StateKind.VALUE for descriptor in descriptors):
            return self._databases.new_database(self._name)
        types = [*keys.types, *(descriptor.type for descriptor in descriptors)]
        return self._databases.new_database(self._name, _looked_up(types))

    def by_window(self, keys: KeyColumns, rows: WindowRows) -> WindowBackend[list[pa.RecordBatch]]:
        return RocksWindowRows(self._databases.new_database(self._name), rows, self._max_parallelism)

    def merged_by_window(
        self, keys: KeyColumns, rows: WindowRows, accumulators: Sequence[Accumulator]
    ) -> WindowBackend[MergedRows]:
        local = self._databases.new_database(self._name)
        return RocksMergedRows(local, keys, rows, self._max_parallelism, accumulators)


def _looked_up(types: Sequence[pa.DataType]) -> Use:
    """Return the use of a database that looks up rows with keys and values of these types."""
    flat = [inner for dtype in types for inner in ([f.type for f in dtype] if pa.types.is_struct(dtype) else [dtype])]
    return Use.NUMBERS if all(map(is_fixed, flat)) else Use.LOOKED_UP


class RocksWorkerStates:
    """See ``worker_backends.WorkerStates``."""

    def __init__(self, memory_bytes: int, directory: str | None) -> None:
        self._databases = LocalDatabases(memory_bytes, directory)

    def of(self, node: str, subtask_index: int, max_parallelism: int) -> RocksStates:
        name = re.sub(r"[^\w.-]", "_", node, flags=re.ASCII)
        return RocksStates(self._databases, f"{name[:64]}-{subtask_index}", max_parallelism)

    def close(self, *, is_left: bool = False) -> None:
        self._databases.close(is_left=is_left)
