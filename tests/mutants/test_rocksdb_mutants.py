"""Bugs of state in RocksDB, planted, and the tests that find them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.state.rocksdb import test_rocksdb_cache as cache
from tests.state.rocksdb import test_rocksdb_files as files
from tests.state.rocksdb import test_rocksdb_layout as layouts
from tests.state.rocksdb.test_rocksdb_cache import seen as counting

from headgate.codec.snapshot import section_views
from headgate.codec.state_rows import stored_rows
from headgate.model.config import RocksState
from headgate.model.security import Access
from headgate.state.choice import WorkerStates, worker_states
from headgate.state.key_hash import text_bytes
from headgate.state.rocksdb import by_column, cells, database, factory, layout, memory, room, tables, values
from headgate.state.rocksdb.by_column import RocksColumnBackend
from headgate.state.rocksdb.cached import CachedMaps, CachedValues
from headgate.state.rocksdb.cells import RocksCells
from headgate.state.rocksdb.database import Database, Rows
from headgate.state.rocksdb.frozen import FrozenDatabase
from headgate.state.rocksdb.list_changes import ListChanges
from headgate.state.rocksdb.memory import Use
from headgate.state.rocksdb.rows import CachedObjects
from headgate.state.rocksdb.stored import StoredLists, StoredMaps
from headgate.state.rocksdb.timers import RocksColumnTimers
from headgate.storage.own_directory import OwnDirectory


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerStates]:
    made = worker_states(RocksState(16 << 20, str(tmp_path)), None)
    yield made
    made.close()


seen = counting
"""The fixture of those tests."""


@contextmanager
def the_end_of_a_scan_is_believed() -> Iterator[None]:
    with patched(Rows, "_check_end", lambda *_: None):
        yield


@contextmanager
def missing_rows_of_a_key_are_taken_from_the_next_one() -> Iterator[None]:
    def of_keys(self: Rows, prefixes: Any, counts: Any) -> Any:
        rest = self._db.iter()
        for prefix, count in zip(prefixes, counts, strict=True):
            rest.seek(prefix)
            for _ in range(count):
                if rest.valid():
                    yield rest.key(), rest.value()
                    rest.next()

    with patched(Rows, "of_keys", of_keys):
        yield


@contextmanager
def released_checkpoints_stay() -> Iterator[None]:
    with patched(FrozenDatabase, "_forget", lambda self: None):
        yield


@contextmanager
def text_has_no_length_in_front() -> Iterator[None]:
    encode = layout._encode_column
    with patched(layout, "_encode_column", lambda c: text_bytes(c) if pa.types.is_large_string(c.type) else encode(c)):
        yield


@contextmanager
def the_table_comes_before_the_key_group() -> Iterator[None]:
    with patched(
        layout.EncodedKeys,
        "in_table",
        lambda self, table: [
            table.to_bytes(2, "big") + int(group).to_bytes(2, "big") + key
            for group, key in zip(self.groups, self.keys, strict=True)
        ],
    ):
        yield


@contextmanager
def tables_have_the_order_of_declaration() -> Iterator[None]:
    def unsorted(found: Sequence[Any], key: Any = None) -> list[Any]:
        return list(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "sorted", unsorted, raising=False)
        yield


@contextmanager
def what_dead_workers_left_stays() -> Iterator[None]:
    with patched(room, "remove_abandoned", lambda parent: None):
        yield


@contextmanager
def everybody_may_look_into_the_directory() -> Iterator[None]:
    before = os.umask(0o022)
    try:
        with patched(room, "OwnDirectory", lambda parent, **_: OwnDirectory(parent, Access.UMASK)):
            yield
    finally:
        os.umask(before)


@contextmanager
def a_checkpoint_is_taken_without_what_changed() -> Iterator[None]:
    with (
        patched(RocksColumnBackend, "write_back", lambda self: None),
        patched(CachedObjects, "write_back", lambda self: None),
    ):
        yield


@contextmanager
def what_is_given_up_is_not_written_back() -> Iterator[None]:
    def give_up(self: RocksColumnBackend) -> None:
        for state in self._states.values():
            if isinstance(state, CachedValues):
                state._differs.written(len(self._index))[:] = False
        original(self)

    original = RocksColumnBackend._give_up

    def prepare(self: RocksColumnBackend) -> None:
        self._turn += 1
        if self._cached_bytes() > self._place.cache_bytes:
            give_up(self)

    with patched(RocksColumnBackend, "prepare", prepare):
        yield


@contextmanager
def elements_that_a_list_lost_stay() -> Iterator[None]:
    original = StoredLists._write

    def keep(self: Any, changes: Any, found: Any, put: Any, gone: Any) -> None:
        original(self, changes, found, put, [])

    with patched(StoredLists, "_write", keep):
        yield


@contextmanager
def entries_that_a_map_lost_stay() -> Iterator[None]:
    original = StoredMaps._write

    def keep(self: Any, changes: Any, found: Any, put: Any, gone: Any) -> None:
        original(self, changes, found, put, [])

    with patched(StoredMaps, "_write", keep):
        yield


@contextmanager
def lists_are_written_anew_each_time() -> Iterator[None]:
    original = ListChanges.write

    def anew(self: ListChanges, changes: Any, slots: Any, keys: Any, exploded: Any, size: int) -> None:
        self._same.written(size)[slots] = 0
        original(self, changes, slots, keys, exploded, size)

    with patched(ListChanges, "write", anew):
        yield


@contextmanager
def removed_entries_are_not_noted() -> Iterator[None]:
    original = CachedMaps._note

    def note(self: CachedMaps, slots: Any, map_keys: Any) -> None:
        has = self.contains(slots, map_keys)
        original(self, slots[has], map_keys.filter(pa.array(has)))

    with patched(CachedMaps, "_note", note):
        yield


@contextmanager
def timers_fire_before_their_state_is_there() -> Iterator[None]:
    with patched(RocksColumnTimers, "take", lambda self, until_ms, rows_max: self.front.take(until_ms, rows_max)):
        yield


@contextmanager
def changes_are_never_much() -> Iterator[None]:
    with patched(RocksCells, "changed_count", 0), patched(CachedValues, "changed_rows", 0):
        yield


@contextmanager
def the_oldest_keys_stay() -> Iterator[None]:
    original = RocksColumnBackend.load

    def load(self: RocksColumnBackend, slots: Any) -> None:
        turn, self._turn = self._turn, by_column.TURNS_MAX - self._turn
        original(self, slots)
        self._turn = turn

    with patched(RocksColumnBackend, "load", load):
        yield


@contextmanager
def a_failed_read_is_nothing() -> Iterator[None]:
    original = RocksCells.fetch

    def fetch(self: RocksCells, keys: Any) -> None:
        listed = list(keys)
        try:
            original(self, listed)
        except Exception:
            self._young.update(dict.fromkeys(listed, cells._NONE))
            raise

    with patched(RocksCells, "fetch", fetch):
        yield


@contextmanager
def a_full_disk_is_not_told() -> Iterator[None]:
    with patched(database, "_FULL", ()):
        yield


@contextmanager
def what_is_written_is_counted_in_the_database() -> Iterator[None]:
    """Then nothing that is lost is missed."""

    def counted(self: FrozenDatabase) -> dict[str, int]:
        return stored_rows(section_views(self._encode()), "here")

    with patched(FrozenDatabase, "_rows", counted):
        yield


@contextmanager
def keys_are_ordered_without_their_slots() -> Iterator[None]:
    in_order = RocksColumnBackend._in_order
    with patched(RocksColumnBackend, "_in_order", lambda self, slots: (slots, in_order(self, slots)[1])):
        yield


@contextmanager
def what_one_state_asked_for_is_what_all_get() -> Iterator[None]:
    def remembered(self: Any, slots: Any) -> Any:
        if self._found is None:
            self._found = self._keys_of(slots)
        return self._found

    with patched(by_column._Remembered, "__call__", remembered):
        yield


@contextmanager
def a_key_in_the_cache_takes_nothing() -> Iterator[None]:
    with patched(by_column, "key_bytes", lambda types: 0), patched(by_column, "SLOT_BYTES", 0):
        yield


@contextmanager
def a_cache_that_gave_up_may_take_more() -> Iterator[None]:
    prepare = RocksColumnBackend.prepare

    def prepared(self: RocksColumnBackend) -> None:
        size = len(self._index)
        prepare(self)
        if len(self._index) < size:
            self._give_up_at = 2 * self._cached_bytes()

    with patched(RocksColumnBackend, "prepare", prepared):
        yield


@contextmanager
def files_are_merged_as_by_default_once_it_goes_on() -> Iterator[None]:
    opening = Database._open

    def opened(self: Database, *, is_new: bool) -> None:
        self._use = self._use if is_new else Use.SEARCHED
        opening(self, is_new=is_new)

    with patched(Database, "_open", opened):
        yield


@contextmanager
def numbers_are_taken_for_texts() -> Iterator[None]:
    with patched(factory, "_looked_up", lambda types: Use.LOOKED_UP):
        yield


@contextmanager
def words_are_not_ordered() -> Iterator[None]:
    with patched(layouts, "disk_order", lambda columns, keys, groups: np.arange(len(columns[0]))):
        yield


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (words_are_not_ordered, layouts.test_numbers_are_written_in_the_order_of_their_rows),
        (words_are_not_ordered, layouts.test_other_keys_are_written_by_key_group),
        (text_has_no_length_in_front, layouts.test_keys_come_back_whatever_bytes_they_have),
        (
            the_table_comes_before_the_key_group,
            layouts.test_a_range_of_key_groups_is_a_range_of_rows_and_numbers_are_in_order,
        ),
        (
            tables_have_the_order_of_declaration,
            layouts.test_tables_are_numbered_by_the_names_of_states_however_they_are_declared,
        ),
    ],
)
def test_bugs_of_the_layout_are_caught(mutant: Mutant, test: Any) -> None:
    assert_caught(mutant, test)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (released_checkpoints_stay, files.test_a_frozen_state_is_links_and_goes_when_it_is_released_or_forgotten),
        (what_dead_workers_left_stays, files.test_what_a_killed_worker_left_is_removed_by_the_next_one),
        (
            everybody_may_look_into_the_directory,
            files.test_only_this_user_may_look_into_the_directory_and_two_workers_have_two,
        ),
    ],
)
def test_bugs_of_the_directory_are_caught(mutant: Mutant, test: Any, worker: WorkerStates, tmp_path: Path) -> None:
    assert_caught(mutant, test, worker, tmp_path)


def test_rows_that_cannot_be_read_are_not_left_out(worker: WorkerStates, tmp_path: Path) -> None:
    test = files.test_damage_of_a_frozen_state_is_named_and_nothing_is_left_out
    assert_caught(the_end_of_a_scan_is_believed, test, worker, tmp_path, "flipped")


def test_nulls_with_decimals_inside_are_caught() -> None:
    """Bug: texts become decimals in one cast, which reads the empty ones below what is null."""
    dtype, given = next(found for found in layouts.VALUES if found[0] == pa.struct([("price", layouts.PRICE)]))
    assert_caught(
        lambda: patched(values, "_typed", lambda found, dtype: found.cast(dtype)),
        layouts.test_values_come_back,
        dtype,
        given,
    )


def test_databases_that_open_as_many_files_however_many_there_are_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = lambda: patched(memory, "open_files", lambda databases_count, limit: 128)  # noqa: E731
    assert_caught(mutant, files.test_many_databases_of_a_process_leave_it_files_to_open, monkeypatch)


def test_rows_of_another_key_are_not_taken(tmp_path: Path) -> None:
    test = files.test_rows_of_a_key_that_are_missing_are_named
    assert_caught(missing_rows_of_a_key_are_taken_from_the_next_one, test, tmp_path)


@pytest.mark.parametrize(
    ("mutant", "test", "views"),
    [
        (what_is_given_up_is_not_written_back, cache.test_what_was_given_up_comes_back_as_it_was, ["columns"]),
        (elements_that_a_list_lost_stay, cache.test_what_a_list_or_map_lost_does_not_come_back, ["rows"]),
        (entries_that_a_map_lost_stay, cache.test_what_a_list_or_map_lost_does_not_come_back, ["rows"]),
        (a_checkpoint_is_taken_without_what_changed, cache.test_what_was_given_up_comes_back_as_it_was, ["columns"]),
        (
            what_is_written_is_counted_in_the_database,
            cache.test_a_row_that_is_lost_on_its_way_is_missed_before_the_checkpoint_counts,
            ["columns", "rows"],
        ),
    ],
)
def test_bugs_of_the_cache_are_caught(
    mutant: Mutant, test: Any, views: list[str], worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for view in views:
        assert_caught(mutant, test, worker, view, monkeypatch)


@pytest.mark.parametrize("mutant", [keys_are_ordered_without_their_slots, what_one_state_asked_for_is_what_all_get])
def test_keys_of_other_slots_are_caught(mutant: Mutant, worker: WorkerStates) -> None:
    assert_caught(mutant, cache.test_states_that_changed_for_other_keys_are_written_for_theirs, worker)


@pytest.mark.parametrize("mutant", [a_key_in_the_cache_takes_nothing, a_cache_that_gave_up_may_take_more])
def test_a_cache_that_takes_more_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    test = cache.test_a_cache_takes_no_more_memory_than_it_may
    assert_caught(mutant, test, pa.large_string(), pa.int64(), tmp_path)


def test_options_that_are_forgotten_are_caught(worker: WorkerStates, tmp_path: Path) -> None:
    test = files.test_files_of_what_is_only_looked_up_wait_longer_to_be_merged
    assert_caught(files_are_merged_as_by_default_once_it_goes_on, test, worker, tmp_path)


def test_numbers_that_are_packed_are_caught(worker: WorkerStates) -> None:
    assert_caught(
        numbers_are_taken_for_texts, files.test_rows_of_numbers_are_neither_packed_nor_copied_to_be_read, worker
    )


@pytest.mark.parametrize("mutant", [timers_fire_before_their_state_is_there])
def test_bugs_of_timers_are_caught(mutant: Mutant, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, cache.test_timers_find_the_state_of_keys_that_were_given_up, worker, monkeypatch)


def test_keys_that_were_used_last_are_not_given_up_first(worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(the_oldest_keys_stay, cache.test_keys_that_were_used_last_stay, worker, monkeypatch)


def test_a_failed_read_is_not_an_absent_key(worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    test = cache.test_a_read_that_failed_is_not_remembered_as_nothing
    assert_caught(a_failed_read_is_nothing, test, worker, monkeypatch)


def test_a_full_disk_is_told(worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    test = files.test_a_full_disk_is_one_sentence_and_what_was_frozen_before_stays
    assert_caught(a_full_disk_is_not_told, test, worker, monkeypatch)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (lists_are_written_anew_each_time, cache.test_of_lists_and_maps_only_what_differs_is_written),
        (removed_entries_are_not_noted, cache.test_of_lists_and_maps_only_what_differs_is_written),
    ],
)
def test_bugs_of_writing_back_are_caught(mutant: Mutant, test: Any, worker: WorkerStates, seen: cache.Seen) -> None:
    assert_caught(mutant, test, worker, seen, "columns")


def test_changes_that_are_much_are_written(
    worker: WorkerStates, seen: cache.Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = cache.test_what_is_much_is_written_back_between_batches
    assert_caught(changes_are_never_much, test, worker, seen, monkeypatch)
