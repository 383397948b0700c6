"""Restores: how long one subtask takes to have its state again, from the storage and from what is on its disk.

State by column is written as a checkpoint and restored: in memory from rows, on RocksDB from files, and on RocksDB from
files that a database of the same subtask still has on this machine (local recovery). A time is that of everything that
reads state between the choice of a checkpoint and the first record: the verification by the driver, which reads all of
it, and the restore by the worker. Starting processes is bench/recovery.py's. The storage is a local directory, so what
was just written may be in the memory of the system. Settings: ``size_mb``, ``value_bytes``, ``memory_mb`` (of RocksDB),
``times``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.harness import Options, Result, at_most, median
from bench.increments import GROUPS, NODE, Taken, Values
from headgate.codec.snapshot import FILES_PREFIX, decode_sections
from headgate.model.config import MemoryState, RocksState, StateConfig
from headgate.model.manifest import SnapshotPart
from headgate.runtime.checkpoints.snapshot_files import read_part, verify_part
from headgate.state.backend import ColumnBackend, ContinuingBackend, Ownership
from headgate.state.descriptors import KeyColumns
from headgate.state.snapshot import StoredFiles
from headgate.state.worker_backends import WorkerStates, worker_states

NAME = "state_restore"

RESTORE_S_MAX = 10.0
LOCAL_S_MAX = 2.0
OWNER = Ownership(GROUPS, 1, 0)
PIPELINE = "p"


def run(options: Options) -> Result:
    """Measure both backends, and local recovery."""
    size_mb, times = int(options.number("size_mb", 1_000, quick=50)), int(options.number("times", 5, quick=2))
    values = Values(int(options.number("value_bytes", 1_000)))
    rocks = RocksState(int(options.number("memory_mb", 512)) << 20, None)
    figures: dict[str, Any] = {"size_mb": size_mb}
    for name, state in (("memory", MemoryState()), ("rocksdb", rocks)):
        found = measure(state, values, size_mb, times)
        figures |= {f"{name}_{what}": value for what, value in found.items()}
    targets = {"memory_restore_s": RESTORE_S_MAX, "rocksdb_restore_s": RESTORE_S_MAX, "rocksdb_local_s": LOCAL_S_MAX}
    return Result(figures, {name: at_most(bound) for name, bound in targets.items()})


def measure(state: StateConfig, values: Values, size_mb: int, times: int) -> dict[str, Any]:
    """Return the seconds of restores of about ``size_mb`` (medians)."""
    keys = max(1, size_mb * 1_000_000 // values.row_bytes)
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        here, elsewhere = f"{directory}/here", f"{directory}/elsewhere"
        taken = Taken(Path(directory) / "checkpoints")
        first = worker_states(state, here)  # stays open: its files are what local recovery finds
        try:
            made = backend_of(first, values)
            values.change(made, np.arange(keys))
            parts = taken.written(made)
            again = Restore(taken, parts, state, values, keys)
            found = {"keys": keys, "mb": sum(part.size_bytes for part in parts) / 1e6}
            found["restore_s"] = median([again.seconds(elsewhere) for _ in range(times)])
            if again.has_files:
                found["local_s"] = median([again.seconds(here) for _ in range(times)])
        finally:
            first.close()
    return found


def backend_of(worker: WorkerStates, values: Values) -> ColumnBackend:
    """Return the empty state of the subtask."""
    return worker.of(NODE, 0, GROUPS).by_column(KeyColumns(("id",), (pa.int64(),)), [values.descriptor])


class Restore:
    """A checkpoint that is restored, again and again."""

    def __init__(
        self, taken: Taken, parts: Sequence[SnapshotPart], state: StateConfig, values: Values, keys: int
    ) -> None:
        """``keys``: so many are in it."""
        self._storage = taken.storage
        self._parts = parts
        self._state = state
        self._values = values
        self._keys = keys

    @property
    def has_files(self) -> bool:
        """Whether the checkpoint is files of a database."""
        return any(part.section.startswith(FILES_PREFIX) for part in self._parts)

    def seconds(self, directory: str) -> float:
        """Restore it into a new worker, with local state in ``directory``; return how long it takes.

        Raises:
            RuntimeError: not everything is there.
        """
        worker = worker_states(self._state, directory)
        try:
            begun = time.perf_counter()
            for part in self._parts:
                verify_part(self._storage, PIPELINE, part)
            made = backend_of(worker, self._values)
            self._restore(made)
            took_s = time.perf_counter() - begun
            some = made.slots([pa.array([0, self._keys - 1], pa.int64())])
            if not made.values(self._values.descriptor).contains(some).all():
                raise RuntimeError("the restored state has not every key")
            return took_s
        finally:
            worker.close()

    def _restore(self, made: ColumnBackend) -> None:
        read = partial(read_part, self._storage, PIPELINE)
        if self.has_files:
            files = [part for part in self._parts if part.section.startswith(FILES_PREFIX)]
            assert isinstance(made, ContinuingBackend)
            if not made.continue_from(StoredFiles(files, read, "files", PIPELINE), OWNER):
                raise RuntimeError("the backend does not go on with its own files")
            return
        for part in self._parts:
            made.restore(decode_sections(read(part), "state"), "state", OWNER)
        made.end_restore()
