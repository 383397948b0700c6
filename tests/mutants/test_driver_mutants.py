"""Mutants of what the driver remembers: a run of months must not grow with every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.runtime.driver import test_answers as answers_tests
from tests.runtime.driver import test_event_loop as loop_tests
from tests.sim.product.patching import around, skipped

from headgate.runtime.driver.answers import Answers
from headgate.runtime.driver.event_loop import EventLoop


def cancelled_timers_wait_for_their_time() -> AbstractContextManager[None]:
    return skipped(EventLoop, "_forget_stale")


def a_cancelled_timer_keeps_what_it_would_have_called() -> AbstractContextManager[None]:
    kept: list[object] = []

    def arm(call: Any, self: Any, timer: object, after_ms: int, fire: Callable[[], None]) -> None:
        kept.append(fire)
        call(self, timer, after_ms, fire)

    return around(EventLoop, "arm", arm)


@contextmanager
def every_answer_is_kept_until_the_end() -> Iterator[None]:
    class Keeping(set[Any]):
        def discard(self, element: Any) -> None: ...

    def begin(call: Any, self: Any, end: Any) -> None:
        call(self, end)
        self._waiting = Keeping()

    with around(Answers, "__init__", begin):
        yield


def whoever_waits_at_the_end_waits_for_ever() -> AbstractContextManager[None]:
    return patched(Answers, "_answer_all", lambda self: None)


CAUGHT: list[tuple[Mutant, Callable[..., object]]] = [
    (cancelled_timers_wait_for_their_time, loop_tests.test_a_cancelled_timer_does_not_wait_for_its_time),
    (
        a_cancelled_timer_keeps_what_it_would_have_called,
        loop_tests.test_what_a_cancelled_timer_would_have_called_is_let_go,
    ),
    (every_answer_is_kept_until_the_end, answers_tests.test_nothing_is_kept_of_whoever_is_answered),
    (whoever_waits_at_the_end_waits_for_ever, answers_tests.test_the_end_of_the_run_answers_whoever_waits),
]


@pytest.mark.parametrize(("mutant", "test"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_named_test_of_the_driver_finds_it(mutant: Mutant, test: Callable[..., object]) -> None:
    test()
    assert_caught(mutant, test)
