"""Windows in RocksDB: what is in memory, what a snapshot has of both, and what remains of a window that fired.

That they give what one query gives: ``tests/operators/windows/test_aligned_windows.py``, with every backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.state.backends import GROUPS, OWNER, Parts, payload_of, rows_in, sections_of, states
from tests.state.memory.test_window_backend import ADD_MAX, KEYS, ROWS, partials, window_of

from headgate.errors import CorruptionError
from headgate.state.backend import META, StateFactory, WindowRows
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.rocksdb import database_snapshot as frozen_files
from headgate.state.rocksdb import window_backend as rocks_windows
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.local_databases import LocalDatabase
from headgate.state.window_aggregates import partial_batch
from headgate.state.worker_backends import WorkerStates

Row = tuple[int | None, ...]
kinds = pytest.mark.parametrize("kind", ["kept", "merged"])


@pytest.fixture
def worker() -> Iterator[WorkerStates]:
    with states("rocksdb") as made:
        yield made


def made(worker: WorkerStates, kind: str) -> Any:
    factory: StateFactory = worker.of("node", 0, GROUPS)
    return factory.by_window(KEYS, ROWS) if kind == "kept" else factory.merged_by_window(KEYS, ROWS, ADD_MAX)


def add(state: Any, *rows: Row) -> None:
    batch = partials(*rows)
    state.add(window_of(batch), batch)


@contextmanager
def without_room() -> Iterator[None]:
    """Have everything go to the database when it is added."""
    with pytest.MonkeyPatch.context() as patch:
        for constant in ("MERGED_ROW_BYTES", "BATCH_COPIES"):
            patch.setattr(rocks_windows, constant, 1 << 40)
        yield


def store(state: Any, *rows: Row) -> None:
    """Add rows, and have everything in the database."""
    with without_room():
        add(state, *rows)


def taken(state: Any, window: int) -> list[Row]:
    """Take a window; return its rows, those that were merged in the order of their keys."""
    found = state.take(window)
    if isinstance(found, list):
        return [tuple(row.values()) for batch in found for row in batch.to_pylist()]
    batch = partial_batch(ROWS.section.schema, found.keys, window, found.table)
    return sorted((tuple(row.values()) for row in batch.to_pylist()), key=lambda row: row[0])


def in_snapshot(frozen: Any) -> list[Row]:
    return [tuple(row.values()) for row in rows_in(sections_of(frozen))["windows"]]


MANY: list[Row] = [(n % 7, n % 3, 1, n, n) for n in range(60)]
SUMS = {
    window: [
        (key, window, len(found), sum(found), max(found))
        for key in range(7)
        if (found := [n for k, w, _, n, _ in MANY if (k, w) == (key, window)])
    ]
    for window in range(3)
}


@kinds
def test_windows_that_have_no_room_are_in_the_database_and_fire_whole(kind: str, worker: WorkerStates) -> None:
    state = made(worker, kind)
    for start in range(0, 40, 10):
        store(state, *MANY[start : start + 10])
    assert state._front.windows() == []
    add(state, *MANY[40:])
    assert state.windows() == [0, 1, 2]
    kept = {window: [row for row in MANY if row[1] == window] for window in range(3)}
    wanted = kept if kind == "kept" else SUMS
    assert {window: taken(state, window) for window in (1, 0, 2)} == wanted, "rows that are kept in the order they came"
    assert state.windows() == []
    assert list(state._local.database.scan(b"", None)) == [], "nothing remains of a window that fired"
    add(state, (5, 1, 1, 1, 1))
    assert taken(state, 1) == [(5, 1, 1, 1, 1)], "it begins with nothing"


def test_partial_results_of_keys_far_apart_are_merged_each_into_its_own(worker: WorkerStates) -> None:
    state = made(worker, "merged")
    keys = [(n * 0x9E3779B97F4A7C15) % (1 << 63) for n in range(2_000)]
    store(state, *((key, 0, 1, n, n) for n, key in enumerate(keys)))
    store(state, *((key, 0, 1, n, n) for n, key in reversed(list(enumerate(keys)))))
    assert taken(state, 0) == sorted((key, 0, 2, 2 * n, n) for n, key in enumerate(keys))


@kinds
def test_a_snapshot_has_what_is_in_memory_and_what_is_stored_once(kind: str, worker: WorkerStates) -> None:
    state = made(worker, kind)
    state.meta = b"about"
    store(state, *MANY[:40])
    add(state, *MANY[40:], (9, -5, 1, 4, None))
    frozen = state.freeze()
    wanted: list[Row] = MANY if kind == "kept" else [row for rows in SUMS.values() for row in rows]
    wanted = [*wanted, (9, -5, 1, 4, None)]
    before = payload_of(frozen)
    for window in state.windows():
        taken(state, window)
    store(state, *MANY)
    assert payload_of(frozen) == before
    assert sorted(map(repr, in_snapshot(frozen))) == sorted(map(repr, wanted))
    assert frozen.rows() == {"windows": len(wanted)}
    assert bytes(sections_of(frozen)[META]) == b"about"
    with states("memory") as memory:
        for one in (made(memory, kind), made(worker, kind)):
            one.restore(sections_of(frozen), "here", OWNER)
            assert one.windows() == [-5, 0, 1, 2]
            assert taken(one, -5) == [(9, -5, 1, 4, None)]
            rows = sorted(taken(one, 1))
            assert rows == sorted(row for row in wanted if row[1] == 1)


@kinds
def test_windows_that_have_room_are_not_in_the_database(
    kind: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = made(worker, kind)
    add(state, *MANY)
    monkeypatch.delattr(LocalDatabase, "checkpoint")
    assert state.freeze().rows() == {"windows": 60 if kind == "kept" else 21}
    assert list(state._local.database.scan(b"", None)) == []


@kinds
def test_what_is_in_memory_is_written_back_when_it_is_much_and_before_a_checkpoint(
    kind: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocks_windows, "CHANGES_MAX", 20)
    state = made(worker, kind)
    add(state, *((n, 1, 1, n, n) for n in range(30)))
    assert state._front.windows() == [1], "nothing is in the database: there is room"
    store(state, (0, 1, 1, 0, 0))
    add(state, *((n, 1, 1, 1, 1) for n in range(3)), *((n, 2, 1, 1, 1) for n in range(17)))
    assert state._front.windows() == [1, 2]
    add(state, (7, 1, 1, 1, 99))
    assert state._front.windows() == [], "the pause of a checkpoint is bounded"
    add(state, (7, 2, 1, 1, 5))
    assert state._front.windows() == [2]
    assert state.freeze().rows() == {"windows": 53 if kind == "kept" else 47}
    assert state._front.windows() == []
    rows = taken(state, 1)
    if kind == "merged":
        assert rows[7] == (7, 1, 3, 15, 99) or rows[7] == (7, 1, 2, 8, 99)
    assert len(taken(state, 2)) == (18 if kind == "kept" else 17)
    add(state, *((n, 3, 1, 1, 1) for n in range(40)))
    assert state._front.windows() == [3], "there is room again"


def rows_of(found: Any, window: int) -> list[Row]:
    """Return the rows of a part of a window."""
    if isinstance(found, list):
        return [tuple(row.values()) for batch in found for row in batch.to_pylist()]
    batch = partial_batch(ROWS.section.schema, found.keys, window, found.table)
    return [tuple(row.values()) for row in batch.to_pylist()]


@kinds
def test_a_window_that_has_no_room_fires_in_parts(kind: str, worker: WorkerStates) -> None:
    state = made(worker, kind)
    many = [(n % 200, 1, 1, n, n) for n in range(600)]
    store(state, *many[:500])
    add(state, *many[500:], (5, 2, 1, 5, 5))
    whole = made(worker, kind)
    store(whole, *many)
    assert len(list(whole.parts(1))) == 1, "there is room"
    with without_room():
        parts = [rows_of(part, 1) for part in state.parts(1)]
        assert 20 < len(parts) <= GROUPS
        keys = [{row[0] for row in part} for part in parts]
        assert sum(map(len, keys)) == len(set().union(*keys)) == 200, "each has all that its keys have"
        rows = [row for part in parts for row in part]
        if kind == "kept":
            by_key = {key: [row[3] for row in rows if row[0] == key] for key in range(200)}
            assert by_key == {key: [key, key + 200, key + 400] for key in range(200)}, "in the order they came"
        else:
            assert sorted(rows) == [(key, 1, 3, 3 * key + 600, key + 400) for key in range(200)]
        assert state.windows() == [2]
        assert [row for part in state.parts(2) for row in rows_of(part, 2)] == [(5, 2, 1, 5, 5)]
    assert list(state._local.database.scan(b"", None)) == [], "nothing remains"


@kinds
def test_rows_of_a_part_of_a_window_that_are_missing_are_named(
    kind: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = made(worker, kind)
    store(state, *((n, 1, 1, n, n) for n in range(200)))
    some, calls = Database.some, []

    def one_less(self: Database, *args: Any) -> Any:
        calls.append(args)
        rows, values = some(self, *args)
        return (rows[1:], values[1:]) if len(calls) == 3 else (rows, values)

    monkeypatch.setattr(Database, "some", one_less)
    with without_room(), pytest.raises(CorruptionError, match=r"200 rows of a window.*199 rows"):
        list(state.parts(1))


@kinds
def test_rows_of_a_window_that_are_missing_are_named(
    kind: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = made(worker, kind)
    store(state, *MANY)
    some = Database.some

    def one_less(self: Database, *args: Any) -> Any:
        rows, values = some(self, *args)
        return rows[1:], values[1:]

    monkeypatch.setattr(Database, "some", one_less)
    with pytest.raises(CorruptionError, match=r"rows of a window"):
        state.take(1)


@kinds
def test_a_row_of_a_window_that_is_lost_on_its_way_is_missed(
    kind: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Changes.put
    monkeypatch.setattr(Changes, "put", lambda self, rows, values: put(self, list(rows)[1:], list(values)[1:]))
    state = made(worker, kind)
    store(state, *MANY)
    frozen = state.freeze()
    assert len(in_snapshot(frozen)) < frozen.rows()["windows"] == (60 if kind == "kept" else 21)


@kinds
def test_parts_of_a_snapshot_have_each_row_of_a_window_once(
    kind: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_files, "RANGE_BYTES_MIN", 1)
    state = made(worker, kind)
    store(state, *MANY[:30])
    add(state, *MANY[30:])
    target = Parts()
    state.freeze().write_to(target)
    assert len(target.parts) == 8
    found = [tuple(row.values()) for _, sections in target.parts for row in rows_in(sections)["windows"]]
    assert sorted(found) == sorted(MANY if kind == "kept" else [row for rows in SUMS.values() for row in rows])


def test_rows_with_nulls_and_of_any_type_come_back(worker: WorkerStates) -> None:
    schema = pa.schema([("name", pa.large_string()), ("at", pa.timestamp("us")), ("many", pa.large_list(pa.float64()))])
    rows = WindowRows(Section("rows", schema, ("name",)), lambda batch: np.zeros(batch.num_rows, np.int64))
    state: Any = worker.of("node", 0, GROUPS).by_window(KeyColumns(("name",), (pa.large_string(),)), rows)
    batch = pa.record_batch([["ä", ""], [None, 5], [[1.5, None], None]], schema)
    with without_room():
        state.add(np.zeros(2, np.int64), batch)
    assert pa.Table.from_batches(state.take(0)).to_pylist() == batch.to_pylist()
