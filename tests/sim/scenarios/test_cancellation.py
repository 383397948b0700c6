"""Pipelines in the machine room that do not retain their checkpoints."""

from __future__ import annotations

from headgate.sim.scenarios.cancellation import CancellingRun

SMOKE = (1, 3, 7, 10, 11, 13)


def test_cancelled_pipelines_give_up_their_checkpoints() -> None:  # SM45
    given_up = asked = 0
    for seed in SMOKE:
        run = CancellingRun(seed)
        assert run.run() is None
        given_up, asked = given_up + run.is_given_up, asked + run.asked_count
    assert given_up > 3
    assert asked > given_up, "some cancels met nothing, or a driver that died over them"
