"""Pipelines whose barriers overtake, in the machine room: restored with what was in flight, at any parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.mutants.harness import around

from headgate.runtime.worker import deployment
from headgate.sim.scenarios.unaligned import OvertakingRun

SMOKE = (32, 37, 42, 43, 49)


def test_the_simulator_restores_what_was_in_flight() -> None:  # SM50, UA11
    replayed: Counter[bool] = Counter()

    def counting(original: Any, parts: Any, ways: Any, plan: Any, subtask: Any) -> Iterator[Any]:
        found = list(parts)
        for restored in original(found, ways, plan, subtask):
            replayed[found[0].parallelism != plan.parallelism] += 1
            yield restored

    with around(deployment, "restored_records", counting):
        for seed in SMOKE:
            assert OvertakingRun(seed).run() is None
    assert replayed[False] > 0, "at the same parallelism"
    assert replayed[True] > 0, "at another one"
