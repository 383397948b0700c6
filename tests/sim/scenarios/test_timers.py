"""Functions with timers, and with state that expires: restored at any parallelism, on machines whose dates differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.conftest import IS_DEEP
from tests.mutants.harness import around

from headgate.operators.process.timers import TimedOperator
from headgate.sim.scenarios.timers import ExpiringRun, Judge, TimedRun

SMOKE = (0, 1, 2, 3, 4)
"""Without ``IS_DEEP`` only until what they are for was reached."""


def test_the_simulator_restores_timers() -> None:  # TM6
    restored: Counter[bool] = Counter()

    def counting(restore: Any, self: Any, states: Any) -> None:
        restore(self, states)
        timers = self._backend.timers
        if timers is not None and len(timers.event_time):
            restored[states[0].parallelism != self.context.parallelism] += 1

    with around(TimedOperator, "restore", counting):
        for seed in SMOKE:
            assert TimedRun(seed).run() is None
            if not IS_DEEP and restored.keys() == {False, True}:
                break
    assert restored[False] > 0, "at the same parallelism"
    assert restored[True] > 0, "at another one"


TTL_SMOKE = (0, 1, 2, 3, 4)


def test_the_simulator_restores_state_that_expires() -> None:
    restored: Counter[bool] = Counter()
    seen: Counter[str] = Counter()

    def counting(restore: Any, self: Any, states: Any) -> None:
        restore(self, states)
        if any(self.freeze().rows().values()):
            restored[states[0].parallelism != self.context.parallelism] += 1

    with around(TimedOperator, "restore", counting):
        for seed in TTL_SMOKE:
            run = ExpiringRun(seed)
            assert run.run() is None
            assert isinstance(run.settings.judge, Judge)
            seen.update(expired=run.settings.judge.expired, lived=run.settings.judge.lived)
            if not IS_DEEP and restored.keys() == {False, True} and min(seen["expired"], seen["lived"]) > 100:
                break
    assert restored[False] > 0, "at the same parallelism"
    assert restored[True] > 0, "at another one"
    assert min(seen["expired"], seen["lived"]) > 100


def test_a_seed_whose_state_expires_has_one_digest() -> None:
    assert ExpiringRun(1).result().digest == ExpiringRun(1).result().digest
