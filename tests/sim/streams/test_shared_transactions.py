"""Two processes that share transactions in the machine room."""

from __future__ import annotations

import pytest

from headgate.sim.streams.shared_transactions import ENDINGS, SharingRun
from headgate.store import transactions

SMOKE = (*range(4), 8, 12, 27)


@pytest.mark.deep
@pytest.mark.early
def test_transactions_that_two_processes_share_are_whole_and_there_once() -> None:
    usual = getattr(transactions, "FLUSH_BYTES")  # noqa: B009 - imported there
    runs = [SharingRun(seed, is_traced=True) for seed in SMOKE]
    assert [(seed, run.run()) for seed, run in zip(SMOKE, runs, strict=True)] == [(seed, None) for seed in SMOKE]
    assert getattr(transactions, "FLUSH_BYTES") == usual  # noqa: B009
    told = ["\n".join(run.world.story) for run in runs]
    assert any("write_shared" in story and "injected after its effect" in story for story in told)
    assert {round_.ending for run in runs for round_ in run.rounds} == set(ENDINGS)
    assert sum(run.kills_count for run in runs) > 20
    assert sum(run.looked_count for run in runs) > 20
    assert any(run.expired_count for run in runs), "somebody was too late, and began a round anew"
    assert any("was opened again since" in story for story in told), "a former life was refused"
