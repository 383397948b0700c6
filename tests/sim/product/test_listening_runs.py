"""Listeners that are told twice, late and out of order publish what they should (HL21)."""

from __future__ import annotations

import random

import pytest
from tests.mutants.harness import Mutant
from tests.sim.product.finding import assert_found
from tests.sim.product.mutants_of_listening import ALL, SEEDS

from headgate.sim.kinds import listening
from headgate.sim.kinds.listening import Disorder, ListeningRun, run_seed
from headgate.sim.product.run import Run

SMOKE = (0, 2, 10)


def test_listeners_that_are_told_twice_and_out_of_order_publish_what_they_should() -> None:  # HL21
    runs = {seed: ListeningRun(seed) for seed in SMOKE}
    assert [(seed, str(found)) for seed, run in runs.items() if (found := run.run()) is not None] == []
    disorders = [disorder for run in runs.values() for disorder in run.disorders]
    assert sum(disorder.repeated for disorder in disorders) > 20
    assert sum(disorder.overtaken for disorder in disorders) > 5
    assert all(run.settings.outside is not None and run.settings.outside.published for run in runs.values())


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_of_listening_is_found(mutant: Mutant) -> None:  # SM6
    seed = SEEDS[mutant.__name__]  # type: ignore[attr-defined]
    assert_found(mutant, lambda seed: run_seed(seed, events_max=60_000).violation, (seed,), range(100))


def test_words_in_order_do_not_bring_the_planted_bug_to_light(monkeypatch: pytest.MonkeyPatch) -> None:  # HL21
    monkeypatch.setattr(listening, "KEPT_RATE", 0.0)
    monkeypatch.setattr(listening, "REPEATED_RATE", 0.0)
    for mutant in ALL:
        with mutant():
            assert run_seed(SEEDS[mutant.__name__]).violation is None, "it is not the disorder that finds it"


def test_every_word_is_passed_on_at_last_and_the_last_one_at_once() -> None:  # HL21
    disorder = Disorder(random.Random(7))
    told = [word for n in range(1, 60) for word in disorder.hear(("complete", n), is_last=False)]
    told += disorder.hear(("complete", 60), is_last=True)
    assert {n for _, n in told} == set(range(1, 61))
    assert len(told) > 60, "some twice"
    assert told != sorted(told), "not in order"


def test_other_runs_are_told_as_the_runtime_tells() -> None:  # HL21
    outside = Run(145).settings.outside
    assert outside is not None
    assert outside.disorder() is None
