"""Mutants of timers in RocksDB: what fires too late, twice, in another order or never, and what takes room (RB11)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.state.backends import states
from tests.state.rocksdb import test_rocksdb_timers as rocks
from tests.state.test_timer_stores import Columns, Rows

from headgate.state.choice import WorkerStates
from headgate.state.memory import column_timers, row_timers
from headgate.state.rocksdb import stored_timers
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.frozen import FrozenDatabase
from headgate.state.rocksdb.stored_timers import EVER, Place, StoredTimers
from headgate.state.rocksdb.timers import RocksTimers

Patch = AbstractContextManager[None]


def all_timers_are_in_memory() -> Patch:
    return patched(RocksTimers, "tidy", lambda self: None)


def the_horizon_stays_when_the_last_timers_are_stored() -> Patch:
    def tidy(self: Any) -> None:
        columns, times_ms = self._split(20)
        if len(times_ms):
            self.stored.add(columns, times_ms)

    return patched(RocksTimers, "tidy", tidy)


def what_waits_is_not_written_before_more_is_read() -> Patch:
    def bring(self: Any) -> bool:
        if self._horizon == EVER:
            return False
        found, self._horizon = self.stored.take_first(self._front_max)
        self._take_in(found)
        return True

    return patched(RocksTimers, "_bring", bring)


def everything_is_read_at_once() -> Patch:
    take = StoredTimers.take_first
    return patched(StoredTimers, "take_first", lambda self, rows_max: take(self, 1 << 20))


def the_horizon_is_a_time() -> Patch:
    """What is read up to a place is taken for all of its time."""
    take = StoredTimers.take_first

    def first(self: StoredTimers, rows_max: int) -> Any:
        found, cut = take(self, rows_max)
        return found, cut if cut == EVER else Place(cut.time_ms + 1, 0)

    return patched(StoredTimers, "take_first", first)


def keys_of_one_hash_are_parted() -> Patch:
    return patched(stored_timers.StoredTimers, "_first", lambda self, group, rows_max: _first(self, group, rows_max))


def _first(self: StoredTimers, group: int, rows_max: int) -> Any:
    rows = self._read(group, rows_max, EVER)
    return (rows, EVER) if len(rows) < rows_max else (rows, stored_timers._place(rows[-1]).next)


def timers_of_one_time_are_in_the_order_of_their_keys() -> Patch:
    return patched(stored_timers, "encode_hashes", lambda hashes: [bytes(8)] * len(hashes))


def timers_of_one_time_stay_together() -> Patch:
    def stay(times_ms: Any, hashes: Any, count: int) -> Any:
        if len(times_ms) <= count:
            return np.ones(len(times_ms), np.bool_)
        return times_ms < max(np.sort(times_ms)[count], times_ms.min() + 1)

    return Both(patched(column_timers, "stay_first", stay), patched(row_timers, "stay_first", stay))


def what_is_read_stays_in_the_database() -> Patch:
    remove = StoredTimers._remove

    def keep(self: StoredTimers, rows: Any, cut: Place) -> Any:
        with patched(Changes, "delete", lambda self, rows: None):
            return remove(self, rows, cut)

    return patched(StoredTimers, "_remove", keep)


def reading_begins_at_the_first_timer_there_ever_was() -> Patch:
    remove = StoredTimers._remove

    def forget(self: StoredTimers, rows: Any, cut: Place) -> Any:
        found = remove(self, rows, cut)
        self._from_ms[:] = 0
        return found

    return patched(StoredTimers, "_remove", forget)


def an_earlier_timer_of_a_key_group_is_not_noticed() -> Patch:
    def note(self: StoredTimers, groups: Any, times_ms: Any, hashes: Any) -> None:
        first = ~self._has[groups]
        self._from_ms[groups[first]], self._from_hash[groups[first]] = times_ms[first], hashes[first]
        self._has[groups] = True

    return patched(StoredTimers, "_note", note)


def registering_twice_counts_twice() -> Patch:
    return patched(Database, "contains", lambda self, rows: [False] * len(rows))


def times_are_in_the_order_of_their_bytes() -> Patch:
    def encode(times_ms: Any) -> Any:
        return times_ms.astype(">i8").view("V8").tolist()

    def decode(rows: Any, start: int) -> Any:
        return np.frombuffer(b"".join(row[start : start + 8] for row in rows), ">i8").astype(np.int64)

    first, second = patched(stored_timers, "encode_times", encode), patched(stored_timers, "decode_times", decode)
    return Both(first, second)


class Both(AbstractContextManager[None]):
    def __init__(self, *patches: Patch) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.__enter__()

    def __exit__(self, *found: Any) -> None:
        for patch in reversed(self._patches):
            patch.__exit__(*found)


def restored_timers_are_overlooked() -> Patch:
    return patched(RocksTimers, "restore", lambda self, columns, times_ms: self.stored.add(columns, times_ms))


def a_snapshot_has_only_what_is_stored() -> Patch:
    encoded = FrozenDatabase._encoded
    return patched(FrozenDatabase, "_encoded", lambda self, rows, beside: encoded(self, rows, []))


def timers_count_as_values() -> Patch:
    return patched(Changes, "mark", lambda self, rows: self.put(rows, [b""] * len(rows)))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerStates]:
    rocks.make_small(monkeypatch)
    with states("rocksdb") as made:
        yield made


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (all_timers_are_in_memory, rocks.test_only_the_next_timers_are_in_memory),
        (the_horizon_stays_when_the_last_timers_are_stored, rocks.test_only_the_next_timers_are_in_memory),
        (what_waits_is_not_written_before_more_is_read, rocks.test_what_waits_counts_before_it_is_written),
        (the_horizon_is_a_time, rocks.test_timers_of_one_time_are_parted_by_the_hashes_of_their_keys),
        (timers_of_one_time_stay_together, rocks.test_timers_of_one_time_are_parted_by_the_hashes_of_their_keys),
        (
            timers_of_one_time_are_in_the_order_of_their_keys,
            rocks.test_timers_of_one_time_are_parted_by_the_hashes_of_their_keys,
        ),
        (what_is_read_stays_in_the_database, rocks.test_a_snapshot_has_the_timers_in_memory_and_those_that_are_stored),
        (reading_begins_at_the_first_timer_there_ever_was, rocks.test_what_was_removed_is_not_looked_at_again),
        (an_earlier_timer_of_a_key_group_is_not_noticed, rocks.test_only_the_next_timers_are_in_memory),
        (registering_twice_counts_twice, rocks.test_what_is_stored_may_be_deleted_and_counts_once),
        (times_are_in_the_order_of_their_bytes, rocks.test_times_before_1970_come_first),
        (restored_timers_are_overlooked, rocks.test_a_snapshot_has_the_timers_in_memory_and_those_that_are_stored),
        (a_snapshot_has_only_what_is_stored, rocks.test_a_snapshot_has_the_timers_in_memory_and_those_that_are_stored),
    ],
)
@pytest.mark.parametrize("make", [Rows, Columns])
def test_bugs_of_timers_in_rocksdb_are_caught(mutant: Mutant, test: Any, make: Any, worker: WorkerStates) -> None:
    assert_caught(mutant, test, make, worker)


@pytest.mark.parametrize("make", [Rows, Columns])
def test_reading_what_is_not_due_is_caught(make: Any, worker: WorkerStates, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(
        everything_is_read_at_once, rocks.test_timers_that_are_not_due_are_not_read, make, worker, monkeypatch
    )


def test_parting_keys_of_one_hash_is_caught() -> None:
    assert_caught(keys_of_one_hash_are_parted, rocks.test_timers_of_one_place_are_not_parted)


def test_timers_that_count_as_values_are_caught(worker: WorkerStates) -> None:
    assert_caught(timers_count_as_values, rocks.test_timers_do_not_make_values_seem_small, worker)
