"""Keepers and standbys in the machine room: pipelines are kept running, and nobody starts what was stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.mutants.harness import Mutant, patched
from tests.sim.product.finding import assert_found
from tests.sim.product.patching import around

from headgate.model.heartbeat import Course
from headgate.protocol.supervision import pulse
from headgate.protocol.supervision.standby import Standby
from headgate.runtime.driver import heart
from headgate.runtime.driver.heart import Heart
from headgate.sim.kinds.standing_by import StandbyRun, run_seed

SMOKE = (1, 2, 3, 5, 6, 7, 11, 12)


def test_pipelines_are_kept_running() -> None:  # SM73
    runs = [StandbyRun(seed) for seed in SMOKE]
    assert [str(violation) for run in runs if (violation := run.run())] == []
    assert sum(run.takeovers_count for run in runs) > 1
    assert sum(run.restarts_count for run in runs) > 5


@contextmanager
def who_was_stopped_has_failed() -> Iterator[None]:
    """SB3: the end of a run that its user stopped is recorded as a failure."""
    real = heart.last_word

    def last_word(generation, owner, result):  # type: ignore[no-untyped-def]
        word = real(generation, owner, result)
        return None if word is None else replace(word, course=Course.FAILED)

    with patched(heart, "last_word", last_word):
        yield


@contextmanager
def a_driver_beats_once() -> Iterator[None]:
    """SB1."""
    real = pulse.Pulse.beat

    def beat(self, now_ms, generation, course):  # type: ignore[no-untyped-def]
        return None if self._count else real(self, now_ms, generation, course)

    with patched(pulse.Pulse, "beat", beat):
        yield


@contextmanager
def a_heart_keeps_what_older_ones_left() -> Iterator[None]:
    """SB4."""
    with patched(Heart, "_tidy", lambda self, generation: None):
        yield


@contextmanager
def a_standby_waits_for_nobody() -> Iterator[None]:
    """SB6: it takes over from a driver that is alive."""
    with around(Standby, "__init__", lambda call, self: call(self, 0)):
        yield


MUTANTS: dict[Mutant, int] = {
    who_was_stopped_has_failed: 0,
    a_driver_beats_once: 62,
    a_heart_keeps_what_older_ones_left: 0,
    a_standby_waits_for_nobody: 13,
}


@pytest.mark.parametrize(("mutant", "seed"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_standing_by_is_found(mutant: Mutant, seed: int) -> None:  # SM73
    assert_found(mutant, lambda seed: run_seed(seed).violation, (seed,), range(100))
