"""Pipelines with unaligned checkpoints and with a broadcast side, restored with what was in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.mutants.harness import around

from headgate.model.graph import BROADCAST_INPUT
from headgate.runtime.worker import deployment
from headgate.sim.scenarios.unaligned import LoopedRun, OvertakingRun, SidedRun

SMOKE = (32, 37, 42, 43, 49)


def test_the_simulator_restores_what_was_in_flight() -> None:
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


BROADCAST_SMOKE = (0, 1, 2, 5, 13, 23)
LOOPED_SMOKE = (4, 9, 14, 19)


def test_broadcast_sides_pass_every_smoke_seed() -> None:
    replayed: Counter[bool] = Counter()
    forms: set[str] = set()

    def counting(original: Any, parts: Any, ways: Any, plan: Any, subtask: Any) -> Iterator[Any]:
        sides = {way.channel.channel for way in ways if way.channel.edge.input == BROADCAST_INPUT}
        for channel, batch in original(parts, ways, plan, subtask):
            replayed[channel in sides] += 1
            yield channel, batch

    with around(deployment, "restored_records", counting):
        for seed in BROADCAST_SMOKE:
            run = SidedRun(seed)
            forms.add(run.settings.job.how)  # type: ignore[attr-defined]
            assert run.run() is None, seed
    assert replayed[True] > 0, "nothing was in flight to a broadcast side"
    assert replayed[False] > 0
    assert forms == {"row", "batch", "plain"}


def test_broadcast_sides_in_loops_pass_every_smoke_seed() -> None:
    runs = {seed: LoopedRun(seed) for seed in LOOPED_SMOKE}
    assert {seed: run.run() for seed, run in runs.items()} == dict.fromkeys(runs)
    assert {run.settings.job.how for run in runs.values()} == {"outside", "inside"}  # type: ignore[attr-defined]
