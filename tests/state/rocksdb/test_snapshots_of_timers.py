"""Timers, windows and state that expires in files of RocksDB: what is written of them, and what is restored.

Random histories that go through such files: ``tests/state/test_timers.py``,
``tests/operators/process/test_timer_histories.py``, ``test_ttl_histories.py`` and ``tests/operators/windows``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import few
from tests.state.backends import IN_FILES, NODE, Moved, restore, states
from tests.state.memory.test_window_backend import ADD_MAX, ROWS, partials, window_of
from tests.state.memory.test_window_backend import KEYS as WINDOW_KEYS
from tests.state.rocksdb.test_window_backend import taken

import headgate as hg
from headgate.codec.snapshot import STATE_PREFIX
from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, key_groups_of_subtask
from headgate.model.manifest import Manifest, SubtaskEntry
from headgate.protocol.checkpoints.retention import SharedFiles
from headgate.state.backend import TimeKind
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind, state_identity
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.rocksdb import database_restore, database_snapshot
from headgate.state.rocksdb import timers as rocks_timers
from headgate.state.rocksdb.database import Database
from headgate.state.rocksdb.ttl import ExpiringTables
from headgate.state.worker_backends import WorkerStates
from headgate.storage.urls import open_storage

GROUPS = 16
COUNTS = (1, 2, 3, 5, 8)
KEYS = KeyColumns(("id",), (pa.int64(),))
HOUR_MS = 3_600_000
PLAIN = StateDescriptor("plain", StateKind.VALUE, pa.int64())
EXPIRES = StateDescriptor("expires", StateKind.VALUE, pa.int64(), ttl=hg.TTL("1h"))
FRONT = 40
Timer = tuple[int, int]

forms = pytest.mark.parametrize("form", ["rows", "columns"])
kinds = pytest.mark.parametrize("kind", ["kept", "merged"])
moves = pytest.mark.parametrize(
    ("p", "later"), few([*((p, IN_FILES) for p in COUNTS), (2, "memory"), (3, "memory")], 3)
)
"""From how many subtasks to which backend; the test goes on to each of ``COUNTS``."""


@pytest.fixture(autouse=True)
def _few_in_memory_and_nothing_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have few timers in memory, and what has expired in the files."""
    monkeypatch.setattr(rocks_timers, "FRONT_MAX", FRONT)
    monkeypatch.setattr(ExpiringTables, "sweep", lambda self: iter(()))


@pytest.fixture
def worker() -> Iterator[WorkerStates]:
    with states(IN_FILES) as made:
        yield made


class Function:
    """The state of a process function: values that expire and others, and timers."""

    def __init__(
        self,
        form: str,
        worker: WorkerStates,
        subtask: int = 0,
        descriptors: Sequence[StateDescriptor] = (PLAIN, EXPIRES),
        *,
        has_timers: bool = True,
    ) -> None:
        factory = worker.of(NODE, subtask, GROUPS)
        make = factory.by_row if form == "rows" else factory.by_column
        self.form = form
        self.backend: Any = make(KEYS, descriptors, has_timers=has_timers)

    def put(self, state: StateDescriptor, keys: Sequence[int], number: int = 0) -> None:
        """Write a value of each key, to the database."""
        self._between()
        until_ms = self.backend.time.now_ms + HOUR_MS
        if self.form == "columns":
            slots = self.backend.slots([pa.array(keys, pa.int64())])
            self.backend.values(state).put(slots, pa.array([key + number for key in keys], pa.int64()))
        else:
            for key in keys:
                value = key + number
                self.backend.cells(state).put(key, value if state.ttl is None else (value, until_ms))
        self._between()

    def get(self, state: StateDescriptor, keys: Sequence[int]) -> dict[int, int]:
        """Return what lives of ``keys``."""
        if self.form == "columns":
            slots = self.backend.slots([pa.array(keys, pa.int64())])
            found = zip(keys, self.backend.values(state).get(slots).to_pylist(), strict=True)
            return {key: value for key, value in found if value is not None}
        cells = self.backend.cells(state)
        held = {key: cells.get(key) for key in keys if cells.get(key) is not None}
        now_ms = self.backend.time.now_ms
        return held if state.ttl is None else {key: value for key, (value, at) in held.items() if at > now_ms}

    def register(self, timers: Sequence[Timer], kind: TimeKind = TimeKind.EVENT_TIME) -> None:
        """Register timers in batches."""
        held = self.backend.timers.of(kind)
        for start in range(0, len(timers), 50):
            self._between()
            some = timers[start : start + 50]
            if self.form == "columns":
                slots = self.backend.slots([pa.array([key for key, _ in some], pa.int64())])
                held.register(slots, pa.array([at for _, at in some], pa.int64()).to_numpy().copy())
                continue
            for key, at in some:
                held.register(key, at)
        self._between()

    def fire(self, until_ms: int = 1 << 40, kind: TimeKind = TimeKind.EVENT_TIME, calls: int = 10_000) -> list[Timer]:
        """Take timers, some at a time."""
        held, found = self.backend.timers.of(kind), []
        for _ in range(calls):
            self._between()
            taken = held.take(until_ms, 16)
            if self.form == "columns":
                slots, times = taken
                if len(slots) == 0:
                    break
                found += zip(self.backend.key_columns(slots)[0].to_pylist(), times.tolist(), strict=True)
            elif taken is None:
                break
            else:
                found += [(key, taken[0]) for key in taken[1]]
        return found

    def _between(self) -> None:
        (self.backend.absorb if self.form == "rows" else self.backend.prepare)()


def in_order(timers: Sequence[Timer]) -> list[Timer]:
    keys = sorted({key for key, _ in timers})
    hashes = hash_columns(pa.record_batch([pa.array(keys, pa.int64())], ["id"]), ["id"])
    by_key = dict(zip(keys, hashes.tolist(), strict=True))
    return sorted(timers, key=lambda timer: (timer[1], by_key[timer[0]]))


def owners(keys: Sequence[int], parallelism: int) -> list[int]:
    groups = key_groups(hash_columns(pa.record_batch([pa.array(keys, pa.int64())], ["id"]), ["id"]), GROUPS)
    return [int(group) * parallelism // GROUPS for group in groups]


def owned_by(keys: Sequence[int], parallelism: int, index: int) -> list[int]:
    return [key for key, owner in zip(keys, owners(keys, parallelism), strict=True) if owner == index]


def timers_of(keys: Sequence[int]) -> list[Timer]:
    """Return two timers of each key: one for midnight as all have, one of its own."""
    return [timer for key in keys for timer in ((key, 500), (key, key * 7_919 % 1_000))]


class Written:
    """A subtask that writes one checkpoint after the other."""

    def __init__(self) -> None:
        self.shared = SharedFiles()
        self.checkpoint = 0
        self.storage: Any = None

    def __call__(self, backend: Any) -> Moved:
        self.checkpoint += 1
        shared, storage = self.shared, self.storage
        found = Moved(backend.freeze(), groups=GROUPS, checkpoint=self.checkpoint, shared=shared, storage=storage)
        self.storage = found.storage
        return found


def new_bytes(before: Moved, after: Moved) -> int:
    return sum(part.size_bytes for part in after.files if part.path not in before.paths)


def in_all(moved: Moved) -> int:
    return sum(part.size_bytes for part in moved.files)


# -- what is written -----------------------------------------------------------------------------------------------


@forms
def test_a_checkpoint_with_timers_writes_only_new_files(form: str, worker: WorkerStates) -> None:
    function, write = Function(form, worker), Written()
    function.put(PLAIN, range(3_000))
    function.register([(key, 10 + key) for key in range(3_000)])
    first = write(function.backend)
    function.register([(key, 5_000) for key in range(60)])
    second = write(function.backend)
    assert first.paths < second.paths, "the old files are referred to"
    assert new_bytes(first, second) < in_all(second) / 5
    (beside,) = [part for part in second.parts if part.section == f"{STATE_PREFIX}{NODE}"]
    assert beside.rows is not None
    assert beside.rows[NODE]["headgate.timers.event_time"] <= FRONT, "so many are in memory"
    assert beside.size_bytes < 10_000


@kinds
def test_a_checkpoint_of_windows_writes_only_new_files(kind: str, worker: WorkerStates) -> None:
    state, write = windows(worker, kind), Written()
    add(state, *((key, key % 3, 1, key, key) for key in range(2_000)))
    first = write(state)
    add(state, *((key, 1, 1, key, key) for key in range(3_000, 3_040)))
    second = write(state)
    assert first.paths < second.paths
    assert new_bytes(first, second) < in_all(second) / 5
    third = write(state)
    assert third.paths == second.paths, "nothing has changed"


@forms
def test_a_checkpoint_of_state_that_expires_writes_only_new_files(form: str, worker: WorkerStates) -> None:
    function, write = Function(form, worker, has_timers=False), Written()
    function.put(EXPIRES, range(3_000))
    first = write(function.backend)
    function.put(EXPIRES, range(40), 1)
    second = write(function.backend)
    assert first.paths < second.paths
    assert new_bytes(first, second) < in_all(second) / 5


# -- what is restored ----------------------------------------------------------------------------------------------


def formers(worker: WorkerStates, form: str, parallelism: int, keys: Sequence[int]) -> list[Moved]:
    """Return what subtasks wrote that hold all keys; what had expired is no less there than in any snapshot."""
    found = []
    for index in range(parallelism):
        function, mine = Function(form, worker, index), owned_by(keys, parallelism, index)
        function.put(PLAIN, mine)
        function.register(timers_of(mine))
        function.register([(key, 900) for key in mine], TimeKind.PROCESSING_TIME)
        function.put(EXPIRES, [key for key in mine if key % 2])
        function.backend.time.now_ms = HOUR_MS
        function.put(EXPIRES, [key for key in mine if not key % 2])
        found.append(Moved(function.backend.freeze(), index, parallelism, GROUPS))
    return found


@pytest.mark.long
@moves
def test_timers_in_files_fire_in_the_same_order_wherever_they_are_restored(
    later: str, p: int, worker: WorkerStates
) -> None:
    keys = range(120)
    moved = formers(worker, "columns" if p % 2 else "rows", p, keys)
    assert all(one.files for one in moved)
    with states(later) as laters:
        for q in COUNTS:
            for index in range(q):
                function = Function("rows" if q % 2 else "columns", laters, index)
                function.backend.time.now_ms = HOUR_MS
                went_on = restore(function.backend, moved, index, q)
                assert went_on == (q == p and later == IN_FILES)
                mine = owned_by(keys, q, index)
                assert function.fire() == in_order(list(dict.fromkeys(timers_of(mine))))
                assert sorted(function.fire(kind=TimeKind.PROCESSING_TIME)) == [(key, 900) for key in mine]
                assert function.get(PLAIN, mine) == {key: key for key in mine}


@forms
@pytest.mark.parametrize("later", ["memory", IN_FILES])
@pytest.mark.parametrize("q", [1, 3])
def test_what_expires_in_files_does_so_wherever_it_is_restored(
    form: str, later: str, q: int, worker: WorkerStates
) -> None:
    keys = range(120)
    moved = formers(worker, form, 1, keys)
    with states(later) as laters:
        for index in range(q):
            function, mine = Function(form, laters, index), owned_by(keys, q, index)
            function.backend.time.now_ms = HOUR_MS
            restore(function.backend, moved, index, q)
            assert function.get(EXPIRES, mine) == {key: key for key in mine if not key % 2}
            assert function.backend.freeze().rows()["expires"] == sum(not key % 2 for key in mine)
            function.backend.time.now_ms = 2 * HOUR_MS
            assert function.get(EXPIRES, mine) == {}
            assert function.backend.freeze().rows()["expires"] == 0


def windows(worker: WorkerStates, kind: str, subtask: int = 0) -> Any:
    factory = worker.of(NODE, subtask, GROUPS)
    made = factory.by_window if kind == "kept" else None
    return made(WINDOW_KEYS, ROWS) if made else factory.merged_by_window(WINDOW_KEYS, ROWS, ADD_MAX)


def add(state: Any, *rows: tuple[int | None, ...]) -> None:
    if rows:
        batch = partials(*rows)
        state.add(window_of(batch), batch)


@pytest.mark.long
@kinds
@moves
def test_windows_in_files_fire_whole_wherever_they_are_restored(
    kind: str, later: str, p: int, worker: WorkerStates
) -> None:
    keys, moved = range(60), []
    for index in range(p):
        state, mine = windows(worker, kind, index), owned_by(keys, p, index)
        state.meta = b"about"
        for turn in range(3):
            add(state, *((key, key % 2 - 1, 1, turn, turn) for key in mine))
        moved.append(Moved(state.freeze(), index, p, GROUPS))
    assert any(one.files for one in moved)
    with states(later) as laters:
        for q in COUNTS:
            for index in range(q):
                state, mine = windows(laters, kind, index), owned_by(keys, q, index)
                restore(state, moved, index, q)
                add(state, *((key, key % 2 - 1, 1, 7, 7) for key in mine))
                for window in (-1, 0):
                    here = [key for key in mine if key % 2 - 1 == window]
                    found = taken(state, window) if here else []
                    if kind == "merged":
                        assert found == [(key, window, 4, 0 + 1 + 2 + 7, 7) for key in here]
                    else:
                        by_key = {key: [row[3] for row in found if row[0] == key] for key in here}
                        assert by_key == {key: [0, 1, 2, 7] for key in here}, "in the order in which they came"
                assert state.windows() == []


def test_a_database_may_go_on_with_one_timer(worker: WorkerStates) -> None:
    function, heir = Function("rows", worker), Function("rows", worker)
    timers = [(key, 10 + key) for key in range(FRONT + 1)]
    function.register(timers)
    for key, at in timers[1:-1]:
        function.backend.timers.event_time.delete(key, at)
    assert restore(heir.backend, [Written()(function.backend)])
    assert heir.fire() == [timers[0], timers[-1]], "one was in memory, and one in the files"


@forms
def test_what_a_database_went_on_with_is_what_it_was(
    form: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, write, keys = Function(form, worker), Written(), range(400)
    function.put(EXPIRES, keys)
    function.register(timers_of(keys))
    wanted = in_order(list(dict.fromkeys(timers_of(keys))))
    fired = function.fire(300)
    assert fired == [timer for timer in wanted if timer[1] <= 300]
    first = write(function.backend)
    heir = Function(form, worker)
    read: list[int] = []
    some = Database.some

    def counted(self: Database, *args: Any) -> Any:
        found = some(self, *args)
        read.append(len(found[0]))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Database, "some", counted)
        assert restore(heir.backend, [first])
        assert read == [], "no row of a timer is looked at before one is asked for"
    untouched = Function(form, worker)
    assert restore(untouched.backend, [Moved(heir.backend.freeze(), groups=GROUPS)]), "nothing is beside the files"
    assert untouched.backend.timers.event_time.next_ms() == min(at for _, at in wanted if at > 300)
    heir.register([(7, 450), (8, 5_000)])
    second = write(heir.backend)
    assert first.paths < second.paths, "it shares what it went on with"
    assert heir.fire(499) == in_order([*(timer for timer in wanted if 300 < timer[1] <= 499), (7, 450)])
    third = Function(form, worker)
    assert restore(third.backend, [second])
    expected = in_order([*(timer for timer in wanted if timer[1] > 300), (7, 450), (8, 5_000)])
    assert third.fire() == expected
    assert third.backend.freeze().rows()["headgate.timers.event_time"] == 0


@kinds
def test_rows_of_windows_that_were_gone_on_with_are_told_from_new_ones(kind: str, worker: WorkerStates) -> None:
    state, write = windows(worker, kind), Written()
    add(state, *((key, 2, 1, 1, 1) for key in range(30)))
    first = write(state)
    heir = windows(worker, kind)
    assert restore(heir, [first])
    assert heir.windows() == [2]
    add(heir, *((key, 2, 1, 5, 5) for key in range(30)))
    second = write(heir)
    last = windows(worker, kind)
    assert restore(last, [second])
    rows = taken(last, 2)
    assert len(rows) == (60 if kind == "kept" else 30)
    assert sum(int(row[3] or 0) for row in rows) == 30 * 6
    assert list(last._local.database.scan(b"", None)) == [], "nothing remains of a window that fired"


@forms
def test_a_ttl_that_became_shorter_counts_for_files_as_well(
    form: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = Function(form, worker, has_timers=False)
    function.put(EXPIRES, range(50))
    moved = Moved(function.backend.freeze(), groups=GROUPS)
    scans: list[bytes] = []
    scan = Database.scan
    monkeypatch.setattr(Database, "scan", lambda self, *args: (scans.append(args[0]), scan(self, *args))[1])
    same = Function(form, worker, has_timers=False)
    assert restore(same.backend, [moved])
    assert scans == [], "no row is read if none lives too long"
    short = replace(EXPIRES, ttl=hg.TTL("10m"))
    shorter = Function(form, worker, descriptors=(PLAIN, short), has_timers=False)
    shorter.backend.time.now_ms = 1
    assert restore(shorter.backend, [moved]), "how long it lives is not how it is stored"
    shorter.backend.time.now_ms = HOUR_MS // 6
    assert len(shorter.get(short, range(50))) == 50
    shorter.backend.time.now_ms = HOUR_MS // 6 + 1
    assert shorter.get(short, range(50)) == {}


@forms
def test_a_function_with_files_may_be_given_timers_or_a_ttl(form: str, worker: WorkerStates) -> None:  # TM6
    function = Function(form, worker, has_timers=False)
    function.put(PLAIN, range(50))
    function.put(EXPIRES, range(50))
    moved = Moved(function.backend.freeze(), groups=GROUPS)
    timed = Function(form, worker)
    assert not restore(timed.backend, [moved]), "it takes the rows"
    assert timed.get(PLAIN, range(50)) == {key: key for key in range(50)}
    others = replace(PLAIN, ttl=hg.TTL("1h")), replace(EXPIRES, ttl=None)
    changed = Function(form, worker, descriptors=others, has_timers=False)
    assert not restore(changed.backend, [moved])
    assert changed.get(others[0], range(50)) == changed.get(others[1], range(50)) == {key: key for key in range(50)}
    changed.backend.time.now_ms = HOUR_MS
    assert changed.get(others[0], range(50)) == {}
    assert len(changed.get(others[1], range(50))) == 50


# -- what a checkpoint is ------------------------------------------------------------------------------------------


def manifest_of(moved: Moved, descriptors: Sequence[StateDescriptor] = (PLAIN, EXPIRES)) -> Manifest:
    entries = (SubtaskEntry(SubtaskId(VertexId(NODE), 0), moved.parts),)
    texts = {NODE: state_identity(KEYS, descriptors)}
    return Manifest(CheckpointId(1), Generation(1), 1, GROUPS, entries, state_texts=texts)


def _timers(worker: WorkerStates) -> Any:
    function = Function("rows", worker, descriptors=(PLAIN,))
    function.put(PLAIN, range(9))
    return function.backend


def _expiring(worker: WorkerStates) -> Any:
    function = Function("rows", worker, has_timers=False)
    function.put(EXPIRES, range(9))
    return function.backend


def _windows(worker: WorkerStates) -> Any:
    state = windows(worker, "kept")
    state.meta = b"about"
    add(state, (1, 1, 1, 1, 1))
    return state


def test_a_timer_that_is_missing_in_files_is_named(worker: WorkerStates) -> None:
    function = Function("rows", worker)
    function.register(timers_of(range(200)))
    moved = Moved(function.backend.freeze(), groups=GROUPS)
    told = [part for part in moved.parts if part.name and part not in moved.files]
    (description,) = told
    assert description.rows is not None
    wrong = {NODE: {**description.rows[NODE], "headgate.timers.event_time": 1_000}}
    moved.parts = tuple(replace(part, rows=wrong) if part == description else part for part in moved.parts)
    for q in (1, 2):
        with pytest.raises(CorruptionError, match=r"1000 rows of state 'headgate.timers.event_time'"):
            restore(Function("rows", worker).backend, [moved], 0, q)


def test_timers_windows_and_expiries_in_files_can_be_looked_at(
    tmp_path: Path, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headgate.runtime.checkpoints.log import CheckpointLog

    monkeypatch.setattr(database_restore, "PART_BYTES", 2_000)
    root = tmp_path / "checkpoints"
    root.mkdir()
    storage = open_storage(str(root))
    log = CheckpointLog(storage, "p")
    generation = log.claim("test", 0).next.generation
    keys = range(120)
    function = Function("columns", worker)
    function.put(PLAIN, keys)
    function.register(timers_of(keys))
    function.fire(100)
    function.put(EXPIRES, [key for key in keys if key % 2])
    function.backend.time.now_ms = HOUR_MS
    function.put(EXPIRES, [key for key in keys if not key % 2])
    moved = Moved(function.backend.freeze(), groups=GROUPS, storage=storage)
    assert moved.files
    log.reserve(CheckpointId(1))
    log.append(replace(manifest_of(moved), generation=generation))
    wanted = [timer for timer in in_order(list(dict.fromkeys(timers_of(keys)))) if timer[1] > 100]
    assert moved.counted["expires"] == 120, "as they are stored"
    catalog = {row["state"]: row["rows"] for row in hg.state_catalog(root / "p").to_dicts()}
    assert catalog["plain"] == 120
    assert catalog["expires"] is None, "what had expired is there, and counts"
    rows = hg.read_state(root / "p", NODE, "headgate.timers.event_time")
    assert sorted(rows.select("id", "time_ms").rows()) == sorted(wanted)
    assert len(hg.read_state(root / "p", NODE, "headgate.timers.event_time", keys=[119])) == 2
    assert sorted(hg.read_state(root / "p", NODE, "expires").rows()) == [(key, key) for key in keys if not key % 2]


def test_groups_of_the_model_are_those_of_the_product() -> None:
    for p in COUNTS:
        for index in range(p):
            groups = key_groups_of_subtask(index, GROUPS, p)
            mine = owned_by(range(100), p, index)
            hashes = hash_columns(pa.record_batch([pa.array(mine, pa.int64())], ["id"]), ["id"])
            assert set(key_groups(hashes, GROUPS).tolist()) <= set(groups)


def test_little_with_timers_is_written_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with states("rocksdb") as worker:
        function = Function("rows", worker)
        function.put(PLAIN, range(9))
        function.register(timers_of(range(9)))
        assert database_snapshot.SIZE_BYTES_MIN > 1
        assert Moved(function.backend.freeze(), groups=GROUPS).files == []
