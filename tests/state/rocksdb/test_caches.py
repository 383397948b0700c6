"""The cache in front of a database: what is read, what is written back, and what is given up."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.state.backends import GROUPS, rows_in, sections_of

from headgate.errors import StorageError
from headgate.model.config import RocksState
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, key_groups_of_subtask
from headgate.model.manifest import KeyGroups
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.state.backend import TimeKind
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.rocksdb import column_backend, row_backend
from headgate.state.rocksdb.column_backend import RocksColumnBackend
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.row_backend import RocksRowBackend
from headgate.state.snapshot import OwnedKeys
from headgate.state.worker_backends import WorkerStates, worker_states
from headgate.storage.memory import MemoryStorage

KEYS = KeyColumns(("id",), (pa.int64(),))
VALUE = StateDescriptor("value", StateKind.VALUE, pa.int64())
LIST = StateDescriptor("list", StateKind.LIST, pa.int64())
MAP = StateDescriptor("map", StateKind.MAP, pa.int64(), pa.int64())
ALL = [VALUE, LIST, MAP]


class Seen:
    """How many rows were asked for, and which were written and removed."""

    def __init__(self) -> None:
        self.read, self.put, self.removed = 0, 0, 0

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    get, put, delete = Database.get, Changes.put, Changes.delete

    def counted_get(self: Database, asked: Any) -> Any:
        found.read += len(asked)
        return get(self, asked)

    def counted_put(self: Changes, put_rows: Any, values: Any) -> None:
        listed = list(put_rows)
        found.put += len(listed)
        put(self, listed, values)

    def counted_delete(self: Changes, gone: Any) -> None:
        listed = list(gone)
        found.removed += len(listed)
        delete(self, listed)

    monkeypatch.setattr(Database, "get", counted_get)
    monkeypatch.setattr(Changes, "put", counted_put)
    monkeypatch.setattr(Changes, "delete", counted_delete)
    return found


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerStates]:
    made = worker_states(RocksState(16 << 20, str(tmp_path)), None)
    yield made
    made.close()


def columns(worker: WorkerStates, *, has_timers: bool = False) -> RocksColumnBackend:
    made = worker.of("node", 0, GROUPS).by_column(KEYS, ALL, has_timers=has_timers)
    assert isinstance(made, RocksColumnBackend)
    return made


def in_rows(worker: WorkerStates) -> RocksRowBackend:
    made = worker.of("node", 0, GROUPS).by_row(KEYS, ALL)
    assert isinstance(made, RocksRowBackend)
    return made


def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_backend, "SLOT_BYTES", 1 << 40)
    monkeypatch.setattr(row_backend, "CACHE_ROW_BYTES", 1 << 40)


def forget(backend: RocksRowBackend) -> None:
    """Have nothing in a cache without room: another key comes twice."""
    for _ in range(2):
        backend.absorb()
        for descriptor in ALL:
            backend.cells(descriptor).get(-1)
    backend.absorb()


def test_hot_keys_are_not_written_before_a_checkpoint_nor_read_again(worker: WorkerStates, seen: Seen) -> None:
    backend, numbers = columns(worker), pa.array(range(1_000))
    for _ in range(20):
        backend.prepare()
        backend.values(VALUE).put(backend.slots([numbers]), numbers)
    assert seen.read == 3_000, "each key is looked up once, in each of three states"
    assert seen.put == 1_000, "and written once, to know how large the values are"
    backend.freeze()
    assert seen.put == 2_000
    seen.clear()
    by_row = in_rows(worker)
    for _ in range(20):
        by_row.absorb()
        by_row.expect([numbers])
        for key in range(1_000):
            by_row.cells(VALUE).put(key, key)
    assert (seen.read, seen.put) == (3_000, 1_000)
    by_row.freeze()
    assert seen.put == 2_000


def test_what_is_much_is_written_back_between_batches(
    worker: WorkerStates, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the pause of a checkpoint is bounded."""
    for module in (column_backend, row_backend):
        monkeypatch.setattr(module, "CHANGES_MAX", 99)
    backend, by_row = columns(worker), in_rows(worker)
    for count, written in ((1, 1), (99, 0), (100, 100)):
        seen.clear()
        numbers = pa.array(range(count))
        backend.values(VALUE).put(backend.slots([numbers]), numbers)
        backend.prepare()
        assert seen.put == written
        for key in range(count):
            by_row.cells(VALUE).put(key, key)
        by_row.absorb()
        assert seen.put == 2 * written


@pytest.mark.parametrize("view", ["columns", "rows"])
def test_of_lists_and_maps_only_what_differs_is_written(worker: WorkerStates, seen: Seen, view: str) -> None:
    if view == "columns":
        backend = columns(worker)
        slots = backend.slots([pa.array([1] * 50)])
        many = pa.array(range(50))
        backend.lists(LIST).append(slots, many)
        backend.maps(MAP).put(slots, many, many)
        backend.freeze()
        seen.clear()
        backend.lists(LIST).append(slots[:1], many[7:8])
        backend.maps(MAP).put(slots[:1], many[7:8], many[:1])
        backend.maps(MAP).remove(slots[:1], many[9:10])
        backend.freeze()
    else:
        by_row = in_rows(worker)
        by_row.cells(LIST).put(1, list(range(50)))
        by_row.cells(MAP).put(1, {n: n for n in range(50)})
        by_row.freeze()
        seen.clear()
        by_row.cells(LIST).writable(1).append(7)
        by_row.cells(MAP).writable(1)[7] = 0
        del by_row.cells(MAP).writable(1)[9]
        by_row.freeze()
    assert (seen.put, seen.removed) == (4, 1), "an element, an entry and two counts; an entry that is gone"


@pytest.mark.parametrize("view", ["columns", "rows"])
def test_what_a_list_or_map_lost_does_not_come_back(
    worker: WorkerStates, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)
    if view == "columns":
        backend = columns(worker)

        def write(elements: int) -> None:
            backend.prepare()
            slots, many = backend.slots([pa.array([1] * elements)]), pa.array(range(elements))
            backend.lists(LIST).clear(slots)
            backend.maps(MAP).clear(slots)
            backend.lists(LIST).append(slots, many)
            backend.maps(MAP).put(slots, many, many)

        write(9)
        write(2)
        frozen = backend.freeze()
    else:
        by_row = in_rows(worker)
        for elements in (9, 2):
            forget(by_row)
            by_row.cells(LIST).put(1, list(range(elements)))
            by_row.cells(MAP).put(1, {n: n for n in range(elements)})
        frozen = by_row.freeze()
    found = rows_in(sections_of(frozen))
    assert [row["value"] for row in found["list"]] == [row["value"] for row in found["map"]] == [0, 1]
    assert frozen.rows() == {"value": 0, "list": 2, "map": 2}


@pytest.mark.parametrize("view", ["columns", "rows"])
def test_what_was_given_up_comes_back_as_it_was(
    worker: WorkerStates, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)
    if view == "columns":
        backend = columns(worker)
        for n in range(10):
            backend.prepare()
            backend.values(VALUE).put(backend.slots([pa.array([n])]), pa.array([n]))
        backend.prepare()
        assert len(backend._index) == 0, "nothing has room"
        found = backend.values(VALUE).get(backend.slots([pa.array(range(10))])).to_pylist()
        frozen = backend.freeze()
    else:
        by_row = in_rows(worker)
        for n in range(10):
            by_row.absorb()
            by_row.cells(VALUE).put(n, n)
        forget(by_row)
        found = [by_row.cells(VALUE).get(n) for n in range(10)]
        frozen = by_row.freeze()
    assert found == list(range(10))
    assert frozen.rows() == {"value": 10, "list": 0, "map": 0}


def test_keys_that_were_used_last_stay(worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = columns(worker)
    for start in (0, 100, 200):
        backend.prepare()
        numbers = pa.array(range(start, start + 100))
        backend.values(VALUE).put(backend.slots([numbers]), numbers)
    monkeypatch.setattr(column_backend, "SLOT_BYTES", (6 << 20) // 100 - 100)
    monkeypatch.setattr(column_backend, "_COPIES", 0)
    backend.prepare()
    assert sorted(backend.key_columns(np.arange(100))[0].to_pylist()) == list(range(200, 300))
    assert len(backend._index) == 100


def test_keys_that_stay_in_a_cache_keep_their_state(worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = columns(worker)
    for start in range(0, 300, 50):
        backend.prepare()
        numbers = pa.array(np.arange(start, start + 50) << 40)
        backend.values(VALUE).put(backend.slots([numbers]), numbers)
    monkeypatch.setattr(column_backend, "SLOT_BYTES", (6 << 20) // 100 - 100)
    monkeypatch.setattr(column_backend, "_COPIES", 0)
    backend.prepare()
    assert len(backend._index) < 300
    numbers = pa.array(np.arange(300) << 40)
    assert backend.values(VALUE).get(backend.slots([numbers])) == numbers


def test_keys_that_were_used_last_stay_after_any_number_of_batches(
    worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_backend, "TURNS_MAX", 4)
    backend = columns(worker)
    for turn in range(40):
        backend.prepare()
        numbers = pa.array(range(10 * (turn % 4), 10 * (turn % 4) + 10))
        backend.values(VALUE).put(backend.slots([numbers]), numbers)
        assert backend._used.read(40)[:40].max() <= 4
    monkeypatch.setattr(column_backend, "SLOT_BYTES", (8 << 20) // 20)
    backend._evict()
    assert sorted(backend.key_columns(np.arange(len(backend._index)))[0].to_pylist())[-10:] == list(range(30, 40))


def test_states_that_changed_for_other_keys_are_written_for_theirs(worker: WorkerStates) -> None:
    others = [StateDescriptor(name, StateKind.VALUE, pa.int64()) for name in ("a", "b", "c")]
    backend = worker.of("node", 0, GROUPS).by_column(KEYS, [*others, MAP])
    for number, descriptor in enumerate(others):  # the first two for the same keys
        numbers = pa.array(range(40 * (number // 2), 40 * (number // 2) + 50))
        backend.values(descriptor).put(backend.slots([numbers]), numbers)
    backend.maps(MAP).put(backend.slots([numbers]), numbers, numbers)
    found = rows_in(sections_of(backend.freeze()))
    for name, first in (("a", 0), ("b", 0), ("c", 40), ("map", 40)):
        assert [(row["key0"], row["value"]) for row in found[name]] == [(n, n) for n in range(first, first + 50)]


@pytest.mark.parametrize(
    ("key_type", "dtype"),
    [
        (pa.int64(), pa.int64()),
        (pa.large_string(), pa.int64()),
        (pa.int64(), pa.large_string()),
        (pa.int64(), pa.struct([("a", pa.int64()), ("b", pa.float64()), ("c", pa.large_string())])),
    ],
    ids=str,
)
def test_a_cache_takes_no_more_memory_than_it_may(key_type: pa.DataType, dtype: Any, tmp_path: Path) -> None:
    worker = worker_states(RocksState(4 << 20, str(tmp_path)), None)
    value = StateDescriptor("value", StateKind.VALUE, dtype)
    backend = worker.of("node", 0, GROUPS).by_column(KeyColumns(("id",), (key_type,)), [value])
    assert isinstance(backend, RocksColumnBackend)
    taken: list[int] = []
    keys: list[int] = []
    gc.collect()  # what other tests left would seem to be given back by this one
    arrow_before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        while sum(np.diff(keys) < 0) < 2:  # until some were given up, and again
            numbers = np.arange(len(keys) * 512, (len(keys) + 1) * 512) * 7_919_317 % 1_000_000_007
            texts = pa.array([f"a text of some length {n}" for n in numbers.tolist()], pa.large_string())
            columns = [texts if key_type == pa.large_string() else pa.array(numbers)]
            parts = {pa.large_string(): texts, pa.int64(): pa.array(numbers)}
            if dtype in parts:
                values = parts[dtype]
            else:
                values = pa.StructArray.from_arrays([pa.array(numbers), pa.array(numbers / 3), texts], list("abc"))
            backend.values(value).put(backend.slots(columns), values)
            del numbers, texts, columns, parts, values
            backend.prepare()
            taken.append(tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - arrow_before)
            keys.append(len(backend._index))
            assert backend._cached_bytes() <= backend._local.cache_bytes
            assert taken[-1] < backend._local.cache_bytes
    finally:
        tracemalloc.stop()
        worker.close()
    if key_type != pa.large_string():  # what Polars has for texts is not counted here, and is estimated
        assert max(taken) > backend._local.cache_bytes // 4, "which it uses"


def test_large_values_have_less_room(worker: WorkerStates) -> None:
    text = StateDescriptor("text", StateKind.VALUE, pa.large_string())
    for size, is_kept in ((10, True), (100_000, False)):
        backend = worker.of("node", 0, GROUPS).by_column(KEYS, [text])
        assert isinstance(backend, RocksColumnBackend)
        backend.values(text).put(backend.slots([pa.array(range(50))]), pa.array(["x" * size] * 50, pa.large_string()))
        backend.prepare()
        assert (len(backend._index) == 50) is is_kept
        by_row = worker.of("node", 0, GROUPS).by_row(KEYS, [text])
        for key in range(50):
            by_row.cells(text).put(key, "x" * size)
        by_row.absorb()
        assert isinstance(by_row, RocksRowBackend)
        assert (len(by_row.cells(text)._young) == 50) is is_kept


def test_timers_find_the_state_of_keys_that_were_given_up(
    worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)
    backend, numbers = columns(worker, has_timers=True), pa.array(range(5))
    assert backend.timers is not None
    slots = backend.slots([numbers])
    backend.values(VALUE).put(slots, numbers)
    backend.timers.of(TimeKind.EVENT_TIME).register(slots, np.arange(5))
    for _ in range(3):
        backend.prepare()
    found, _ = backend.timers.of(TimeKind.EVENT_TIME).take(10, 5)
    keys = backend.key_columns(found)[0].to_pylist()
    assert backend.values(VALUE).get(found).to_pylist() == keys
    assert sorted(keys) == list(range(5))


def test_a_read_that_failed_is_not_remembered_as_nothing(worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    without_room(monkeypatch)
    backend = in_rows(worker)
    backend.cells(VALUE).put(1, 7)
    forget(backend)

    def failing(*_: object) -> None:
        raise StorageError("read", "x", "injected")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "get", failing)
        with pytest.raises(StorageError, match="injected"):
            backend.cells(VALUE).get(1)
    assert backend.cells(VALUE).get(1) == 7


@pytest.mark.parametrize("view", ["columns", "rows"])
def test_a_row_that_is_lost_on_its_way_is_missed_before_the_checkpoint_counts(
    worker: WorkerStates, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Changes.put

    def lossy(self: Changes, put_rows: Any, values: Any) -> None:
        pairs = list(zip(put_rows, values, strict=True))[1:]
        put(self, [row for row, _ in pairs], [value for _, value in pairs])

    backend: Any = columns(worker) if view == "columns" else in_rows(worker)
    if view == "columns":
        backend.values(VALUE).put(backend.slots([pa.array(range(5))]), pa.array(range(5)))
    else:
        for key in range(5):
            backend.cells(VALUE).put(key, key)
    with monkeypatch.context() as patch:
        patch.setattr(Changes, "put", lossy)
        frozen = backend.freeze()
    owned = key_groups_of_subtask(0, GROUPS, 1)
    to = SnapshotDestination(
        MemoryStorage(), "p", Generation(1), 0, OwnedKeys(KeyGroups(owned.start, len(owned)), GROUPS)
    )
    target = SubtaskTarget(to, SubtaskId(VertexId("v"), 0), CheckpointId(1))
    with pytest.raises(AssertionError, match="must have 5 rows of state 'value', but has 4 rows"):
        target.put_state("node", frozen)
