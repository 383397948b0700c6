"""Mutants of savepoints from frames: rows in the wrong place, lost, unchecked, or there too early; a test fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.written_state import test_edited_state as edited
from tests.runtime.written_state import test_written_state as fresh

from headgate.api import written_state as api
from headgate.model.manifest import SnapshotPart
from headgate.model.savepoint import Savepoint
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.written_state import changes, columns, draft, writing
from headgate.runtime.written_state.draft import Base, Draft
from headgate.runtime.written_state.rows import SubtaskState, WrittenRows
from headgate.state.timers import TIME_COLUMN
from headgate.state.ttl import NEVER_MS
from headgate.storage.backends import open_storage

Test = Callable[..., object]


@contextmanager
def keys_are_dealt_out_in_turn() -> Iterator[None]:
    def owners_of(rows: pa.RecordBatch, shape: Any, max_parallelism: int, parallelism: int) -> Any:
        return np.arange(rows.num_rows) % parallelism

    with patched(draft, "owners_of", owners_of):
        yield


@contextmanager
def rows_of_a_key_are_turned_round() -> Iterator[None]:
    deal = draft.dealt_out

    def dealt_out(rows: pa.RecordBatch, owners: Any, parallelism: int) -> Any:
        return deal(rows.take(pa.array(np.arange(rows.num_rows)[::-1])), owners[::-1], parallelism)

    with patched(draft, "dealt_out", dealt_out):
        yield


@contextmanager
def a_key_may_have_two_values() -> Iterator[None]:
    with patched(columns, "_refuse_repeated", lambda rows, shape, what: None):
        yield


@contextmanager
def nulls_are_stored() -> Iterator[None]:
    with patched(columns, "_refuse_nothing", lambda rows, shape, what: None):
        yield


@contextmanager
def whatever_arrow_can_cast_is_cast() -> Iterator[None]:
    with patched(columns, "fitted", lambda column, dtype, name: column.cast(dtype, safe=False)):
        yield


@contextmanager
def expiries_are_forgotten() -> Iterator[None]:
    with patched(columns, "_expiries", lambda given, what: pa.repeat(pa.scalar(NEVER_MS), given.num_rows)):
        yield


@contextmanager
def expiries_may_be_in_any_order() -> Iterator[None]:
    with patched(columns, "_in_order_of_expiry", lambda rows, shape, what: rows):
        yield


@contextmanager
def timers_are_rounded_down() -> Iterator[None]:
    stored = columns._stored

    def early(given: pa.Table, shape: Any, place: int, what: str) -> pa.Array:
        found = stored(given, shape, place, what)
        is_told = shape.schema.field(place).name == TIME_COLUMN and TIME_COLUMN not in given.column_names
        return pa.array(found.to_numpy() - 1) if is_told else found

    with patched(columns, "_stored", early):
        yield


@contextmanager
def other_states_of_the_operator_are_lost() -> Iterator[None]:
    with patched(changes._Keyed, "_stays", lambda self, name: False):
        yield


@contextmanager
def rows_of_another_key_stay() -> Iterator[None]:
    with patched(changes._Keyed, "_stays_as", lambda self, name, shape: None):
        yield


@contextmanager
def the_identity_keeps_what_was_dropped() -> Iterator[None]:
    with patched(changes._Keyed, "_text_without", lambda self, shapes, gone: self.text):
        yield


@contextmanager
def positions_are_not_written() -> Iterator[None]:
    with patched(writing._Writer, "_positioned", lambda self, small, subtask: dict(small)):
        yield


@contextmanager
def output_stays_in_the_source() -> Iterator[None]:
    def shared(self: Any, base: Any, subtask: Any, part: SnapshotPart) -> SnapshotPart:
        return part

    with patched(writing._Writer, "_copied_output", shared):
        yield


@contextmanager
def what_belongs_to_no_key_is_left_out() -> Iterator[None]:
    with patched(WrittenRows, "_meta", lambda self: {}):
        yield


@contextmanager
def what_a_subtask_knew_begins_anew() -> Iterator[None]:
    state = writing._Writer._state

    def begun(self: Any, change: Any, subtask: Any, former: Any) -> SubtaskState:
        return SubtaskState(state(self, change, subtask, former).sections, change.meta)

    with patched(writing._Writer, "_state", begun):
        yield


@contextmanager
def what_is_copied_is_not_verified() -> Iterator[None]:
    def read(self: Base, part: SnapshotPart) -> memoryview:
        where = f"{self.checkpoint.place.prefix}/{part.path}"
        return memoryview(part.inline or self.storage.get_range(where, part.offset, part.size_bytes))

    with patched(Base, "read", read):
        yield


@contextmanager
def it_is_a_savepoint_before_everything_is_there() -> Iterator[None]:
    def write_savepoint(one: Draft, url: str, now_ms: int) -> writing.Written:
        storage, directory = open_storage(url), SavepointDirectory(url)
        place, resolved = directory.place(storage.draw_name(8)), one.resolved()
        elsewhere = open_storage(f"{url}-prepared")
        manifest = writing._Writer(one, resolved, elsewhere, place, ()).manifest(now_ms)
        savepoint = Savepoint("0", one.pipeline, now_ms, place.prefix, manifest, "")
        directory.write(savepoint)
        for path in elsewhere.list(""):
            storage.put(path, [elsewhere.get(path)])
        return writing.Written(savepoint, resolved)

    with patched(api, "write_savepoint", write_savepoint):
        yield


@contextmanager
def what_a_failed_try_wrote_stays() -> Iterator[None]:
    with patched(SavepointDirectory, "give_up", lambda self, place: None):
        yield


ON_DISK: list[tuple[Mutant, Test, tuple[object, ...]]] = [
    (keys_are_dealt_out_in_turn, fresh.test_keys_are_where_the_product_looks_for_them, ()),
    (rows_of_a_key_are_turned_round, fresh.test_what_is_written_is_read, ()),
    (a_key_may_have_two_values, fresh.test_rows_that_do_not_fit_are_refused_by_one_sentence, ("entry-twice",)),
    (nulls_are_stored, fresh.test_rows_that_do_not_fit_are_refused_by_one_sentence, ("null",)),
    (whatever_arrow_can_cast_is_cast, fresh.test_rows_that_do_not_fit_are_refused_by_one_sentence, ("text",)),
    (expiries_are_forgotten, edited.test_expiries_are_kept_and_in_order, ()),
    (expiries_may_be_in_any_order, edited.test_expiries_are_kept_and_in_order, ()),
    (timers_are_rounded_down, edited.test_timers_are_written_and_changed, ()),
    (other_states_of_the_operator_are_lost, edited.test_what_is_replaced_is_other_and_nothing_else, ()),
    (rows_of_another_key_stay, edited.test_a_pipeline_says_what_the_state_shall_be, ()),
    (the_identity_keeps_what_was_dropped, edited.test_a_state_is_dropped_with_its_part_of_the_identity, ()),
    (positions_are_not_written, fresh.test_positions_of_sources_are_set_and_taken_away, ()),
    (output_stays_in_the_source, edited.test_output_that_a_checkpoint_promised_stays_promised, ()),
    (what_belongs_to_no_key_is_left_out, edited.test_what_belongs_to_no_key_is_there_from_the_beginning, ()),
    (
        what_a_subtask_knew_begins_anew,
        edited.test_every_state_is_stored_as_it_was_when_it_is_written_back,
        ("window-merge",),
    ),
    (what_is_copied_is_not_verified, edited.test_a_damaged_source_is_named_and_nothing_is_left, ()),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), ON_DISK, ids=lambda one: getattr(one, "__name__", ""))
def test_writing_something_else_is_caught(
    mutant: Mutant, test: Test, arguments: tuple[object, ...], tmp_path: Path
) -> None:
    assert_caught(mutant, test, tmp_path, *arguments)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            it_is_a_savepoint_before_everything_is_there,
            edited.test_killed_half_way_there_is_nothing_to_read_and_a_second_try_works,
        ),
        (what_a_failed_try_wrote_stays, edited.test_a_storage_that_fails_leaves_nothing),
    ],
)
def test_a_savepoint_that_is_half_there_is_caught(mutant: Mutant, test: Test, tmp_path: Path) -> None:  # WS7
    with pytest.MonkeyPatch.context() as patch:
        assert_caught(mutant, test, tmp_path, patch)
