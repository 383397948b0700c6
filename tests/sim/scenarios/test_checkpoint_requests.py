"""Checkpoints that users ask for, and pipelines that give theirs up when they are cancelled."""

from __future__ import annotations

from collections import Counter

from tests.conftest import IS_DEEP

from headgate.sim.scenarios.checkpoint_requests import AskingRun, CancellingRun

SMOKE = (0, 3, 6, 9)
"""Without ``IS_DEEP`` only until what they are for was reached."""
KINDS = ("told", "refused", "without interval", "without restarts")


def test_who_asks_for_a_checkpoint_can_rely_on_the_answer() -> None:
    kinds: Counter[str] = Counter()
    for seed in SMOKE:
        run = AskingRun(seed)
        assert (seed, run.run()) == (seed, None)
        kinds["told"] += len(run.announced)
        kinds["refused"] += run.refused_count
        kinds["without interval"] += not run.has_interval
        kinds["without restarts"] += not run.restarts and len(run.started) > 2
        if not IS_DEEP and min(kinds[kind] for kind in KINDS) > 0:
            break
    assert min(kinds[kind] for kind in KINDS) > 0, kinds


CANCELLATION_SMOKE = (3, 4, 7, 10, 11, 13)


def test_cancelled_pipelines_give_up_their_checkpoints() -> None:
    given_up = asked = 0
    for seed in CANCELLATION_SMOKE:
        run = CancellingRun(seed)
        assert run.run() is None
        given_up, asked = given_up + run.is_given_up, asked + run.asked_count
        if not IS_DEEP and asked > given_up > 3:
            break
    assert given_up > 3
    assert asked > given_up, "some cancels met nothing, or a driver that died over them"
