"""Planted bugs of rows that several states of a key share: values that are lost, mixed up, or come from nowhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.state.rocksdb import test_rocksdb_packed as tests
from tests.state.rocksdb.test_rocksdb_packed import worker  # noqa: F401 - a fixture

from headgate.codec import log_entry
from headgate.state.choice import WorkerStates
from headgate.state.rocksdb import by_column, packed, reopening
from headgate.state.rocksdb.cached_pack import CachedPack
from headgate.state.rocksdb.described import Description
from headgate.state.rocksdb.packed import PackedTable

Patch = AbstractContextManager[None]


def what_is_absent_is_zero() -> Patch:
    original = PackedTable.decode

    def decode(self: PackedTable, values: Any) -> Any:
        found = original(self, values)
        if not len(values):
            return found
        zeros = [(np.ones(len(values), np.bool_), has, column) for has, column in found]
        made = []
        for everywhere, has, column in zeros:
            whole = np.zeros(len(values), column.to_numpy(zero_copy_only=False).dtype)
            whole[has] = column.to_numpy(zero_copy_only=False)
            made.append((everywhere, pa.array(whole, column.type)))
        return made

    return patched(PackedTable, "decode", decode)


def only_the_first_state_says_what_differs() -> Patch:
    return patched(CachedPack, "_differs", lambda self: self._members[0].differs())


def what_differs_is_all_that_is_written() -> Patch:
    def write_back(self: Any, changes: Any, keys_of: Any) -> None:
        slots = np.flatnonzero(self._differs())
        if len(slots):
            slots, keys = keys_of(slots)
            held = []
            for member in self._members:
                has = member.held(slots)[0] & member.differs()[slots]
                held.append((has, member.held(slots[has])[1]))
            packed.put_or_delete(changes, keys.in_table(self.table.number), *self.table.encode(held))
            for member in self._members:
                member.wrote(slots)

    return patched(CachedPack, "write_back", write_back)


def rows_that_are_restored_replace_each_other() -> Patch:
    original = packed.restore_packed

    def restore(table: Any, database: Any, *others: Any) -> None:
        class Empty:
            def get(self, rows: Any) -> Any:
                return [None] * len(rows)

            def write(self, changes: Any) -> None:
                database.write(changes)

        original(table, Empty(), *others)  # type: ignore[arg-type]

    return patched(by_column, "restore_packed", restore)


def rows_without_a_value_stay() -> Patch:
    original = PackedTable.encode

    def encode(self: PackedTable, members: Any) -> Any:
        is_there, rows = original(self, members)
        if is_there.all():
            return is_there, rows
        empty = bytes(np.dtype(packed._layout(self._types)).itemsize)
        left = iter(rows)
        return np.ones(len(is_there), np.bool_), [next(left) if there else empty for there in is_there.tolist()]

    return patched(PackedTable, "encode", encode)


def rows_are_counted_for_every_state() -> Patch:
    return patched(PackedTable, "counts", lambda self, values: [len(values)] * len(self.members))


def nothing_is_counted_in_shared_rows() -> Patch:
    return patched(reopening, "check_rows", lambda *_: None)


def old_releases_take_shared_rows_for_damage() -> Patch:
    return patched(log_entry, "PACKED_DESCRIPTION", "nothing")


def any_tables_are_gone_on_with() -> Patch:
    return patched(Description, "is_of", lambda self, tables: True)


def changes_of_each_state_count() -> Patch:
    def count(self: Any) -> int:
        return sum(member.changed_rows for member in self._members)

    return patched(CachedPack, "changed_rows", property(count))


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (what_is_absent_is_zero, tests.test_any_history_of_several_states_is_that_of_plain_dicts),
        (only_the_first_state_says_what_differs, tests.test_any_history_of_several_states_is_that_of_plain_dicts),
        (what_differs_is_all_that_is_written, tests.test_any_history_of_several_states_is_that_of_plain_dicts),
        (
            rows_that_are_restored_replace_each_other,
            tests.test_rows_of_states_that_are_restored_one_after_the_other_keep_each_other,
        ),
        (rows_without_a_value_stay, tests.test_a_key_that_lost_its_last_value_has_no_row),
        (old_releases_take_shared_rows_for_damage, tests.test_a_manifest_with_packed_files_is_of_a_version_of_its_own),
        (any_tables_are_gone_on_with, tests.test_other_states_take_the_rows),
        (changes_of_each_state_count, tests.test_states_that_were_written_are_counted_once_for_a_write_back),
    ],
)
def test_bugs_of_shared_rows_are_caught(mutant: Mutant, test: Any, worker: WorkerStates) -> None:  # noqa: F811
    assert_caught(mutant, test, worker)


@pytest.mark.parametrize("mutant", [rows_are_counted_for_every_state, what_is_absent_is_zero])
def test_bugs_of_restoring_shared_rows_are_caught(mutant: Mutant, worker: WorkerStates) -> None:  # noqa: F811
    test = tests.test_packed_files_are_restored_by_every_backend_at_any_parallelism
    assert_caught(mutant, test, "rocksdb-in-files", 1, worker)


def test_values_in_shared_rows_are_counted_by_whoever_restores(
    worker: WorkerStates,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_caught(
        nothing_is_counted_in_shared_rows, tests.test_a_value_that_is_missing_in_a_row_is_named, worker, monkeypatch
    )
