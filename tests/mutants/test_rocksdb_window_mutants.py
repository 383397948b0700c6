"""Mutants of windows in RocksDB: rows that are lost, come twice, in another order, or stay for ever (RB12)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.mutants.test_rocksdb_timer_mutants import Both
from tests.operators.windows import test_windows as operators
from tests.state.backends import choose, states
from tests.state.rocksdb import test_rocksdb_windows as rocks

from headgate.operators.windows import window
from headgate.state.choice import WorkerStates
from headgate.state.rocksdb.database import Changes
from headgate.state.rocksdb.stored_windows import StoredWindows
from headgate.state.rocksdb.windows import RocksMergedRows, RocksWindowRows, _RocksWindows

Patch = AbstractContextManager[None]


def all_windows_stay_in_memory() -> Patch:
    return patched(RocksMergedRows, "_tidy", lambda self, rows: None)


def what_is_stored_of_a_window_does_not_fire() -> Patch:
    return patched(StoredWindows, "has", lambda self, window: False)


def what_fired_stays_in_the_database() -> Patch:
    return patched(Changes, "delete", lambda self, rows: None)


def rows_fire_in_the_order_of_their_key_groups() -> Patch:
    take = StoredWindows.take
    return patched(StoredWindows, "take", lambda self, window, is_by_suffix=False: take(self, window))


def every_batch_counts_its_rows_from_the_beginning() -> Patch:
    store = RocksWindowRows._store

    def from_zero(self: RocksWindowRows, window: int, batch: Any) -> None:
        self._rows_before = 0
        store(self, window, batch)

    return patched(RocksWindowRows, "_store", from_zero)


def a_partial_result_takes_the_place_of_the_stored_one() -> Patch:
    return patched(RocksMergedRows, "_merged", lambda self, window, batch, found: batch)


def a_partial_result_that_is_there_counts_again() -> Patch:
    put = StoredWindows.put

    def counted(self: StoredWindows, window: int, groups: Any, keys: Any, rows: Any, new: int) -> None:
        put(self, window, groups, keys, rows, rows.num_rows)

    return patched(StoredWindows, "put", counted)


def what_is_in_memory_is_never_written_back() -> Patch:
    first, second = (patched(one, "_write_back", lambda self: None) for one in (RocksMergedRows, RocksWindowRows))
    return Both(first, second)


def nothing_is_written_back_while_there_is_room() -> Patch:
    def tidy(self: Any, rows: Any) -> None:
        if self._held(rows)[1] > self._place.cache_bytes:
            self._write_back()

    return patched(_RocksWindows, "_tidy", tidy)


def a_snapshot_forgets_what_is_in_memory() -> Patch:
    freeze = _RocksWindows.freeze

    def only_stored(self: Any) -> Any:
        with what_is_in_memory_is_never_written_back():
            return freeze(self)

    return patched(_RocksWindows, "freeze", only_stored)


def a_part_of_a_window_is_all_of_it() -> Patch:
    parts = StoredWindows.parts

    def first(self: StoredWindows, window: int, rows_max: int, *, is_by_suffix: bool = False) -> Any:
        yield next(parts(self, window, rows_max, is_by_suffix=is_by_suffix))

    return patched(StoredWindows, "parts", first)


def what_is_in_memory_of_a_window_comes_as_a_part_of_its_own() -> Patch:
    def apart(self: Any, window: int) -> Any:
        found = self._front.take(window) if self._front.has(window) else None
        for batch in self._stored.parts(window, 1, is_by_suffix=True):
            yield [batch]
        if found is not None:
            yield found

    return patched(RocksWindowRows, "parts", apart)


def windows_are_read_whole() -> Patch:
    return Both(*(patched(one, "_part_rows", 1 << 40) for one in (RocksWindowRows, RocksMergedRows)))


def results_come_in_the_order_of_key_groups() -> Patch:
    return patched(window, "key_order", lambda batch, keys: pa.array(range(batch.num_rows)))


@pytest.fixture
def worker() -> Iterator[WorkerStates]:
    with states("rocksdb") as made:
        yield made


WHOLE = rocks.test_windows_that_have_no_room_are_in_the_database_and_fire_whole
SNAPSHOT = rocks.test_a_snapshot_has_what_is_in_memory_and_what_is_stored_once


@pytest.mark.parametrize(
    ("mutant", "test", "kind"),
    [
        (all_windows_stay_in_memory, WHOLE, "merged"),
        (what_is_stored_of_a_window_does_not_fire, WHOLE, "kept"),
        (what_is_stored_of_a_window_does_not_fire, WHOLE, "merged"),
        (what_fired_stays_in_the_database, WHOLE, "kept"),
        (what_fired_stays_in_the_database, WHOLE, "merged"),
        (rows_fire_in_the_order_of_their_key_groups, WHOLE, "kept"),
        (every_batch_counts_its_rows_from_the_beginning, WHOLE, "kept"),
        (a_partial_result_takes_the_place_of_the_stored_one, WHOLE, "merged"),
        (a_partial_result_that_is_there_counts_again, WHOLE, "merged"),
        (what_is_in_memory_is_never_written_back, WHOLE, "kept"),
        (what_is_in_memory_is_never_written_back, WHOLE, "merged"),
        (a_snapshot_forgets_what_is_in_memory, SNAPSHOT, "kept"),
        (a_snapshot_forgets_what_is_in_memory, SNAPSHOT, "merged"),
    ],
)
def test_bugs_of_windows_in_rocksdb_are_caught(mutant: Mutant, test: Any, kind: str, worker: WorkerStates) -> None:
    assert_caught(mutant, test, kind, worker)


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        (a_part_of_a_window_is_all_of_it, "kept"),
        (a_part_of_a_window_is_all_of_it, "merged"),
        (what_is_in_memory_of_a_window_comes_as_a_part_of_its_own, "kept"),
        (windows_are_read_whole, "kept"),
        (windows_are_read_whole, "merged"),
    ],
)
def test_bugs_of_windows_in_parts_are_caught(mutant: Mutant, kind: str, worker: WorkerStates) -> None:
    assert_caught(mutant, rocks.test_a_window_that_has_no_room_fires_in_parts, kind, worker)


def test_results_in_another_order_are_caught() -> None:
    test = operators.test_results_are_emitted_before_the_watermark_and_sorted_by_window_and_key
    with choose("rocksdb-without-cache"):
        assert_caught(results_come_in_the_order_of_key_groups, test)


@pytest.mark.parametrize("kind", ["kept", "merged"])
def test_changes_that_are_never_written_back_are_caught(
    kind: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = rocks.test_what_is_in_memory_is_written_back_when_it_is_much_and_before_a_checkpoint
    assert_caught(nothing_is_written_back_while_there_is_room, test, kind, worker, monkeypatch)
