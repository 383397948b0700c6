"""Windows of all kinds, joins and tables that change, restored at any parallelism."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.conftest import IS_DEEP
from tests.mutants.harness import around, patched

from headgate.operators.base import KeyedOperator
from headgate.sim.product.workloads import Branches
from headgate.sim.scenarios.event_time import OVER_WORKLOADS, WORKLOADS, EventTimeRun, OverRun

SMOKE = range(6) if IS_DEEP else (1, 7)


def test_the_simulator_restores_what_has_event_time() -> None:
    restored: Counter[bool] = Counter()
    seen: set[str] = set()

    def counting(restore: Any, self: Any, states: Any) -> Any:
        restored[states[0].parallelism != self.context.parallelism] += 1
        return restore(self, states)

    with around(KeyedOperator, "_restore_backend", counting):
        for seed in SMOKE:
            run = EventTimeRun(seed)
            assert run.run() is None
            assert isinstance(run.settings.job, Branches)
            seen |= {workload.name for workload in run.settings.job.workloads}
    assert seen == {workload.name for workload in WORKLOADS}
    assert restored[True] > 0, "at another one"


def test_the_simulator_notices_that_nothing_is_restored() -> None:
    with patched(KeyedOperator, "_restore_backend", lambda self, states: iter(())):
        assert any(EventTimeRun(seed).run() is not None for seed in SMOKE)


OVER_SMOKE = range(8) if IS_DEEP else (1, 2, 5, 13)


def test_the_simulator_restores_records_before_others_and_updated_sessions() -> None:
    restored: Counter[bool] = Counter()
    seen: set[str] = set()

    def counting(restore: Any, self: Any, states: Any) -> Any:
        restored[states[0].parallelism != self.context.parallelism] += 1
        return restore(self, states)

    with around(KeyedOperator, "_restore_backend", counting):
        for seed in OVER_SMOKE:
            run = OverRun(seed)
            assert run.run() is None
            assert isinstance(run.settings.job, Branches)
            seen |= {workload.name for workload in run.settings.job.workloads}
    assert seen == {workload.name for workload in OVER_WORKLOADS}
    assert restored[True] > 0, "at another one"
    assert restored[False] > 0


def test_the_simulator_notices_that_no_over_is_restored() -> None:
    with patched(KeyedOperator, "_restore_backend", lambda self, states: iter(())):
        assert any(OverRun(seed).run() is not None for seed in OVER_SMOKE)
