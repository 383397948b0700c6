"""Triggers, late records, two keyed inputs and asynchronous calls, restored at any parallelism."""

from __future__ import annotations

from tests.conftest import IS_DEEP
from tests.mutants.harness import patched

from headgate.operators.windows.window_trigger import TriggerOperator
from headgate.sim.product.workloads import Branches
from headgate.sim.scenarios.functions import WORKLOADS, FunctionRun

SMOKE = range(1, 7) if IS_DEEP else (1, 2, 6)


def test_the_simulator_runs_functions() -> None:
    for seed in SMOKE:
        assert FunctionRun(seed).run() is None


def test_every_workload_is_drawn() -> None:
    jobs = [FunctionRun(seed).settings.job for seed in range(20)]
    assert {one.name for job in jobs if isinstance(job, Branches) for one in job.workloads} == {
        one.name for one in WORKLOADS
    }


def test_the_simulator_notices_that_triggers_are_not_restored() -> None:
    triggered = {"threes", "at-end", "now-and-then", "late-triggers"}
    runs = [FunctionRun(seed) for seed in range(30)]
    chosen = [r for r in runs if isinstance(r.settings.job, Branches) and triggered & set(r.settings.job.columns)]
    with patched(TriggerOperator, "_restore_backend", lambda self, states: iter(())):
        assert any(run.run() is not None for run in chosen[:6])
