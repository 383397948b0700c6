"""Checkpoints when a part of the keys has changed since the last one: bytes and time beside a full snapshot.

One subtask, state by column, on both backends, and in memory with a timer for each key, too, which is moved when its
key changes (``memory_timers``); files go to a local directory, with the syncs that it makes. The first
checkpoint is full. Then a part of the keys changes before each of the following ones, and every one is completed. Time
is that of ``freeze`` and of writing, without processing beside it. Judged are medians; the means stand beside them,
because RocksDB merges its files now and then. On RocksDB it is measured with larger values, too (``rocksdb_large``):
a full checkpoint copies files, so with numbers it is over before one row in twenty could be written. Beside it is
therefore, too, what a snapshot costs that does not copy files: a savepoint of the same state, written from its rows
(``savepoint_share``). Parts are inline as far as they are in a pipeline. Settings:
``keys``, ``changed`` (share), ``checkpoints``, ``memory_mb`` (of RocksDB), ``value_bytes`` (0: numbers),
``large_keys``, ``large_bytes``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.harness import Options, Result, at_most
from headgate.codec.snapshot import FILES_PREFIX
from headgate.model.config import CheckpointConfig, MemoryState, RocksState, StateConfig
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.protocol.checkpoints.retention import SharedFiles
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.state.backend import ColumnBackend
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.snapshot import OwnedKeys
from headgate.state.worker_backends import worker_states
from headgate.storage.urls import open_storage

NAME = "increments"

SHARE_MAX = 0.05
GROUPS = 128
BATCH_ROWS = 50_000
HOUR_MS = 3_600_000
NODE = "node"


def run(options: Options) -> Result:
    """Measure both backends."""
    keys = int(options.number("keys", 10_000_000, quick=300_000))
    changed = options.number("changed", 0.01)
    checkpoints = int(options.number("checkpoints", 10, quick=5))
    rocks = RocksState(int(options.number("memory_mb", 512)) << 20, None)
    values = Values(int(options.number("value_bytes", 0)))
    large_keys = int(options.number("large_keys", 5_000_000, quick=100_000))
    large = Values(int(options.number("large_bytes", 100)))
    figures: dict[str, Any] = {"keys": keys, "changed": changed, "large_keys": large_keys}
    cases: list[tuple[str, StateConfig, int, Values, Timers | None]] = [
        ("memory", MemoryState(), keys, values, None),
        ("memory_timers", MemoryState(), keys, values, Timers(keys)),
        ("rocksdb", rocks, keys, values, None),
        ("rocksdb_large", rocks, large_keys, large, None),
    ]
    for name, state, count, some, timers in cases:
        found = measure(state, count, changed, checkpoints, some, timers)
        figures |= {f"{name}_{what}": value for what, value in found.items()}
    judged = [f"{name}_{what}_share" for name in ("memory", "rocksdb", "rocksdb_large") for what in ("bytes", "time")]
    judged += ["memory_timers_bytes_share", "rocksdb_savepoint_share", "rocksdb_large_savepoint_share"]
    return Result(figures, {name: at_most(SHARE_MAX) for name in judged})


class Values:
    """What keys have: random numbers, or texts of so many bytes that cannot be compressed much."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._random = np.random.default_rng(7)
        self.descriptor = StateDescriptor("value", StateKind.VALUE, pa.large_binary() if size_bytes else pa.float64())

    @property
    def row_bytes(self) -> int:
        """About what a key and its value take."""
        return 8 + (self._size_bytes or 8)

    def some(self, rows: int) -> pa.Array:
        """Return other ones than before."""
        if not self._size_bytes:
            return pa.array(self._random.random(rows))
        offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int64) * self._size_bytes)
        return pa.Array.from_buffers(
            pa.large_binary(), rows, [None, offsets, pa.py_buffer(self._random.bytes(rows * self._size_bytes))]
        )

    def chosen(self, keys: int, share: float) -> np.ndarray:
        """Return some of ``keys`` keys, at random."""
        return self._random.choice(keys, max(1, int(keys * share)), replace=False)

    def change(self, state: ColumnBackend, keys: np.ndarray) -> None:
        """Give each of ``keys`` another value."""
        for start in range(0, len(keys), BATCH_ROWS):
            some = keys[start : start + BATCH_ROWS]
            slots = state.slots([pa.array(some, pa.int64())])
            state.values(self.descriptor).put(slots, self.some(len(some)))
            state.prepare()


class Timers:
    """When each key has its timer: somewhere in an hour of event time."""

    def __init__(self, keys: int) -> None:
        self._random = np.random.default_rng(11)
        self._at = np.full(keys, -1)

    def move(self, state: ColumnBackend, keys: np.ndarray) -> None:
        """Have the timer of each of ``keys`` at another time."""
        assert state.timers is not None
        for start in range(0, len(keys), BATCH_ROWS):
            some = keys[start : start + BATCH_ROWS]
            slots, before = state.slots([pa.array(some, pa.int64())]), self._at[some]
            state.timers.event_time.delete(slots[before >= 0], before[before >= 0])
            self._at[some] = self._random.integers(0, HOUR_MS, len(some))
            state.timers.event_time.register(slots, self._at[some])


def measure(
    state: StateConfig, keys: int, changed: float, checkpoints: int, values: Values, timers: Timers | None = None
) -> dict[str, Any]:
    """Return bytes and times of a full checkpoint and of those after it, and their shares."""

    def change(some: np.ndarray) -> None:
        values.change(backend, some)
        if timers is not None:
            timers.move(backend, some)

    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        worker = worker_states(state, directory)
        try:
            key, states = KeyColumns(("id",), (pa.int64(),)), [values.descriptor]
            backend = worker.of(NODE, 0, GROUPS).by_column(key, states, has_timers=timers is not None)
            change(np.arange(keys))
            taken = Taken(Path(directory) / "checkpoints")
            full_bytes, full_s = taken.checkpoint(backend)
            found = []
            for _ in range(checkpoints):
                change(values.chosen(keys, changed))
                found.append(taken.checkpoint(backend))
            savepoint_s = taken.savepoint(backend)
        finally:
            worker.close()
    sizes, times = [size for size, _ in found], [seconds for _, seconds in found]
    return {
        "full_mb": full_bytes / 1e6,
        "full_s": full_s,
        "bytes_share": float(np.median(sizes)) / full_bytes,
        "bytes_share_mean": float(np.mean(sizes)) / full_bytes,
        "time_share": float(np.median(times)) / full_s,
        "time_share_mean": float(np.mean(times)) / full_s,
        "savepoint_s": savepoint_s,
        "savepoint_share": float(np.median(times)) / savepoint_s,
        "increments_mb": [size / 1e6 for size in sizes],
        "increments_s": times,
    }


class Taken:
    """The checkpoints of one subtask, each completed."""

    def __init__(self, directory: Path) -> None:
        self.storage = open_storage(str(directory))
        self._shared = SharedFiles()
        self._number = 0

    def checkpoint(self, state: ColumnBackend) -> tuple[int, float]:
        """Take one; return how many bytes it has written, and in how many seconds."""
        begun = time.perf_counter()
        parts = self.written(state)
        took_s = time.perf_counter() - begun
        mine = f"chk-{self._number:010d}/"
        return sum(part.size_bytes for part in parts if not part.path or part.path.startswith(mine)), took_s

    def savepoint(self, state: ColumnBackend) -> float:
        """Write all of it as rows, which any backend restores; return in how many seconds."""
        begun = time.perf_counter()
        self._written(state, None)
        return time.perf_counter() - begun

    def written(self, state: ColumnBackend) -> tuple[SnapshotPart, ...]:
        """Write and complete a checkpoint; return its parts."""
        parts = self._written(state, self._shared.shareable())
        number = CheckpointId(self._number)
        self._shared.wrote(number, [part for part in parts if part.section.startswith(FILES_PREFIX)])
        self._shared.completed(number)
        return parts

    def _written(self, state: ColumnBackend, shareable: Sequence[SnapshotPart] | None) -> tuple[SnapshotPart, ...]:
        self._number += 1
        inline_bytes_max = CheckpointConfig().inline_bytes_max
        to = SnapshotDestination(
            self.storage, "p", Generation(1), inline_bytes_max, OwnedKeys(KeyGroups(0, GROUPS), GROUPS)
        )
        target = SubtaskTarget(to, SubtaskId(VertexId(NODE), 0), CheckpointId(self._number), shareable)
        frozen = state.freeze()
        target.put_state(NODE, frozen)
        parts = target.finish()
        frozen.release()
        return parts
