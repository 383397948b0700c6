"""Supervisors and standbys in the machine room: pipelines are kept running, and nobody starts what was stopped."""

from __future__ import annotations

from tests.conftest import IS_DEEP

from headgate.sim.scenarios.standby import StandbyRun

SMOKE = (1, 2, 3, 5, 6, 20, 24) if IS_DEEP else (1, 6, 20, 24)


def test_pipelines_are_kept_running() -> None:
    runs = [StandbyRun(seed) for seed in SMOKE]
    assert [str(violation) for run in runs if (violation := run.run())] == []
    assert sum(run.takeovers_count for run in runs) > 1
    assert sum(run.restarts_count for run in runs) > 5
