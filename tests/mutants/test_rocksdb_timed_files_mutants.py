"""Planted bugs of timers, windows and expiries in files of RocksDB: what is lost, comes back, or is written again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.state.backends import IN_FILES, states
from tests.state.rocksdb import test_rocksdb_timed_files as files
from tests.state.rocksdb import test_rocksdb_timers as timers

from headgate.codec import log_entry
from headgate.codec.snapshot import decode_sections
from headgate.operators.keyed import KeyedOperator, owner_of
from headgate.operators.process.batch_timers import BatchTimers
from headgate.runtime.stored_state.catalog import StoredState
from headgate.state.choice import WorkerStates
from headgate.state.rocksdb import described, frozen, increments, reopening
from headgate.state.rocksdb.described import Description
from headgate.state.rocksdb.expiring import ExpiringTables
from headgate.state.rocksdb.frozen import FrozenDatabase
from headgate.state.rocksdb.stored_timers import EVER, StoredTimers
from headgate.state.rocksdb.stored_windows import StoredWindows
from headgate.state.rocksdb.timers import RocksTimers
from headgate.state.rocksdb.windows import RocksWindowRows

Patch = AbstractContextManager[None]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerStates]:
    files.make_small(monkeypatch)
    with states(IN_FILES) as made:
        yield made


def described_as(**other: Any) -> Patch:
    describe = reopening.describe
    return patched(reopening, "describe", lambda stored: replace(describe(stored), **other))


def what_had_expired_is_read_from_files() -> Patch:
    return described_as(now_ms=0)


def what_belongs_to_no_key_is_only_beside_the_files() -> Patch:
    return described_as(meta={})


def what_is_beside_the_files_is_restored_first() -> Patch:
    def restore(self: Any, restored: Any) -> Any:
        owner, continued = owner_of(self.context), set()
        for state in restored:
            if state.files is not None and id(state.files) not in continued and self._goes_on_with(state.files, owner):
                continued.add(id(state.files))
            if id(state.files) not in continued:
                sections = decode_sections(state.payload, "state")
                self._backend.restore(sections, "state", owner)
                yield state, sections

    return patched(KeyedOperator, "_restore_backend", restore)


def what_is_beside_the_files_is_forgotten() -> Patch:
    write = FrozenDatabase._write_files
    return patched(
        FrozenDatabase, "_write_files", lambda self, target, keys, shared, _: write(self, target, keys, shared, [])
    )


def timers_that_were_gone_on_with_are_overlooked() -> Patch:
    def go_on_with(self: Any, continued: Any) -> None:
        self.stored.go_on_with(continued.rows[self.stored.table.section.name], continued.groups)

    return patched(RocksTimers, "go_on_with", go_on_with)


def timers_that_were_gone_on_with_are_not_counted() -> Patch:
    def go_on_with(self: StoredTimers, count: int, groups: range) -> None:
        self._has[groups.start : groups.stop] = True
        self._from_ms[:] = -(1 << 63)

    return patched(StoredTimers, "go_on_with", go_on_with)


def reading_begins_in_1970_after_going_on() -> Patch:
    go_on_with = StoredTimers.go_on_with

    def later(self: StoredTimers, count: int, groups: range) -> None:
        go_on_with(self, count, groups)
        self._from_ms[:] = 600

    return patched(StoredTimers, "go_on_with", later)


def all_timers_are_looked_at_when_going_on() -> Patch:
    go_on_with = StoredTimers.go_on_with

    def looks(self: StoredTimers, count: int, groups: range) -> None:
        go_on_with(self, count, groups)
        for group in groups:
            self._read(group, 1, EVER)

    return patched(StoredTimers, "go_on_with", looks)


def databases_with_timers_are_written_as_rows() -> Patch:
    return patched(frozen, "may_be_files", lambda path, tables: all(hasattr(table, "kind") for table in tables))


def windows_are_written_as_rows() -> Patch:
    may_be = frozen.may_be_files
    return patched(
        frozen, "may_be_files", lambda path, tables: may_be(path, tables) and tables[0].section.name != "windows"
    )


def what_expires_is_written_as_rows() -> Patch:
    return patched(increments, "is_told_by", lambda tables: all(table.ttl is None for table in tables))


def new_rows_take_the_places_of_those_gone_on_with() -> Patch:
    return patched(RocksWindowRows, "_went_on", lambda self, last: None)


def windows_that_were_gone_on_with_are_not_known() -> Patch:
    return patched(StoredWindows, "go_on_with", lambda self: b"")


def a_ttl_that_became_shorter_counts_for_new_values_only() -> Patch:
    return patched(ExpiringTables, "go_on_with", lambda self, latest_ms: None)


def every_restore_reads_all_rows_that_expire() -> Patch:
    return patched(Description, "latest_ms", property(lambda self: {one.number: 1 << 62 for one in self.tables}))


def how_long_rows_live_is_how_they_are_stored() -> Patch:
    return patched(described, "_stored_as", lambda table: table)


def any_tables_are_gone_on_with() -> Patch:
    return patched(Description, "is_of", lambda self, tables: True)


def old_releases_take_timers_in_files_for_damage() -> Patch:
    return patched(log_entry, "TIMED_DESCRIPTION", "nothing")


def every_manifest_with_files_is_new() -> Patch:
    return patched(Description, "is_timed", property(lambda self: True))


def timers_in_files_are_not_counted() -> Patch:
    check = reopening.check_rows

    def without(rows: Any, tables: Any, wanted: Any, where: str) -> None:
        check(
            rows,
            [one for one in tables if hasattr(one, "kind")],
            {n: c for n, c in wanted.items() if "." not in n},
            where,
        )

    return patched(reopening, "check_rows", without)


ORDER = files.test_timers_in_files_fire_in_the_same_order_wherever_they_are_restored
WENT_ON = files.test_what_a_database_went_on_with_is_what_it_was


@pytest.mark.parametrize(
    ("mutant", "later"),
    [
        (what_belongs_to_no_key_is_only_beside_the_files, "memory"),
        (what_is_beside_the_files_is_restored_first, IN_FILES),
        (what_is_beside_the_files_is_forgotten, "memory"),
        (reading_begins_in_1970_after_going_on, IN_FILES),
    ],
)
def test_bugs_of_timers_in_files_are_caught(mutant: Mutant, later: str, worker: WorkerStates) -> None:
    assert_caught(mutant, ORDER, later, 1, worker)


@pytest.mark.parametrize("form", ["rows", "columns"])
@pytest.mark.parametrize(
    "mutant",
    [
        timers_that_were_gone_on_with_are_overlooked,
        timers_that_were_gone_on_with_are_not_counted,
        all_timers_are_looked_at_when_going_on,
    ],
)
def test_bugs_of_going_on_with_timers_are_caught(
    mutant: Mutant, form: str, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(mutant, WENT_ON, form, worker, monkeypatch)


@pytest.mark.parametrize(
    ("mutant", "test", "which"),
    [
        (databases_with_timers_are_written_as_rows, files.test_a_checkpoint_with_timers_writes_only_new_files, "rows"),
        (windows_are_written_as_rows, files.test_a_checkpoint_of_windows_writes_only_new_files, "kept"),
        (
            what_expires_is_written_as_rows,
            files.test_a_checkpoint_of_state_that_expires_writes_only_new_files,
            "columns",
        ),
        (
            new_rows_take_the_places_of_those_gone_on_with,
            files.test_rows_of_windows_that_were_gone_on_with_are_told_from_new_ones,
            "kept",
        ),
        (
            windows_that_were_gone_on_with_are_not_known,
            files.test_rows_of_windows_that_were_gone_on_with_are_told_from_new_ones,
            "merged",
        ),
        (any_tables_are_gone_on_with, files.test_a_function_with_files_may_be_given_timers_or_a_ttl, "rows"),
    ],
)
def test_bugs_of_what_is_in_files_are_caught(mutant: Mutant, test: Any, which: str, worker: WorkerStates) -> None:
    assert_caught(mutant, test, which, worker)


def expired_rows_count_as_rows() -> Patch:
    return patched(StoredState, "_may_have_expired", lambda self, piece: False)


@pytest.mark.parametrize("mutant", [what_had_expired_is_read_from_files, expired_rows_count_as_rows])
def test_expired_rows_that_are_shown_are_caught(
    mutant: Mutant, worker: WorkerStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = files.test_timers_windows_and_expiries_in_files_can_be_looked_at
    assert_caught(mutant, test, tmp_path, worker, monkeypatch)


@pytest.mark.parametrize(
    "mutant",
    [
        a_ttl_that_became_shorter_counts_for_new_values_only,
        every_restore_reads_all_rows_that_expire,
        how_long_rows_live_is_how_they_are_stored,
    ],
)
def test_bugs_of_expiries_in_files_are_caught(
    mutant: Mutant, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(mutant, files.test_a_ttl_that_became_shorter_counts_for_files_as_well, "columns", worker, monkeypatch)


@pytest.mark.parametrize("mutant", [old_releases_take_timers_in_files_for_damage, every_manifest_with_files_is_new])
def test_a_wrong_version_is_caught(mutant: Mutant, worker: WorkerStates) -> None:
    test = files.test_a_manifest_with_timers_in_files_is_of_a_version_of_its_own
    assert_caught(mutant, test, files._timers, worker)


def test_timers_that_nobody_counts_are_caught(worker: WorkerStates) -> None:
    assert_caught(timers_in_files_are_not_counted, files.test_a_timer_that_is_missing_in_files_is_named, worker)


def a_watermark_has_all_that_it_fires_in_the_cache() -> Patch:
    return patched(BatchTimers, "holds_slots", property(lambda self: True))


def what_waits_is_numbered_anew() -> Patch:
    return patched(BatchTimers, "holds_slots", property(lambda self: False))


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            a_watermark_has_all_that_it_fires_in_the_cache,
            timers.test_what_one_watermark_fires_is_not_all_in_the_cache,
        ),
        (what_waits_is_numbered_anew, timers.test_what_waits_is_of_the_same_keys_while_others_fire),
    ],
)
def test_bugs_of_the_cache_while_timers_fire_are_caught(
    mutant: Mutant, test: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers.make_small(monkeypatch)
    with states("rocksdb") as worker:
        assert_caught(mutant, test, worker, monkeypatch)
