"""Listeners that are told twice, late and out of order publish what they should."""

from __future__ import annotations

import random

from headgate.sim.product.run import Run
from headgate.sim.scenarios.listeners import Disorder, ListeningRun

SMOKE = (4, 8, 10)


def test_listeners_that_are_told_twice_and_out_of_order_publish_what_they_should() -> None:
    runs = {seed: ListeningRun(seed) for seed in SMOKE}
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
