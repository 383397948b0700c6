"""Mutants of what stands between state and its snapshot: freezing, encoding, uploading, reading back, restoring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.mutants.harness import assert_caught, patched
from tests.operators import test_reduce
from tests.operators.windows import test_windows
from tests.runtime.checkpoints import test_frozen_states, test_upload_faults
from tests.runtime.checkpoints.frozen_cases import CASES, small
from tests.state.memory import test_memory_windows

from headgate.operators import reduce
from headgate.operators.base import WATERMARK_MIN_MS
from headgate.operators.windows.window import WindowOperator
from headgate.runtime.checkpoints import snapshots, targets, uploads
from headgate.state import backend
from headgate.state.frozen import FrozenState
from headgate.state.memory import records as memory_records
from headgate.state.memory import rows as memory_rows
from headgate.state.memory.cells import MemoryCells
from headgate.state.memory.windows import MemoryMergedRows, _frozen
from headgate.state.window_rows import MergedRows

ROWS = [name for name in CASES if name.startswith("by-row")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(uploads, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))
    with small():
        yield


def forgetful(frozen: type) -> AbstractContextManager[None]:
    """As version 0.1 was: encoding releases what it encodes, without a word."""
    encode, forget = frozen._encode, frozen._forget  # type: ignore[attr-defined]

    def once(self: Any) -> Any:
        found = encode(self)
        forget(self)
        return found

    return patched(frozen, "_encode", once)


def encoding_uses_accumulators_up() -> AbstractContextManager[None]:
    return forgetful(memory_records._Frozen)


def encoding_uses_objects_up() -> AbstractContextManager[None]:
    return forgetful(memory_rows._Frozen)


@contextmanager
def a_released_state_is_encoded() -> Iterator[None]:
    with patched(FrozenState, "_assert_held", lambda self: None):
        yield


@contextmanager
def writes_do_not_release() -> Iterator[None]:
    with patched(uploads.FrozenSubtask, "release", lambda self: None):
        yield


@contextmanager
def only_written_states_are_released() -> Iterator[None]:
    """Not those that were given up."""
    original = uploads.SnapshotWriter._write

    def write(self: Any, job: Any) -> None:
        original(self, job)
        release(job)

    release = uploads.FrozenSubtask.release
    with patched(uploads.FrozenSubtask, "release", lambda self: None), patched(uploads.SnapshotWriter, "_write", write):
        yield


@contextmanager
def encoding_is_not_repeated() -> Iterator[None]:
    """Writing is not, whatever fails in it."""

    def once(self: Any, call: Any) -> Any:
        return call() if "_write_state" in call.__code__.co_names else retrying(self, call)

    retrying = uploads.SnapshotWriter._with_retries
    with patched(uploads.SnapshotWriter, "_with_retries", once):
        yield


@contextmanager
def rows_are_not_compared_before_the_acknowledgement() -> Iterator[None]:
    with patched(targets, "difference", lambda recorded, found: None):
        yield


@contextmanager
def rows_are_not_compared_when_reading() -> Iterator[None]:
    with patched(snapshots, "difference", lambda recorded, found: None):
        yield


@contextmanager
def rows_are_not_recorded() -> Iterator[None]:
    def put(self: Any, section: str, chunks: Any, rows: Any = None, *more: Any) -> Any:
        return original(self, section, chunks, None, *more)

    original = targets.SubtaskTarget.put
    with patched(targets.SubtaskTarget, "put", put):
        yield


@contextmanager
def only_the_newest_snapshot_holds_the_objects() -> Iterator[None]:
    def absorb(self: Any) -> None:
        self._frozen = self._frozen[-1:]
        original(self)

    original = MemoryCells.absorb
    with patched(MemoryCells, "absorb", absorb):
        yield


@contextmanager
def objects_change_while_they_are_held() -> Iterator[None]:
    def absorb(self: Any) -> None:
        if self._overlay is not None:
            self._merge_into(self._base)
            self._overlay = None

    with patched(MemoryCells, "absorb", absorb):
        yield


def rows_of_other_subtasks_are_restored() -> AbstractContextManager[None]:
    return patched(backend, "owned_rows", lambda batch, *owner: batch)


def the_own_watermark_counts_only_once_nobody_is_ahead() -> AbstractContextManager[None]:
    original = WindowOperator._late

    def late(self: Any, batch: Any, windows: Any) -> Any:
        before = self._watermark_ms
        self._watermark_ms = WATERMARK_MIN_MS if self._fired.is_any_ahead else before
        try:
            return original(self, batch, windows)
        finally:
            self._watermark_ms = before

    return patched(WindowOperator, "_late", late)


def test_restoring_rows_of_other_subtasks_is_caught() -> None:
    named = test_reduce.test_a_restore_at_another_parallelism_moves_every_key_to_its_owner
    assert_caught(rows_of_other_subtasks_are_restored, named)


def test_windows_that_forget_their_own_watermark_are_caught() -> None:
    named = test_windows.test_a_watermark_between_those_of_former_subtasks_makes_late_what_it_has_passed
    assert_caught(the_own_watermark_counts_only_once_nobody_is_ahead, named, pl.len().alias("n"))


def accumulators_are_shared_with_the_function() -> AbstractContextManager[None]:
    return patched(reduce, "own_copy", lambda value: value)


def test_sharing_accumulators_with_the_function_is_caught() -> None:
    named = test_reduce.test_a_function_may_change_structs_and_lists_of_its_accumulator_in_place
    assert_caught(accumulators_are_shared_with_the_function, named)


def test_encoding_that_uses_accumulators_up_is_caught() -> None:
    assert_caught(encoding_uses_accumulators_up, test_frozen_states.test_encoding_twice_gives_the_same_bytes, "reduce")
    assert_caught(
        encoding_uses_accumulators_up, test_upload_faults.test_a_state_whose_encoding_failed_is_encoded_again, "reduce"
    )


@pytest.mark.parametrize("name", ROWS)
def test_encoding_that_uses_objects_up_is_caught(name: str) -> None:
    assert_caught(encoding_uses_objects_up, test_frozen_states.test_encoding_twice_gives_the_same_bytes, name)
    assert_caught(
        encoding_uses_objects_up, test_upload_faults.test_a_state_whose_encoding_failed_is_encoded_again, name
    )


@pytest.mark.parametrize("name", CASES)
def test_encoding_what_was_released_is_caught(name: str) -> None:
    named = test_frozen_states.test_a_released_state_is_never_encoded_and_a_second_release_is_nothing
    assert_caught(a_released_state_is_encoded, named, name)


def test_writes_that_do_not_release_are_caught() -> None:
    named = test_upload_faults.test_a_cancelled_write_releases_its_state_without_encoding_it
    assert_caught(writes_do_not_release, named)
    assert_caught(
        only_written_states_are_released,
        test_upload_faults.test_a_state_is_released_whatever_ends_its_write,
        ValueError("a bug"),
    )


def test_encoding_that_is_not_repeated_is_caught() -> None:
    assert_caught(
        encoding_is_not_repeated, test_upload_faults.test_a_state_whose_encoding_failed_is_encoded_again, "loop-log"
    )


def test_rows_that_nobody_compares_are_caught() -> None:
    named = test_upload_faults.test_a_snapshot_with_other_rows_than_were_frozen_is_not_acknowledged
    assert_caught(rows_are_not_compared_before_the_acknowledgement, named, "reduce")
    read = test_upload_faults.test_a_restore_that_finds_other_rows_than_the_manifest_says_refuses
    assert_caught(rows_are_not_compared_when_reading, read, "reduce", -1)


def test_rows_that_nobody_records_are_caught() -> None:
    named = test_upload_faults.test_a_transient_fault_in_any_storage_operation_changes_nothing_of_the_state
    assert_caught(rows_are_not_recorded, named, "reduce")


def test_overlays_that_are_put_back_too_early_are_caught() -> None:
    several = test_frozen_states.test_of_several_pending_snapshots_each_stays_as_it_was_until_its_own_release
    assert_caught(only_the_newest_snapshot_holds_the_objects, several, "by-row-list", (2, 1, 0))
    assert_caught(objects_change_while_they_are_held, several, "reduce", (2, 1, 0))


def windows_are_copied_when_they_fire() -> AbstractContextManager[None]:
    def take(self: Any, window: int) -> MergedRows:
        held = self._held.pop(window)
        slots = np.arange(len(held.index))
        return MergedRows(held.index.columns(slots), held.table.take(slots))

    return patched(MemoryMergedRows, "take", take)


def windows_that_fired_are_kept() -> AbstractContextManager[None]:
    def take(self: Any, window: int) -> MergedRows:
        taken = _frozen(window, self._held[window])
        return MergedRows(taken.keys(), taken.table)

    return patched(MemoryMergedRows, "take", take)


def test_copying_windows_when_they_fire_is_caught() -> None:
    named = test_memory_windows.test_a_window_hands_over_the_arrays_in_which_it_merged
    assert_caught(windows_are_copied_when_they_fire, named)


def test_keeping_windows_that_fired_is_caught() -> None:
    named = test_memory_windows.test_what_a_window_handed_over_stays_as_it_was_when_the_window_begins_again
    assert_caught(windows_that_fired_are_kept, named)
