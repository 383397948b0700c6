"""A subtask with state in RocksDB and the checkpoints of it, without the rest of a pipeline."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa

from headgate.codec.snapshot import FILES_PREFIX, decode_sections
from headgate.model.config import MemoryState, RocksState, StateConfig
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, WorkerIndex, key_groups_of_subtask
from headgate.model.manifest import KeyGroups, Manifest, SnapshotPart, SubtaskEntry
from headgate.operators.base import RestoredState
from headgate.protocol.checkpoints.retention import SharedFiles
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.restore import parts_for_worker, read_restored
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.state.backend import ContinuingBackend, Ownership
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind, state_identity
from headgate.state.snapshot import OwnedKeys, is_description
from headgate.state.worker_backends import WorkerStates, _InMemory, worker_states
from headgate.storage.base import Storage
from headgate.storage.memory import MemoryStorage

GROUPS = 128
KEYS = KeyColumns(("id",), (pa.int64(),))
VALUE = StateDescriptor("value", StateKind.VALUE, pa.large_string())
LIST = StateDescriptor("list", StateKind.LIST, pa.int64())
STATES = [VALUE, LIST]
SUBTASK = SubtaskId(VertexId("sum"), 0)


def text(key: int, version: int = 0) -> str:
    """Return a value that cannot be compressed much."""
    return f"{random.Random(key * 1_000 + version).getrandbits(2_400):x}"


class Subtask:
    """One subtask of a pipeline at parallelism 1."""

    def __init__(self, root: Path, storage: Storage | None = None, generation: int = 1) -> None:
        self.root = root
        self.storage: Storage = storage or MemoryStorage("increments")
        self.worker = worker_states(RocksState(64 << 20, str(root)), None)
        self.backend: Any = self.worker.of("sum", 0, GROUPS).by_row(KEYS, STATES)
        self.shared = SharedFiles()
        self.log = CheckpointLog(self.storage, "p")
        self.generation = Generation(generation)
        self.expected: dict[int, str] = {}

    def claim(self) -> None:
        """Begin a generation."""
        self.generation = self.log.claim("test", 0).next.generation

    def put(self, keys: Any, version: int = 0) -> None:
        """Change keys."""
        self.backend.expect([pa.array(keys, pa.int64())])
        values, lists = self.backend.cells(VALUE), self.backend.cells(LIST)
        for key in keys:
            self.expected[key] = text(key, version)
            values.put(key, self.expected[key])
            lists.put(key, [key, version])
        self.backend.absorb()

    def write(self, checkpoint: int, *, is_portable: bool = False) -> tuple[SnapshotPart, ...]:
        """Write a snapshot, as ``SnapshotWriter`` does."""
        keys = OwnedKeys(KeyGroups(0, GROUPS), GROUPS)
        to = SnapshotDestination(self.storage, "p", self.generation, 100_000, keys)
        shareable = None if is_portable else self.shared.shareable()
        target = SubtaskTarget(to, SUBTASK, CheckpointId(checkpoint), shareable)
        frozen = self.backend.freeze()
        target.put_state("sum", frozen)
        parts = target.finish()
        frozen.release()
        if not is_portable:
            self.shared.wrote(CheckpointId(checkpoint), files_of(parts))
        return parts

    def complete(self, checkpoint: int, parts: tuple[SnapshotPart, ...], *, is_heard: bool = True) -> Manifest:
        """Make a checkpoint of ``parts`` durable."""
        found = manifest_of(checkpoint, parts, self.generation)
        self.log.reserve(CheckpointId(checkpoint))
        self.log.append(found)
        if is_heard:
            self.shared.completed(CheckpointId(checkpoint))
        return found

    def checkpoint(self, number: int) -> Manifest:
        """Take one and complete it."""
        return self.complete(number, self.write(number))

    def kill(self) -> None:
        """Leave the local directory as a worker leaves it that is killed."""
        room = self.worker._databases  # type: ignore[attr-defined]
        for place in room._open:
            place.database.close()
        os.close(room._own._lock)
        room._own = None


def manifest_of(checkpoint: int, parts: tuple[SnapshotPart, ...], generation: int = 1) -> Manifest:
    entries = (SubtaskEntry(SUBTASK, parts),)
    texts = {"sum": state_identity(KEYS, STATES)}
    return Manifest(CheckpointId(checkpoint), Generation(generation), 1, GROUPS, entries, state_texts=texts)


def files_of(parts: tuple[SnapshotPart, ...]) -> list[SnapshotPart]:
    return [part for part in parts if part.section.startswith(FILES_PREFIX) and not is_description(part)]


def written_by(parts: tuple[SnapshotPart, ...], checkpoint: int) -> list[SnapshotPart]:
    """Return the files that this checkpoint wrote itself."""
    return [part for part in files_of(parts) if part.path.startswith(f"chk-{checkpoint:010d}/")]


def restored_states(
    storage: Storage, manifest: Manifest, worker: int = 0, parallelism: int = 1, directory: Path | None = None
) -> list[RestoredState]:
    """Return what the operator of ``worker`` is given."""
    from tests.runtime.checkpoints.test_restore import plan_of

    plan = plan_of(parallelism)
    vertex = next(v for v in plan.vertices if not v.is_source)
    sent = parts_for_worker(manifest, plan, WorkerIndex(worker))
    local = None if directory is None else str(directory)
    return read_restored(storage, "p", WorkerIndex(worker), plan, sent, lambda node: local).states("sum", vertex)


class Restored:
    """The state of one subtask after a restore."""

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        root: Path,
        *,
        worker: int = 0,
        parallelism: int = 1,
        config: StateConfig | None = None,
    ) -> None:
        self.states: WorkerStates = worker_states(config or RocksState(64 << 20, str(root)), None)
        self.backend: Any = self.states.of("sum", worker, GROUPS).by_row(KEYS, STATES)
        self.owner = Ownership(GROUPS, parallelism, worker)
        self.continued = False
        found = restored_states(storage, manifest, worker, parallelism, root)
        for state in found:
            if state.files is not None:
                if not self.continued and isinstance(self.backend, ContinuingBackend):
                    self.continued = self.backend.continue_from(state.files, self.owner)
                if self.continued:
                    continue
            self.backend.restore(decode_sections(state.payload, "state"), "state", self.owner)

    @property
    def found(self) -> dict[int, str]:
        """What is there."""
        keys = self.backend.all_keys()
        values, lists = self.backend.cells(VALUE), self.backend.cells(LIST)
        if not isinstance(self.states, _InMemory):  # read together
            values.fetch(keys)
            lists.fetch(keys)
        assert all(lists.get(key)[0] == key and len(lists.get(key)) == 2 for key in keys)
        return {key: values.get(key) for key in keys}


IN_MEMORY = MemoryState()


def owned(worker: int, parallelism: int) -> range:
    return key_groups_of_subtask(worker, GROUPS, parallelism)
