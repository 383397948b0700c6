"""Timers in RocksDB: what is in memory, what is read and when, and what a snapshot has of both.

That they are what a set is, in the order of memory: ``tests/state/test_timers.py``, with every backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness
from tests.state.backends import GROUPS, Parts, rows_in, sections_of, states
from tests.state.test_timers import GROUPS as FEW_GROUPS
from tests.state.test_timers import KEYS, Columns, Rows, Timer, arrays, hash_of

import headgate as hg
from headgate.operators.process import batch_process
from headgate.operators.process.connected_process import process_spec
from headgate.state.backend import Ownership, TimeKind, first_timers
from headgate.state.memory.timers import MemoryColumnTimers
from headgate.state.rocksdb import column_backend, row_encoding
from headgate.state.rocksdb import timers as rocks_timers
from headgate.state.rocksdb.column_backend import RocksColumnBackend
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.row_backend import RocksRowBackend
from headgate.state.rocksdb.timers import END_OF_TIME, StoredTimers
from headgate.state.worker_backends import WorkerStates

EVENT = TimeKind.EVENT_TIME
SECTION = "headgate.timers.event_time"
each = pytest.mark.parametrize("make", [Rows, Columns])


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have few timers in memory."""
    monkeypatch.setattr(rocks_timers, "FRONT_MAX", 40)
    monkeypatch.setattr(rocks_timers, "WAITING_MAX", 30)


@pytest.fixture
def worker() -> Iterator[WorkerStates]:
    with states("rocksdb") as made:
        yield made


def timers(count: int, first_ms: int = 0) -> list[Timer]:
    """Return timers of as many keys, each for a time of its own, in no order."""
    return [((f"k{n}", n), first_ms + (n * 7_919) % count) for n in range(count)]


def register(store: Any, found: list[Timer], *, is_deletion: bool = False) -> None:
    for start in range(0, len(found), 50):
        store.between_batches()
        store.change(EVENT, found[start : start + 50], is_deletion=is_deletion)
    store.between_batches()


def held(store: Any) -> Any:
    assert store.backend.timers is not None
    return store.backend.timers.event_time


def fired(store: Any, until_ms: int) -> list[Timer]:
    found: list[Timer] = []
    while part := store.take(EVENT, until_ms, 16):
        found += part
        store.between_batches()
    return found


def fired_in(store: Any, until_ms: int, calls: int) -> list[Timer]:
    """Take timers so many times."""
    found: list[Timer] = []
    for _ in range(calls):
        found += store.take(EVENT, until_ms, 1)
    return found


def in_order(found: list[Timer]) -> list[Timer]:
    return sorted(found, key=lambda timer: (timer[1], hash_of(timer[0])))


@each
def test_only_the_next_timers_are_in_memory(make: Any, worker: WorkerStates) -> None:
    store = make(worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_backend, "SLOT_BYTES", 1 << 40)
        register(store, timers(1_000))
    assert len(held(store).front) <= 40
    assert held(store).stored.count >= 960
    assert len(held(store)) == 1_000
    if make is Columns:
        assert len(store.backend._index) <= 100, "nor have the others slots"
    assert fired(store, 499) == in_order([timer for timer in timers(1_000) if timer[1] < 500])
    assert len(held(store).front) <= 40
    register(store, timers(100, 400))
    assert fired(store, 5_000) == in_order([timer for timer in timers(1_000) if timer[1] >= 500] + timers(100, 400))
    assert len(held(store)) == held(store).stored.count == 0


@each
def test_timers_that_are_not_due_are_not_read(make: Any, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(worker)
    register(store, timers(1_000))
    read: list[int] = []
    some = Database.some

    def counted(self: Database, *args: Any) -> Any:
        found = some(self, *args)
        read.append(len(found[0]))
        return found

    monkeypatch.setattr(Database, "some", counted)
    assert len(fired(store, 99)) == 100
    assert sum(read) <= 300, "of a thousand"


@each
def test_what_was_removed_is_not_looked_at_again(make: Any, worker: WorkerStates) -> None:
    store = make(worker)
    register(store, timers(1_000))
    fired(store, 600)
    stored = held(store).stored
    assert (stored._from_ms[stored._has] > 600).all()
    register(store, [(("late", 1), 5), (("late", 2), 900)])
    assert fired(store, 600) == [(("late", 1), 5)]


@each
def test_what_is_stored_may_be_deleted_and_counts_once(make: Any, worker: WorkerStates) -> None:
    store = make(worker)
    register(store, timers(200))
    register(store, timers(200))
    assert store.backend.freeze().rows()[SECTION] == 200
    register(store, [timer for timer in timers(200) if timer[1] % 2], is_deletion=True)
    register(store, [(("nobody", 1), 150)], is_deletion=True)
    assert store.backend.freeze().rows()[SECTION] == 100
    assert fired(store, 1_000) == in_order([timer for timer in timers(200) if timer[1] % 2 == 0])


@each
def test_what_waits_counts_before_it_is_written(make: Any, worker: WorkerStates) -> None:
    store = make(worker)
    register(store, timers(200))
    fired(store, 90)
    store.change(EVENT, [(("last", 1), 1_000)], is_deletion=False)
    store.change(EVENT, [(("last", 2), 1_001), (("last", 3), 1_002)], is_deletion=False)
    store.change(EVENT, [(("last", 2), 1_001)], is_deletion=True)
    assert fired(store, 5_000)[-2:] == [(("last", 1), 1_000), (("last", 3), 1_002)]


@each
def test_timers_of_one_time_are_parted_by_the_hashes_of_their_keys(make: Any, worker: WorkerStates) -> None:
    store = make(worker)
    found = [((f"same{n}", n), 7) for n in range(300)]
    register(store, [*found[:30], (("later", 1), 9)])
    register(store, found[30:])
    register(store, found[::3])  # those that are there already, on either side of the horizon
    assert len(held(store)) == 301
    assert len(held(store).front) <= 40
    assert store.backend.freeze().rows()[SECTION] == 301
    register(store, found[::2], is_deletion=True)
    found = found[1::2]
    assert store.backend.freeze().rows()[SECTION] == 151
    first = fired_in(store, 7, 20)
    assert first == in_order(found)[: len(first)]
    register(store, [(("between", 1), 7), *found[:0]])
    assert sorted(first + fired(store, 7)) == sorted([*found, (("between", 1), 7)])
    assert len(held(store).front) <= 40
    assert fired(store, 9) == [(("later", 1), 9)]
    crowded = make(worker)
    several = [*timers(60, -60), *found, *timers(60, 8)]
    register(crowded, several)
    assert fired(crowded, 1_000) == in_order(several)
    restored = make(worker)
    register(restored, found)
    again = make(worker)
    again.backend.restore(sections_of(restored.backend.freeze()), "here", Ownership(FEW_GROUPS, 1, 0))
    assert fired(again, 7) == in_order(found)


def test_timers_of_one_place_are_not_parted() -> None:
    """Keys of one hash: were one of them before the horizon, and another behind it, nobody would find either."""
    times_ms, hashes = np.array([5, 7, 7, 7, 7, 9]), np.array([1, 2, 2, 2, 3, 1], np.uint64)
    for count, kept in ((0, 1), (1, 1), (2, 1), (3, 1), (4, 4), (5, 5), (6, 6)):
        stays = first_timers(times_ms, hashes, count)
        assert stays.tolist() == [True] * kept + [False] * (6 - kept)
    assert first_timers(times_ms[1:4], hashes[1:4], 1).tolist() == [True] * 3, "nothing tells which"
    with states("rocksdb") as worker, pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.setattr(row_encoding, "hash_columns", lambda batch, names: np.full(batch.num_rows, 3, np.uint64))
        place = worker._databases.new_database("node")  # type: ignore[attr-defined]
        stored = StoredTimers(place.database, EVENT, KEYS, FEW_GROUPS)
        found = [((f"k{n}", n), 7 + n // 6) for n in range(12)]
        stored.add(arrays([key for key, _ in found]), np.array([at for _, at in found]))
        assert stored.take_first(4)[0][1].tolist() == [7] * 6, "all six of them"
        assert stored.count == 6
        (columns, times), cut = stored.take_first(100)
        assert (times.tolist(), cut, len(columns)) == ([8] * 6, END_OF_TIME, 2)


@each
def test_what_the_keys_of_timers_have_is_read_together(
    make: Any, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(worker)
    register(store, [((f"k{n}", n), 7) for n in range(30)])
    read: list[int] = []
    get = Database.get

    def counted(self: Database, rows: Any) -> Any:
        read.append(len(rows))
        return get(self, rows)

    monkeypatch.setattr(Database, "get", counted)
    if make is Columns:
        monkeypatch.setattr(column_backend, "SLOT_BYTES", 1 << 40)
        store.between_batches()
    assert len(store.take(EVENT, 7, 16)) == 16
    assert read == [16]


class Counts(hg.BatchProcessFunction):
    """A value and a timer for each key; says how many keys are in the cache whenever timers fire."""

    schema = {"id": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        self.seen = state.value("seen", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        self.seen.put(batch["id"])
        context.timers.register_event_time(batch["id"] % 7)

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        assert (self.seen.get() == context.keys.frame()["id"]).all()
        return context.keys.frame()


def test_what_one_watermark_fires_is_not_all_in_the_cache(
    worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_process, "TIMERS_PER_CALL", 20)
    schema = pa.schema([("id", pa.int64())])
    run = Harness(process_spec("node", ("id",), Counts(), schema), worker=worker)
    backend = run.operator._backend  # type: ignore[attr-defined]
    monkeypatch.setattr(column_backend, "SLOT_BYTES", backend._local.cache_bytes // 100)
    for start in range(0, 2_000, 50):
        run.send(pa.record_batch([pa.array(range(start, start + 50))], schema))
    held: list[int] = []
    take = MemoryColumnTimers.take

    def counted(self: MemoryColumnTimers, *args: Any) -> Any:
        held.append(len(backend._index))
        return take(self, *args)

    monkeypatch.setattr(MemoryColumnTimers, "take", counted)
    run.operator.on_watermark(10)
    assert sorted(row["id"] for row in run.out.rows()) == list(range(2_000))
    assert max(held) < 600


class Again(Counts):
    """Registers a timer for a time that has passed, for every third key."""

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        found = super().on_timer(timers, context)
        context.timers.register_event_time(0, where=(found["id"] % 3 == 0) & (timers.times_ms == found["id"] % 7))
        return found


def test_what_waits_is_of_the_same_keys_while_others_fire(
    worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_process, "TIMERS_PER_CALL", 20)
    monkeypatch.setattr(column_backend, "SLOT_BYTES", 1 << 40)
    schema = pa.schema([("id", pa.int64())])
    run = Harness(process_spec("node", ("id",), Again(), schema), worker=worker)
    for start in range(0, 300, 50):
        run.send(pa.record_batch([pa.array(range(start, start + 50))], schema))
    run.operator.on_watermark(10)
    assert sorted(row["id"] for row in run.out.rows()) == list(range(300))
    run.out.batches.clear()
    run.operator.on_watermark(20)
    assert sorted(row["id"] for row in run.out.rows()) == list(range(0, 300, 3))


@each
def test_times_before_1970_come_first(make: Any, worker: WorkerStates) -> None:
    store = make(worker)
    found = timers(200, -100)
    register(store, found)
    assert fired(store, 1_000) == in_order(found)


@each
def test_a_snapshot_has_the_timers_in_memory_and_those_that_are_stored(make: Any, worker: WorkerStates) -> None:
    store = make(worker)
    register(store, timers(300))
    store.change(EVENT, [(("waits", 1), 9_000)], is_deletion=False)
    fired(store, 99)
    frozen = store.backend.freeze()
    wanted = sorted([*(timer for timer in timers(300) if timer[1] > 99), (("waits", 1), 9_000)])
    fired(store, 10_000)
    register(store, timers(50, 500))
    assert frozen.rows()[SECTION] == 201
    rows = rows_in(sections_of(frozen))[SECTION]
    assert sorted(((row["key0"], row["key1"]), row["time_ms"]) for row in rows) == wanted
    with states("memory") as memory:
        for one in (Rows(memory), Columns(memory), Rows(worker), Columns(worker)):
            one.backend.restore(sections_of(frozen), "here", Ownership(FEW_GROUPS, 1, 0))
            assert fired(one, 10_000) == in_order(wanted)


@each
def test_parts_of_a_snapshot_have_each_timer_once(
    make: Any, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headgate.state.rocksdb import database_snapshot as frozen_files

    monkeypatch.setattr(frozen_files, "RANGE_BYTES_MIN", 1)
    store = make(worker)
    register(store, timers(300))
    target = Parts(groups=FEW_GROUPS)
    store.backend.freeze().write_to(target)
    assert len(target.parts) == 8
    found = [row for _, sections in target.parts for row in rows_in(sections)[SECTION]]
    assert sorted(((row["key0"], row["key1"]), row["time_ms"]) for row in found) == sorted(timers(300))


@each
def test_a_timer_that_is_lost_on_its_way_is_missed(
    make: Any, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(worker)
    mark = Changes.mark
    monkeypatch.setattr(Changes, "mark", lambda self, rows: mark(self, list(rows)[1:]))
    register(store, timers(300))
    frozen = store.backend.freeze()
    assert frozen.rows()[SECTION] == 300
    assert len(rows_in(sections_of(frozen))[SECTION]) < 300


def test_timers_of_a_function_without_state_are_stored_too(worker: WorkerStates) -> None:
    factory = worker.of("node", 0, GROUPS)
    assert isinstance(factory.by_row(KEYS, [], has_timers=True), RocksRowBackend)
    assert isinstance(factory.by_column(KEYS, [], has_timers=True), RocksColumnBackend)


def test_timers_do_not_make_values_seem_small(worker: WorkerStates) -> None:
    store = Columns(worker)
    slots = store.backend.slots([pa.array(["a"], pa.large_string()), pa.array([1])])
    (count,) = store.backend._states  # type: ignore[attr-defined]
    store.backend.values(count).put(slots, pa.array([1]))
    store.backend.freeze()
    sizes = store.backend._local.database.sizes  # type: ignore[attr-defined]
    before = sizes.mean_bytes
    register(store, timers(300))
    assert sizes.mean_bytes == before == 8
