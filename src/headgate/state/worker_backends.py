"""Which backend holds the keyed state of a pipeline: what its configuration says, as one worker has it.

The only place that knows all backends. A backend that needs a library is imported when it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol

import pyarrow as pa

from headgate.distribution import install_command
from headgate.errors import UsageError
from headgate.model.config import MemoryState, StateConfig
from headgate.model.manifest import KeyGroups
from headgate.state.backend import ColumnBackend, RowBackend, StateFactory, WindowBackend, WindowRows
from headgate.state.descriptors import KeyColumns, StateDescriptor
from headgate.state.memory import incremental_restore
from headgate.state.memory.column_backend import MemoryColumnBackend
from headgate.state.memory.row_backend import MemoryRowBackend
from headgate.state.memory.window_backend import MemoryMergedRows, MemoryWindowRows
from headgate.state.snapshot import StoredFiles
from headgate.state.window_aggregates import Accumulator, MergedRows


class MemoryStates:
    """State in memory of one operator in one subtask: see ``backend.StateFactory``."""

    def by_row(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False
    ) -> RowBackend:
        return MemoryRowBackend(keys, descriptors, has_timers=has_timers)

    def by_column(
        self, keys: KeyColumns, descriptors: Sequence[StateDescriptor], *, has_timers: bool = False
    ) -> ColumnBackend:
        return MemoryColumnBackend(keys, descriptors, has_timers=has_timers)

    def by_window(self, keys: KeyColumns, rows: WindowRows) -> WindowBackend[list[pa.RecordBatch]]:
        return MemoryWindowRows(rows)

    def merged_by_window(
        self, keys: KeyColumns, rows: WindowRows, accumulators: Sequence[Accumulator]
    ) -> WindowBackend[MergedRows]:
        return MemoryMergedRows(keys, rows, accumulators)


class WorkerStates(Protocol):
    """The state of all operators of one worker."""

    def of(self, node: str, subtask_index: int, max_parallelism: int) -> StateFactory:
        """Return where one operator gets its state."""

    def close(self, *, is_left: bool = False) -> None:
        """Give everything up that is not in a checkpoint. Idempotent; after the operators are closed.

        ``is_left``: another worker is about to restore; what may serve it on this machine stays.
        """


class _InMemory:
    """See ``WorkerStates``."""

    def of(self, node: str, subtask_index: int, max_parallelism: int) -> StateFactory:
        return MemoryStates()

    def close(self, *, is_left: bool = False) -> None:
        """See ``WorkerStates``."""


def require_rocksdict() -> None:
    """Make sure that RocksDB can be used here.

    Raises:
        UsageError: its library is not installed.
    """
    if find_spec("rocksdict") is None:
        raise UsageError(
            "headgate.RocksDB needs the package rocksdict, in the driver and on every worker: "
            f"{install_command('rocksdb')}"
        )


def portable_rows(stored: StoredFiles, directory: str | None, groups: KeyGroups) -> list[Callable[[], memoryview]]:
    """Return what reads the rows of ``groups`` from the files of a backend, a part at a time.

    Args:
        stored: of a checkpoint.
        directory: where those of a database are put meanwhile, on a local disk; None: the system's for temporary files.
        groups: that the rows are wanted of.

    Raises:
        CorruptionError, StorageError
        UsageError: the library that is needed is not installed.
    """
    if stored.are_chunks:
        return incremental_restore.portable_rows(stored, groups)
    require_rocksdict()
    from headgate.state.rocksdb import database_restore

    return database_restore.portable_rows(stored, directory, groups)


def schema_in_files(stored: StoredFiles, state: str) -> pa.Schema:
    """Return the columns of one state in the files of a backend; the files are not read.

    Raises:
        CorruptionError: there is no such state.
        UsageError: the library that is needed is not installed.
    """
    if stored.are_chunks:
        return incremental_restore.schema_of(stored, state)
    require_rocksdict()
    from headgate.state.rocksdb import database_restore

    return database_restore.schema_of(stored, state)


def local_directory(
    node: str, config: StateConfig, others: Iterable[tuple[str, StateConfig]], directory: str | None
) -> str | None:
    """Return where the files of a database of ``node`` are to be on this machine.

    Args:
        node: an operator.
        config, others, directory: see ``worker_states``.
    """
    own = dict(others).get(node, config)
    return directory if isinstance(own, MemoryState) else own.directory or directory


class _ByOperator:
    """State of operators that do not all have the same. Those that have the same share what it may use."""

    def __init__(self, config: StateConfig, others: Mapping[str, StateConfig], directory: str | None) -> None:
        self._config = config
        self._others = dict(others)
        self._made = {one: worker_states(one, directory) for one in {config, *others.values()}}

    def of(self, node: str, subtask_index: int, max_parallelism: int) -> StateFactory:
        made = self._made[self._others.get(node, self._config)]
        return made.of(node, subtask_index, max_parallelism)

    def close(self, *, is_left: bool = False) -> None:
        for made in self._made.values():
            made.close(is_left=is_left)


def worker_states(
    config: StateConfig, directory: str | None, others: Iterable[tuple[str, StateConfig]] = ()
) -> WorkerStates:
    """Return the state of one worker.

    Args:
        config: of the pipeline.
        directory: on a local disk, if the configuration names none; None: the system's for temporary files.
        others: operators that have another one.

    Raises:
        UsageError: the library that is needed is not installed.
    """
    if found := dict(others):
        return _ByOperator(config, found, directory)
    if isinstance(config, MemoryState):
        return _InMemory()
    require_rocksdict()
    from headgate.state.rocksdb.factory import RocksWorkerStates

    return RocksWorkerStates(config.memory_bytes, config.directory or directory)
