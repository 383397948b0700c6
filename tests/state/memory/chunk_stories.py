"""A subtask with state in memory, and checkpoints of it that go wrong in every way, beside plain dicts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from tests.state.backends import GROUPS, rows_in, sections_of
from tests.state.rocksdb.increments import SUBTASK, manifest_of, restored_states
from tests.state.test_backends import Model, Rows, change, counts, in_snapshot

from headgate.codec.snapshot import FILES_PREFIX, decode_sections
from headgate.errors import StorageError
from headgate.model.config import MemoryState
from headgate.model.ids import CheckpointId
from headgate.model.manifest import KeyGroups, Manifest, SnapshotPart
from headgate.protocol.checkpoints.sharing import SharedFiles
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.targets import Destination, SubtaskTarget
from headgate.state import keyed
from headgate.state.backend import ContinuingBackend, Ownership
from headgate.state.choice import worker_states
from headgate.state.frozen import FrozenState, OwnedKeys
from headgate.state.memory import by_column, changes, chunk_log, chunked, lists, maps
from headgate.storage.memory import MemoryStorage

Contents = dict[str, list[dict[str, Any]]]

OWNED = OwnedKeys(KeyGroups(0, GROUPS), GROUPS)


@contextmanager
def small() -> Iterator[None]:
    """Have everything happen that happens to large state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "SIZE_BYTES_MIN", 1)
        patch.setattr(chunk_log, "CHUNKS_MAX", 3)
        patch.setattr(changes, "KEYS_FREE", 4)
        patch.setattr(keyed, "RANGE_BYTES_MIN", 64)
        patch.setattr(by_column, "_RENUMBER_MIN", 4)
        patch.setattr(maps, "_DEAD_FREE", 4)
        patch.setattr(lists, "_POOL_FREE", 4)
        yield


class FailingStorage(MemoryStorage):
    """Refuses one write, if it is told to."""

    fails_in = 0

    def put(self, path: str, chunks: Any) -> None:
        """See ``Storage``."""
        self.fails_in -= 1
        if self.fails_in == 0:
            raise StorageError("put", path, "it does not", is_transient=True)
        super().put(path, chunks)


class Story:
    """One pipeline of one subtask."""

    def __init__(self, use: Rows, key: str) -> None:
        self.use, self.key = use, key
        self.worker = worker_states(MemoryState(), None)
        self.storage = FailingStorage("chunks")
        self.log = CheckpointLog(self.storage, "p")
        self.model: Model = {"value": {}, "list": {}, "map": {}}
        self.retained: dict[int, tuple[Manifest, Model]] = {}
        self.number = 0
        self.continued = 0
        self.begin()

    def begin(self) -> None:
        """Begin a generation with nothing."""
        self.generation = self.log.claim("test", 0).next.generation
        self.backend: Any = self.use.make(self.worker)
        self.shared = SharedFiles()
        self.frozen: list[tuple[int, FrozenState, Model]] = []
        self.written: dict[int, tuple[tuple[SnapshotPart, ...], Model]] = {}

    def change(self, what: str, numbers: list[int], n: int) -> None:
        """Process something."""
        self.use.change(what, numbers, n)
        change(self.model, what, numbers, n)

    def freeze(self) -> None:
        """A barrier comes."""
        self.number += 1
        self.log.reserve(CheckpointId(self.number))
        frozen = self.backend.freeze()
        assert frozen.rows() == counts(self.model)
        self.frozen.append((self.number, frozen, copy.deepcopy(self.model)))

    def write(self, fails_in: int = 0) -> tuple[SnapshotPart, ...]:
        """Write the oldest snapshot that is frozen; the first try may fail."""
        number, frozen, model = self.frozen.pop(0)
        self.storage.fails_in = fails_in
        try:
            parts = self._parts(number, frozen)
        except StorageError:
            parts = self._parts(number, frozen)
        self.storage.fails_in = 0
        frozen.release()
        self.shared.wrote(CheckpointId(number), _files(parts))
        self.written[number] = parts, model
        return parts

    def give_up(self, fails_in: int) -> None:
        """A snapshot fails, after some of it was written."""
        number, frozen, _ = self.frozen.pop(0)
        self.storage.fails_in = fails_in
        try:
            self._parts(number, frozen)
        except StorageError:
            pass
        self.storage.fails_in = 0
        frozen.release()

    def _parts(self, number: int, frozen: FrozenState) -> tuple[SnapshotPart, ...]:
        to = Destination(self.storage, "p", self.generation, 0, OWNED)
        target = SubtaskTarget(to, SUBTASK, CheckpointId(number), self.shared.shareable())
        target.put_state("sum", frozen)
        return target.finish()

    def complete(self, number: int, *, is_heard: bool = True) -> Manifest:
        """Complete a checkpoint; older ones are given up."""
        parts, model = self.written.pop(number)
        manifest = manifest_of(number, parts, int(self.generation))
        self.log.append(manifest)
        self.retained[number] = manifest, model
        for older in [one for one in self.written if one < number]:
            self.abort(older)
        if is_heard:
            self.shared.completed(CheckpointId(number))
        return manifest

    def abort(self, number: int) -> None:
        """Give a checkpoint up; subtasks are not told."""
        self.log.files.delete(self.written.pop(number)[0])

    def checkpoint(self) -> Manifest:
        """Take one, and complete it."""
        self.freeze()
        self.write()
        return self.complete(self.number)

    def drop(self) -> None:
        """Drop the oldest checkpoint that is retained."""
        oldest, *others = sorted(self.retained)
        del self.retained[oldest]
        self.log.drop(CheckpointId(oldest), CheckpointId(others[0]))

    def restart(self) -> None:
        """Everything dies, and goes on from the newest checkpoint."""
        self.begin()
        if not self.retained:
            self.model = {"value": {}, "list": {}, "map": {}}
            return
        manifest, model = self.retained[max(self.retained)]
        self.model = copy.deepcopy(model)
        self.continued += self.restore(manifest, self.backend)
        self.shared = SharedFiles(_files(manifest.entries[0].parts))

    def restore(self, manifest: Manifest, backend: Any, worker: int = 0, parallelism: int = 1) -> bool:
        """Restore a subtask; return whether it goes on with the chunks."""
        owner = Ownership(GROUPS, parallelism, worker)
        is_continued = False
        for state in restored_states(self.storage, manifest, worker, parallelism):
            if state.files is not None and not is_continued:
                assert isinstance(backend, ContinuingBackend)
                is_continued = backend.go_on_with(state.files, owner)
            if not is_continued:
                backend.restore(decode_sections(state.payload, "state"), "state", owner)
        return is_continued

    def contents(self, manifest: Manifest, parallelism: int = 1) -> Contents:
        """Return what is restored of a checkpoint, all subtasks together."""
        found: Contents = {}
        use = type(self.use)(self.key)
        for worker in range(parallelism):
            backend: Any = use.make(self.worker)
            self.restore(manifest, backend, worker, parallelism)
            for name, rows in rows_in(sections_of(backend.freeze())).items():
                found.setdefault(name, []).extend(rows)
        return {name: _ordered(rows) for name, rows in found.items()}

    def check(self, parallelism: int = 1) -> None:
        """Whatever is retained can be restored."""
        for manifest, model in self.retained.values():
            assert self.log.files.verify(manifest) == []
            assert self.contents(manifest, parallelism) == in_snapshot(model, self.key)

    def check_no_leak(self) -> None:
        """Once nothing is under way, nothing is there that nobody needs."""
        self.begin()
        self.log.files.sweep()
        there = {path.removeprefix("p/") for path in self.storage.list("p") if "/chk-" in path}
        assert there == {path for manifest, _ in self.retained.values() for path in manifest.files}


def _files(parts: Sequence[SnapshotPart]) -> list[SnapshotPart]:
    return [part for part in parts if part.section.startswith(FILES_PREFIX)]


def chunks_of(manifest: Manifest) -> list[SnapshotPart]:
    """Return the files of a checkpoint that are chunks."""
    return [part for part in _files(manifest.entries[0].parts) if part.name]


def new_bytes(manifest: Manifest) -> int:
    """Return how many bytes a checkpoint wrote itself."""
    own = f"chk-{manifest.checkpoint:010d}/"
    return sum(p.size_bytes for p in manifest.entries[0].parts if not p.path or p.path.startswith(own))


def _ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: [found for name, found in row.items() if name != "value"])


