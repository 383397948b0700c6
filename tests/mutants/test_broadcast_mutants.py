"""Mutants of broadcast state (BC1 to BC12): order, copies, what is in flight, who may write, event time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.operators.process import test_broadcast as operator_tests
from tests.operators.process.broadcast_functions import BatchLimits, Limits
from tests.runtime import test_broadcast_run as run_tests
from tests.runtime.checkpoints import test_broadcast_in_flight as in_flight_tests
from tests.sim.product.patching import around, skipped

from headgate.api import connected
from headgate.model.graph import Partitioner
from headgate.operators import ordering
from headgate.operators.ordering import OrderingOperator
from headgate.operators.process import broadcast_by_row, broadcast_side, spec
from headgate.operators.process.broadcast_side import BroadcastMap, BroadcastSide
from headgate.runtime.checkpoints import in_flight, restoring


@contextmanager
def the_side_is_spread_over_all_subtasks() -> Iterator[None]:  # BC2
    original = connected.replace

    def replace(edge: Any, **changes: Any) -> Any:
        return original(edge, partitioner=Partitioner.REBALANCE)

    with patched(connected, "replace", replace):
        yield


def every_subtask_writes_its_copy() -> AbstractContextManager[None]:  # BC5
    def freeze(call: Any, self: Any, context: Any, *, is_own: bool) -> Any:
        found = [one.frozen() for one in self._maps.values() if one.get(None)]
        return broadcast_side.FrozenBroadcast(found, is_own=is_own) if found else None

    return around(BroadcastSide, "freeze", freeze)


def copies_that_differ_are_not_written() -> AbstractContextManager[None]:  # BC6
    return around(BroadcastSide, "freeze", lambda call, self, context, *, is_own: call(self, context, is_own=False))


def an_empty_copy_is_none() -> AbstractContextManager[None]:  # BC6
    def freeze(call: Any, self: Any, context: Any, *, is_own: bool) -> Any:
        return call(self, context, is_own=is_own) if any(one.get(None) for one in self._maps.values()) else None

    return around(BroadcastSide, "freeze", freeze)


def others_are_not_given_the_copy_of_the_first_one() -> AbstractContextManager[None]:  # BC5
    return patched(restoring, "is_for_everybody", lambda part, writer: part.section.startswith("union/"))


def nobody_restores_broadcast_state() -> AbstractContextManager[None]:  # BC5
    return skipped(BroadcastSide, "restore")


def everybody_replays_what_the_first_one_had_in_flight() -> AbstractContextManager[None]:  # BC6
    return skipped(in_flight._Heirs, "copied_from", 0)


def nobody_knows_whose_copy_is_whose() -> AbstractContextManager[None]:  # BC6
    return patched(broadcast_side._COPIES.__class__, "found_in", lambda self, sections, path: None)


def what_is_in_flight_to_the_side_goes_to_heirs() -> AbstractContextManager[None]:  # BC6
    return patched(in_flight, "is_alike", lambda name: False)


def what_is_in_flight_to_the_side_comes_last() -> AbstractContextManager[None]:  # BC6
    def restored(call: Any, parts: Any, ways: Any, plan: Any, subtask: Any) -> Any:
        found = list(call(parts, ways, plan, subtask))
        inputs = {way.channel.channel: way.channel.edge.input for way in ways}
        return iter(sorted(found, key=lambda one: inputs[one[0]] == "broadcast"))

    return patched_everywhere("restored_records", restored)


@contextmanager
def patched_everywhere(name: str, change: Callable[..., Any]) -> Iterator[None]:
    """The test has imported the function by its name."""
    original = getattr(in_flight, name)
    replacement = lambda *a: change(original, *a)  # noqa: E731
    with patched(in_flight, name, replacement), patched(in_flight_tests, name, replacement):
        yield


def what_is_frozen_is_changed_in_place() -> AbstractContextManager[None]:  # BC7
    def writable(self: Any, key: object) -> Any:
        self.version += 1
        return self._entries or None

    return patched(BroadcastMap, "writable", writable)


def a_change_is_not_seen_in_frames() -> AbstractContextManager[None]:  # BC9
    def writable(self: Any, key: object) -> Any:
        if self._is_frozen:
            self._entries, self._is_frozen = dict(self._entries), False
        return self._entries or None

    return patched(BroadcastMap, "writable", writable)


def anybody_writes() -> AbstractContextManager[None]:  # BC4
    return skipped(BroadcastSide, "check_writable")


def what_is_not_there_yet_can_be_read() -> AbstractContextManager[None]:  # BC4
    return skipped(BroadcastSide, "check_readable")


def a_side_without_event_times_is_waited_for() -> AbstractContextManager[None]:  # BC8
    return skipped(OrderingOperator, "on_splits")


def event_times_that_are_none_go_on() -> AbstractContextManager[None]:  # BC8
    return patched(OrderingOperator, "on_watermark", lambda self, ms: self.output.emit_watermark(ms))


def bad_records_go_to_every_subtask() -> AbstractContextManager[None]:  # BC3
    return patched(ordering, "divert_unreadable", lambda operator, batch: batch)


def types_are_no_part_of_the_identity() -> AbstractContextManager[None]:  # BC1
    return patched(spec, "broadcast_text", lambda one: f"broadcast map {one.name}: int64 -> int64")


def values_of_older_programs_are_taken_as_they_are() -> AbstractContextManager[None]:  # BC12
    return patched(broadcast_side, "evolved_values", lambda values, dtype, evolution: values)


def timers_without_a_key_are_taken() -> AbstractContextManager[None]:  # BC9
    return skipped(broadcast_by_row, "check_function")


CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[Any, ...]]] = [
    (every_subtask_writes_its_copy, operator_tests.test_the_first_subtask_writes_for_all, ()),
    (
        others_are_not_given_the_copy_of_the_first_one,
        in_flight_tests.test_unions_and_the_first_copy_of_broadcast_state_go_to_everybody,
        (),
    ),
    (
        nobody_restores_broadcast_state,
        operator_tests.test_a_form_restores_what_the_other_one_wrote_in_its_order,
        (Limits, BatchLimits),
    ),
    *(
        (mutant, operator_tests.test_where_barriers_overtake_each_subtask_goes_on_with_its_own_copy, (3,))
        for mutant in (copies_that_differ_are_not_written, an_empty_copy_is_none, nobody_knows_whose_copy_is_whose)
    ),
    *(
        (
            mutant,
            in_flight_tests.test_what_is_in_flight_to_a_broadcast_side_is_replayed_with_the_copy_it_belongs_to,
            (before, after),
        )
        for mutant, before, after in (
            (everybody_replays_what_the_first_one_had_in_flight, 2, 2),
            (what_is_in_flight_to_the_side_goes_to_heirs, 3, 2),
            (what_is_in_flight_to_the_side_goes_to_heirs, 2, 3),
            (what_is_in_flight_to_the_side_comes_last, 1, 1),
        )
    ),
    (
        what_is_frozen_is_changed_in_place,
        operator_tests.test_what_is_frozen_of_a_broadcast_side_does_not_change,
        (Limits,),
    ),
    (
        a_change_is_not_seen_in_frames,
        operator_tests.test_both_forms_do_the_same_with_and_without_a_key,
        (BatchLimits, ("key",)),
    ),
    (anybody_writes, operator_tests.test_broadcast_state_is_written_by_its_side_only, (operator_tests.Wrong, "put")),
    (
        what_is_not_there_yet_can_be_read,
        operator_tests.test_broadcast_state_is_written_by_its_side_only,
        (operator_tests.WrongBatches, "put"),
    ),
    (a_side_without_event_times_is_waited_for, operator_tests.test_a_side_without_event_times_holds_nothing_back, ()),
    (event_times_that_are_none_go_on, operator_tests.test_a_side_without_event_times_holds_nothing_back, ()),
    (bad_records_go_to_every_subtask, operator_tests.test_a_bad_record_of_the_side_is_one, ()),
    (
        types_are_no_part_of_the_identity,
        operator_tests.test_the_identity_of_broadcast_state_is_names_and_types_in_any_order,
        (Limits, ("key",)),
    ),
    (values_of_older_programs_are_taken_as_they_are, operator_tests.test_broadcast_state_evolves, ()),
    (timers_without_a_key_are_taken, operator_tests.test_what_a_broadcast_function_cannot_be_is_refused, ()),
]


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"), CAUGHT, ids=[f"{mutant.__name__}-{at}" for at, (mutant, _, _) in enumerate(CAUGHT)]
)
def test_a_mutant_of_broadcast_state_is_caught(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    assert_caught(mutant, test, *arguments)


def test_a_side_that_is_spread_over_all_subtasks_is_caught(tmp_path: Path) -> None:
    def several_times() -> None:  # by luck all subtasks see one order now and then
        for number in range(5):
            (tmp_path / str(number)).mkdir()
            run_tests.test_every_subtask_sees_the_records_of_several_senders_in_one_order(tmp_path / str(number))

    assert_caught(the_side_is_spread_over_all_subtasks, several_times)
