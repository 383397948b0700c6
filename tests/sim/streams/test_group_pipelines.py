"""Pipelines in the machine room whose subtasks share a stream by a reader group."""

from __future__ import annotations

import pytest
from tests.conftest import IS_DEEP

from headgate.sim.streams.group_pipelines import GroupedRun

SMOKE = range(10) if IS_DEEP else (0, 1, 7)


@pytest.mark.early
def test_pipelines_share_a_stream_by_a_group() -> None:  # SM96
    runs = [GroupedRun(seed) for seed in SMOKE]
    assert [str(problem) for run in runs if (problem := run.run()) is not None] == []
    assert sum(run.refused_count for run in runs) > 2 * len(runs)
    assert sum(run.compared_count for run in runs) > 10 * len(runs)
    assert any(run.deleted_count for run in runs)
    assert any(run.scales and run.scaler.scaled_count > 10 for run in runs)
    assert any(len(run.started) > 2 for run in runs)
