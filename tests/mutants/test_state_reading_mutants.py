"""Mutants of reading state without a pipeline: what is shown is not what there is, or not verified; a test fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.stored_state import test_shapes as shaped
from tests.runtime.stored_state import test_stored_state as read
from tests.runtime.stored_state import test_timers_shown as timed
from tests.spark import test_state_source as sourced

from headgate.model import state_identity
from headgate.model.manifest import KeyGroups, SnapshotPart
from headgate.model.state_identity import StateIdentity
from headgate.runtime.checkpoints import snapshots
from headgate.runtime.stored_state import catalog, decoding, pieces, places, reading, shapes
from headgate.runtime.stored_state.places import StoredCheckpoint
from headgate.runtime.stored_state.reading import Selection
from headgate.spark import state_source
from headgate.spark.state_source import StateDataSource
from headgate.storage.base import Storage
from headgate.storage.local import LocalStorage

Test = Callable[..., object]


@contextmanager
def a_part_is_taken_for_its_first_key_group() -> Iterator[None]:
    def may_be_in(self: Selection, piece: pieces.Piece) -> bool:
        return self.groups is None or piece.key_groups.first in self.groups

    with patched(Selection, "may_be_in", may_be_in):
        yield


@contextmanager
def every_part_is_read_whatever_is_wanted() -> Iterator[None]:
    with patched(Selection, "may_be_in", lambda self, piece: True):
        yield


@contextmanager
def every_part_is_listed_to_read_one() -> Iterator[None]:
    with patched(pieces, "_alike", lambda part: None):
        yield


@contextmanager
def rows_of_the_key_group_count_for_the_key() -> Iterator[None]:
    with patched(reading, "_is_among", lambda batch, keys, names: reading.np.ones(batch.num_rows, bool)):
        yield


@contextmanager
def only_the_first_column_of_a_key_is_compared() -> Iterator[None]:
    compare = reading._is_among
    with patched(reading, "_is_among", lambda batch, keys, names: compare(batch, keys, names[:1])):
        yield


@contextmanager
def what_is_read_is_not_verified() -> Iterator[None]:
    with patched(snapshots, "_check_bytes", lambda part, size_bytes, checksum, where: None):
        yield


@contextmanager
def a_header_is_not_verified() -> Iterator[None]:
    with patched(pieces, "section_sizes", lambda data, path: {"s": 0}):
        yield


@contextmanager
def damage_in_the_log_is_passed_over() -> Iterator[None]:
    with patched(places, "refuse_unless_newest_is_known", lambda observed: None):
        yield


@contextmanager
def what_was_removed_is_called_damaged() -> Iterator[None]:
    with patched(StoredCheckpoint, "_is_retained", lambda self, log: True):
        yield


@contextmanager
def what_is_missing_is_called_removed() -> Iterator[None]:
    with patched(StoredCheckpoint, "_is_retained", lambda self, log: False):
        yield


@contextmanager
def a_key_is_what_arrow_makes_of_it() -> Iterator[None]:
    with patched(reading, "exact_array", pa.array):
        yield


@contextmanager
def looking_makes_a_directory() -> Iterator[None]:
    find = places.named_log

    def made(url: str) -> Any:
        LocalStorage(url)
        return find(url)

    with patched(places, "named_log", made):
        yield


@contextmanager
def a_savepoint_is_looked_for_where_its_checkpoint_was() -> Iterator[None]:
    def read_there(self: StoredCheckpoint, storage: Storage, part: SnapshotPart) -> memoryview:
        return snapshots.read_part(storage, self.pipeline, part)

    with patched(StoredCheckpoint, "read", read_there):
        yield


@contextmanager
def windows_begin_where_they_end() -> Iterator[None]:
    column = reading._column

    def late(batch: Any, shape: Any, name: str, piece: Any, max_parallelism: int) -> Any:
        return column(batch, shape, name.replace("_start", "_end"), piece, max_parallelism)

    with patched(reading, "_column", late):
        yield


@contextmanager
def a_list_of_the_operator_hides_behind_keyed_state() -> Iterator[None]:
    def apart(identity: StateIdentity, prefix: str, name: str, schema: pa.Schema) -> shapes.Shape:
        return shape_of(identity, "state/", name, schema)

    shape_of = shapes.shape_of
    with patched(decoding, "shape_of", apart):
        yield


@contextmanager
def who_sent_records_in_flight_is_forgotten() -> Iterator[None]:
    with patched(pieces, "_way", lambda section: (f"in-flight/{section.split('/')[0]}", 0)):
        yield


@contextmanager
def a_key_is_told_by_the_first_way_to_read_it() -> Iterator[None]:
    def first(self: StateIdentity, columns: Mapping[str, str]) -> tuple[str, ...]:
        return next(state_identity._names_at(self.text.partition("keys ")[2], columns), ())

    with patched(StateIdentity, "keys_among", first):
        yield


@contextmanager
def a_clash_of_names_goes_unseen() -> Iterator[None]:
    with patched(shapes, "_apart", lambda stored, named, others: tuple(named)):
        yield


@contextmanager
def a_bundle_of_version_1_has_one_operator() -> Iterator[None]:
    def may_have(checkpoint: Any, entry: Any, part: SnapshotPart, operator: str) -> bool:
        return operator in (entry.subtask.vertex, part.section.rpartition("/")[2])

    with patched(pieces, "_may_have", may_have):
        yield


@contextmanager
def subtasks_are_taken_for_one() -> Iterator[None]:
    with patched(pieces, "_owned", lambda checkpoint, entry, part: KeyGroups(0, 1)):
        yield


@contextmanager
def keys_are_forgotten() -> Iterator[None]:
    with patched(state_source, "_keys", lambda state, text: None):
        yield


@contextmanager
def every_action_looks_for_the_newest_checkpoint() -> Iterator[None]:
    def load(self: Any) -> Any:
        return self._found(state_source.find(str(self.options["path"]), None))

    with patched(StateDataSource, "_load", load):
        yield


@contextmanager
def timers_are_taken_for_declared_values() -> Iterator[None]:
    with patched(shapes, "OF_TIMERS", {}), patched(reading, "OF_TIMERS", {}):
        yield


@contextmanager
def times_that_are_no_dates_are_shown_as_some() -> Iterator[None]:
    def dates(times_ms: pa.Array) -> pa.Array:
        return pa.array(times_ms.to_numpy() * 1_000).view(pa.timestamp("us"))

    with patched(reading, "_dates", dates):
        yield


@contextmanager
def timers_count_as_declared_state() -> Iterator[None]:
    with patched(catalog, "_RANKS", dict.fromkeys(catalog.BESIDE, 2)):
        yield


ON_DISK: list[tuple[Mutant, Test, tuple[object, ...]]] = [
    (a_part_is_taken_for_its_first_key_group, read.test_rows_are_those_of_the_keys, ()),
    (rows_of_the_key_group_count_for_the_key, read.test_rows_are_those_of_the_keys, ()),
    (only_the_first_column_of_a_key_is_compared, read.test_keys_of_several_columns_are_tuples, ()),
    (a_key_is_what_arrow_makes_of_it, read.test_a_key_that_arrow_would_round_is_none, ()),
    (what_was_removed_is_called_damaged, read.test_what_retention_removes_meanwhile_is_one_sentence, ()),
    (what_is_missing_is_called_removed, read.test_a_file_that_is_cut_or_missing_is_named, (Path.unlink,)),
    (looking_makes_a_directory, read.test_looking_changes_nothing, ()),
    (damage_in_the_log_is_passed_over, read.test_an_older_checkpoint_is_never_shown_as_the_newest, (Path.unlink,)),
    (a_savepoint_is_looked_for_where_its_checkpoint_was, read.test_a_savepoint_that_was_moved_can_be_looked_at, ()),
    (windows_begin_where_they_end, read.test_what_earlier_versions_wrote_can_be_looked_at, ("savepoint_1",)),
    (
        a_bundle_of_version_1_has_one_operator,
        read.test_what_earlier_versions_wrote_can_be_looked_at,
        ("checkpoints_0_1/golden",),
    ),
    (subtasks_are_taken_for_one, read.test_what_earlier_versions_wrote_can_be_looked_at, ("checkpoints_1/golden",)),
    (a_list_of_the_operator_hides_behind_keyed_state, read.test_lists_of_an_operator_are_beside_its_keyed_state, ()),
    (who_sent_records_in_flight_is_forgotten, read.test_records_in_flight_are_shown_as_such, ()),
    (timers_are_taken_for_declared_values, timed.test_timers_can_be_looked_at, ("row",)),
    (times_that_are_no_dates_are_shown_as_some, timed.test_timers_can_be_looked_at, ("batch",)),
    (timers_count_as_declared_state, timed.test_timers_do_not_hide_which_state_is_meant, ()),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), ON_DISK, ids=lambda one: getattr(one, "__name__", ""))
def test_reading_that_shows_something_else_is_caught(
    mutant: Mutant, test: Test, arguments: tuple[object, ...], tmp_path: Path
) -> None:
    assert_caught(mutant, test, tmp_path, *arguments)


@pytest.mark.parametrize("mutant", [every_part_is_read_whatever_is_wanted, every_part_is_listed_to_read_one])
def test_reading_too_much_is_caught(mutant: Mutant, tmp_path: Path) -> None:  # RS7
    seen: read.Reads = []
    get_range = LocalStorage.get_range

    def counted(self: LocalStorage, path: str, offset: int, size_bytes: int) -> bytes:
        seen.append((path, offset))
        return get_range(self, path, offset, size_bytes)

    with patched(LocalStorage, "get_range", counted):
        assert_caught(mutant, read.test_only_the_parts_that_can_hold_a_key_are_read, tmp_path, seen)


@pytest.mark.parametrize("mutant", [what_is_read_is_not_verified, a_header_is_not_verified])
def test_believing_what_is_damaged_is_caught(mutant: Mutant, tmp_path: Path) -> None:  # RS8
    with pytest.MonkeyPatch.context() as patch:
        assert_caught(mutant, read.test_what_is_read_is_verified_and_the_rest_is_left_alone, tmp_path, patch)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (keys_are_forgotten, sourced.test_keys_choose_what_is_read),
        (
            every_action_looks_for_the_newest_checkpoint,
            sourced.test_all_tasks_read_the_checkpoint_that_was_the_newest_at_the_load,
        ),
    ],
)
def test_a_dataframe_of_something_else_is_caught(mutant: Mutant, test: Test, tmp_path: Path) -> None:  # RS13
    path = shutil.copytree(sourced.GOLDEN / "checkpoints_1", tmp_path / "checkpoints") / "golden"
    assert_caught(mutant, test, path)


def test_keys_that_are_guessed_are_caught() -> None:  # RS5
    test = shaped.test_keys_of_records_are_found_or_rows_are_not_chosen_by_them
    assert_caught(a_key_is_told_by_the_first_way_to_read_it, test, ("k", "n", "k, n"), False)
    assert_caught(
        a_clash_of_names_goes_unseen, shaped.test_a_key_that_is_called_as_another_column_keeps_its_position, "value"
    )
