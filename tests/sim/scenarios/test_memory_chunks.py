"""Checkpoints that refer to chunks of state in memory, in the machine room."""

from __future__ import annotations

from headgate.sim.scenarios.memory_chunks import (
    BOUNDS,
    CHUNKS_KINDS,
    ChunksRun,
    ExpiringChunksRun,
    TimedChunksRun,
    WindowedChunksRun,
)

SMOKE = (0, 2, 5, 7)


def test_checkpoints_share_chunks_of_small_states() -> None:  # SM89
    usual = [getattr(owner, name) for owner, name, _ in BOUNDS]
    runs = {seed: CHUNKS_KINDS[seed % len(CHUNKS_KINDS)](seed) for seed in SMOKE}
    assert {seed: run.run() for seed, run in runs.items()} == dict.fromkeys(runs)
    assert all(run.history.shared_count for run in runs.values())
    assert {type(run) for run in runs.values()} == {ChunksRun, ExpiringChunksRun, TimedChunksRun, WindowedChunksRun}
    assert usual == [getattr(owner, name) for owner, name, _ in BOUNDS]
    assert TimedChunksRun(7).result().digest == runs[7].world.digest
