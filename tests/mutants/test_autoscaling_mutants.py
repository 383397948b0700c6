"""Mutants of streams that are scaled by their policy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.store import test_autoscaling_decisions as decisions
from tests.store import test_autoscaling as tests

from headgate.protocol.store import autoscaling
from headgate.protocol.store.autoscaling import Observed, ScalingPolicy
from headgate.store import autoscaled_store
from headgate.store.catalogue import autoscaling as tables
from headgate.store.catalogue import scaling, starting_over
from headgate.store.catalogue.sql import SqlCatalogue

Test = Callable[..., object]


def a_machine() -> None:
    quick = settings(max_examples=100, stateful_step_count=20, phases=(Phase.generate,))
    run_state_machine_as_test(decisions.ScalingMachine, settings=quick)


def merged_is_what_is_split_again() -> AbstractContextManager[None]:  # S80
    def cold(policy: ScalingPolicy, observed: Observed, pair: Any) -> int | None:
        both = [observed.amounts[segment.segment_id][-1] for segment in pair]
        return sum(x or 0 for x in both) if all(x is not None for x in both) else None

    return patched(autoscaling, "_cold_amount", cold)


def each_of_both_is_cold_by_itself() -> AbstractContextManager[None]:  # S80
    real = autoscaling._cold_amount

    def cold(policy: ScalingPolicy, observed: Observed, pair: Any) -> int | None:
        found = [real(policy, observed, (one, one)) for one in pair]
        return None if None in found else sum(x or 0 for x in found)

    return patched(autoscaling, "_cold_amount", cold)


def nothing_cools_down() -> AbstractContextManager[None]:  # S80
    real = autoscaling.decide
    return patched(decisions, "decide", lambda policy, observed: real(replace(policy, cool_down_ms=0), observed))


def it_is_split_without_bounds() -> AbstractContextManager[None]:  # S79
    real = autoscaling._splits
    return patched(autoscaling, "_splits", lambda policy, *rest: real(replace(policy, segments_max=4_096), *rest))


def it_is_merged_without_bounds() -> AbstractContextManager[None]:  # S79
    real = autoscaling._pairs
    return patched(autoscaling, "_pairs", lambda policy, *rest: real(replace(policy, segments_min=1), *rest))


def the_first_window_counts_as_the_others() -> AbstractContextManager[None]:  # S79
    return patched(autoscaling, "HOT_FACTORS", (1.0, 1.0, 1.0))


def a_short_time_is_taken_for_a_long_one() -> AbstractContextManager[None]:  # S80
    real = autoscaling.decide

    def decide(policy: ScalingPolicy, observed: Observed) -> Any:
        longer = max(observed.unchanged_ms, autoscaling.WINDOWS_MS[-1])
        return real(policy, replace(observed, unchanged_ms=longer))

    return patched(decisions, "decide", decide)


def what_is_truncated_never_came() -> AbstractContextManager[None]:  # S80
    real = tables._amounts
    return patched(tables, "_amounts", lambda *args: tuple(amount or 0 for amount in real(*args)))


def only_events_are_counted() -> AbstractContextManager[None]:  # S79
    real = tables._amounts
    return patched(
        tables, "_amounts", lambda c, stream, segment, unit, now_ms: real(c, stream, segment, tests.Unit.EVENTS, now_ms)
    )


def all_that_ever_came_is_counted() -> AbstractContextManager[None]:  # S79
    real = tables._amounts
    return patched(tables, "_amounts", lambda *args: (real(*args)[-1],) * 4)


def a_step_by_hand_does_not_count() -> AbstractContextManager[None]:  # S80
    real = scaling._apply
    return patched(scaling, "_apply", lambda connection, stream, change, now_ms: real(connection, stream, change, 0))


def two_scale_one_after_the_other() -> AbstractContextManager[None]:  # S81
    def autoscale(self: SqlCatalogue, stream: Any, plan: Any, now_ms: int) -> bool:
        with self._database.write() as connection:
            layout = tables.find_layout(connection, replace(stream, layout_epoch=tables.look(connection, stream)[0]))
            again = autoscaling.Plan(layout.epoch, (layout.present[0].segment_id,), (layout.present[0].keys,))
            scaling.scale(connection, replace(stream, layout_epoch=layout.epoch), again, now_ms)
        return True

    return patched(SqlCatalogue, "autoscale", autoscale)


def a_policy_of_before_is_carried_out() -> AbstractContextManager[None]:  # S81
    def autoscale(connection: Any, stream: Any, plan: Any, now_ms: int) -> bool:
        scaling.scale(connection, stream, plan, now_ms)
        return True

    return patched(tables, "autoscale", autoscale)


def who_looks_fails_with_the_look() -> AbstractContextManager[None]:  # S81
    return patched(autoscaled_store, "HeadgateError", type("Never", (Exception,), {}))


def who_empties_a_stream_forgets_its_policy() -> AbstractContextManager[None]:  # S79
    real = starting_over.StreamDefinition
    return patched(starting_over, "StreamDefinition", lambda *args: real(*args[:5]))


PURE: dict[Mutant, Test] = {
    merged_is_what_is_split_again: a_machine,
    each_of_both_is_cold_by_itself: decisions.test_neighbours_that_get_less_than_half_of_the_target_together_are_merged,
    nothing_cools_down: decisions.test_after_a_step_there_is_none_until_it_has_cooled_down,
    it_is_split_without_bounds: a_machine,
    it_is_merged_without_bounds: decisions.test_the_coldest_neighbours_are_merged_and_never_below_the_least,
    the_first_window_counts_as_the_others: lambda: decisions.test_the_more_it_gets_the_sooner_it_is_split(
        0, 500, False
    ),
    a_short_time_is_taken_for_a_long_one: decisions.test_nothing_is_concluded_from_a_time_that_was_not_seen,
}
STORED: dict[Mutant, Test] = {
    what_is_truncated_never_came: tests.test_what_was_truncated_is_not_taken_for_silence,
    only_events_are_counted: tests.test_by_data_rate_bytes_are_counted,
    all_that_ever_came_is_counted: tests.test_what_came_is_counted_for_each_window_whoever_wrote_it,
    a_step_by_hand_does_not_count: tests.test_scaling_by_hand_has_it_cool_down_too,
    two_scale_one_after_the_other: tests.test_of_two_processes_that_look_at_once_one_scales,
    a_policy_of_before_is_carried_out: tests.test_nothing_is_done_by_a_policy_that_the_stream_has_no_more,
    who_looks_fails_with_the_look: tests.test_a_look_that_fails_fails_nobody,
    who_empties_a_stream_forgets_its_policy: tests.test_a_stream_that_a_pipeline_empties_keeps_its_policy,
}


@pytest.mark.parametrize("mutant", PURE, ids=lambda mutant: mutant.__name__)
def test_mutants_of_decisions_are_caught(mutant: Mutant) -> None:
    assert_caught(mutant, PURE[mutant])


@pytest.mark.parametrize("mutant", STORED, ids=lambda mutant: mutant.__name__)
def test_mutants_are_caught(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    test = STORED[mutant]
    tries = iter(range(10))

    def run() -> None:
        root, clock = tmp_path / str(next(tries)), tests.Clock()
        with tests.opened(root, clock) as store:
            store.create_stream(tests.STREAM, tests.KEYED, segments=2, routing_key="key", scaling=tests.SCALING)
            given = {"store": store, "clock": clock, "tmp_path": root, "monkeypatch": monkeypatch, "caplog": caplog}
            wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
            test(**{name: given[name] for name in wanted})

    assert_caught(mutant, run)
