"""Planted bugs in checkpoints of state in memory that write what changed, and in what is restored of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.state.memory import test_memory_chunks as tests
from tests.state.test_backends import Columns, Rows

from headgate.codec import log_entry
from headgate.runtime.checkpoints.targets import SubtaskTarget
from headgate.state.memory import by_column, chunk_log, chunked, records, rows, stored_chunks, windows
from headgate.state.memory.cells import MemoryCells
from headgate.state.memory.changes import ChangedKeys, Interval
from headgate.state.memory.chunk_log import ChunkLog
from headgate.state.memory.maps import MemoryMaps
from headgate.state.memory.values import MemoryValues


def only_slots_of_the_last_interval_are_written() -> AbstractContextManager[None]:
    return patched(by_column, "slots_after", lambda found, _: np.flatnonzero(found == found.max(initial=-1)))


@contextmanager
def only_keys_of_the_last_interval_are_written() -> Iterator[None]:
    def last(found: Any, _: int) -> Any:
        return found[-1][1] if found else {}

    with patched(rows, "keys_after", last), patched(records, "keys_after", last):
        yield


def keys_that_went_are_not_written() -> AbstractContextManager[None]:
    original = chunked.encode_chunk
    return patched(chunked, "encode_chunk", lambda found, keys: original([replace(c, gone=()) for c in found], keys))


def older_chunks_count_too() -> AbstractContextManager[None]:
    return patched(stored_chunks._Seen, "left", lambda self, batch: batch)


def what_is_numbered_anew_is_not_forgotten() -> AbstractContextManager[None]:
    return patched(Interval, "forget", lambda self: None)


def chunks_that_may_go_are_referred_to() -> AbstractContextManager[None]:
    original = ChunkLog.chain
    return patched(ChunkLog, "chain", lambda self, _: original(self, {f.name: f for c in self._known for f in c.files}))


def chunks_are_told_by_their_names() -> AbstractContextManager[None]:
    original = ChunkLog.chain

    def chain(self: ChunkLog, shareable: Any) -> Any:
        return original(self, {f.name: f for c in self._known for f in c.files if f.name in shareable})

    return patched(ChunkLog, "chain", chain)


def chunks_are_never_merged() -> AbstractContextManager[None]:
    def kept(chain: Any, moment: Any, live_rows: int, changed: Any) -> Any:
        return chain if chain and chain[-1].until >= moment.known_since else ()

    return patched(chunked, "kept", kept)


def only_rows_that_are_there_count() -> AbstractContextManager[None]:
    original = chunk_log.kept
    return patched(chunked, "kept", lambda chain, moment, live, changed: original(chain, moment, 10**9, changed))


def everything_is_written_each_time() -> AbstractContextManager[None]:
    return patched(ChunkLog, "chain", lambda self, shareable: [])


def savepoints_have_chunks() -> AbstractContextManager[None]:
    return patched(SubtaskTarget, "shareable", lambda self, section: {})


def rows_of_chunks_are_not_counted() -> AbstractContextManager[None]:
    return patched(stored_chunks.PortableChunks, "_end", lambda self: None)


def old_releases_take_chunks_for_a_database() -> AbstractContextManager[None]:
    return patched(log_entry, "CHUNK_SUFFIX", ".nothing")


def names_begin_again_after_a_restore() -> AbstractContextManager[None]:
    return patched(ChunkLog, "name", lambda self, moment, place: f"{moment.number}-{place}.chunk")


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

    def wrote(self: ChunkLog, moment: Any, chain: Any, new: Any) -> None:
        original(self, moment, chain, new)
        self.interval.needed_since = moment.number

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


def only_sums_of_the_last_interval_are_written() -> AbstractContextManager[None]:
    return patched(windows, "slots_after", lambda found, _: np.flatnonzero(found == found.max(initial=-1)))


def chunks_have_nothing_beside_their_rows() -> AbstractContextManager[None]:
    return patched(windows._FrozenMerged, "_meta_of_rows", lambda self: {})


ABORTED = tests.test_what_an_aborted_checkpoint_wrote_is_written_by_the_next
SEVERAL = tests.test_what_was_frozen_before_a_checkpoint_completes_misses_nothing
CONTINUED = tests.test_what_goes_on_with_chunks_shares_them
WRITES = tests.test_a_checkpoint_writes_what_changed_and_refers_to_the_rest


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
        (
            what_is_numbered_anew_is_not_forgotten,
            tests.test_no_more_changed_keys_are_remembered_than_half_of_all,
            ("row",),
        ),
        (
            changed_keys_are_remembered_for_ever,
            tests.test_no_more_changed_keys_are_remembered_than_half_of_all,
            ("record",),
        ),
        (chunks_are_never_merged, tests.test_chunks_are_few_and_hardly_more_than_what_there_is, ("column",)),
        (only_rows_that_are_there_count, tests.test_state_that_shrinks_gives_its_chunks_up, ("column",)),
        (rows_of_chunks_are_not_counted, tests.test_rows_that_chunks_do_not_have_are_missed, (True,)),
        (keys_that_went_are_not_written, tests.test_windows_write_what_changed_and_which_have_gone, (1,)),
        (older_chunks_count_too, tests.test_windows_write_what_changed_and_which_have_gone, (2,)),
        (only_sums_of_the_last_interval_are_written, tests.test_windows_write_what_changed_and_which_have_gone, (1,)),
        (chunks_have_nothing_beside_their_rows, tests.test_windows_write_what_changed_and_which_have_gone, (1,)),
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
