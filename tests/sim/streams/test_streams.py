"""The stream store in the machine room: sound code passes, and a seed is repeated exactly."""

from __future__ import annotations

import pytest
from tests.conftest import IS_DEEP

from headgate.sim.machine.world import Fault
from headgate.sim.streams.shared_transactions import ENDINGS, SharingRun
from headgate.sim.streams.streams import GroupedRun, StreamRun
from headgate.store import location, transactions

SMOKE = (*range(14), 16, 26, 36, 72) if IS_DEEP else (3, 26, 72)


@pytest.mark.early
def test_streams_pass_every_smoke_seed() -> None:
    """Several starts of pipeline and producer, lost answers of the catalogue, and readers of unfinished output."""
    runs = [StreamRun(seed, is_traced=True) for seed in SMOKE]
    found = [(seed, str(violation)) for seed, run in zip(SMOKE, runs, strict=True) if (violation := run.run())]
    assert found == []
    assert "sim" not in location.OPENERS
    told = ["\n".join(run.world.story) for run in runs]
    assert any("producer2" in story for story in told)
    assert any("injected after its effect" in story for story in told)
    assert any(len(run.started) > 2 for run in runs)
    assert any(reader.events for run in runs for reader in run._onlookers)
    assert any(Fault.POWER_CUT in run.faults.on for run in runs)
    assert any(run.empties and run.emptied.kills_count for run in runs)
    assert any(run.cuts_count > 20 for run in runs)
    assert any(run.truncated_count for run in runs)
    assert any(run.scales and run.scaler.scaled_count > 20 for run in runs)
    assert any(run.has_policies and run.policies.scaled_count > 3 for run in runs)


GROUP_PIPELINES_SMOKE = range(10) if IS_DEEP else (0, 2, 3, 4)


@pytest.mark.deep
@pytest.mark.early
def test_pipelines_share_a_stream_by_a_group() -> None:
    runs = [GroupedRun(seed) for seed in GROUP_PIPELINES_SMOKE]
    assert [str(problem) for run in runs if (problem := run.run()) is not None] == []
    assert sum(run.refused_count for run in runs) > 2 * len(runs)
    assert sum(run.compared_count for run in runs) > 10 * len(runs)
    assert any(run.deleted_count for run in runs)
    assert any(run.scales and run.scaler.scaled_count > 10 for run in runs)
    assert any(len(run.started) > 2 for run in runs)


SHARED_SMOKE = (*range(4), 8, 12, 27)


@pytest.mark.deep
@pytest.mark.early
def test_transactions_that_two_processes_share_are_whole_and_there_once() -> None:
    usual = getattr(transactions, "FLUSH_BYTES")  # noqa: B009 - imported there
    runs = [SharingRun(seed, is_traced=True) for seed in SHARED_SMOKE]
    assert [(seed, run.run()) for seed, run in zip(SHARED_SMOKE, runs, strict=True)] == [
        (seed, None) for seed in SHARED_SMOKE
    ]
    assert getattr(transactions, "FLUSH_BYTES") == usual  # noqa: B009
    told = ["\n".join(run.world.story) for run in runs]
    assert any("write_shared" in story and "injected after its effect" in story for story in told)
    assert {round_.ending for run in runs for round_ in run.rounds} == set(ENDINGS)
    assert sum(run.kills_count for run in runs) > 20
    assert sum(run.looked_count for run in runs) > 20
    assert any(run.expired_count for run in runs), "somebody was too late, and began a round anew"
    assert any("was opened again since" in story for story in told), "a former life was refused"
