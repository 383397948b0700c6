"""A subtask with state in memory, and checkpoints of it that go wrong in every way, beside plain dicts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.state.backends import GROUPS, rows_in, sections_of
from tests.state.memory import test_window_backend as windows
from tests.state.rocksdb.increments import SUBTASK, manifest_of, restored_states
from tests.state.test_backend import ALL, Columns, Model, Rows, change, counts, in_snapshot

from headgate.codec.snapshot import FILES_PREFIX, decode_sections
from headgate.errors import StorageError
from headgate.model.config import MemoryState
from headgate.model.ids import CheckpointId
from headgate.model.manifest import KeyGroups, Manifest, SnapshotPart
from headgate.protocol.checkpoints.retention import SharedFiles
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.state import snapshot
from headgate.state.backend import TIMERS, ContinuingBackend, Ownership, TimeKind
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.memory import change_tracking, column_backend, column_states, incremental_snapshot
from headgate.state.memory import timers as timers_module
from headgate.state.memory.row_backend import MemoryRowBackend
from headgate.state.snapshot import FrozenState, OwnedKeys, is_description
from headgate.state.ttl import TTL
from headgate.state.worker_backends import worker_states
from headgate.storage.memory import MemoryStorage

Contents = dict[str, list[dict[str, Any]]]

KEYS = KeyColumns(("id",), (pa.int64(),))
VALUE = StateDescriptor("value", StateKind.VALUE, pa.large_string())

PLAIN = (int, str, tuple, type(None))

EVENT, PROCESSING = (f"{TIMERS}.{kind.value}" for kind in TimeKind)
TIMERS_OF = {EVENT: TimeKind.EVENT_TIME, PROCESSING: TimeKind.PROCESSING_TIME}
TIMER_CHANGES = ["register", "register", "delete", "take"]

OWNED = OwnedKeys(KeyGroups(0, GROUPS), GROUPS)


@contextmanager
def small() -> Iterator[None]:
    """Have everything happen that happens to large state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incremental_snapshot, "SIZE_BYTES_MIN", 1)
        patch.setattr(incremental_snapshot, "CHUNKS_MAX", 3)
        patch.setattr(change_tracking, "KEYS_FREE", 10)
        patch.setattr(snapshot, "RANGE_BYTES_MIN", 64)
        patch.setattr(column_backend, "_RENUMBER_MIN", 4)
        patch.setattr(column_states, "_DEAD_FREE", 4)
        patch.setattr(column_states, "_POOL_FREE", 4)
        patch.setattr(timers_module, "_TAIL_ROWS", 8)
        patch.setattr(timers_module, "_RUNS_MERGED", 2)
        yield


class Few:
    """Values, lists and maps of five keys, in one of the forms of ``test_backends``, and timers of both kinds."""

    now_ms = 0

    def __init__(self, form: type[Rows], key: str) -> None:
        self._form, self._key = form, key

    def make(self, worker: Any) -> Any:
        of = worker.of("node", 0, GROUPS)
        make = of.by_column if self._form is Columns else of.by_row
        return make(self._form(self._key).columns, ALL, has_timers=True)

    def nothing(self) -> Model:
        return {"value": {}, "list": {}, "map": {}} | {name: {} for name in TIMERS_OF}

    def _used(self, backend: Any) -> Any:
        used: Any = self._form(self._key)
        used.backend = used.columned = backend
        return used

    def process(self, backend: Any, model: Model, what: str, numbers: list[int], n: int) -> None:
        if what in TIMER_CHANGES:
            name = list(TIMERS_OF)[n % 2]
            self._change_timers(backend, TIMERS_OF[name], model[name], what, numbers, n // 2)
        else:
            self._used(backend).change(what, numbers, n)
            change(model, what, numbers, n)

    def _change_timers(
        self, backend: Any, kind: TimeKind, model: dict[Any, None], what: str, numbers: list[int], n: int
    ) -> None:
        timers, used = backend.timers.of(kind), self._used(backend)
        pairs = [(number, (n + place) % 5) for place, number in enumerate(numbers)]
        if what == "take":
            due = {(used.key(number), time_ms): (number, time_ms) for number, time_ms in model if time_ms <= n % 5}
            taken = take(backend, timers, n % 5, 1 + n % 3)
            times = sorted(time_ms for _, time_ms in due)
            assert [time_ms for _, time_ms in taken] == times[: len(taken)], "the first ones"
            assert taken or not due
            for pair in taken:
                del model[due[pair]]
            return
        for pair in pairs:
            model.pop(pair, None)
            model |= {pair: None} if what == "register" else {}
        if self._form is Columns:
            slots, times_ms = used.slots(numbers), np.array([time_ms for _, time_ms in pairs])
            getattr(timers, what)(slots, times_ms)
        else:
            for number, time_ms in pairs:
                getattr(timers, what)(used.key(number), time_ms)

    def tidy(self, backend: Any) -> None:
        self._used(backend).tidy()

    def check(self, backend: Any, model: Model) -> None:
        self._used(backend).check(model)

    def counts(self, model: Model) -> dict[str, int]:
        return counts(model) | {name: len(model[name]) for name in TIMERS_OF}

    def wanted(self, model: Model) -> Contents:
        found = in_snapshot(model, self._key)
        for name in TIMERS_OF:
            rows = [self._outer(n) | {"time_ms": time_ms} for n, time_ms in model[name]]
            found[name] = ordered(rows)
        return found

    def _outer(self, number: int) -> dict[str, Any]:
        (row,) = in_snapshot({"value": {number: 0}, "list": {}, "map": {}}, self._key)["value"]
        return {name: found for name, found in row.items() if name != "value"}


def take(backend: Any, timers: Any, until_ms: int, count_max: int) -> list[tuple[Any, int]]:
    """Take timers that are due; return the key and the time of each."""
    found = timers.take(until_ms, count_max)
    if isinstance(backend, MemoryRowBackend):
        return [] if found is None else [(key, found[0]) for key in found[1]]
    slots, times_ms = found
    keys = list(zip(*(column.to_pylist() for column in backend.key_columns(slots)), strict=True))
    return [(key if len(key) > 1 else key[0], time_ms) for key, time_ms in zip(keys, times_ms.tolist(), strict=True)]


class Many:
    """A value of thousands of keys: how they are put, and taken away, depends on the form."""

    FORMS = ("row", "column")

    def __init__(self, form: str) -> None:
        self.form = form
        self.state = VALUE.name
        self.ttl: TTL | None = None
        self.now_ms = 0

    @property
    def value(self) -> StateDescriptor:
        return replace(VALUE, ttl=self.ttl)

    def make(self, worker: Any, states: Sequence[StateDescriptor] | None = None, *, has_timers: bool = False) -> Any:
        of = worker.of("sum", 0, GROUPS)
        make = of.by_row if self.form == "row" else of.by_column
        return make(KEYS, [self.value] if states is None else states, has_timers=has_timers)

    def nothing(self) -> dict[int, str]:
        return {}

    def process(self, backend: Any, model: dict[int, str], keys: Iterable[int], version: int | None) -> None:
        """Give all ``keys`` a value, or take theirs away (None)."""
        keys = list(keys)
        for key in keys:
            model.pop(key, None)
            model |= {} if version is None else {key: text(key, version)}
        if self.form == "row":
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
        rows = [{"key0": key, "value": found} for key, found in sorted(model.items())]
        return {self.state: rows}


class Timers:
    """Values and timers of event time of thousands of keys."""

    now_ms = 0

    def __init__(self, form: str) -> None:
        self.many = Many(form)

    def make(self, worker: Any) -> Any:
        return self.many.make(worker, has_timers=True)

    def nothing(self) -> dict[str, Any]:
        return {"values": {}, "timers": {}}

    def process(self, backend: Any, model: dict[str, Any], what: str, found: Any, version: int | None = 0) -> None:
        """Put values of keys, register or delete timers (pairs of key and time), or take what is due at a time."""
        timers, known = backend.timers.of(TimeKind.EVENT_TIME), model["timers"]
        if what == "put":
            self.many.process(backend, model["values"], found, version)
        elif what == "take":
            while taken := take(backend, timers, found, 1_000):
                for pair in taken:
                    del known[pair]
            assert not [pair for pair in known if pair[1] <= found]
        else:
            for pair in found:
                known.pop(pair, None)
                known |= {pair: None} if what == "register" else {}
            if self.many.form == "row":
                for key, time_ms in found:
                    getattr(timers, what)(key, time_ms)
            else:
                slots = backend.slots([pa.array([key for key, _ in found], pa.int64())])
                getattr(timers, what)(slots, np.array([time_ms for _, time_ms in found]))
        if self.many.form == "row":
            backend.absorb()

    def counts(self, model: dict[str, Any]) -> dict[str, int]:
        return {VALUE.name: len(model["values"]), EVENT: len(model["timers"])}

    def wanted(self, model: dict[str, Any]) -> Contents:
        rows = [{"key0": key, "time_ms": time_ms} for key, time_ms in sorted(model["timers"])]
        return {**self.many.wanted(model["values"]), EVENT: rows, PROCESSING: []}


class Windows:
    """Sums by key and window: a model is the sum of each window and key."""

    now_ms = 0

    def make(self, worker: Any) -> Any:
        return worker.of("sum", 0, GROUPS).merged_by_window(windows.KEYS, windows.ROWS, windows.ADD_MAX)

    def nothing(self) -> Any:
        return {}

    def process(self, backend: Any, model: Any, window: int, keys: Iterable[int] | None, value: int = 0) -> None:
        """Add ``value`` to the sums of ``keys`` in a window, or take it (None)."""
        if keys is None:
            self._take(backend, model, window)
            return
        rows = [(key, window, 1, value, value) for key in keys]
        self._add(model, window, [key for key, *_ in rows], value)
        batch = windows.partials(*rows)
        backend.add(windows.window_of(batch), batch)
        backend.meta = b"%d" % value

    def _take(self, backend: Any, model: Any, window: int) -> None:
        taken = backend.take(window)
        found = dict(zip(taken.keys[0].to_pylist(), taken.table.values[0].tolist(), strict=True))
        assert found == {key: model.pop((window, key)) for at, key in list(model) if at == window}

    def _add(self, model: Any, window: int, keys: list[int], value: int) -> None:
        for key in keys:
            model[window, key] = model.get((window, key), 0) + value

    def windows(self, model: Any) -> list[int]:
        """Return those that have rows."""
        return sorted({window for window, _ in model})

    def counts(self, model: Any) -> dict[str, int]:
        return {"windows": len(model)}

    def wanted(self, model: Any) -> Contents:
        return {"windows": [{"key": key, "window": window, "sum": n} for (window, key), n in sorted(model.items())]}


class KeptWindows(Windows):
    """The rows of windows as they came: a model has those of each window, in their order."""

    def make(self, worker: Any) -> Any:
        return worker.of("sum", 0, GROUPS).by_window(windows.KEYS, windows.ROWS)

    def _take(self, backend: Any, model: Any, window: int) -> None:
        table = pa.Table.from_batches(backend.take(window))
        found = list(zip(table["key"].to_pylist(), table["sum"].to_pylist(), strict=True))
        assert sorted(found, key=_first) == sorted(model.pop(window), key=_first), "those of a key in their order"

    def _add(self, model: Any, window: int, keys: list[int], value: int) -> None:
        model.setdefault(window, []).extend((key, value) for key in keys)

    def windows(self, model: Any) -> list[int]:
        """See ``Windows``."""
        return sorted(model)

    def counts(self, model: Any) -> dict[str, int]:
        return {"windows": sum(map(len, model.values()))}

    def wanted(self, model: Any) -> Contents:
        rows = [(window, key, value) for window, found in sorted(model.items()) for key, value in found]
        rows.sort(key=lambda row: row[:2])
        return {"windows": [{"key": key, "window": window, "sum": value} for window, key, value in rows]}


class FewWindows:
    """Some of either, told what to do as ``Few``."""

    now_ms = 0

    def __init__(self, use: Windows) -> None:
        self.use = use
        self.make, self.nothing, self.counts, self.wanted = use.make, use.nothing, use.counts, use.wanted

    def process(self, backend: Any, model: Any, what: str, numbers: list[int], n: int) -> None:
        there = self.use.windows(model)
        if what != "take":
            self.use.process(backend, model, n % 4, numbers, n)
        elif there:
            self.use.process(backend, model, there[n % len(there)], None)

    def tidy(self, backend: Any) -> None: ...

    def check(self, backend: Any, model: Any) -> None:
        assert backend.windows() == self.use.windows(model)


_first = itemgetter(0)


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
        self.frozen.append((self.number, frozen, copied(self.model)))

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
        to = SnapshotDestination(self.storage, "p", self.generation, 0, OWNED)
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
        self.model = copied(model)
        self.continued += self.restore(manifest, self.backend)
        self.shared = SharedFiles(_files(manifest.entries[0].parts))

    def restore(self, manifest: Manifest, backend: Any, worker: int = 0, parallelism: int = 1) -> bool:
        """Restore a subtask; return whether it goes on with the chunks."""
        owner = Ownership(GROUPS, parallelism, worker)
        is_continued = False
        for state in restored_states(self.storage, manifest, worker, parallelism):
            if state.files is not None and not is_continued:
                is_continued = isinstance(backend, ContinuingBackend) and backend.continue_from(state.files, owner)
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
            return {"windows": sorted(summed, key=itemgetter("window", "key"))}
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


def copied(model: Any) -> Any:
    """Return a deep copy; of thousands of rows, which are tuples of plain values, ``copy.deepcopy`` takes seconds."""
    if isinstance(model, dict):
        return {key: copied(value) for key, value in model.items()}
    if isinstance(model, list):
        return [copied(value) for value in model]
    return model if isinstance(model, PLAIN) else copy.deepcopy(model)


def _files(parts: Sequence[SnapshotPart]) -> list[SnapshotPart]:
    return [part for part in parts if part.section.startswith(FILES_PREFIX)]


def chunks_of(manifest: Manifest) -> list[SnapshotPart]:
    """Return the files of a checkpoint that are chunks."""
    return [part for part in _files(manifest.entries[0].parts) if not is_description(part)]


def new_bytes(manifest: Manifest) -> int:
    """Return how many bytes a checkpoint wrote itself."""
    own = f"chk-{manifest.checkpoint:010d}/"
    return sum(p.size_bytes for p in manifest.entries[0].parts if not p.path or p.path.startswith(own))


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: [found for name, found in row.items() if name not in ("value", "text")])
