"""Windows of all kinds, joins, tables that change, and OVER aggregates, restored at any parallelism."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.conftest import IS_DEEP
from tests.mutants.harness import around, patched

from headgate.operators.base import KeyedOperator
from headgate.sim.product.workloads import Branches
from headgate.sim.scenarios.event_time import OVER_WORKLOADS, WORKLOADS, EventTimeRun, OverRun
from headgate.sim.scenarios.timers import TimedRun

SMOKE = {
    EventTimeRun: (range(6) if IS_DEEP else (1, 7), WORKLOADS),
    OverRun: (range(8) if IS_DEEP else (1, 2, 5, 13), OVER_WORKLOADS),
}
"""Seeds of each kind, which draw each of its workloads, and go on at another parallelism."""


@pytest.mark.parametrize("kind", SMOKE)
def test_the_simulator_restores_what_has_event_time(kind: type[TimedRun]) -> None:
    restored: Counter[bool] = Counter()
    seen: set[str] = set()
    seeds, workloads = SMOKE[kind]

    def counting(restore: Any, self: Any, states: Any) -> Any:
        restored[states[0].parallelism != self.context.parallelism] += 1
        return restore(self, states)

    with around(KeyedOperator, "_restore_backend", counting):
        for seed in seeds:
            run = kind(seed)
            assert run.run() is None
            assert isinstance(run.settings.job, Branches)
            seen |= {workload.name for workload in run.settings.job.workloads}
    assert seen == {workload.name for workload in workloads}
    assert restored[True] > 0, "at another one"
    assert kind is EventTimeRun or restored[False] > 0


@pytest.mark.parametrize("kind", SMOKE)
def test_the_simulator_notices_that_nothing_is_restored(kind: type[TimedRun]) -> None:
    with patched(KeyedOperator, "_restore_backend", lambda self, states: iter(())):
        assert any(kind(seed).run() is not None for seed in SMOKE[kind][0])
