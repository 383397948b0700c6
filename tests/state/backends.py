"""Every backend there is, as tests of the contract want it, and what a snapshot holds as plain Python."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import few

from headgate.codec.snapshot import decode_sections
from headgate.model.config import MemoryState, RocksState
from headgate.model.ids import key_groups_of_subtask
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.state.backend import Ownership
from headgate.state.rocksdb import column_backend as rocks_columns
from headgate.state.rocksdb import database_snapshot
from headgate.state.rocksdb import row_backend as rocks_rows
from headgate.state.rocksdb import window_backend as rocks_windows
from headgate.state.snapshot import FrozenState, OwnedKeys
from headgate.state.worker_backends import WorkerStates, worker_states

NAMES = ["memory", "rocksdb", "rocksdb-without-cache"]
"""The last one writes everything back, and gives everything up, whenever it may."""

EACH = few(NAMES, 2)
"""For what must be the same on each: ``make test`` leaves the database with a cache to tests of its own."""

IN_FILES = "rocksdb-in-files"
"""As the last one; and checkpoints are files, however little state there is. Not for who looks at payloads."""

GROUPS = 128
OWNER = Ownership(GROUPS, 1, 0)
ARROW = b"\xff\xff\xff\xff"

_WHERE = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Databases are made by the hundred: where there is a file system in memory, the disk is not asked."""


@contextmanager
def states(name: str) -> Iterator[WorkerStates]:
    """Make the backend ``name``, in a directory of its own."""
    with tempfile.TemporaryDirectory(dir=_WHERE) as directory, pytest.MonkeyPatch.context() as patch:
        if name == IN_FILES:
            patch.setattr(database_snapshot, "SIZE_BYTES_MIN", 1)
        if name in ("rocksdb-without-cache", IN_FILES):
            for module, constant in ((rocks_columns, "SLOT_BYTES"), (rocks_rows, "CACHE_ROW_BYTES")):
                patch.setattr(module, constant, 1 << 40)
                patch.setattr(module, "CHANGES_MAX", 1)
            for constant in ("MERGED_ROW_BYTES", "BATCH_COPIES"):
                patch.setattr(rocks_windows, constant, 1 << 40)
        made = worker_states(MemoryState() if name == "memory" else RocksState(32 << 20, directory), None)
        try:
            yield made
        finally:
            made.close()


class Chosen:
    """The backend that tests of operators run on: memory, unless ``choose`` says another."""

    worker: WorkerStates = worker_states(MemoryState(), None)
    in_files = False


@contextmanager
def choose(name: str) -> Iterator[None]:
    """Have tests of operators run on the backend ``name``."""
    with states(name) as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chosen, "worker", made)
        patch.setattr(Chosen, "in_files", name == IN_FILES)
        yield


def payload_of(frozen: FrozenState) -> bytes:
    return b"".join(bytes(memoryview(part)) for part in frozen.encode())


def sections_of(frozen: FrozenState) -> dict[str, memoryview]:
    return decode_sections(payload_of(frozen), "snapshot")


def rows_in(sections: dict[str, memoryview]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each section: those of a list in their order, keys and map keys in any."""
    found = {}
    for name, data in sections.items():
        if data[:4] == ARROW:
            table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
            outer = [one for one in table.column_names if one.startswith("key") or one == "map_key"]
            rows = table.to_pylist()
            found[name] = sorted(rows, key=itemgetter(*outer)) if outer else rows
    return found


class Parts:
    """A target of snapshots: keeps the parts, with the key groups of each."""

    def __init__(self, parallelism: int = 1, subtask: int = 0, groups: int = GROUPS) -> None:
        owned = key_groups_of_subtask(subtask, groups, parallelism)
        self.keys = OwnedKeys(KeyGroups(owned.start, len(owned)), groups)
        self.parts: list[tuple[KeyGroups | None, dict[str, memoryview]]] = []

    def put(
        self, chunks: Iterable[Any], rows: Any, key_groups: KeyGroups | None = None, name: str = ""
    ) -> SnapshotPart:
        payload = b"".join(bytes(memoryview(chunk)) for chunk in chunks)
        self.parts.append((key_groups, decode_sections(payload, "part")))
        return SnapshotPart(len(payload), 0)

    def share(self, part: SnapshotPart) -> None:
        raise AssertionError("nothing is shared")

    files = None
    """Portable parts are wanted."""

    def put_file(self, name: str, chunks: Iterable[Any], key_groups: KeyGroups | None = None) -> SnapshotPart:
        raise AssertionError("portable parts are wanted")

    def describe_files(self, chunks: Iterable[Any], rows: Any, name: str) -> SnapshotPart:
        raise AssertionError("portable parts are wanted")
