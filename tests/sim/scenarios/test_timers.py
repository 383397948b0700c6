"""Pipelines whose functions have timers, in the machine room: restored, at any parallelism, each timer fires once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.mutants.harness import around

from headgate.operators.process.timers import TimedOperator
from headgate.sim.scenarios.timers import TimedRun

SMOKE = (0, 1, 2, 3, 4)


def test_the_simulator_restores_timers() -> None:  # SM60, TM6
    restored: Counter[bool] = Counter()

    def counting(restore: Any, self: Any, states: Any) -> None:
        restore(self, states)
        timers = self._backend.timers
        if timers is not None and len(timers.event_time):
            restored[states[0].parallelism != self.context.parallelism] += 1

    with around(TimedOperator, "restore", counting):
        for seed in SMOKE:
            assert TimedRun(seed).run() is None
    assert restored[False] > 0, "at the same parallelism"
    assert restored[True] > 0, "at another one"
