"""Mutants of time-to-live in RocksDB: what is not written, comes back, is never dropped, or taken for lost (RB10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.operators.process import test_ttl as functions
from tests.state.backends import choose, states
from tests.state.rocksdb import test_rocksdb_ttl as rocks

from headgate.state.choice import WorkerStates
from headgate.state.rocksdb import expiring, frozen, stored
from headgate.state.rocksdb.cached_expiring import CachedExpiringLists, CachedExpiringMaps, CachedExpiringValues
from headgate.state.rocksdb.expiring import ExpiringTables
from headgate.state.rocksdb.frozen import FrozenDatabase
from headgate.state.rocksdb.tables import Table

Patch = AbstractContextManager[None]


def what_was_renewed_is_not_written() -> Patch:
    @contextmanager
    def all_three() -> Iterator[None]:
        with (
            patched(CachedExpiringValues, "_renewed", lambda self, slots: None),
            patched(CachedExpiringLists, "_renewed", lambda self, slots: None),
            patched(CachedExpiringMaps, "_renewed", lambda self, entries: None),
        ):
            yield

    return all_three()


def what_is_loaded_counts_as_written_now() -> Patch:
    def fill(self: Any, slots: Any, stored_: Any) -> None:
        self.put(slots, stored_.flatten()[0])

    return patched(CachedExpiringValues, "fill", fill)


def the_database_is_never_swept() -> Patch:
    return patched(ExpiringTables, "sweep", lambda self: iter(()))


def a_sweep_begins_anew_each_time() -> Patch:
    sweep = ExpiringTables.sweep

    def from_the_beginning(self: ExpiringTables) -> Any:
        self._at = b""
        return sweep(self)

    return patched(ExpiringTables, "sweep", from_the_beginning)


def a_sweep_does_not_care_how_much_was_written() -> Patch:
    sweep = ExpiringTables.sweep

    def always_the_same(self: ExpiringTables) -> Any:
        self._written = self._database.rows_written
        return sweep(self)

    return patched(ExpiringTables, "sweep", always_the_same)


def a_snapshot_has_what_expired() -> Patch:
    return patched(Table, "living", lambda self, batch, now_ms: batch)


def what_expired_counts_as_there() -> Patch:
    return patched(frozen, "expired_counts", lambda rows, tables, now_ms: {})


def what_is_in_the_database_is_all_that_is_expected() -> Patch:
    def counted(self: FrozenDatabase) -> dict[str, int]:
        found = {table.section.name: 0 for table in self._tables.values()}
        with self._opened() as rows:  # type: ignore[attr-defined]
            for number, batch in frozen._batches(self._tables, rows.scan(b"", None), self._beside.now_ms):
                found[self._tables[number].section.name] += batch.num_rows
        return found

    @contextmanager
    def opened(self: FrozenDatabase) -> Iterator[Any]:
        rows = self._database.opened(self._path)
        yield rows
        rows.close()

    @contextmanager
    def both() -> Iterator[None]:
        with patched(FrozenDatabase, "_rows", counted), pytest.MonkeyPatch.context() as patch:
            patch.setattr(FrozenDatabase, "_opened", opened, raising=False)
            yield

    return both()


def a_restore_shortens_nothing() -> Patch:
    return patched(ExpiringTables, "end_restore", lambda self: None)


def every_restore_reads_the_whole_database() -> Patch:
    restored = ExpiringTables.restored

    def noted(self: ExpiringTables, table: Table, batch: Any) -> Any:
        found = restored(self, table, batch)
        self._latest_ms[table.number] = 1 << 62
        return found

    return patched(ExpiringTables, "restored", noted)


def what_expired_is_restored() -> Patch:
    return patched(ExpiringTables, "restored", lambda self, table, batch: batch)


def entries_come_in_the_order_of_their_keys() -> Patch:
    plain = stored.StoredMaps._map

    def unsorted(self: Any, suffixes: Any, objects: Any) -> Any:
        return dict(sorted(plain(self, suffixes, objects).items()))

    return patched(stored.StoredMaps, "_map", unsorted)


def a_value_without_an_expiry_lives_for_ever_on() -> Patch:
    return patched(expiring, "expiring_at", lambda values, at: list(values))


@pytest.fixture
def worker() -> Iterator[WorkerStates]:
    with states("rocksdb") as made:
        yield made


@pytest.mark.parametrize(
    ("mutant", "test", "views"),
    [
        (
            the_database_is_never_swept,
            rocks.test_what_has_expired_goes_from_the_database_while_only_another_key_is_used,
            ["columns", "rows"],
        ),
        (
            a_sweep_begins_anew_each_time,
            rocks.test_a_turn_looks_at_a_bounded_number_of_rows_and_more_if_more_was_written,
            ["columns", "rows"],
        ),
        (
            a_sweep_does_not_care_how_much_was_written,
            rocks.test_a_turn_looks_at_a_bounded_number_of_rows_and_more_if_more_was_written,
            ["columns", "rows"],
        ),
    ],
)
def test_what_is_never_dropped_is_caught(
    mutant: Mutant, test: Any, views: list[str], worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for view in views:
        assert_caught(mutant, test, view, worker, monkeypatch)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (a_snapshot_has_what_expired, rocks.test_what_expired_is_in_no_snapshot_and_is_not_taken_for_lost),
        (what_expired_counts_as_there, rocks.test_what_expired_is_in_no_snapshot_and_is_not_taken_for_lost),
        (what_expired_is_restored, rocks.test_what_expired_before_a_restore_does_not_come_into_the_database),
    ],
)
def test_what_expired_and_is_there_is_caught(mutant: Mutant, test: Any, worker: WorkerStates) -> None:
    for view in ("columns", "rows"):
        assert_caught(mutant, test, view, worker)


def test_counting_in_the_database_is_caught(worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    test = rocks.test_a_row_with_an_expiry_that_is_lost_on_its_way_is_missed
    assert_caught(what_is_in_the_database_is_all_that_is_expected, test, "rows", worker, monkeypatch)


@pytest.mark.parametrize(
    ("mutant", "ttl"),
    [
        (a_restore_shortens_nothing, "2h"),
        (a_value_without_an_expiry_lives_for_ever_on, None),
        (every_restore_reads_the_whole_database, "1h"),
    ],
)
def test_bugs_of_restores_are_caught(
    mutant: Mutant, ttl: str | None, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = rocks.test_a_restore_shortens_only_what_would_live_too_long
    former = None if ttl is None else rocks.hg.TTL(ttl)
    assert_caught(mutant, test, "rows", rocks.StateKind.VALUE, former, worker, monkeypatch)


def test_entries_in_another_order_are_caught(worker: WorkerStates) -> None:
    test = rocks.test_entries_that_come_from_the_database_are_in_the_order_of_their_expiry
    assert_caught(entries_come_in_the_order_of_their_keys, test, worker)


RENEWED: list[tuple[Callable[[], Patch], Any]] = [
    (what_was_renewed_is_not_written, functions.test_each_form_restores_what_the_other_wrote_also_what_was_renewed),
    (
        what_is_loaded_counts_as_written_now,
        functions.test_what_was_written_lives_for_its_duration_and_not_a_millisecond_more,
    ),
]


@pytest.mark.parametrize(("mutant", "test"), RENEWED)
def test_bugs_of_the_expiries_in_the_cache_are_caught(mutant: Mutant, test: Any) -> None:
    arguments = ("batch", "batch") if "each_form" in test.__name__ else ("batch",)
    with functions.unswept(), choose("rocksdb-without-cache"):
        assert_caught(mutant, test, *arguments)
