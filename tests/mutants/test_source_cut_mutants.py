"""Mutants of sources that begin or end at stream cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.connectors import test_source_cuts as tests
from tests.mutants.harness import Mutant, assert_caught, patched

from headgate.connectors.streams import source
from headgate.protocol.store.layouts import Segment
from headgate.protocol.store.reading_order import FirstStart, Place, ReadingOrder
from headgate.protocol.store.truncation import Extent
from headgate.store import cut_store
from headgate.store.cuts import StreamCut
from headgate.store.store import Store

BeginAt = Callable[[ReadingOrder, Segment, Extent, Mapping[int, int], int | None], Place | None]


def beginning(change: Callable[[BeginAt, tuple[Any, ...]], Place | None]) -> AbstractContextManager[None]:
    real = ReadingOrder._begin_at
    return patched(ReadingOrder, "_begin_at", lambda *args: change(real, args))


def what_was_closed_is_passed_over() -> AbstractContextManager[None]:  # SC52
    return beginning(lambda real, args: real(*args[:2], Extent(0, 0), *args[3:]))


def what_was_closed_is_read_again() -> AbstractContextManager[None]:  # SC52
    return beginning(lambda real, args: Place(0, args[4]))


def what_the_start_does_not_name_begins_with_what_is_left() -> AbstractContextManager[None]:  # SC52
    return beginning(lambda real, args: real(*args[:3], {args[1].segment_id: args[2].head} | dict(args[3]), args[4]))


def the_end_is_no_end() -> AbstractContextManager[None]:  # SC52
    return patched(source, "FirstStart", lambda *args: replace(FirstStart(*args), is_bounded=False))


def the_latest_is_the_earliest() -> AbstractContextManager[None]:  # SC52
    return patched(source, "FirstStart", lambda moment, latest, bounded, begin: FirstStart(moment, latest, bounded))


def any_cut_will_do() -> AbstractContextManager[None]:  # SC52
    return patched(StreamCut, "check", lambda self, stream: None)


def what_came_later_is_counted() -> AbstractContextManager[None]:  # S66
    real = cut_store._between
    return patched(cut_store, "_between", lambda first, last, x, extent: real(first, {x: extent.end} | last, x, extent))


MUTANTS: dict[Mutant, Callable[..., object]] = {
    what_was_closed_is_passed_over: partial(
        tests.test_a_segment_that_was_closed_behind_the_date_is_read_from_the_date_on, parallelism=1
    ),
    what_was_closed_is_read_again: tests.test_what_lies_between_two_cuts_is_read_whatever_was_scaled,
    what_the_start_does_not_name_begins_with_what_is_left: (
        tests.test_what_is_gone_behind_the_start_is_missed_with_an_error
    ),
    the_end_is_no_end: partial(tests.test_a_pipeline_reads_what_lies_between_two_cuts, parallelism=1),
    the_latest_is_the_earliest: tests.test_from_the_latest_event_on_up_to_a_cut_there_is_nothing,
    any_cut_will_do: tests.test_a_cut_of_another_stream_is_refused_before_anything_runs,
    what_came_later_is_counted: tests.test_what_lies_between_two_cuts_is_read_whatever_was_scaled,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_caught(mutant: Mutant, tmp_path: Path) -> None:
    tries = iter(range(10))

    def run() -> None:
        store = Store.shared(tmp_path / str(next(tries)))
        store.create_stream(tests.NAME, tests.SCHEMA, segments=2, routing_key="key")
        MUTANTS[mutant](store)

    assert_caught(mutant, run)
