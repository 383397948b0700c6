"""Checkpoints that users ask for, in the machine room."""

from __future__ import annotations

from collections import Counter

from headgate.sim.scenarios.checkpoint_requests import AskingRun

SMOKE = (0, 3, 6, 9)


def test_who_asks_for_a_checkpoint_can_rely_on_the_answer() -> None:  # SM47
    kinds: Counter[str] = Counter()
    for seed in SMOKE:
        run = AskingRun(seed)
        assert (seed, run.run()) == (seed, None)
        kinds["told"] += len(run.told)
        kinds["refused"] += run.refused_count
        kinds["without interval"] += not run.has_interval
        kinds["without restarts"] += not run.restarts and len(run.started) > 2
    assert min(kinds[kind] for kind in ("told", "refused", "without interval", "without restarts")) > 0, kinds
