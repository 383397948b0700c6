"""Checkpoints that refer to chunks of state in memory, in the machine room; and planted bugs that are found."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
from tests.mutants import test_memory_chunks_mutants as mutants
from tests.mutants.harness import Mutant, patched
from tests.sim.product import test_rocks_runs as rocks
from tests.sim.product.finding import assert_found

from headgate.sim.kinds.chunks import (
    BOUNDS,
    KINDS,
    ChunksRun,
    ExpiringChunksRun,
    TimedChunksRun,
    WindowedChunksRun,
    run_seed,
)
from headgate.sim.product.run import result_of
from headgate.state.memory import stored_chunks

SMOKE = (0, 2, 5, 7)


def test_checkpoints_share_chunks_of_small_states() -> None:  # SM89
    usual = [getattr(owner, name) for owner, name, _ in BOUNDS]
    runs = {seed: KINDS[seed % len(KINDS)](seed) for seed in SMOKE}
    assert {seed: run.run() for seed, run in runs.items()} == dict.fromkeys(runs)
    assert all(run.history.shared_count for run in runs.values())
    assert {type(run) for run in runs.values()} == {ChunksRun, ExpiringChunksRun, TimedChunksRun, WindowedChunksRun}
    assert usual == [getattr(owner, name) for owner, name, _ in BOUNDS]
    again = result_of(TimedChunksRun(7), 7, is_traced=False)
    assert again.digest == runs[7].world.digest


def what_had_expired_is_restored() -> AbstractContextManager[None]:  # MC6
    return patched(stored_chunks, "_living", lambda batch, now_ms: batch)


MUTANTS: dict[Mutant, int] = {
    mutants.only_slots_of_the_last_interval_are_written: 15,
    mutants.only_keys_of_the_last_interval_are_written: 0,
    mutants.keys_that_went_are_not_written: 7,
    mutants.older_chunks_count_too: 0,
    mutants.chunks_that_may_go_are_referred_to: 22,
    mutants.changes_after_a_restore_are_not_noted: 7,
    mutants.only_timers_of_the_last_interval_are_written: 15,
    mutants.timers_that_are_taken_by_row_are_not_noted: 7,
    mutants.windows_that_were_taken_are_not_noted: 18,
    mutants.windows_that_are_taken_after_a_restore_are_not_noted: 2,
    what_had_expired_is_restored: 17,
    rocks.files_of_checkpoints_that_may_fail_are_shared: 22,
    rocks.files_go_with_the_checkpoint_that_wrote_them: 0,
}


@pytest.mark.parametrize(("mutant", "seed"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_chunks_is_found(mutant: Mutant, seed: int) -> None:  # SM89
    assert_found(mutant, lambda seed: run_seed(seed, events_max=60_000).violation, (seed,), range(24))
