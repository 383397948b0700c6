"""Bytes of checkpoints of state in RocksDB, when a part of the keys has changed since the last one.

    python -m bench.increments --keys 1000000 --changed 0.01 --checkpoints 10

One subtask, state by column, files in memory: what is measured is how much a checkpoint writes and how long that takes
beside processing, not the storage.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np
import pyarrow as pa

from headgate.codec.snapshot import FILES_PREFIX
from headgate.model.config import RocksState
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.protocol.checkpoints.sharing import SharedFiles
from headgate.runtime.checkpoints.targets import Destination, SubtaskTarget
from headgate.state.backend import ColumnBackend
from headgate.state.choice import worker_states
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.frozen import OwnedKeys
from headgate.storage.memory import MemoryStorage

GROUPS = 128
VALUE = StateDescriptor("value", StateKind.VALUE, pa.float64())
BATCH_ROWS = 50_000
MEGABYTE = 1e6


def main() -> None:
    """Fill the state, then change some of it before each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--changed", type=float, default=0.01, help="share of the keys that change between two")
    parser.add_argument("--checkpoints", type=int, default=10)
    asked = parser.parse_args()
    draw = np.random.default_rng(7)
    with tempfile.TemporaryDirectory() as directory:
        worker = worker_states(RocksState(256 << 20, directory), None)
        state = worker.of("node", 0, GROUPS).by_column(KeyColumns(("id",), (pa.int64(),)), [VALUE])
        change(state, np.arange(asked.keys), draw)
        taken = Taken()
        full = taken.checkpoint(state)
        rows = sum(part.size_bytes for part in taken.written(state, is_portable=True))
        print(f"as rows: {rows / MEGABYTE:.1f} MB; first as files: {full / MEGABYTE:.1f} MB")
        found = []
        for _ in range(asked.checkpoints):
            change(state, draw.choice(asked.keys, int(asked.keys * asked.changed), replace=False), draw)
            started = time.perf_counter()
            found.append(taken.checkpoint(state))
            took_ms = 1_000 * (time.perf_counter() - started)
            print(f"{found[-1] / MEGABYTE:8.2f} MB, {found[-1] / full:6.1%} of the first, {took_ms:.0f} ms")
        median, mean = float(np.median(found)), float(np.mean(found))
        print(f"median {median / full:.1%}, mean {mean / full:.1%} of a full checkpoint")
        worker.close()


def change(state: ColumnBackend, keys: np.ndarray, draw: np.random.Generator) -> None:
    """Give each of ``keys`` another value."""
    for start in range(0, len(keys), BATCH_ROWS):
        some = keys[start : start + BATCH_ROWS]
        slots = state.slots([pa.array(some, pa.int64())])
        state.values(VALUE).put(slots, pa.array(draw.random(len(some))))
        state.prepare()


class Taken:
    """The checkpoints of one subtask, each completed."""

    def __init__(self) -> None:
        self._storage = MemoryStorage("increments")
        self._shared = SharedFiles()
        self._number = 0

    def checkpoint(self, state: ColumnBackend) -> int:
        """Take one; return how many bytes it has written."""
        parts = self.written(state)
        taken = CheckpointId(self._number)
        self._shared.wrote(taken, [part for part in parts if part.section.startswith(FILES_PREFIX)])
        self._shared.completed(taken)
        mine = f"chk-{self._number:010d}/"
        return sum(part.size_bytes for part in parts if not part.path or part.path.startswith(mine))

    def written(self, state: ColumnBackend, *, is_portable: bool = False) -> tuple[SnapshotPart, ...]:
        """Write a snapshot."""
        self._number += 1
        to = Destination(self._storage, "p", Generation(1), 0, OwnedKeys(KeyGroups(0, GROUPS), GROUPS))
        shareable = None if is_portable else self._shared.shareable()
        target = SubtaskTarget(to, SubtaskId(VertexId("node"), 0), CheckpointId(self._number), shareable)
        frozen = state.freeze()
        target.put_state("node", frozen)
        parts = target.finish()
        frozen.release()
        return parts


if __name__ == "__main__":
    main()
