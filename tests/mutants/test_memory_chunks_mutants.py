"""Planted bugs in checkpoints of state in memory that write what changed, and in what is restored of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.state import test_timer_stores as timer_stores
from tests.state.memory import test_memory_chunks as tests
from tests.state.memory import test_memory_expiring_chunks as expiring
from tests.state.memory import test_memory_timer_chunks as timers
from tests.state.memory import test_memory_window_chunks as window_chunks
from tests.state.memory.chunk_stories import KeptWindows, Windows
from tests.state.test_backends import Columns, Rows

from headgate.codec import log_entry
from headgate.runtime.checkpoints.targets import SubtaskTarget
from headgate.state.memory import (
    by_column,
    chunk_log,
    chunked,
    chunks,
    counted_timers,
    stored_chunks,
    timer_changes,
    windows,
)
from headgate.state.memory.cells import MemoryCells
from headgate.state.memory.changes import ChangedKeys, ChangedSlots, KeyChanges, SlotChanges
from headgate.state.memory.chunk_log import ChunkLog
from headgate.state.memory.column_timers import MemoryColumnTimers
from headgate.state.memory.expiring_cells import ExpiringCells
from headgate.state.memory.expiry import Expiries
from headgate.state.memory.lists import MemoryLists
from headgate.state.memory.maps import MemoryMaps
from headgate.state.memory.row_timers import MemoryRowTimers
from headgate.state.memory.timer_changes import NotedTimers, TimerChanges
from headgate.state.memory.values import MemoryValues


def only_slots_of_the_last_interval_are_written() -> AbstractContextManager[None]:
    def after(self: SlotChanges, interval: int) -> Any:
        return np.flatnonzero(self.intervals == self.intervals.max(initial=-1))

    return patched(SlotChanges, "after", after)


def only_keys_of_the_last_interval_are_written() -> AbstractContextManager[None]:
    return patched(KeyChanges, "after", lambda self, _: self.by_interval[-1][1] if self.by_interval else {})


def only_timers_of_the_last_interval_are_written() -> AbstractContextManager[None]:
    original = TimerChanges._after

    def after(self: TimerChanges, interval: int) -> Any:
        return original(self, self._found[-1][0] - 1 if self._found else interval)

    return patched(TimerChanges, "_after", after)


def keys_that_went_are_not_written() -> AbstractContextManager[None]:
    original = chunked.encode_chunk
    return patched(chunked, "encode_chunk", lambda found, keys: original([replace(c, gone=()) for c in found], keys))


def older_chunks_count_too() -> AbstractContextManager[None]:
    return patched(stored_chunks._Seen, "left", lambda self, batch: batch)


def what_is_numbered_anew_is_not_forgotten() -> AbstractContextManager[None]:
    return patched(ChangedSlots, "renumber", lambda self, old: self._in.renumber(old))


def what_was_given_up_counts_as_known() -> AbstractContextManager[None]:
    original = ChangedKeys.freeze
    return patched(ChangedKeys, "freeze", lambda self: replace(original(self), known_since=0))


def chunks_that_may_go_are_referred_to() -> AbstractContextManager[None]:
    original = ChunkLog.chain
    return patched(ChunkLog, "chain", lambda self, _: original(self, {f.name: f for c in self._known for f in c.files}))


def chunks_are_told_by_their_names() -> AbstractContextManager[None]:
    original = ChunkLog.chain

    def chain(self: ChunkLog, shareable: Any) -> Any:
        return original(self, {f.name: f for c in self._known for f in c.files if f.name in shareable})

    return patched(ChunkLog, "chain", chain)


def chunks_are_never_merged() -> AbstractContextManager[None]:
    def kept(chain: Any, live_rows: int, changed: Any) -> Any:
        return chain if chain and changed(chain[-1].until) is not None else ()

    return patched(chunked, "kept", kept)


def only_rows_that_are_there_count() -> AbstractContextManager[None]:
    original = chunk_log.kept
    return patched(chunked, "kept", lambda chain, live, changed: original(chain, 10**9, changed))


def everything_is_written_each_time() -> AbstractContextManager[None]:
    return patched(ChunkLog, "chain", lambda self, shareable: [])


def savepoints_have_chunks() -> AbstractContextManager[None]:
    return patched(SubtaskTarget, "shareable", lambda self, section: {})


def rows_of_chunks_are_not_counted() -> AbstractContextManager[None]:
    return patched(stored_chunks.PortableChunks, "_end", lambda self: None)


def old_releases_take_chunks_for_a_database() -> AbstractContextManager[None]:
    return patched(log_entry, "CHUNK_SUFFIX", ".nothing")


def names_begin_again_after_a_restore() -> AbstractContextManager[None]:
    return patched(ChunkLog, "name", lambda self, number, place: f"{number}-{place}.chunk2")


def changes_after_a_restore_are_not_noted() -> AbstractContextManager[None]:
    return patched(MemoryCells, "note_changes", lambda self: None)


def changed_keys_are_not_kept_for_later_snapshots() -> AbstractContextManager[None]:
    original = ChangedKeys.freeze

    def freeze(self: ChangedKeys) -> Any:
        self._before = []
        return original(self)

    return patched(ChangedKeys, "freeze", freeze)


def changed_keys_go_with_any_snapshot() -> AbstractContextManager[None]:
    original = ChunkLog.wrote

    def wrote(self: ChunkLog, number: int, chain: Any, new: Any) -> None:
        original(self, number, chain, new)
        self.interval.needed_since = number

    return patched(ChunkLog, "wrote", wrote)


def changed_keys_are_remembered_for_ever() -> AbstractContextManager[None]:
    return patched(ChangedKeys, "bounded", lambda self, keys_count: self.now)


def a_value_that_is_cleared_has_not_changed() -> AbstractContextManager[None]:
    def clear(self: MemoryValues, slots: Any) -> None:
        self._present.written(self._size)[slots] = False

    return patched(MemoryValues, "clear", clear)


def an_entry_that_is_removed_has_not_changed() -> AbstractContextManager[None]:
    original = MemoryMaps._forget

    def forget(self: MemoryMaps, entries: Any) -> None:
        kept, self._changed = self._changed, None
        original(self, entries)
        self._changed = kept

    return patched(MemoryMaps, "_forget", forget)


def a_part_has_the_keys_of_all_parts() -> AbstractContextManager[None]:
    return patched(stored_chunks, "_within", lambda batch, *_: batch)


def other_states_are_gone_on_with() -> AbstractContextManager[None]:
    original = stored_chunks.describe
    same: list[Any] = []

    def described(stored: Any) -> Any:
        return replace(original(stored), states=same)

    actual = stored_chunks.gone_on_with

    def gone_on_with(backend: Any, log: Any, states: Any, stored: Any, owner: Any) -> bool:
        same[:] = states
        with (
            patched(stored_chunks, "describe", described),
            patched(stored_chunks.PortableChunks, "_end", lambda _: None),
        ):
            return actual(backend, log, states, stored, owner)

    return patched(by_column, "gone_on_with", gone_on_with)


def chunks_have_nothing_beside_their_rows() -> AbstractContextManager[None]:
    return patched(windows._FrozenWindows, "_meta_of_rows", lambda self: {})


def timers_have_nothing_beside_their_rows() -> AbstractContextManager[None]:
    return patched(by_column._Frozen, "_meta_of_rows", lambda self: {})


def timers_that_are_taken_are_not_noted() -> AbstractContextManager[None]:
    original = MemoryColumnTimers._first

    def first(self: MemoryColumnTimers, rows_max: int) -> Any:
        kept, self._noted = self._noted, None
        found = original(self, rows_max)
        self._noted = kept
        return found

    return patched(MemoryColumnTimers, "_first", first)


def without_noting(name: str) -> AbstractContextManager[None]:
    original = getattr(MemoryRowTimers, name)

    def changed(self: MemoryRowTimers, *given: Any) -> Any:
        kept, self._changed = self._changed, None
        found = original(self, *given)
        self._changed = kept
        return found

    return patched(MemoryRowTimers, name, changed)


def timers_that_are_taken_by_row_are_not_noted() -> AbstractContextManager[None]:
    return without_noting("take")


def timers_that_are_deleted_by_row_are_not_noted() -> AbstractContextManager[None]:
    return without_noting("delete")


def all_timers_of_a_time_are_written() -> AbstractContextManager[None]:
    def after(self: KeyChanges, interval: int) -> Any:
        found = original(self, interval)
        return found and {(time_ms, key): None for time_ms, _ in found for key in range(18_040)}

    original = KeyChanges.after
    return patched(KeyChanges, "after", after)


def timers_that_were_numbered_anew_are_not_forgotten() -> AbstractContextManager[None]:
    original = MemoryColumnTimers.renumber

    def renumber(self: MemoryColumnTimers, living: Any) -> None:
        kept, self._noted = self._noted, None
        original(self, living)
        self._noted = kept

    return patched(MemoryColumnTimers, "renumber", renumber)


def timers_after_a_restore_are_not_noted(timers: type[Any]) -> AbstractContextManager[None]:
    return patched(timers, "note_changes", lambda self: None)


def timers_by_column_after_a_restore_are_not_noted() -> AbstractContextManager[None]:
    return timers_after_a_restore_are_not_noted(MemoryColumnTimers)


def timers_by_row_after_a_restore_are_not_noted() -> AbstractContextManager[None]:
    return timers_after_a_restore_are_not_noted(MemoryRowTimers)


def timers_are_remembered_for_ever() -> AbstractContextManager[None]:
    return patched(timer_changes, "are_too_many", lambda *_: False)


def what_is_done_to_timers_is_kept_call_by_call() -> AbstractContextManager[None]:
    def add(self: NotedTimers, times: Any, changes: Any, timers_count: int) -> None:
        if self._now is not None:
            self._now.append((times, changes))

    return patched(NotedTimers, "add", add)


def timers_that_are_there_are_counted_again() -> AbstractContextManager[None]:
    def places(older: Any, newer: Any) -> Any:
        return np.zeros(len(newer[0]), np.int64), np.zeros(len(newer[0]), np.bool_)

    return patched(counted_timers, "_places", places)


def timers_are_counted_from_the_first_snapshot() -> AbstractContextManager[None]:
    original, firsts = MemoryColumnTimers._since_counted, {}

    def since_counted(self: MemoryColumnTimers) -> Any:
        if self._counted is not None:
            self._counted = firsts.setdefault(id(self), self._counted)
        return original(self)

    return patched(MemoryColumnTimers, "_since_counted", since_counted)


def a_snapshot_shares_the_list_of_what_comes_behind_it() -> AbstractContextManager[None]:
    original = MemoryColumnTimers._refer_to

    def refer_to(self: MemoryColumnTimers, former: Any, since: Any) -> None:
        before = self._tail
        original(self, former, since)
        if self._tail is not before:
            self._tail = since

    return patched(MemoryColumnTimers, "_refer_to", refer_to)


def what_was_done_since_timers_were_counted_is_forgotten() -> AbstractContextManager[None]:
    return patched(NotedTimers, "since", lambda self, number: [])


def slots_that_a_restore_shortened_have_not_changed() -> AbstractContextManager[None]:
    original = Expiries.end_restore

    def end_restore(self: Expiries, size: int) -> Any:
        return original(self, size)[:0]

    return patched(Expiries, "end_restore", end_restore)


def lists_that_a_restore_shortened_have_not_changed() -> AbstractContextManager[None]:
    return patched(MemoryLists, "touched", lambda self, slots: None)


def keys_that_a_restore_shortened_have_not_changed() -> AbstractContextManager[None]:
    return patched(ExpiringCells, "put", ExpiringCells._set)


def keys_that_a_restore_looked_at_have_changed() -> AbstractContextManager[None]:
    return patched(ExpiringCells, "_set", ExpiringCells.put)


def older_chunks_count_for_a_whole_state() -> AbstractContextManager[None]:
    return patched(chunks.Description, "since", lambda self, state: self.chunks)


def one_state_of_which_nothing_is_known_has_all_written() -> AbstractContextManager[None]:
    def changed_count(self: chunked.ChunkedState, after: int) -> int | None:
        counts = list(self._changed_counts(after).values())
        return None if None in counts else sum(counts)

    return patched(chunked.ChunkedState, "_changed_count", changed_count)


def a_whole_state_without_rows_is_not_told() -> AbstractContextManager[None]:
    original = chunked.ChunkedState._put_chunk

    def put_chunk(self: Any, target: Any, keys: Any, changes: Any, on: Any) -> Any:
        if not chunks.rows_of(changes):
            changes = [replace(change, is_whole=False) for change in changes]
        return original(self, target, keys, changes, on)

    return patched(chunked.ChunkedState, "_put_chunk", put_chunk)


def whole_states_are_not_remembered_over_a_restart() -> AbstractContextManager[None]:
    original = ChunkLog.go_on_with
    return patched(
        ChunkLog,
        "go_on_with",
        lambda self, found: original(self, [(rows, files, frozenset()) for rows, files, _ in found]),
    )


def windows_that_were_taken_are_not_noted() -> AbstractContextManager[None]:
    return patched(windows._Windows, "_removed", lambda self, window: self._held.pop(window))


def windows_that_are_taken_after_a_restore_are_not_noted() -> AbstractContextManager[None]:
    return patched(ChangedKeys, "start", lambda self: None)


def windows_begin_anew_after_a_restore() -> AbstractContextManager[None]:
    return patched(windows._Windows, "go_on_with", lambda *_: False)


def chunks_of_windows_that_are_in_a_database_are_referred_to() -> AbstractContextManager[None]:
    return patched(windows._Windows, "begin_anew", lambda self: None)


def records_of_windows_are_those_of_the_first_interval() -> AbstractContextManager[None]:
    original = windows._Kept
    return patched(windows, "_Kept", lambda interval, window, batch: original(0, window, batch))


def records_of_windows_are_all_written_each_time() -> AbstractContextManager[None]:
    original = windows._FrozenRows._rows_after
    return patched(windows._FrozenRows, "_rows_after", lambda self, after: original(self, None))


def what_has_gone_counts_for_its_own_chunk() -> AbstractContextManager[None]:
    """As if each file of a chunk were a chunk."""
    original = stored_chunks._latest

    def latest(state: Any, found: Any, groups: Any, description: Any) -> Any:
        return original(state, [[one] for files in found for one in files], groups, description)

    return patched(stored_chunks, "_latest", latest)


def chunks_of_version_1_are_gone_on_with() -> AbstractContextManager[None]:
    return patched(stored_chunks, "VERSION", 1)


ABORTED = tests.test_what_an_aborted_checkpoint_wrote_is_written_by_the_next
SEVERAL = tests.test_what_was_frozen_before_a_checkpoint_completes_misses_nothing
CONTINUED = tests.test_what_goes_on_with_chunks_shares_them
WRITES = tests.test_a_checkpoint_writes_what_changed_and_refers_to_the_rest
WINDOWS = tests.test_windows_write_what_changed_and_which_have_gone
BEGINS_AGAIN = tests.test_a_window_that_begins_again_within_a_chunk_in_several_files_is_there
WINDOWS_GO_ON = window_chunks.test_windows_that_go_on_with_chunks_write_what_changed
WITHOUT_ROOM = window_chunks.test_windows_without_room_for_what_is_restored_do_not_refer_to_it
WHOLE = timers.test_what_is_not_known_of_timers_is_no_reason_to_write_all_values_anew


SHORTENED = expiring.test_what_a_restore_shortens_is_written_again


@pytest.mark.parametrize(
    ("mutant", "test", "given"),
    [
        (only_slots_of_the_last_interval_are_written, ABORTED, ("column",)),
        (only_keys_of_the_last_interval_are_written, ABORTED, ("row",)),
        (only_keys_of_the_last_interval_are_written, ABORTED, ("record",)),
        (changed_keys_are_not_kept_for_later_snapshots, ABORTED, ("row",)),
        (changed_keys_go_with_any_snapshot, ABORTED, ("record",)),
        (chunks_that_may_go_are_referred_to, ABORTED, ("column",)),
        (only_keys_of_the_last_interval_are_written, SEVERAL, ("row",)),
        (
            all_timers_of_a_time_are_written,
            timers.test_of_all_timers_of_one_time_those_that_changed_are_written,
            ("row",),
        ),
        (
            timers_have_nothing_beside_their_rows,
            timers.test_a_checkpoint_writes_which_timers_came_and_went,
            ("column",),
        ),
        (
            timers_that_are_there_are_counted_again,
            timers.test_a_checkpoint_writes_which_timers_came_and_went,
            ("column",),
        ),
        (
            what_was_done_since_timers_were_counted_is_forgotten,
            timers.test_a_checkpoint_writes_which_timers_came_and_went,
            ("column",),
        ),
        (
            timers_by_column_after_a_restore_are_not_noted,
            timers.test_what_goes_on_with_chunks_shares_those_of_timers,
            ("column",),
        ),
        (
            timers_by_row_after_a_restore_are_not_noted,
            timers.test_what_goes_on_with_chunks_shares_those_of_timers,
            ("row",),
        ),
        (everything_is_written_each_time, WRITES, ("column",)),
        (savepoints_have_chunks, tests.test_a_savepoint_has_no_chunks, ("row",)),
        (old_releases_take_chunks_for_a_database, tests.test_a_manifest_with_chunks_is_of_a_version_of_its_own, ()),
        (names_begin_again_after_a_restore, CONTINUED, ("column",)),
        (changes_after_a_restore_are_not_noted, CONTINUED, ("row",)),
        (other_states_are_gone_on_with, tests.test_other_states_take_the_rows_of_chunks, ("column",)),
    ],
)
def test_bugs_of_chunks_are_caught(mutant: Mutant, test: Callable[..., Any], given: tuple[Any, ...]) -> None:
    assert_caught(mutant, test, *given)


@pytest.mark.parametrize(
    ("mutant", "test", "given"),
    [
        (
            keys_that_went_are_not_written,
            tests.test_chunks_are_restored_at_any_parallelism_in_any_backend,
            ("row", "memory"),
        ),
        (older_chunks_count_too, tests.test_chunks_are_restored_at_any_parallelism_in_any_backend, ("row", "memory")),
        (
            a_part_has_the_keys_of_all_parts,
            tests.test_chunks_are_restored_at_any_parallelism_in_any_backend,
            ("row", "memory"),
        ),
        (
            a_value_that_is_cleared_has_not_changed,
            tests.test_chunks_are_restored_at_any_parallelism_in_any_backend,
            ("column", "memory"),
        ),
        (what_is_numbered_anew_is_not_forgotten, tests.test_keys_that_are_numbered_anew_are_all_written, ()),
        (what_was_given_up_counts_as_known, tests.test_no_more_changed_keys_are_remembered_than_half_of_all, ("row",)),
        (
            timers_that_were_numbered_anew_are_not_forgotten,
            timers.test_timers_of_keys_that_are_numbered_anew_are_all_written,
            (),
        ),
        (timers_are_remembered_for_ever, timers.test_no_more_is_remembered_of_timers_than_half_of_all, ("column",)),
        (changed_keys_are_remembered_for_ever, timers.test_no_more_is_remembered_of_timers_than_half_of_all, ("row",)),
        (
            what_is_done_to_timers_is_kept_call_by_call,
            timers.test_little_is_done_for_each_batch_that_changes_timers,
            (),
        ),
        (
            timers_are_counted_from_the_first_snapshot,
            timers.test_a_checkpoint_brings_into_order_what_changed_since_the_last_one,
            (),
        ),
        (
            a_snapshot_shares_the_list_of_what_comes_behind_it,
            timer_stores.test_a_snapshot_that_is_written_later_has_no_timer_that_came_behind_its_barrier,
            (timer_stores.Columns,),
        ),
        (slots_that_a_restore_shortened_have_not_changed, SHORTENED, ("column",)),
        (lists_that_a_restore_shortened_have_not_changed, SHORTENED, ("column",)),
        (keys_that_a_restore_shortened_have_not_changed, SHORTENED, ("row",)),
        (
            keys_that_a_restore_looked_at_have_changed,
            expiring.test_what_a_restore_does_not_shorten_is_not_written_again,
            ("row",),
        ),
        (older_chunks_count_for_a_whole_state, WHOLE, ("column",)),
        (one_state_of_which_nothing_is_known_has_all_written, WHOLE, ("row",)),
        (a_whole_state_without_rows_is_not_told, WHOLE, ("column",)),
        (whole_states_are_not_remembered_over_a_restart, WHOLE, ("row",)),
        (
            changed_keys_are_remembered_for_ever,
            tests.test_no_more_changed_keys_are_remembered_than_half_of_all,
            ("record",),
        ),
        (chunks_are_never_merged, tests.test_chunks_are_few_and_hardly_more_than_what_there_is, ("column",)),
        (only_rows_that_are_there_count, tests.test_state_that_shrinks_gives_its_chunks_up, ("column",)),
        (rows_of_chunks_are_not_counted, tests.test_rows_that_chunks_do_not_have_are_missed, (True,)),
        (keys_that_went_are_not_written, WINDOWS, (Windows, 1)),
        (older_chunks_count_too, WINDOWS, (Windows, 2)),
        (only_slots_of_the_last_interval_are_written, WINDOWS, (Windows, 1)),
        (chunks_have_nothing_beside_their_rows, WINDOWS, (Windows, 1)),
        (windows_that_were_taken_are_not_noted, WINDOWS, (KeptWindows, 1)),
        (records_of_windows_are_those_of_the_first_interval, WINDOWS, (KeptWindows, 2)),
        (records_of_windows_are_all_written_each_time, WINDOWS, (KeptWindows, 1)),
        (windows_that_are_taken_after_a_restore_are_not_noted, WINDOWS_GO_ON, (Windows, "memory")),
        (windows_that_are_taken_after_a_restore_are_not_noted, WINDOWS_GO_ON, (KeptWindows, "memory")),
        (windows_begin_anew_after_a_restore, WINDOWS_GO_ON, (Windows, "rocksdb")),
        (names_begin_again_after_a_restore, WINDOWS_GO_ON, (KeptWindows, "memory")),
        (chunks_of_windows_that_are_in_a_database_are_referred_to, WITHOUT_ROOM, (KeptWindows,)),
        (what_has_gone_counts_for_its_own_chunk, BEGINS_AGAIN, (KeptWindows,)),
        (what_has_gone_counts_for_its_own_chunk, BEGINS_AGAIN, (Windows,)),
        (rows_of_chunks_are_not_counted, tests.test_rows_that_chunks_do_not_have_are_missed, (False,)),
    ],
)
def test_bugs_of_large_and_small_chunks_are_caught(
    mutant: Mutant, test: Callable[..., Any], given: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = test.__code__.co_varnames[: test.__code__.co_argcount]
    assert_caught(mutant, test, *given, *([monkeypatch] if "monkeypatch" in takes else []))


@pytest.mark.parametrize(
    ("mutant", "form"),
    [
        (only_timers_of_the_last_interval_are_written, Columns),
        (timers_that_are_taken_are_not_noted, Columns),
        (timers_that_are_taken_by_row_are_not_noted, Rows),
        (timers_that_are_deleted_by_row_are_not_noted, Rows),
        (an_entry_that_is_removed_has_not_changed, Columns),
        (a_value_that_is_cleared_has_not_changed, Columns),
        (keys_that_went_are_not_written, Columns),
        (older_chunks_count_too, Rows),
        (changed_keys_are_not_kept_for_later_snapshots, Rows),
        (chunks_that_may_go_are_referred_to, Rows),
    ],
)
def test_some_story_finds_what_is_missing(mutant: Mutant, form: Any) -> None:
    assert_caught(mutant, tests.test_long_stories_of_checkpoints, form)
