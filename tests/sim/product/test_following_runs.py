"""Programs that follow a stream, in the machine room: what holds, what seeds reach, and planted bugs that are found."""

from __future__ import annotations

import pytest
from tests.mutants.harness import Mutant
from tests.sim.product.finding import assert_found
from tests.sim.product.mutants_of_following import ALL

from headgate.sim.streams.following import FollowRun, run_seed
from headgate.store import store as stores

SMOKE = range(20)
EVENTS_MAX = 30_000
"""With a planted bug: several times what a seed needs without one."""


@pytest.mark.early
def test_programs_that_follow_pass_every_smoke_seed() -> None:  # SM92
    """The seeds reach what they are for, too."""
    runs = [FollowRun(seed, is_traced=True) for seed in SMOKE]
    found = [(seed, str(violation)) for seed, run in zip(SMOKE, runs, strict=True) if (violation := run.run())]
    assert found == []
    assert "sim" not in stores.OPENERS
    assert sum(run.heard_count for run in runs) > 40
    assert any(run.truncated_count for run in runs)
    assert any(run.scaler.scaled_count > 2 for run in runs)
    assert any(follower.lost for run in runs for follower in run.followers), "somebody was overtaken by a truncation"
    told = ["\n".join(run.world.story) for run in runs]
    for words in ("ended with code -9", "paused", "injected after its effect"):
        assert any(words in story for story in told), words


@pytest.mark.parametrize(("mutant", "seed"), ALL.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_following_is_found(mutant: Mutant, seed: int) -> None:  # SM92
    assert_found(mutant, lambda seed: run_seed(seed, events_max=EVENTS_MAX).violation, (seed,), range(60))
