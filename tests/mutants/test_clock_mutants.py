"""Who measures an interval by the date is caught (W18, N14)."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.clocks import HandClock
from tests.connectors.test_generator_clock import (
    test_setting_the_date_changes_neither_the_pace_nor_the_times_of_records as generated,
)
from tests.mutants.harness import assert_caught, patched
from tests.runtime.worker.test_worker_clock import (
    test_operators_are_given_a_clock_that_nobody_can_set as operators_are_given,
)
from tests.runtime.worker.test_worker_clock import (
    test_the_mailbox_goes_by_a_clock_that_nobody_can_set as the_mailbox_goes,
)
from tests.test_clock import test_intervals_do_not_follow_a_date_that_is_set as intervals_follow_no_date

from headgate.clock import SystemClock
from headgate.connectors.generator import GeneratorReader
from headgate.runtime.worker.deployment import Deployment
from headgate.runtime.worker.worker import Worker


def the_systems_monotonic_clock_is_the_date() -> AbstractContextManager[None]:
    return patched(SystemClock, "monotonic_ms", lambda self: time.time_ns() // 1_000_000)  # noqa: TID251


class DateClock(HandClock):
    """Measures intervals by the date."""

    def __init__(self, real: HandClock) -> None:
        self.real = real

    def monotonic_ms(self) -> int:
        return self.real.date_ms

    def wall_ms(self) -> int:
        return self.real.date_ms


def given_the_date(method: Any, place: int) -> Any:
    def mutated(self: Any, *args: Any) -> None:
        method(self, *args[:place], DateClock(args[place]), *args[place + 1 :])

    return mutated


def the_mailbox_goes_by_the_date() -> AbstractContextManager[None]:
    return patched(Worker, "__init__", given_the_date(Worker.__init__, 1))


def operators_are_given_the_date() -> AbstractContextManager[None]:
    return patched(Deployment, "__init__", given_the_date(Deployment.__init__, 8))


def a_generator_paces_by_the_date() -> AbstractContextManager[None]:
    return patched(GeneratorReader, "__init__", given_the_date(GeneratorReader.__init__, 2))


@pytest.mark.parametrize("step_s", [3_600, -3_600])
def test_a_monotonic_clock_that_is_the_date_is_caught(step_s: int) -> None:
    assert_caught(the_systems_monotonic_clock_is_the_date, intervals_follow_no_date, step_s)


def test_a_mailbox_that_goes_by_the_date_is_caught() -> None:
    assert_caught(the_mailbox_goes_by_the_date, the_mailbox_goes)


def test_operators_that_are_given_the_date_are_caught() -> None:
    assert_caught(operators_are_given_the_date, operators_are_given)


@pytest.mark.parametrize("step_ms", [3_600_000, -3_600_000])
def test_a_generator_that_paces_by_the_date_is_caught(step_ms: int) -> None:
    assert_caught(a_generator_paces_by_the_date, generated, step_ms)
