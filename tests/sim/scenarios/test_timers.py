"""Functions with timers, and with state that expires: restored at any parallelism, on machines whose dates differ."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from tests.conftest import IS_DEEP
from tests.mutants.harness import around

from headgate.model.config import RocksState
from headgate.operators.process.timers import TimedOperator
from headgate.sim.scenarios.timers import (
    BOUNDS,
    CHUNKS_KINDS,
    ROCKSDB_KINDS,
    ChunksRun,
    ExpiringChunksRun,
    ExpiringRun,
    Judge,
    RocksExpiringFilesRun,
    RocksExpiringRun,
    RocksFilesRun,
    RocksRun,
    RocksTimedFilesRun,
    RocksTimedRun,
    TimedChunksRun,
    TimedRun,
    WindowedChunksRun,
)
from headgate.state.rocksdb import database_snapshot
from headgate.state.rocksdb.database import Database

SMOKE = (0, 1, 2, 3, 4)
"""Without ``IS_DEEP`` only until what they are for was reached."""


def test_the_simulator_restores_timers() -> None:  # TM6
    restored: Counter[bool] = Counter()

    def counting(restore: Any, self: Any, states: Any) -> None:
        restore(self, states)
        timers = self._backend.timers
        if timers is not None and len(timers.event_time):
            restored[states[0].parallelism != self.context.parallelism] += 1

    with around(TimedOperator, "restore", counting):
        for seed in SMOKE:
            assert TimedRun(seed).run() is None
            if not IS_DEEP and restored.keys() == {False, True}:
                break
    assert restored[False] > 0, "at the same parallelism"
    assert restored[True] > 0, "at another one"


TTL_SMOKE = (0, 1, 2, 3, 4)


def test_the_simulator_restores_state_that_expires() -> None:
    restored: Counter[bool] = Counter()
    seen: Counter[str] = Counter()

    def counting(restore: Any, self: Any, states: Any) -> None:
        restore(self, states)
        if any(self.freeze().rows().values()):
            restored[states[0].parallelism != self.context.parallelism] += 1

    with around(TimedOperator, "restore", counting):
        for seed in TTL_SMOKE:
            run = ExpiringRun(seed)
            assert run.run() is None
            assert isinstance(run.settings.judge, Judge)
            seen.update(expired=run.settings.judge.expired, lived=run.settings.judge.lived)
            if not IS_DEEP and restored.keys() == {False, True} and min(seen["expired"], seen["lived"]) > 100:
                break
    assert restored[False] > 0, "at the same parallelism"
    assert restored[True] > 0, "at another one"
    assert min(seen["expired"], seen["lived"]) > 100


ROCKSDB_SMOKE = (3, 6, 9) if IS_DEEP else (3,)


def test_kinds_made_of_two_run_in_other_processes() -> None:
    command = [sys.executable, "-m", "headgate.sim", "--rocksdb", "--seeds", "2", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "2 seeds of rocksdb, 0 violations" in done.stdout, done.stderr


def test_state_is_in_rocksdb(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    begin = Database.__init__

    def opens(self: Database, *arguments: Any, **options: Any) -> None:
        opened.append(arguments)
        begin(self, *arguments, **options)

    monkeypatch.setattr(Database, "__init__", opens)
    for seed in ROCKSDB_SMOKE:
        assert (seed, RocksRun(seed).run()) == (seed, None)
    assert len(opened) > 10


def test_timers_and_ttl_are_in_rocksdb_too() -> None:
    seeds = (1, 3) if IS_DEEP else (1,)
    kinds = {(kind, seed): kind(seed) for kind in (RocksTimedRun, RocksExpiringRun) for seed in seeds}
    for name, run in kinds.items():
        assert (name, run.run()) == (name, None)
        assert isinstance(run.settings.state, RocksState)
    assert {type(run_of) for run_of in kinds.values()} < set(ROCKSDB_KINDS)


def test_checkpoints_share_files_of_small_databases() -> None:
    usual = database_snapshot.SIZE_BYTES_MIN
    runs = {seed: RocksFilesRun(seed) for seed in ((6, 10) if IS_DEEP else (6,))}
    assert {seed: run.run() for seed, run in runs.items()} == dict.fromkeys(runs)
    assert all(run.history.shared_count for run in runs.values())
    assert usual == database_snapshot.SIZE_BYTES_MIN > 1


def test_checkpoints_share_files_with_timers_and_expiries() -> None:
    for kind, seed in ((RocksTimedFilesRun, 5), (RocksExpiringFilesRun, 7)):
        run = kind(seed)
        assert (kind, run.run()) == (kind, None)
        assert run.history.shared_count
        assert ROCKSDB_KINDS[seed % len(ROCKSDB_KINDS)] is kind


MEMORY_CHUNKS_SMOKE = (0, 2, 5, 7)


def test_checkpoints_share_chunks_of_small_states() -> None:
    usual = [getattr(owner, name) for owner, name, _ in BOUNDS]
    runs = {seed: CHUNKS_KINDS[seed % len(CHUNKS_KINDS)](seed) for seed in MEMORY_CHUNKS_SMOKE}
    assert {seed: run.run() for seed, run in runs.items()} == dict.fromkeys(runs)
    assert all(run.history.shared_count for run in runs.values())
    assert {type(run) for run in runs.values()} == {ChunksRun, ExpiringChunksRun, TimedChunksRun, WindowedChunksRun}
    assert usual == [getattr(owner, name) for owner, name, _ in BOUNDS]
