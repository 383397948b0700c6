"""Mutants of what becomes of damaged values in a store's catalogue, and of how much of its history is looked at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.sim.product.patching import around, skipped
from tests.store import test_store_damage as damaging
from tests.store.catalogue import test_damaged_values as values
from tests.store.catalogue import test_long_histories as histories
from tests.store.catalogue.damaging import Damaged

from headgate.protocol.store import group_holds
from headgate.store import fsck, schemas
from headgate.store.catalogue import audit, heads, soundness, streams
from headgate.store.catalogue import tables as t
from headgate.store.store import Store


@pytest.fixture(scope="module")
def damaged() -> Damaged:
    return Damaged(values.filled)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, damaging.Events]:
    return damaging.made(tmp_path_factory.mktemp("whole"))


# -- damaged values (CT14, S40) --------------------------------------------------------------------------------------


def nobody_looks_at_kinds() -> AbstractContextManager[None]:
    return patched(soundness, "_problems_of_rows", lambda raw, table: [])


def the_first_stream_that_cannot_be_read_ends_the_check() -> AbstractContextManager[None]:
    def all_streams(self: Any) -> Any:
        rows = self._connection.execute(sa.select(t.streams)).all()
        return {row.name: audit.stream_info(row, self._where) for row in rows}

    return patched(audit.SqlAudit, "_streams", property(all_streams))


def what_a_check_trips_over_ends_it() -> AbstractContextManager[None]:
    return patched(audit, "checked", lambda where, check, *of: [(where, problem) for problem in check(*of)])


def a_schema_is_whatever_arrow_reads() -> AbstractContextManager[None]:
    return patched(schemas, "_decoded", lambda data: pa.ipc.read_schema(pa.py_buffer(data)))


@pytest.mark.parametrize("mutant", [nobody_looks_at_kinds, the_first_stream_that_cannot_be_read_ends_the_check])
def test_a_check_that_tells_too_little_is_found(mutant: Mutant, damaged: Damaged) -> None:
    assert_caught(mutant, values.check_values, damaged)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [(a_schema_is_whatever_arrow_reads, "streams.schema"), (what_a_check_trips_over_ends_it, "owners.life")],
)
def test_a_blob_that_nobody_checks_is_found(mutant: Mutant, name: str, damaged: Damaged) -> None:
    assert_caught(mutant, values.test_a_value_that_is_damaged_somewhere_is_told, damaged, name)


def nobody_asks_the_file() -> AbstractContextManager[None]:
    return patched(soundness, "told", lambda path, connect: nullcontext())


def values_are_handed_on_as_they_are() -> AbstractContextManager[None]:
    return patched(streams, "of_kinds", lambda row, *kinds: row)


def test_verbs_that_trip_over_values_are_found(damaged: Damaged) -> None:
    test = values.test_no_verb_ends_in_an_error_of_another_kind_where_a_value_is_damaged
    assert_caught(nobody_asks_the_file, test, damaged)


def test_values_that_others_trip_over_are_found(damaged: Damaged) -> None:
    test = values.test_what_a_verb_only_hands_on_is_looked_at
    assert_caught(values_are_handed_on_as_they_are, test, damaged, *values.HANDED_ON[0])


def orphans_go_whatever_is_damaged() -> AbstractContextManager[None]:
    return skipped(Store, "fsck", [])


def test_files_that_go_although_they_may_be_needed_are_missed(
    whole: tuple[Path, damaging.Events], tmp_path: Path
) -> None:
    assert_caught(
        orphans_go_whatever_is_damaged, damaging.test_no_file_is_removed_where_something_is_damaged, whole, tmp_path
    )


def a_footer_that_cannot_be_read_ends_the_check() -> AbstractContextManager[None]:
    return patched(fsck, "checked", lambda where, check, *of: [(where, problem) for problem in check(*of)])


def test_a_check_that_ends_with_the_first_damage_is_found(whole: tuple[Path, damaging.Events], tmp_path: Path) -> None:
    test = damaging.test_a_check_tells_of_a_chunk_that_is_damaged_anywhere_and_goes_on
    assert_caught(a_footer_that_cannot_be_read_ends_the_check, test, whole, tmp_path)


# -- long histories (CT15) -------------------------------------------------------------------------------------------


def those_that_take_events_are_looked_for_among_all() -> AbstractContextManager[None]:
    """As it was: SQLite does not take the index for this."""
    own = t.segments.c
    return patched(t, "present", lambda stream_id: (own.stream_id == stream_id, own.closed_epoch.is_(None)))


def who_holds_looks_at_all_segments() -> AbstractContextManager[None]:
    return around(heads, "_extents", lambda call, connection, of_stream, *named: call(connection, of_stream))


def what_a_group_holds_is_looked_at_anew_with_each_change() -> AbstractContextManager[None]:
    """As it was."""
    return patched(group_holds, "moved", lambda before, after, stream: None)


HISTORIES: list[Callable[[], AbstractContextManager[None]]] = [
    those_that_take_events_are_looked_for_among_all,
    who_holds_looks_at_all_segments,
    what_a_group_holds_is_looked_at_anew_with_each_change,
]


@pytest.mark.parametrize("mutant", HISTORIES)
def test_what_looks_at_the_history_is_found(mutant: Mutant) -> None:
    short, long = histories.History(histories.SHORT), histories.History(histories.LONG)
    assert_caught(mutant, histories.check_often, short, long)
