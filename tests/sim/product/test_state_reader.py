"""Somebody reads the state of checkpoints when a seed is over: it is what it must be."""

from __future__ import annotations

import pytest

from headgate.sim.product import state_reader
from headgate.sim.product.run import Run
from headgate.sim.scenarios.savepoints import SavepointRun
from headgate.sim.world import Violation

SMOKE = (2, 3, 5, 8, 9)


@pytest.fixture(autouse=True)
def _everybody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_reader, "RATE", 1.0)


def read_states(seed: int, kind: type[Run] = Run) -> tuple[Violation | None, state_reader.StoredStates]:
    run = kind(seed)
    violation = run.run()
    return violation, run.stored


def test_somebody_reads_the_state_of_seeds() -> None:  # SM72
    found = [read_states(seed) for seed in SMOKE] + [read_states(seed, SavepointRun) for seed in range(1, 3)]
    assert [str(violation) for violation, _ in found if violation] == []
    assert sum(reader.states_count for _, reader in found) > 50
    assert sum(reader.rows_count for _, reader in found) > 500
    assert sum(reader.compared_count for _, reader in found) > 1
