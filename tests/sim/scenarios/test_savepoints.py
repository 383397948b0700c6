"""Savepoints in the machine room: taken, moved with, begun at."""

from __future__ import annotations

from headgate.sim.scenarios.savepoints import BeginningRun, SavepointRun

SMOKE = (3, 6, 10)
DRAINED = (43,)


def test_savepoints_are_taken_and_restored() -> None:
    taken = moved = begun = 0
    for seed in SMOKE:
        first = SavepointRun(seed)
        assert first.run() is None
        taken, moved = taken + len(first.taken), moved + first.moves_count
        if first.kept is not None:
            begun += 1
            assert BeginningRun(seed, first.kept).run() is None
    assert taken > 3
    assert moved > 1
    assert begun > 1


def test_a_drain_with_a_savepoint_is_the_end_of_everything() -> None:
    begun = 0
    for seed in DRAINED:
        first = SavepointRun(seed)
        assert first.run() is None
        assert [taken.savepoint.manifest.is_final for taken in first.drained] == [True]
        assert first.kept is not None
        begun += first.kept.manifest.is_final
        assert BeginningRun(seed, first.kept).run() is None
    assert begun > 0, "somebody began at the end of another pipeline"
