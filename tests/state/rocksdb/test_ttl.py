"""States with a TTL in RocksDB: what is in the database, when it goes from there, and what a restore does.

What functions see is tested with every backend: ``tests/operators/process/test_ttl.py``, ``test_ttl_histories.py`` and
``tests/state/test_ttl.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from tests.state.backends import GROUPS, OWNER, rows_in, sections_of, states

import headgate as hg
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.rocksdb import column_backend
from headgate.state.rocksdb import ttl as ttl_module
from headgate.state.rocksdb.column_backend import RocksColumnBackend
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.row_backend import RocksRowBackend
from headgate.state.rocksdb.row_encoding import runs
from headgate.state.snapshot import FrozenState
from headgate.state.ttl import EXPIRES_COLUMN
from headgate.state.worker_backends import WorkerStates

KEYS = KeyColumns(("id",), (pa.int64(),))
HOUR_MS = 3_600_000
views = pytest.mark.parametrize("view", ["columns", "rows"])


def declared(ttl: hg.TTL | None) -> tuple[StateDescriptor, ...]:
    return (
        StateDescriptor("value", StateKind.VALUE, pa.int64(), ttl=ttl),
        StateDescriptor("list", StateKind.LIST, pa.int64(), ttl=ttl),
        StateDescriptor("map", StateKind.MAP, pa.int64(), pa.int64(), ttl=ttl),
    )


ALL = declared(hg.TTL("1h"))
VALUE, LIST, MAP = ALL


@pytest.fixture
def worker() -> Iterator[WorkerStates]:
    with states("rocksdb") as made:
        yield made


class Columns:
    """Three states by column."""

    def __init__(self, worker: WorkerStates, descriptors: tuple[StateDescriptor, ...] = ALL) -> None:
        made = worker.of("node", 0, GROUPS).by_column(KEYS, descriptors)
        assert isinstance(made, RocksColumnBackend)
        self.backend: Any = made
        self.descriptors = descriptors
        self.database = made._local.database

    def fill(self, first: int, count: int) -> None:
        """One more of everything for each of some keys."""
        value, list_, map_ = self.descriptors
        slots, numbers = self.backend.slots([pa.array(range(first, first + count))]), pa.array(range(count))
        self.backend.values(value).put(slots, numbers)
        self.backend.lists(list_).append(slots, numbers)
        self.backend.maps(map_).put(slots, pa.array([self.backend.time.now_ms] * count), numbers)

    def turn(self) -> None:
        self.backend.prepare()

    def forget(self) -> None:
        """Have everything in the database, and nothing in the cache."""
        self.backend.write_back()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(column_backend, "SLOT_BYTES", 1 << 40)
            self.backend._evict()


class Rows(Columns):
    """The same by row, as its handles would do it."""

    def __init__(self, worker: WorkerStates, descriptors: tuple[StateDescriptor, ...] = ALL) -> None:
        made = worker.of("node", 0, GROUPS).by_row(KEYS, descriptors)
        assert isinstance(made, RocksRowBackend)
        self.backend = made
        self.descriptors = descriptors
        self.database = made._objects._local.database

    def fill(self, first: int, count: int) -> None:
        value, list_, map_ = map(self.backend.cells, self.descriptors)
        now_ms = self.backend.time.now_ms
        for key in range(first, first + count):
            pair = (key - first, now_ms + HOUR_MS)
            value.put(key, pair)
            list_.put(key, [*(list_.get(key) or ()), pair])
            map_.put(key, {**(map_.get(key) or {}), now_ms: pair})

    def turn(self) -> None:
        self.backend.absorb()

    def forget(self) -> None:
        self.backend._objects.write_back()
        for cells in 2 * self.backend._objects.cells:
            cells.age()


def made(view: str, worker: WorkerStates, descriptors: tuple[StateDescriptor, ...] = ALL) -> Columns:
    return {"columns": Columns, "rows": Rows}[view](worker, descriptors)


def rows_of(database: Database) -> dict[int, int]:
    """Return how many rows each table has."""
    found: dict[int, int] = {}
    for rows, _ in database.scan(b"", None):
        for number, start, end in runs(rows):
            found[number] = found.get(number, 0) + end - start
    return found


@pytest.mark.parametrize("loaded", [2, 5])
def test_what_was_only_read_is_not_written_again(loaded: int, worker: WorkerStates) -> None:
    store = Columns(worker)
    store.fill(0, 5)
    store.forget()
    written = store.database.rows_written
    slots = store.backend.slots([pa.array(range(loaded))])
    assert store.backend.values(VALUE).get(slots).to_pylist() == [*range(loaded)]
    assert store.backend.lists(LIST).counts(slots).tolist() == [1] * loaded
    assert store.backend.maps(MAP).contains(slots, pa.array([0] * loaded)).all()
    store.backend.write_back()
    assert store.database.rows_written == written


@views
def test_what_has_expired_goes_from_the_database_while_only_another_key_is_used(
    view: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttl_module, "SWEEP_ROWS", 100)
    store = made(view, worker)
    store.fill(0, 300)
    store.forget()
    assert sum(rows_of(store.database).values()) == 5 * 300, "values, elements and entries, and two heads"
    store.backend.time.now_ms = HOUR_MS
    for _ in range(60):
        store.turn()
        store.fill(5_000, 1)
    store.forget()
    assert rows_of(store.database) == {0: 60, 1: 1, 2: 1, 3: 1, 4: 1}, "one key, with a list of 60 elements"


@views
def test_a_turn_looks_at_a_bounded_number_of_rows_and_more_if_more_was_written(
    view: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttl_module, "SWEEP_ROWS", 100)
    store = made(view, worker)
    store.turn()
    store.fill(0, 300)
    store.forget()
    looked: list[int] = []
    some = Database.some

    def counted(self: Database, start: bytes, count: int) -> Any:
        found = some(self, start, count)
        looked.append(len(found[0]))
        return found

    monkeypatch.setattr(Database, "some", counted)
    for _ in range(17):
        store.turn()
    assert looked == [1_500] + [100] * 15 + [0], "what was written counts twice; then it begins anew"


@views
def test_what_expired_is_in_no_snapshot_and_is_not_taken_for_lost(view: str, worker: WorkerStates) -> None:
    store = made(view, worker)
    store.fill(0, 5)
    store.forget()
    store.backend.time.now_ms = HOUR_MS - 1
    store.fill(3, 4)
    before = store.backend.freeze()
    store.backend.time.now_ms = HOUR_MS
    after = store.backend.freeze()
    assert before.rows() == {"value": 7, "list": 9, "map": 9}
    assert after.rows() == {"value": 4, "list": 4, "map": 4}
    for frozen in (before, after):
        found = {name: len(rows) for name, rows in rows_in(sections_of(frozen)).items()}
        assert found == frozen.rows(), "also later, and again"


@views
def test_a_row_with_an_expiry_that_is_lost_on_its_way_is_missed(
    view: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made(view, worker)
    store.fill(0, 3)
    store.forget()
    store.backend.time.now_ms = HOUR_MS
    store.fill(3, 5)
    put = Changes.put

    def lossy(self: Changes, rows: Any, values: Any) -> None:
        put(self, list(rows)[1:], list(values)[1:])

    with monkeypatch.context() as patch:
        patch.setattr(Changes, "put", lossy)
        frozen = store.backend.freeze()
    assert frozen.rows()["value"] == 5
    assert len(rows_in(sections_of(frozen))["value"]) == 4


@views
@pytest.mark.parametrize("kind", StateKind)
@pytest.mark.parametrize("former_ttl", [None, hg.TTL("2h"), hg.TTL("1h")])
def test_a_restore_shortens_only_what_would_live_too_long(
    view: str, kind: StateKind, former_ttl: hg.TTL | None, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = Columns(worker, declared(former_ttl))
    former.fill(0, 3)
    sections = sections_of(former.backend.freeze())
    store = made(view, worker)
    store.backend.time.now_ms = 7
    store.backend.restore(sections, "snapshot", OWNER)
    scans: list[bytes] = []
    scan = Database.scan
    monkeypatch.setattr(Database, "scan", lambda self, start, end: [scans.append(start), scan(self, start, end)][1])
    store.backend.end_restore()
    assert len(scans) == (0 if former_ttl == hg.TTL("1h") else 1), "otherwise nothing has to be looked at"
    found = rows_in(sections_of(store.backend.freeze()))[kind.value]
    expected = HOUR_MS if former_ttl == hg.TTL("1h") else HOUR_MS + 7
    assert [row[EXPIRES_COLUMN] for row in found] == [expected] * 3


@views
def test_what_expired_before_a_restore_does_not_come_into_the_database(view: str, worker: WorkerStates) -> None:
    former = Columns(worker)
    former.fill(0, 3)
    sections = sections_of(former.backend.freeze())
    store = made(view, worker)
    store.backend.time.now_ms = HOUR_MS
    store.backend.restore(sections, "snapshot", OWNER)
    store.backend.end_restore()
    assert rows_of(store.database) == {}
    assert store.backend.freeze().rows() == {"value": 0, "list": 0, "map": 0}


def test_entries_that_come_from_the_database_are_in_the_order_of_their_expiry(worker: WorkerStates) -> None:
    store = Rows(worker)
    cells = store.backend.cells(MAP)
    cells.put(1, {9: (0, 1), 5: (0, 2), 7: (0, 3)})
    sections = sections_of(store.backend.freeze())
    later = Rows(worker)
    later.backend.restore(sections, "snapshot", OWNER)
    assert list(later.backend.cells(MAP).get(1)) == [9, 5, 7]


@pytest.mark.parametrize("one", ["memory", "rocksdb"])
@pytest.mark.parametrize("other", ["memory", "rocksdb"])
def test_state_with_a_ttl_goes_on_on_either_backend(one: str, other: str) -> None:
    with states(one) as first, states(other) as second:
        former = first.of("node", 0, GROUPS).by_column(KEYS, ALL)
        slots, numbers = former.slots([pa.array([1, 2])]), pa.array([3, 4])
        former.values(VALUE).put(slots, numbers)
        former.time.now_ms = 5
        former.lists(LIST).append(slots, numbers)
        former.maps(MAP).put(slots, numbers, numbers)
        frozen = former.freeze()
        sections = sections_of(frozen)
        for make in (second.of("node", 0, GROUPS).by_row, second.of("node", 0, GROUPS).by_column):
            later: Any = make(KEYS, ALL)
            later.time.now_ms = 5
            later.restore(sections, "snapshot", OWNER)
            later.end_restore()
            again: FrozenState = later.freeze()
            assert rows_in(sections_of(again)) == rows_in(sections)
            assert again.rows() == frozen.rows() == {"value": 2, "list": 2, "map": 2}
            later.time.now_ms = HOUR_MS
            assert later.freeze().rows() == {"value": 0, "list": 2, "map": 2}


class Seen(hg.ProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        self.seen = state.value("seen", pa.bool_(), ttl=hg.TTL("1m"))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        self.seen.put(True)


def test_a_pipeline_on_rocksdb_may_have_state_with_a_ttl() -> None:
    made = hg.Pipeline("p", state=hg.RocksDB())
    made.source(hg.FromRows([{"n": 1}])).key_by("n").process(Seen(), name="dedup").sink(hg.Discard())
    assert made.definition()


@pytest.mark.parametrize("kind", StateKind)
def test_a_state_that_had_a_ttl_goes_on_on_rocksdb(kind: StateKind) -> None:
    key_type = pa.int64() if kind is StateKind.MAP else None
    had, has = (StateDescriptor("s", kind, pa.int64(), key_type, ttl) for ttl in (hg.TTL("1m"), None))
    with states("memory") as memory, states("rocksdb") as rocks:
        former = memory.of("node", 0, GROUPS).by_column(KEYS, [had])
        slots, numbers = former.slots([pa.array([1, 2])]), pa.array([3, 4])
        match kind:
            case StateKind.VALUE:
                former.values(had).put(slots, numbers)
            case StateKind.LIST:
                former.lists(had).append(slots, numbers)
            case StateKind.MAP:
                former.maps(had).put(slots, numbers, numbers)
        sections = sections_of(former.freeze())
        for made in (rocks.of("node", 0, GROUPS).by_row, rocks.of("node", 0, GROUPS).by_column):
            later = made(KEYS, [has])
            later.restore(sections, "snapshot", OWNER)
            later.end_restore()
            assert later.freeze().rows() == {"s": 2}
