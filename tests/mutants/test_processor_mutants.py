"""Mutants of stateful processors: calls by batch or row, timers that come twice or too early, keys that begin twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
import pytest
from tests.mutants.harness import assert_caught, patched
from tests.spark.processors import test_processors as tests

from headgate.operators.process.by_key import KeyFunctionOperator
from headgate.operators.process.by_row import ProcessOperator
from headgate.operators.process.key_timers import KeyTimers
from headgate.spark.processors.function import FrameFunction, ProcessorFunction
from headgate.spark.processors.values import Fields, MapKeys
from headgate.state.descriptors import StateDescriptor

Patch = AbstractContextManager[None]


def a_key_is_called_for_each_row() -> Patch:
    whole = KeyFunctionOperator._call_keys

    def one_by_one(self: Any, batch: pa.RecordBatch, function: Any, results: list[Any]) -> None:
        for place in range(batch.num_rows):
            whole(self, batch.slice(place, 1), function, results)

    return patched(KeyFunctionOperator, "_call_keys", one_by_one)


def late_records_are_given_to_the_processor() -> Patch:
    return patched(KeyFunctionOperator, "_in_time", lambda self, batch: batch)


def what_has_passed_waits_for_a_watermark() -> Patch:
    return patched(KeyFunctionOperator, "_fire_what_has_passed", lambda self: None)


def a_restore_lets_keys_begin_again() -> Patch:
    def restore(self: Any, states: Any) -> None:
        ProcessOperator.restore(self, states)
        self._key_timers.restored()

    return patched(KeyFunctionOperator, "restore", restore)


def every_subtask_takes_the_whole_initial_state() -> Patch:
    from headgate.operators.process import by_key

    return patched(by_key, "owned_rows", lambda batch, *_: batch)


def a_barrier_forgets_the_initial_state() -> Patch:
    """A snapshot before the first record has nothing of it."""
    return patched(KeyFunctionOperator, "before_barrier", lambda self: None)


def the_end_goes_on_for_what_is_new() -> Patch:
    begin = KeyTimers.begin

    def own(self: Any, firing_ms: int, until_ms: int) -> None:
        begin(self, firing_ms, firing_ms)
        self.fires = getattr(self, "fires", 0) + 1
        assert self.fires < 1_000, "it would never be over"

    return patched(KeyTimers, "begin", own)


def the_end_is_not_remembered() -> Patch:
    def on_watermark(self: Any, watermark_ms: int) -> None:
        self._begin()
        ProcessOperator.on_watermark(self, watermark_ms)

    return patched(KeyFunctionOperator, "on_watermark", on_watermark)


def the_timer_that_fires_may_be_registered_again() -> Patch:
    register = KeyTimers.register

    def own(self: Any, time: Any) -> None:
        if time == self._firing_ms:
            self._waiting[self._cursor.key, time] = None
        else:
            register(self, time)

    return patched(KeyTimers, "register", own)


def a_list_of_timers_has_those_that_fired() -> Patch:
    def begin(self: Any, firing_ms: int, until_ms: int) -> None:
        self._firing_ms, self._until_ms = firing_ms, until_ms

    return patched(KeyTimers, "begin", begin)


def a_list_of_timers_is_of_every_key() -> Patch:
    return patched(KeyTimers, "times", lambda self: sorted({time_ms for time_ms, _ in self._all()}))


def packed_keys_lose_a_field() -> Patch:
    def stored(self: Any, key: Any) -> Any:
        found = list(self._fields.dict_of(key).values())
        return repr(found[:1]).encode() if self._is_packed else found[0]

    return patched(MapKeys, "stored", stored)


def packed_keys_of_other_types_are_taken() -> Patch:
    return patched(MapKeys, "check", lambda self, stored: None)


def values_are_read_by_the_order_of_their_names() -> Patch:
    def tuple_of(self: Any, stored: Any) -> tuple[Any, ...]:
        return tuple(stored[name] for name in sorted(stored))

    return patched(Fields, "tuple_of", tuple_of)


def rows_are_written_by_position() -> Patch:
    whole = Fields.dict_of

    def own(self: Any, value: Any, *, by_name: bool = False) -> Any:
        return whole(self, value)

    return patched(Fields, "dict_of", own)


def frames_are_read_by_position() -> Patch:
    whole = FrameFunction._batch

    def own(self: Any, frame: Any) -> Any:
        return whole(self, frame.iloc[:, : len(self.schema)].set_axis(range(len(self.schema)), axis="columns"))

    return patched(FrameFunction, "_batch", own)


def the_key_of_one_column_is_no_tuple() -> Patch:
    return patched(ProcessorFunction, "_key", lambda self: self._context.key)


def a_ttl_is_forgotten() -> Patch:
    from headgate.spark.processors.states import ProcessorHandle

    return patched(ProcessorHandle, "_ttl", lambda self, name, duration_ms: None)


def a_state_is_known_by_its_name_alone() -> Patch:
    return patched(StateDescriptor, "text", lambda self: "state")


def a_changed_processor_is_asked_for_words() -> Patch:
    """Bug: what added fields and states are had to be said with an ``Evolution``, which no processor can."""
    from headgate.spark.processors import states
    from headgate.state.evolution import NO_EVOLUTION

    return patched(states, "evolution_of", lambda dtype: NO_EVOLUTION)


def what_is_deleted_is_still_missed() -> Patch:
    from headgate.operators.process.declaring import Declarations

    return patched(Declarations, "forgotten", property(lambda self: frozenset()))


CAUGHT: list[tuple[Callable[[], Patch], Callable[..., object], tuple[object, ...]]] = [
    (a_key_is_called_for_each_row, tests.test_a_key_is_called_once_a_batch_with_its_rows_in_their_order, ()),
    (
        late_records_are_given_to_the_processor,
        tests.test_records_that_event_time_has_passed_are_dropped_and_counted,
        (),
    ),
    (what_has_passed_waits_for_a_watermark, tests.test_a_timer_for_what_has_passed_fires_behind_its_batch, ()),
    (
        a_restore_lets_keys_begin_again,
        tests.test_the_initial_state_is_taken_over_once_by_the_subtask_that_has_the_key,
        ("rows",),
    ),
    (
        every_subtask_takes_the_whole_initial_state,
        tests.test_each_key_begins_in_one_subtask,
        (),
    ),
    (
        a_barrier_forgets_the_initial_state,
        tests.test_the_initial_state_is_taken_over_once_by_the_subtask_that_has_the_key,
        ("rows",),
    ),
    (
        the_end_goes_on_for_what_is_new,
        tests.test_the_end_of_input_fires_what_there_is_and_nothing_that_is_new,
        (),
    ),
    (the_end_is_not_remembered, tests.test_the_end_of_input_fires_what_there_is_and_nothing_that_is_new, ()),
    (
        the_timer_that_fires_may_be_registered_again,
        tests.test_the_timer_that_fires_is_gone_when_its_call_is_over,
        (),
    ),
    (a_list_of_timers_has_those_that_fired, tests.test_timers_are_listed_and_deleted_by_key, ()),
    (a_list_of_timers_is_of_every_key, tests.test_timers_are_listed_and_deleted_by_key, ()),
    (
        packed_keys_of_other_types_are_taken,
        tests.test_keys_of_several_fields_that_changed_are_told,
        ("a STRING, b INT", "(a: large_string, b: int32)", "containsKey"),
    ),
    (packed_keys_lose_a_field, tests.test_a_map_may_have_keys_of_several_fields, ()),
    (
        values_are_read_by_the_order_of_their_names,
        tests.test_what_was_put_is_got_in_sparks_types_before_and_after_a_restore,
        ("memory",),
    ),
    (rows_are_written_by_position, tests.test_results_are_taken_by_name_or_by_position, ()),
    (frames_are_read_by_position, tests.test_frames_are_taken_by_name_or_by_position, ()),
    (the_key_of_one_column_is_no_tuple, tests.test_a_key_is_called_once_a_batch_with_its_rows_in_their_order, ()),
    (a_ttl_is_forgotten, tests.test_state_with_a_ttl_is_gone_after_its_duration_of_processing_time, ()),
    (
        a_changed_processor_is_asked_for_words,
        tests.test_a_processor_that_was_changed_goes_on_as_in_spark,
        ("memory",),
    ),
    (what_is_deleted_is_still_missed, tests.test_a_processor_that_was_changed_goes_on_as_in_spark, ("memory",)),
    (a_state_is_known_by_its_name_alone, tests.test_states_are_known_by_name_kind_and_type, ()),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=[found[0].__name__ for found in CAUGHT])
def test_a_broken_rule_is_noticed(
    mutant: Callable[[], Patch], test: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    assert_caught(mutant, test, *arguments)
