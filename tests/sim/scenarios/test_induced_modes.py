"""Hooks and markers beside other guarantees, barriers that overtake, and savepoints, in the machine room."""

from __future__ import annotations

from collections import Counter

from headgate.sim.scenarios.induced_modes import (
    AtLeastOnceRun,
    AtMostOnceRun,
    TapesOvertakenRun,
    TapesSavedRun,
    draw_induced_mode,
)

SMOKE = (0, 1, 16, 18)


def test_hooks_and_markers_go_with_everything_else() -> None:  # SM42
    kinds: Counter[type] = Counter()
    lost = moves = faults = 0
    for seed in SMOKE:
        run = draw_induced_mode(seed)
        assert (seed, run.run()) == (seed, None)
        assert len(run.history.completed) > 2
        kinds[type(run)] += 1
        faults += run.tapes.faults_count
        lost += run.judge.lost if isinstance(run, AtMostOnceRun) else 0
        moves += run.moves_count if isinstance(run, TapesSavedRun) else 0
    assert kinds == {AtLeastOnceRun: 1, AtMostOnceRun: 1, TapesOvertakenRun: 1, TapesSavedRun: 1}
    assert lost > 0, "at most once something was under way when something failed"
    assert moves > 0, "a pipeline went on from a savepoint"
    assert faults > 8, "markers and hooks met faults"


def test_a_source_has_the_credit_to_read_to_its_marker() -> None:  # UA20, SM42
    """A seed in which none of its checkpoints was ever completed."""
    assert draw_induced_mode(36).run() is None
