"""Checkpoints that users ask for, in the machine room; and planted bugs that are found."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, patched
from tests.mutants.test_request_mutants import any_completion_answers_everybody
from tests.sim.product.finding import assert_found
from tests.sim.product.patching import around

from headgate.protocol.checkpoints.coordinator_events import AnswerRequest
from headgate.protocol.checkpoints.requests import Requests
from headgate.protocol.supervision import restart
from headgate.sim.kinds.asking import AskingRun, run_seed

SMOKE = (0, 3, 6, 9)


def test_who_asks_for_a_checkpoint_can_rely_on_the_answer() -> None:  # SM47
    kinds: Counter[str] = Counter()
    for seed in SMOKE:
        run = AskingRun(seed)
        assert (seed, run.run()) == (seed, None)
        kinds["told"] += len(run.told)
        kinds["refused"] += run.refused_count
        kinds["without interval"] += not run.has_interval
        kinds["without restarts"] += not run.restarts and len(run.started) > 2
    assert min(kinds[kind] for kind in ("told", "refused", "without interval", "without restarts")) > 0, kinds


def what_was_given_up_is_told_as_completed() -> AbstractContextManager[None]:  # C61
    def failed(call: Any, self: Any, checkpoint: Any, reason: str) -> Any:
        return [AnswerRequest(effect.request, checkpoint) for effect in call(self, checkpoint, reason)]

    return around(Requests, "failed", failed)


def every_failure_is_restarted() -> AbstractContextManager[None]:  # R2
    return patched(restart, "StayDown", lambda reason: restart.RestartAfter(20))


MUTANTS: dict[Mutant, int] = {
    any_completion_answers_everybody: 0,
    what_was_given_up_is_told_as_completed: 12,
    every_failure_is_restarted: 1,
}


@pytest.mark.parametrize(("mutant", "seed"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_asking_is_found(mutant: Mutant, seed: int) -> None:  # SM47
    assert_found(mutant, lambda seed: run_seed(seed, events_max=100_000).violation, (seed,), range(20))
