"""Pipelines in the machine room whose user has them start over."""

from __future__ import annotations

from tests.conftest import IS_DEEP

from headgate.sim.scenarios.reset import ResettingRun

SMOKE = (14, 10, 9, 2, 5, 13, 16)
"""Without ``IS_DEEP`` only until what they are for was reached."""


def test_pipelines_start_over_whoever_runs_them() -> None:
    steps = carried_out = finished = given_up = 0
    for seed in SMOKE:
        run = ResettingRun(seed)
        assert run.run() is None
        steps, given_up = (
            steps + len(run.history.steps),
            given_up + sum(newest for _, newest in run.history.given_up.values()),
        )
        carried_out, finished = carried_out + run.carried_out_count, finished + run.finished_count
        if not IS_DEEP and steps > carried_out > 3 and finished > 0 and given_up > steps:
            break
    assert steps > carried_out > 3, "some resets did not live to their end"
    assert finished > 0, "starts finish what was begun"
    assert given_up > steps, "there were checkpoints"
