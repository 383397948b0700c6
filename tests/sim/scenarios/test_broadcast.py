"""Pipelines with a broadcast side, in the machine room: every subtask keeps the same, also of what was in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.mutants.harness import around

from headgate.model.graph import BROADCAST_INPUT
from headgate.runtime.worker import deployment
from headgate.sim.scenarios.broadcast import LoopedRun, SidedRun

SMOKE = (0, 1, 2, 5, 13, 23)
LOOPED_SMOKE = (4, 9, 14, 19)


def test_broadcast_sides_pass_every_smoke_seed() -> None:  # SM97, BC6
    replayed: Counter[bool] = Counter()
    forms: set[str] = set()

    def counting(original: Any, parts: Any, ways: Any, plan: Any, subtask: Any) -> Iterator[Any]:
        sides = {way.channel.channel for way in ways if way.channel.edge.input == BROADCAST_INPUT}
        for channel, batch in original(parts, ways, plan, subtask):
            replayed[channel in sides] += 1
            yield channel, batch

    with around(deployment, "restored_records", counting):
        for seed in SMOKE:
            run = SidedRun(seed)
            forms.add(run.settings.job.how)  # type: ignore[attr-defined]
            assert run.run() is None, seed
    assert replayed[True] > 0, "nothing was in flight to a broadcast side"
    assert replayed[False] > 0
    assert forms == {"row", "batch", "plain"}


def test_broadcast_sides_in_loops_pass_every_smoke_seed() -> None:  # SM97, BC13
    runs = {seed: LoopedRun(seed) for seed in LOOPED_SMOKE}
    assert {seed: run.run() for seed, run in runs.items()} == dict.fromkeys(runs)
    assert {run.settings.job.how for run in runs.values()} == {"outside", "inside"}  # type: ignore[attr-defined]
