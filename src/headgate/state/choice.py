"""Which backend holds the keyed state of a pipeline: what its configuration says, as one worker has it.

The only place that knows all backends. A backend that needs a library is imported when it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import pyarrow as pa

from headgate.errors import UsageError
from headgate.model.config import MemoryState, StateConfig
from headgate.model.manifest import KeyGroups
from headgate.state.backend import StateFactory
from headgate.state.files import StoredFiles
from headgate.state.memory.factory import MemoryStates


class WorkerStates(Protocol):
    """The state of all operators of one worker."""

    def of(self, node: str, subtask_index: int, max_parallelism: int) -> StateFactory:
        """Return where one operator gets its state."""

    def close(self) -> None:
        """Give everything up that is not in a checkpoint. Idempotent; after the operators are closed."""


class _InMemory:
    """See ``WorkerStates``."""

    def of(self, node: str, subtask_index: int, max_parallelism: int) -> StateFactory:
        """See ``WorkerStates``."""
        return MemoryStates()

    def close(self) -> None:
        """See ``WorkerStates``."""


def refuse_missing_library() -> None:
    """Make sure that RocksDB can be used here.

    Raises:
        UsageError: its library is not installed.
    """
    if find_spec("rocksdict") is None:
        raise UsageError(
            "headgate.RocksDB needs the package rocksdict, in the driver and on every worker: "
            "pip install 'headgate[rocksdb]'"
        )


def portable_rows(stored: StoredFiles, directory: str | None, groups: KeyGroups) -> list[Callable[[], memoryview]]:
    """Return what reads the rows of the key groups ``groups`` from the files of a database, a part at a time (RB22).

    Args:
        stored: of a checkpoint.
        directory: where they are put meanwhile, on a local disk; None: the system's for temporary files.
        groups: whose rows are wanted.

    Raises:
        UsageError: the library that is needed is not installed.
    """
    refuse_missing_library()
    from headgate.state.rocksdb import reopening

    return reopening.portable_rows(stored, directory, groups)


def schema_in_files(stored: StoredFiles, state: str) -> pa.Schema:
    """Return the columns of one state in the files of a database; the files are not read.

    Raises:
        CorruptionError: there is no such state.
        UsageError: the library that is needed is not installed.
    """
    refuse_missing_library()
    from headgate.state.rocksdb import reopening

    return reopening.schema_of(stored, state)


def worker_states(config: StateConfig, directory: str | None) -> WorkerStates:
    """Return the state of one worker.

    Args:
        config: of the pipeline.
        directory: on a local disk, if the configuration names none; None: the system's for temporary files.

    Raises:
        UsageError: the library that is needed is not installed.
    """
    if isinstance(config, MemoryState):
        return _InMemory()
    refuse_missing_library()
    from headgate.state.rocksdb.factory import RocksWorkerStates

    return RocksWorkerStates(config.memory_bytes, config.directory or directory)
