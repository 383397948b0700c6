"""Timers of every backend, by row and by column, against a plain set, however small their runs and heaps are."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.state.backends import IN_FILES, Chosen, Moved, restore, states

from headgate.codec.snapshot import decode_sections
from headgate.model.ids import key_groups_of_subtask
from headgate.state.backend import ColumnBackend, Ownership, RowBackend, TimeKind
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.memory import column_backend
from headgate.state.memory import timers as timers_module
from headgate.state.rocksdb import timers as rocks_timers
from headgate.state.snapshot import FrozenState
from headgate.state.worker_backends import WorkerStates

KEYS = KeyColumns(("name", "number"), (pa.large_string(), pa.int64()))
COUNT = StateDescriptor("count", StateKind.VALUE, pa.int64())
GROUPS = 16

Timer = tuple[tuple[str, int], int]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers_module, "_TAIL_ROWS", 8)
    monkeypatch.setattr(timers_module, "_TAIL_PARTS", 3)
    monkeypatch.setattr(timers_module, "_RUNS_MERGED", 2)
    monkeypatch.setattr(timers_module, "_DUE_ROWS", 6)
    monkeypatch.setattr(timers_module, "_STALE_TIMES_MAX", 2)
    monkeypatch.setattr(column_backend, "_RENUMBER_MIN", 4)
    monkeypatch.setattr(rocks_timers, "FRONT_MAX", 5)
    monkeypatch.setattr(rocks_timers, "WAITING_MAX", 6)


def arrays(keys: list[tuple[str, int]]) -> list[pa.Array]:
    return [pa.array([k[i] for k in keys], dtype) for i, dtype in enumerate(KEYS.types)]


def hash_of(key: tuple[str, int]) -> int:
    return int(hash_columns(pa.RecordBatch.from_arrays(arrays([key]), names=list(KEYS.names)), KEYS.names)[0])


class Rows:
    """Timers by row."""

    def __init__(self, worker: WorkerStates = Chosen.worker) -> None:
        self.backend: RowBackend = worker.of("node", 0, GROUPS).by_row(KEYS, [COUNT], has_timers=True)

    def change(self, kind: TimeKind, timers: list[Timer], *, is_deletion: bool) -> None:
        assert self.backend.timers is not None
        held = self.backend.timers.of(kind)
        for key, time_ms in timers:
            (held.delete if is_deletion else held.register)(key, time_ms)

    def take(self, kind: TimeKind, until_ms: int, count_max: int) -> list[Timer]:
        assert self.backend.timers is not None
        found = self.backend.timers.of(kind).take(until_ms, count_max)
        return [] if found is None else [(key, found[0]) for key in found[1]]

    def between_batches(self) -> None:
        self.backend.absorb()


class Columns:
    """Timers by column."""

    def __init__(self, worker: WorkerStates = Chosen.worker) -> None:
        self.backend: ColumnBackend = worker.of("node", 0, GROUPS).by_column(KEYS, [COUNT], has_timers=True)

    def change(self, kind: TimeKind, timers: list[Timer], *, is_deletion: bool) -> None:
        assert self.backend.timers is not None
        held = self.backend.timers.of(kind)
        slots = self.backend.slots(arrays([key for key, _ in timers]))
        (held.delete if is_deletion else held.register)(slots, np.array([time for _, time in timers], np.int64))

    def take(self, kind: TimeKind, until_ms: int, count_max: int) -> list[Timer]:
        assert self.backend.timers is not None
        slots, times = self.backend.timers.of(kind).take(until_ms, count_max)
        assert len(set(slots.tolist())) == len(slots)
        names, numbers = (column.to_pylist() for column in self.backend.key_columns(slots))
        return list(zip(zip(names, numbers, strict=True), times.tolist(), strict=True))

    def between_batches(self) -> None:
        self.backend.prepare()


def bytes_of(frozen: FrozenState) -> bytes:
    return b"".join(bytes(memoryview(part)) for part in frozen.encode())


some_timers = st.lists(
    st.tuples(st.tuples(st.sampled_from("abcdé"), st.integers(0, 4)), st.integers(-5, 25)), min_size=1, max_size=12
)
kinds = st.sampled_from(TimeKind)


class Machine(RuleBasedStateMachine):
    """All backends and a set for each kind; times may be taken in parts, with changes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.open = ExitStack()
        self.workers = [Chosen.worker, self.open.enter_context(states(IN_FILES))]
        self.stores: list[Rows | Columns] = [make(worker) for worker in self.workers for make in (Rows, Columns)]
        self.wanted: dict[TimeKind, set[Timer]] = {kind: set() for kind in TimeKind}
        self.until = dict.fromkeys(TimeKind, -10)
        self.frozen: list[tuple[FrozenState, dict[TimeKind, set[Timer]]]] = []

    @rule(kind=kinds, timers=some_timers, is_deletion=st.booleans())
    def change(self, kind: TimeKind, timers: list[Timer], is_deletion: bool) -> None:
        for store in self.stores:
            store.between_batches()
            store.change(kind, timers, is_deletion=is_deletion)
        if is_deletion:
            self.wanted[kind] -= set(timers)
        else:
            self.wanted[kind] |= set(timers)

    @rule(kind=kinds, by_ms=st.integers(0, 10), count_max=st.integers(1, 9), all_of_it=st.booleans())
    def fire(self, kind: TimeKind, by_ms: int, count_max: int, all_of_it: bool) -> None:
        self.until[kind] += by_ms
        wanted = sorted((t for t in self.wanted[kind] if t[1] <= self.until[kind]), key=lambda t: (t[1], hash_of(t[0])))
        count = len(wanted) if all_of_it else min(count_max, len(wanted))
        for store in self.stores:
            found: list[Timer] = []
            while len(found) < count:
                part = store.take(kind, self.until[kind], min(count_max, count - len(found)))
                found += part
            if isinstance(store, Columns) or len(found) == len(wanted):
                assert sorted(found) == sorted(wanted[:count])
            assert [t[1] for t in found] == [t[1] for t in wanted[:count]]
            if isinstance(store, Columns):
                assert found == wanted[:count]
            if count < len(wanted):  # keys of one time that are left may be others in each form: make them the same
                store.change(kind, found, is_deletion=False)
                store.change(kind, wanted[:count], is_deletion=True)
        self.wanted[kind] -= set(wanted[:count])

    @rule()
    def freeze(self) -> None:
        for store in self.stores:
            self.frozen.append((store.backend.freeze(), {kind: set(found) for kind, found in self.wanted.items()}))

    @rule()
    def go_on_with_a_checkpoint(self) -> None:
        for place, store in enumerate(self.stores):
            heir = type(store)(self.workers[place // 2])
            moved = Moved(store.backend.freeze(), groups=GROUPS)
            assert restore(heir.backend, [moved]) == bool(moved.files), "those in RocksDB, if anything is there"
            self.stores[place] = heir

    @rule(parallelism=st.integers(1, 3))
    def restore_what_was_frozen(self, parallelism: int) -> None:
        for frozen, wanted in self.frozen:
            sections = decode_sections(memoryview(bytes_of(frozen)), "here")
            assert frozen.rows() == {"count": 0, **{f"headgate.timers.{k.value}": len(t) for k, t in wanted.items()}}
            for index in range(parallelism):
                groups = key_groups_of_subtask(index, GROUPS, parallelism)
                for store in [make(worker) for worker in self.workers for make in (Rows, Columns)]:
                    store.backend.restore(sections, "here", Ownership(GROUPS, parallelism, index))
                    for kind in TimeKind:
                        mine = {t for t in wanted[kind] if hash_of(t[0]) % GROUPS in groups}
                        found: set[Timer] = set()
                        while part := store.take(kind, 100, 5):
                            found |= set(part)
                        assert found == mine
            frozen.release()
        self.frozen.clear()

    def teardown(self) -> None:
        self.open.close()

    @invariant()
    def the_next_time_is_known(self) -> None:
        for store in self.stores:
            timers = store.backend.timers
            assert timers is not None
            for kind, wanted in self.wanted.items():
                next_ms = timers.of(kind).next_ms()
                least = min((time for _, time in wanted), default=None)
                if isinstance(store, Rows):
                    assert next_ms == least
                    assert len(timers.of(kind)) == len(wanted)
                elif least is not None:
                    assert next_ms is not None
                    assert next_ms <= least, "it may be that of a deleted timer, and never too late"


TestTimersAreWhatASetIs = Machine.TestCase
pytest.mark.long(TestTimersAreWhatASetIs)
TestTimersAreWhatASetIs.settings = settings(max_examples=25, stateful_step_count=25)


def test_the_groups_of_the_model_are_those_of_the_product() -> None:
    key = ("é", 3)
    hashes = hash_columns(pa.RecordBatch.from_arrays(arrays([key]), names=list(KEYS.names)), KEYS.names)
    assert int(key_groups(hashes, GROUPS)[0]) == hash_of(key) % GROUPS


@pytest.mark.parametrize("make", [Rows, Columns])
def test_a_snapshot_that_is_written_later_has_no_timer_that_came_behind_its_barrier(make: Any) -> None:
    store = make()
    store.change(TimeKind.EVENT_TIME, [(("a", n), n) for n in range(100)], is_deletion=False)
    first = store.backend.freeze()
    bytes_of(first)  # counted: the next one is told from it, and from what was done since
    for number in range(3):
        store.between_batches()
        frozen = store.backend.freeze()
        store.change(TimeKind.EVENT_TIME, [(("b", number), 50 + number)], is_deletion=False)
        assert frozen.rows()[f"headgate.timers.{TimeKind.EVENT_TIME.value}"] == 100 + number
        sections = decode_sections(memoryview(bytes_of(frozen)), "here")
        heir = make()
        heir.backend.restore(sections, "here", Ownership(GROUPS, 1, 0))
        found = [key for key, _ in all_of(heir)]
        assert sorted(found) == [("a", n) for n in range(100)] + [("b", n) for n in range(number)]


def all_of(store: Any) -> list[Timer]:
    found: list[Timer] = []
    while part := store.take(TimeKind.EVENT_TIME, 1_000, 50):
        found += part
    return found


@pytest.mark.parametrize("make", [Rows, Columns])
def test_what_is_deleted_and_registered_again_and_again_takes_no_more_room(make: Any) -> None:
    store = make()
    key = ("a", 1)
    for step in range(2_000):
        store.between_batches()
        store.change(TimeKind.EVENT_TIME, [(key, 1_000 + step)], is_deletion=False)
        store.change(TimeKind.EVENT_TIME, [(key, 1_000 + step - 1)], is_deletion=True)
    timers = store.backend.timers
    assert timers is not None
    held = timers.event_time
    if isinstance(store, Rows):
        assert len(held._heap) < 20
    else:
        assert len(held) < 200
    assert store.take(TimeKind.EVENT_TIME, 10_000, 5) == [(key, 2_999)]
