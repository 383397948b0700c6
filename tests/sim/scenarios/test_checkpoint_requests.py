"""Checkpoints that users ask for, and pipelines that give theirs up when they are cancelled."""

from __future__ import annotations

import random
from collections import Counter

from tests.conftest import IS_DEEP

from headgate.sim.product.run import Run
from headgate.sim.scenarios.checkpoint_requests import AskingRun, CancellingRun, Disorder, ListeningRun

SMOKE = (6, 0, 3, 9)
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


CANCELLATION_SMOKE = (3, 10, 11, 4, 7, 13)


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


LISTENING_SMOKE = (4, 8, 10) if IS_DEEP else (4,)


def test_listeners_that_are_told_twice_and_out_of_order_publish_what_they_should() -> None:
    runs = {seed: ListeningRun(seed) for seed in LISTENING_SMOKE}
    assert [(seed, str(found)) for seed, run in runs.items() if (found := run.run()) is not None] == []
    disorders = [disorder for run in runs.values() for disorder in run.disorders]
    assert sum(disorder.repeated for disorder in disorders) > 20
    assert sum(disorder.overtaken for disorder in disorders) > 5
    assert all(run.settings.outside is not None and run.settings.outside.published for run in runs.values())


def test_every_word_is_passed_on_at_last_and_the_last_one_at_once() -> None:
    disorder = Disorder(random.Random(7))
    told = [word for n in range(1, 60) for word in disorder.hear(("complete", n), is_last=False)]
    told += disorder.hear(("complete", 60), is_last=True)
    assert {n for _, n in told} == set(range(1, 61))
    assert len(told) > 60, "some twice"
    assert told != sorted(told), "not in order"


def test_other_runs_are_told_as_the_runtime_tells() -> None:
    outside = Run(145).settings.outside
    assert outside is not None
    assert outside.disorder() is None
