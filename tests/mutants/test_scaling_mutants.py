"""Mutants of scaling, and of reading a stream that is scaled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.connectors import test_scaled_streams as reading
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.store import test_layouts as layout_tests
from tests.protocol.store import test_reading_order as order
from tests.store import test_scaling as scaling

from headgate.connectors.streams import source
from headgate.connectors.streams.segments import OwnSegments
from headgate.connectors.streams.source import StreamCutReader, StreamSource
from headgate.protocol.store import layouts, reading_order
from headgate.protocol.store.layouts import Change, Layout, Plan, Reopened
from headgate.protocol.store.reading_order import FirstStart, ReadingOrder
from headgate.store.appends import FlushAttempt
from headgate.store.catalogue import markers, positions
from headgate.store.catalogue import scaling as tables
from headgate.store.catalogue import streams as sql_streams
from headgate.store.store import Store
from headgate.store.writer import StreamWriter

Test = Callable[..., object]


def who_holds_nothing_begins_when_it_comes() -> AbstractContextManager[None]:  # SC42
    return patched(StreamSource, "only_looks", True)


def events_routed_by_a_former_layout_are_taken() -> AbstractContextManager[None]:  # S73
    return patched(sql_streams, "check_writable", lambda connection, stream: None)


def what_is_routed_anew_begins_with_the_last_append() -> AbstractContextManager[None]:  # S73
    real = FlushAttempt.begin_again

    def begin_again(self: FlushAttempt, path: str) -> None:
        real(self, path)
        self.items.reverse()

    return patched(FlushAttempt, "begin_again", begin_again)


def a_scaled_writer_writes_under_the_old_name() -> AbstractContextManager[None]:  # S73
    def begin_again(self: FlushAttempt, path: str) -> None:
        self.is_uncertain = False

    return patched(FlushAttempt, "begin_again", begin_again)


def a_writer_takes_any_stream_of_that_name() -> AbstractContextManager[None]:  # S73
    return patched(StreamWriter, "_scaled", lambda self: self._catalogue.find_stream(self.stream.name))


def a_closed_segment_has_no_end() -> AbstractContextManager[None]:  # S74
    open_ones = positions._ENDED.with_only_columns(positions.t.streams.c.is_sealed, positions.sa.null())
    return patched(positions, "_ENDED", open_ones.add_columns(positions.sa.null().label("closed_epoch")))


def late_events_go_to_the_first_heir() -> AbstractContextManager[None]:  # S75
    def home(layout: Layout, number: int) -> int | None:
        return next(x.segment_id for x in layout.present if x.overlaps(layout.segments[number]))

    return patched(layouts, "_home", home)


def late_events_stay_where_they_were_routed() -> AbstractContextManager[None]:  # S75
    return patched(layouts, "reopen", lambda layout, epoch, touched: Reopened({number: number for number in touched}))


def the_old_ranges_stay() -> AbstractContextManager[None]:  # S75
    return patched(layouts, "back", lambda layout, ranges: None)


def every_late_transaction_reopens() -> AbstractContextManager[None]:  # S75
    def places(self: Any, stream: Any, epoch: int, touched: Any, real: Any = tables.Reopening.places) -> Any:
        found = real(self, stream, epoch, touched)
        self.close()
        self._ranges.clear()
        return found

    return patched(tables.Reopening, "places", places)


def a_plan_fits_any_layout() -> AbstractContextManager[None]:  # S72
    real = layouts.scale
    return patched(layouts, "scale", lambda layout, plan: real(layout, replace(plan, epoch=layout.epoch)))


def a_step_is_made_again() -> AbstractContextManager[None]:  # S72
    return patched(layouts, "_was_made", lambda layout, plan: False)


def keys_may_be_left_out() -> AbstractContextManager[None]:  # S72
    def scale(layout: Layout, plan: Plan) -> Change:
        return layouts._step(layout, plan)

    return patched(layout_tests, "scale", scale)


def resizing_touches_all_segments() -> AbstractContextManager[None]:  # S72
    def towards(layout: Layout, ranges: Any) -> Plan | None:
        if {segment.keys for segment in layout.present} == set(ranges):
            return None
        return Plan(layout.epoch, tuple(segment.segment_id for segment in layout.present), tuple(ranges))

    return patched(layouts, "_towards", towards)


def dates_begin_anew() -> AbstractContextManager[None]:  # S66
    real = tables._apply

    def apply(connection: Any, stream: Any, change: Any, now_ms: int) -> Any:
        layout = real(connection, stream, change, now_ms)
        connection.execute(tables.t.segments.update().values(latest_ms=0))
        return layout

    return patched(tables, "_apply", apply)


def any_generation_counts() -> AbstractContextManager[None]:  # SC40
    def passed(connection: Any, stream: Any, reader: Any) -> set[int]:
        return set(connection.scalars(tables.sa.select(tables.t.passed.c.segment_id)))

    return patched(tables, "passed", passed)


def nobody_waits() -> AbstractContextManager[None]:  # SC40
    return patched(ReadingOrder, "_passed_before", lambda self, number: True)


def any_checkpoint_counts() -> AbstractContextManager[None]:  # SC40
    return patched(ReadingOrder, "completed", lambda self, checkpoint: set(self._untold))


def the_end_counts_at_once() -> AbstractContextManager[None]:  # SC40
    real = OwnSegments.__init__
    return patched(OwnSegments, "__init__", lambda self, *args, at_once: real(self, *args, at_once=True))


def what_could_not_be_told_is_forgotten() -> AbstractContextManager[None]:  # SC40
    def tell(self: Any, segments: Any, real: Any = OwnSegments._tell) -> None:
        numbers = sorted(segments)
        real(self, numbers)
        self._order.told(numbers)

    return patched(OwnSegments, "_tell", tell)


def what_was_read_is_forgotten() -> AbstractContextManager[None]:  # SC40
    return patched(ReadingOrder, "_is_asked_for", lambda self, number, start: False)


def everything_without_a_position_is_new() -> AbstractContextManager[None]:  # SC40
    def passed_by(layout: Any, extents: Any, places: Any) -> set[int]:
        closed = {x.segment_id for x in layout.segments if x.closed_epoch is not None}
        return {x for x, place in places.items() if x in closed and place.position >= extents[x].end}

    return patched(order, "passed_by", passed_by)


def an_unfinished_segment_is_passed_with_what_follows() -> AbstractContextManager[None]:  # SC40
    real = reading_order.passed_by

    def passed_by(layout: Any, extents: Any, places: Any) -> set[int]:
        return set().union(*(real(layout, extents, {x: place}) for x, place in places.items()))

    return patched(order, "passed_by", passed_by)


def everybody_deals_out_what_he_sees() -> AbstractContextManager[None]:  # SC41
    return patched(ReadingOrder, "_owner", lambda self, segment: segment.segment_id % self.parallelism)


def what_waits_is_no_split() -> AbstractContextManager[None]:  # SC41
    def splits(self: Any) -> list[str]:
        return [split for split in self._readers if split not in self._finished]

    return patched(source.StreamSourceReader, "splits", splits)


def each_subtask_begins_when_it_opens() -> AbstractContextManager[None]:  # SC42
    def start_of(store: Any, stream: Any, context: Any, of: StreamSource, places: Any) -> Any:
        if places is not None:
            return reading_order.Restored(places)
        ends = dict(enumerate(stream.ends))
        return FirstStart(ends, from_latest=of.start == "latest", is_bounded=not of.follow)

    return patched(source, "start_of", start_of)


def every_life_begins_at_the_same_moment() -> AbstractContextManager[None]:  # SC42
    real = source.start_of

    def start_of(store: Any, stream: Any, context: Any, of: StreamSource, places: Any) -> Any:
        return real(store, stream, replace(context, life="one"), of, places)

    return patched(source, "start_of", start_of)


def a_moment_is_of_what_takes_events() -> AbstractContextManager[None]:  # S85, SC42
    real = source._moment

    def moment(store: Any, stream: Any, *rest: Any) -> Any:
        present = {x.segment_id for x in store.layout(stream.name).of_epoch(stream.layout_epoch)}
        return {number: end for number, end in real(store, stream, *rest).items() if number in present}

    return patched(source, "_moment", moment)


def closed_segments_are_cut_where_their_readers_are() -> AbstractContextManager[None]:  # S85, SC44
    real = markers._ends

    def ends(connection: Any, stream: Any, segments: Any) -> Any:
        found, closed = real(connection, stream, segments)
        return found, [segment for segment in closed if not found[segment]]

    return patched(markers, "_ends", ends)


def the_end_of_what_waits_is_not_kept() -> AbstractContextManager[None]:  # SC42
    return patched(order.Subtask, "places", lambda self: {**self.order.done, **self.reading, **self.ended})


def a_segment_that_came_later_has_no_marker() -> AbstractContextManager[None]:  # SC44
    def next_one(self: Any, segment: int) -> Any:
        markers = self._frontier.markers.get(segment, ())
        return next((marker for marker in markers if marker.checkpoint > self._met.get(segment, 0)), None)

    return patched(source.SegmentCuts, "next", next_one)


def what_waits_meets_no_marker() -> AbstractContextManager[None]:  # SC44
    return patched(StreamCutReader, "_meet_waiting", lambda self: None)


def a_scaled_stream_is_another_one() -> AbstractContextManager[None]:  # SC40
    return patched(Layout, "of_epoch", lambda self, epoch: self.present)


def a_machine() -> None:
    """The random histories of ``test_reading_order``, without explaining what they find."""
    quick = settings(order.TestReading.settings, max_examples=400, phases=[Phase.generate], database=None)
    run_state_machine_as_test(order.Reading, settings=quick)  # type: ignore[no-untyped-call]


MUTANTS: dict[Mutant, Test] = {
    who_holds_nothing_begins_when_it_comes: partial(
        reading.test_subtasks_that_begin_while_a_stream_is_scaled_begin_at_one_moment, start="latest", holds=False
    ),
    events_routed_by_a_former_layout_are_taken: scaling.test_a_writer_goes_on_when_its_stream_is_scaled,
    what_is_routed_anew_begins_with_the_last_append: scaling.test_a_writer_goes_on_when_its_stream_is_scaled,
    a_scaled_writer_writes_under_the_old_name: scaling.test_a_writer_goes_on_when_its_stream_is_scaled,
    a_closed_segment_has_no_end: scaling.test_a_closed_segment_has_an_end,
    late_events_go_to_the_first_heir: (
        scaling.test_a_transaction_that_was_prepared_before_a_split_comes_behind_what_was_written_meanwhile
    ),
    late_events_stay_where_they_were_routed: (
        scaling.test_a_transaction_that_began_before_a_split_and_is_prepared_behind_it_is_committed
    ),
    the_old_ranges_stay: (
        scaling.test_a_transaction_that_was_prepared_before_a_split_comes_behind_what_was_written_meanwhile
    ),
    every_late_transaction_reopens: scaling.test_what_one_layout_prepared_is_reopened_once,
    a_plan_fits_any_layout: scaling.test_of_two_that_scale_at_once_one_is_told,
    a_step_is_made_again: scaling.test_scaling_again_whose_answer_was_lost_changes_nothing,
    dates_begin_anew: scaling.test_dates_do_not_go_back_in_new_segments,
    any_generation_counts: scaling.test_what_was_passed_belongs_to_one_generation,
    nobody_waits: reading.test_a_segment_that_follows_those_of_two_subtasks_waits_for_a_checkpoint,
    any_checkpoint_counts: reading.test_a_checkpoint_that_began_before_the_end_of_a_segment_does_not_count,
    the_end_counts_at_once: reading.test_a_segment_that_follows_those_of_two_subtasks_waits_for_a_checkpoint,
    what_could_not_be_told_is_forgotten: reading.test_what_cannot_be_told_is_told_with_the_next_checkpoint,
    what_waits_is_no_split: reading.test_a_segment_that_follows_those_of_two_subtasks_waits_for_a_checkpoint,
    each_subtask_begins_when_it_opens: partial(
        reading.test_subtasks_that_begin_while_a_stream_is_scaled_begin_at_one_moment, holds=True, start="latest"
    ),
    every_life_begins_at_the_same_moment: reading.test_another_life_of_a_pipeline_begins_at_a_moment_of_its_own,
    a_segment_that_came_later_has_no_marker: partial(
        reading.test_a_cut_goes_through_a_stream_that_is_scaled, parallelism=2
    ),
    a_moment_is_of_what_takes_events: reading.test_a_bounded_read_ends_where_its_first_subtask_saw_the_end,
    closed_segments_are_cut_where_their_readers_are: partial(
        reading.test_a_cut_goes_through_a_stream_that_is_scaled, parallelism=1
    ),
    everybody_deals_out_what_he_sees: reading.test_segments_that_follow_are_read_by_who_read_those_before,
    a_scaled_stream_is_another_one: reading.test_a_scaled_stream_is_the_same_stream,
}

PURE: dict[Mutant, Test] = {
    keys_may_be_left_out: layout_tests.test_a_step_that_was_made_is_not_made_again,
    resizing_touches_all_segments: layout_tests.test_a_resized_stream_keeps_the_segments_that_fit,
    nobody_waits: a_machine,
    what_was_read_is_forgotten: order.test_a_segment_that_nobody_asks_for_leaves_the_positions,
    everything_without_a_position_is_new: (
        order.test_what_was_read_and_has_no_position_any_more_is_known_by_what_follows
    ),
    an_unfinished_segment_is_passed_with_what_follows: (
        order.test_what_was_read_and_has_no_position_any_more_is_known_by_what_follows
    ),
    the_end_of_what_waits_is_not_kept: partial(
        order.test_a_bounded_read_ends_at_its_moment_also_after_a_restart, parallelism=2
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_caught(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = MUTANTS[mutant]
    tries = iter(range(10))

    def run() -> None:
        inner = test.func if isinstance(test, partial) else test
        root = tmp_path / str(next(tries))
        with Store.open(root) as store, monkeypatch.context() as patch:
            segments = 2 if inner.__module__ == reading.__name__ else 3
            store.create_stream(reading.NAME, reading.SCHEMA, segments=segments, routing_key="key")
            if inner.__module__ == reading.__name__:
                store = Store.shared(root)
            given = {"store": store, "monkeypatch": patch, "linger": None}
            wanted = inner.__code__.co_varnames[: inner.__code__.co_argcount]
            test(**{name: given[name] for name in wanted if name in given})

    assert_caught(mutant, run)


@pytest.mark.parametrize("mutant", PURE, ids=lambda mutant: mutant.__name__)
def test_mutants_of_decisions_are_caught(mutant: Mutant) -> None:
    def run() -> None:
        PURE[mutant]()

    assert_caught(mutant, run)
