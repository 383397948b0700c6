"""Every backend there is, as tests of the contract want it, and what a snapshot holds as plain Python."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import few

from headgate.codec.snapshot import FILES_PREFIX, decode_sections
from headgate.model.config import MemoryState, RocksState
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, key_groups_of_subtask
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.operators.base import KeyedOperator, RestoredState
from headgate.protocol.checkpoints.retention import SharedFiles
from headgate.runtime.checkpoints.snapshot_files import read_part
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.state.backend import Ownership
from headgate.state.rocksdb import column_backend as rocks_columns
from headgate.state.rocksdb import database_snapshot
from headgate.state.rocksdb import row_backend as rocks_rows
from headgate.state.rocksdb import window_backend as rocks_windows
from headgate.state.snapshot import FrozenState, OwnedKeys, StoredFiles, is_description
from headgate.state.worker_backends import WorkerStates, portable_rows, worker_states
from headgate.storage.base import Storage
from headgate.storage.memory import MemoryStorage

NAMES = ["memory", "rocksdb", "rocksdb-without-cache"]
"""The last one writes everything back, and gives everything up, whenever it may."""

EACH = few(NAMES, 2)
"""For what must be the same on each: ``make test`` leaves the database with a cache to tests of its own."""

IN_FILES = "rocksdb-in-files"
"""As the last one; and checkpoints are files, however little state there is. Not for who looks at payloads."""

MEMORY = few(NAMES, 1)
"""For facts of an operator, which knows no backend: ``make test`` has random histories beside them on databases."""

DATABASES = ["rocksdb", IN_FILES, pytest.param("rocksdb-without-cache", marks=pytest.mark.deep)]
"""For these histories."""

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


NODE = "node"


class Written:
    """What a subtask left in a checkpoint of its state."""

    def __init__(
        self,
        storage: Storage,
        parts: Sequence[SnapshotPart],
        index: int = 0,
        parallelism: int = 1,
        groups: int = 128,
        pipeline: str = "p",
    ) -> None:
        self.storage, self.parts, self.pipeline = storage, tuple(parts), pipeline
        self.index, self.parallelism, self.groups = index, parallelism, groups

    @property
    def files(self) -> list[SnapshotPart]:
        """The files of a database."""
        return [part for part in self.parts if part.section.startswith(FILES_PREFIX) and not is_description(part)]

    @property
    def paths(self) -> set[str]:
        """Where these are."""
        return {part.path for part in self.files}

    @property
    def counted(self) -> dict[str, int]:
        """How many rows the files have, as the manifest says."""
        (told,) = [part for part in self.parts if part.section.startswith(FILES_PREFIX) and is_description(part)]
        return dict((told.rows or {})[NODE])

    def stored(self) -> StoredFiles:
        """Return them as a restore has them."""
        found = [part for part in self.parts if part.section.startswith(FILES_PREFIX)]
        read = partial(read_part, self.storage, self.pipeline)
        return StoredFiles(found, read, f"files of '{NODE}'", self.pipeline)

    def states(self, index: int, parallelism: int) -> list[RestoredState]:
        """Return what the operator of another subtask restores of it (R15)."""
        if parallelism == self.parallelism and index != self.index:
            return []
        owned = key_groups_of_subtask(index, self.groups, parallelism)
        mine = KeyGroups(owned.start, len(owned))
        found: list[RestoredState] = []
        for part in self.parts:
            if part.key_groups is not None and not part.key_groups.overlaps(mine):
                continue
            read = partial(read_part, self.storage, self.pipeline, part)
            if not part.section.startswith(FILES_PREFIX):
                found.append(RestoredState(self.index, self.parallelism, read))
            elif is_description(part):
                stored = self.stored()
                groups = mine if part.key_groups is None else part.key_groups.common(mine)
                readers = portable_rows(stored, None, groups)
                found += [RestoredState(self.index, self.parallelism, one, True, stored) for one in readers]
        return found


class Moved(Written):
    """The same of state that is written now."""

    def __init__(
        self,
        frozen: FrozenState,
        index: int = 0,
        parallelism: int = 1,
        groups: int = 128,
        *,
        checkpoint: int = 1,
        shared: SharedFiles | None = None,
        storage: Storage | None = None,
        pipeline: str = "p",
    ) -> None:
        """``shared``: what it may refer to; the checkpoint is completed at once."""
        to_storage = storage or MemoryStorage("moved")
        owned = key_groups_of_subtask(index, groups, parallelism)
        keys = OwnedKeys(KeyGroups(owned.start, len(owned)), groups)
        to = SnapshotDestination(to_storage, pipeline, Generation(1), 1_000, keys)
        shareable = () if shared is None else shared.shareable()
        number = CheckpointId(checkpoint)
        target = SubtaskTarget(to, SubtaskId(VertexId(NODE), index), number, shareable)
        target.put_state(NODE, frozen)
        super().__init__(to_storage, target.finish(), index, parallelism, groups, pipeline)
        frozen.release()
        if shared is not None:
            shared.wrote(number, [part for part in self.parts if part.section.startswith(FILES_PREFIX)])
            shared.completed(number)


class _Restoring(KeyedOperator):
    def __init__(self, backend: Any, owner: Ownership) -> None:
        self._backend = backend
        self.context = SimpleNamespace(  # type: ignore[assignment]
            node=NODE,
            max_parallelism=owner.max_parallelism,
            parallelism=owner.parallelism,
            subtask_index=owner.subtask_index,
        )
        self.went_on = 0

    def _goes_on_with(self, files: StoredFiles, owner: Ownership) -> bool:
        found = super()._goes_on_with(files, owner)
        self.went_on += found
        return found


def restore(backend: Any, moved: Sequence[Written], index: int = 0, parallelism: int = 1) -> bool:
    """Have ``backend`` restore what subtasks wrote; return whether it went on with files."""
    operator = _Restoring(backend, Ownership(moved[0].groups, parallelism, index))
    operator.restore([state for one in moved for state in one.states(index, parallelism)])
    if hasattr(backend, "end_restore"):
        backend.end_restore()
    return bool(operator.went_on)
