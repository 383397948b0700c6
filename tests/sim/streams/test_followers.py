"""Programs that follow a stream, in the machine room: what holds and what seeds reach."""

from __future__ import annotations

import pytest
from tests.conftest import IS_DEEP

from headgate.sim.streams.client_programs import FollowRun
from headgate.store import location

SMOKE = range(20) if IS_DEEP else range(8)


@pytest.mark.early
def test_programs_that_follow_pass_every_smoke_seed() -> None:
    """The seeds reach what they are for, too."""
    runs = [FollowRun(seed, is_traced=True) for seed in SMOKE]
    found = [(seed, str(violation)) for seed, run in zip(SMOKE, runs, strict=True) if (violation := run.run())]
    assert found == []
    assert "sim" not in location.OPENERS
    assert sum(run.heard_count for run in runs) > 2 * len(runs)
    assert any(run.truncated_count for run in runs)
    assert any(run.scaler.scaled_count > 2 for run in runs)
    assert any(follower.lost for run in runs for follower in run.followers), "somebody was overtaken by a truncation"
    told = ["\n".join(run.world.story) for run in runs]
    for words in ("ended with code -9", "paused", "injected after its effect"):
        assert any(words in story for story in told), words
