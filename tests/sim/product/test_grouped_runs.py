"""Pipelines in the machine room whose subtasks share a stream by a reader group; and planted bugs that are found."""

from __future__ import annotations

import pytest
from tests.mutants.harness import Mutant
from tests.sim.product.finding import assert_found
from tests.sim.product.mutants_of_grouped import ALL

from headgate.sim.streams.grouped import GroupedRun, run_seed

SMOKE = range(10)


@pytest.mark.early
def test_pipelines_share_a_stream_by_a_group() -> None:  # SM96
    runs = [GroupedRun(seed) for seed in SMOKE]
    assert [str(problem) for run in runs if (problem := run.run()) is not None] == []
    assert sum(run.refused_count for run in runs) > 20
    assert sum(run.compared_count for run in runs) > 100
    assert any(run.deleted_count for run in runs)
    assert any(run.scales and run.scaler.scaled_count > 10 for run in runs)
    assert any(len(run.started) > 2 for run in runs)


@pytest.mark.parametrize(("mutant", "seed"), ALL.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_a_shared_stream_is_found(mutant: Mutant, seed: int) -> None:  # SM96
    assert_found(mutant, lambda seed: run_seed(seed).violation, (seed,), range(60))
