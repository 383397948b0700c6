"""A subtask with state in memory, and checkpoints of it that go wrong in every way, beside plain dicts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.state.backends import GROUPS, rows_in, sections_of
from tests.state.memory import test_memory_windows as windows
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
from headgate.state.descriptors import KeyColumns, Section, StateDescriptor, StateKind
from headgate.state.frozen import FrozenState, OwnedKeys
from headgate.state.memory import by_column, changes, chunk_log, chunked, lists, maps
from headgate.state.timers import TimeKind
from headgate.state.ttl import TTL
from headgate.storage.memory import MemoryStorage

Contents = dict[str, list[dict[str, Any]]]

KEYS = KeyColumns(("id",), (pa.int64(),))
VALUE = StateDescriptor("value", StateKind.VALUE, pa.large_string())
RECORDS = Section("accumulators", pa.schema([("key", pa.int64()), ("text", pa.large_string())]), ("key",))

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


class Few:
    """Values, lists and maps of five keys, in one of the forms of ``test_backends``."""

    now_ms = 0

    def __init__(self, form: type[Rows], key: str) -> None:
        self._form, self._key = form, key

    def make(self, worker: Any) -> Any:
        return self._form(self._key).make(worker)

    def nothing(self) -> Model:
        return {"value": {}, "list": {}, "map": {}}

    def _used(self, backend: Any) -> Any:
        used: Any = self._form(self._key)
        used.backend = used.columned = backend
        return used

    def process(self, backend: Any, model: Model, what: str, numbers: list[int], n: int) -> None:
        self._used(backend).change(what, numbers, n)
        change(model, what, numbers, n)

    def tidy(self, backend: Any) -> None:
        self._used(backend).tidy()

    def check(self, backend: Any, model: Model) -> None:
        self._used(backend).check(model)

    def counts(self, model: Model) -> dict[str, int]:
        return counts(model)

    def wanted(self, model: Model) -> Contents:
        return in_snapshot(model, self._key)


class Many:
    """A value, or a record, of thousands of keys: how they are put, and taken away, depends on the form."""

    FORMS = ("row", "column", "record")

    def __init__(self, form: str) -> None:
        self.form = form
        self.state = "accumulators" if form == "record" else VALUE.name
        self.ttl: TTL | None = None
        self.now_ms = 0

    @property
    def value(self) -> StateDescriptor:
        return replace(VALUE, ttl=self.ttl)

    def make(self, worker: Any, states: Sequence[StateDescriptor] | None = None, *, has_timers: bool = False) -> Any:
        of = worker.of("sum", 0, GROUPS)
        if self.form == "record":
            return of.records(RECORDS)
        make = of.by_row if self.form == "row" else of.by_column
        return make(KEYS, [self.value] if states is None else states, has_timers=has_timers)

    def make_timed(self, worker: Any) -> Any:
        return self.make(worker, has_timers=True)

    def register(self, backend: Any, times_ms: dict[int, int]) -> None:
        """Have timers of event time."""
        timers = backend.timers.of(TimeKind.EVENT_TIME)
        if self.form == "row":
            for key, time_ms in times_ms.items():
                timers.register(key, time_ms)
        else:
            timers.register(backend.slots([pa.array(times_ms, pa.int64())]), np.array(list(times_ms.values())))

    def nothing(self) -> dict[int, str]:
        return {}

    def process(self, backend: Any, model: dict[int, str], keys: Iterable[int], version: int | None) -> None:
        """Give all ``keys`` a value, or take theirs away (None)."""
        keys = list(keys)
        for key in keys:
            model.pop(key, None)
            model |= {} if version is None else {key: text(key, version)}
        if self.form == "record":
            assert version is not None, "records never go"
            backend.load(keys)
            backend.store({key: (key, model[key]) for key in keys})
        elif self.form == "row":
            cells = backend.cells(self.value)
            for key in keys:
                if version is None:
                    cells.remove(key)
                else:
                    cells.put(key, model[key] if self.ttl is None else (model[key], self.now_ms + 100))
            backend.absorb()
        else:
            slots, values = backend.slots([pa.array(keys, pa.int64())]), backend.values(self.value)
            if version is None:
                values.clear(slots)
            else:
                values.put(slots, pa.array([model[key] for key in keys], pa.large_string()))
            backend.prepare()

    def living(self, model: dict[int, str]) -> dict[int, str]:
        """Return what has not expired: a text says when it was put."""
        return {key: found for key, found in model.items() if self.ttl is None or _time_ms(found) + 100 > self.now_ms}

    def counts(self, model: dict[int, str]) -> dict[str, int]:
        return {self.state: len(self.living(model))}

    def wanted(self, model: dict[int, str]) -> Contents:
        names = RECORDS.schema.names if self.form == "record" else ["key0", "value"]
        rows = [dict(zip(names, found, strict=True)) for found in model.items()]
        return {self.state: sorted(rows, key=lambda row: row[names[0]])}


class Windows:
    """Sums by key and window: a model is the sum of each window and key."""

    now_ms = 0

    def make(self, worker: Any) -> Any:
        return worker.of("sum", 0, GROUPS).merged_by_window(windows.KEYS, windows.ROWS, windows.ADD_MAX)

    def nothing(self) -> dict[tuple[int, int], int]:
        return {}

    def process(
        self, backend: Any, model: dict[tuple[int, int], int], window: int, keys: Iterable[int] | None, value: int = 0
    ) -> None:
        """Add ``value`` to the sums of ``keys`` in a window, or take it (None)."""
        if keys is None:
            taken = backend.take(window)
            found = dict(zip(taken.keys[0].to_pylist(), taken.table.values[0].tolist(), strict=True))
            assert found == {key: model.pop((window, key)) for at, key in list(model) if at == window}
            return
        rows = [(key, window, 1, value, value) for key in keys]
        for key, *_ in rows:
            model[window, key] = model.get((window, key), 0) + value
        batch = windows.partials(*rows)
        backend.add(windows.window_of(batch), batch)
        backend.meta = b"%d" % value

    def counts(self, model: dict[tuple[int, int], int]) -> dict[str, int]:
        return {"windows": len(model)}

    def wanted(self, model: dict[tuple[int, int], int]) -> Contents:
        return {"windows": [{"key": key, "window": window, "sum": n} for (window, key), n in sorted(model.items())]}


def _time_ms(found: str) -> int:
    return int(found.split()[5].removesuffix("th"))


def text(key: int, version: int) -> str:
    return f"{key} was put for the {version}th time, which takes about fifty bytes"


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

    def __init__(self, use: Any, storage: Any = None) -> None:
        """``use``: how its backend is used, and what is there then: see ``Few`` and ``Many``."""
        self.use = use
        self.worker = worker_states(MemoryState(), None)
        self.storage: Any = storage or FailingStorage("chunks")
        self.log = CheckpointLog(self.storage, "p")
        self.model: Any = use.nothing()
        self.retained: dict[int, tuple[Manifest, Any]] = {}
        self.number = 0
        self.continued = 0
        self.begin()

    def begin(self) -> None:
        """Begin a generation with nothing."""
        self.generation = self.log.claim("test", 0).next.generation
        self.backend: Any = self.use.make(self.worker)
        self.shared = SharedFiles()
        self.frozen: list[tuple[int, FrozenState, Any]] = []
        self.written: dict[int, tuple[tuple[SnapshotPart, ...], Any]] = {}

    def change(self, *what: Any) -> None:
        """Process something."""
        self.use.process(self.backend, self.model, *what)

    def freeze(self) -> None:
        """A barrier comes."""
        self.number += 1
        self.log.reserve(CheckpointId(self.number))
        frozen = self.backend.freeze()
        assert {**frozen.rows(), **self.use.counts(self.model)} == frozen.rows()
        self.frozen.append((self.number, frozen, copy.deepcopy(self.model)))

    def write(self, fails_in: int = 0) -> tuple[SnapshotPart, ...]:
        """Write the oldest snapshot that is frozen; the first try may fail."""
        number, frozen, model = self.frozen.pop(0)
        self._fail_in(fails_in)
        try:
            parts = self._parts(number, frozen)
        except StorageError:
            parts = self._parts(number, frozen)
        self._fail_in(0)
        frozen.release()
        self.shared.wrote(CheckpointId(number), _files(parts))
        self.written[number] = parts, model
        return parts

    def give_up(self, fails_in: int) -> None:
        """A snapshot fails, after some of it was written."""
        number, frozen, _ = self.frozen.pop(0)
        self._fail_in(fails_in)
        with suppress(StorageError):
            self._parts(number, frozen)
        self._fail_in(0)
        frozen.release()

    def _fail_in(self, writes: int) -> None:
        if isinstance(self.storage, FailingStorage):
            self.storage.fails_in = writes

    def _parts(self, number: int, frozen: FrozenState, *, is_portable: bool = False) -> tuple[SnapshotPart, ...]:
        to = Destination(self.storage, "p", self.generation, 0, OWNED)
        shareable = None if is_portable else self.shared.shareable()
        target = SubtaskTarget(to, SUBTASK, CheckpointId(number), shareable)
        target.put_state("sum", frozen)
        return target.finish()

    def savepoint(self) -> Manifest:
        """Write what was frozen last as a savepoint, too."""
        number, frozen, _ = self.frozen[-1]
        return manifest_of(number, self._parts(number, frozen, is_portable=True), int(self.generation))

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
            self.model = self.use.nothing()
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
                is_continued = isinstance(backend, ContinuingBackend) and backend.go_on_with(state.files, owner)
            if not is_continued:
                backend.restore(decode_sections(state.payload, "state"), "state", owner)
        if hasattr(backend, "end_restore"):
            backend.time.now_ms = self.use.now_ms
            backend.end_restore()
        return is_continued

    def contents(self, manifest: Manifest, parallelism: int = 1) -> Contents:
        """Return what is restored of a checkpoint, all subtasks together."""
        found: Contents = {}
        for worker in range(parallelism):
            backend: Any = self.use.make(self.worker)
            self.restore(manifest, backend, worker, parallelism)
            for name, rows in rows_in(sections_of(backend.freeze())).items():
                found.setdefault(name, []).extend(rows)
        if "windows" in found:
            summed = [{name: row[name] for name in ("key", "window", "sum")} for row in found["windows"]]
            return {"windows": sorted(summed, key=lambda row: (row["window"], row["key"]))}
        return {name: ordered(rows) for name, rows in found.items()}

    def check(self, parallelism: int = 1) -> None:
        """Whatever is retained can be restored."""
        for manifest, model in self.retained.values():
            assert self.log.files.verify(manifest) == []
            assert self.contents(manifest, parallelism) == self.use.wanted(model)

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


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: [found for name, found in row.items() if name not in ("value", "text")])
