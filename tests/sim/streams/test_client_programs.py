"""Programs that follow a stream, in the machine room: what holds and what seeds reach."""

from __future__ import annotations

import pytest
from tests.conftest import IS_DEEP

from headgate.sim.scenario_table import scenario
from headgate.sim.streams.client_programs import FollowRun
from headgate.sim.streams.remote_store import REMOTE_KINDS, AfarRun, ServedRun
from headgate.store import location
from headgate.store.client import connection

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


REMOTE_SMOKE = range(12) if IS_DEEP else (2, 3, 8, 9)


@pytest.mark.deep
@pytest.mark.early
def test_stores_afar_pass_every_smoke_seed() -> None:
    """The seeds reach what they are for, too."""
    usual = connection.PATIENCE_S
    runs = [scenario("remote-store").draw(seed, is_traced=True) for seed in REMOTE_SMOKE]
    found = [(seed, str(violation)) for seed, run in zip(REMOTE_SMOKE, runs, strict=True) if (violation := run.run())]
    assert found == []
    assert "sim" not in location.OPENERS
    assert usual == connection.PATIENCE_S
    assert {type(run) for run in runs} == set(REMOTE_KINDS)
    served = [run.served for run in runs if isinstance(run, ServedRun)]
    assert {what for one in served for what in one.done} == {"link", "crash", "pause", "end", "lost", "late"}
    assert any(isinstance(run, AfarRun) and run.fetched_count > 20 for run in runs)
    told = ["\n".join(run.world.story) for run in runs]
    for words in ("the answer was lost", "cannot reach headgate://", "it does not answer"):
        assert any(words in story for story in told), words
