"""RocksDB in the machine room; and a planted bug that is found."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, patched
from tests.sim.product.finding import assert_found
from tests.sim.product.patching import around, skipped

from headgate.model.config import RocksState
from headgate.model.manifest import SnapshotPart
from headgate.protocol.checkpoints.retention import FileRetention
from headgate.protocol.checkpoints.sharing import SharedFiles
from headgate.sim.kinds.rocks import (
    KINDS,
    RocksExpiringFilesRun,
    RocksExpiringRun,
    RocksFilesRun,
    RocksRun,
    RocksTimedFilesRun,
    RocksTimedRun,
    run_seed,
)
from headgate.sim.product.run import result_of
from headgate.state.rocksdb import increments
from headgate.state.rocksdb.database import Changes, Database

SMOKE = (3, 6, 9)


def test_state_is_in_rocksdb(monkeypatch: pytest.MonkeyPatch) -> None:  # SM48
    opened: list[Any] = []
    begin = Database.__init__

    def opens(self: Database, *arguments: Any, **options: Any) -> None:
        opened.append(arguments)
        begin(self, *arguments, **options)

    monkeypatch.setattr(Database, "__init__", opens)
    for seed in SMOKE:
        assert (seed, RocksRun(seed).run()) == (seed, None)
    assert len(opened) > 10


def test_timers_and_ttl_are_in_rocksdb_too() -> None:  # SM48
    kinds = {(kind, seed): kind(seed) for kind in (RocksTimedRun, RocksExpiringRun) for seed in (1, 3)}
    for name, run in kinds.items():
        assert (name, run.run()) == (name, None)
        assert isinstance(run.settings.state, RocksState)
    assert {type(run_of) for run_of in kinds.values()} < set(KINDS)


def test_checkpoints_share_files_of_small_databases() -> None:  # SM48
    usual = increments.SIZE_BYTES_MIN
    runs = {seed: RocksFilesRun(seed) for seed in (6, 10)}
    assert {seed: run.run() for seed, run in runs.items()} == dict.fromkeys(runs)
    assert all(run.history.shared_count for run in runs.values())
    assert usual == increments.SIZE_BYTES_MIN > 1
    again = result_of(RocksFilesRun(6), 6, is_traced=False)
    assert again.digest == runs[6].world.digest


def test_checkpoints_share_files_with_timers_and_expiries() -> None:  # SM48, RB24
    for kind, seed in ((RocksTimedFilesRun, 5), (RocksExpiringFilesRun, 7)):
        run = kind(seed)
        assert (kind, run.run()) == (kind, None)
        assert run.history.shared_count
        assert KINDS[seed % len(KINDS)] is kind


def a_database_forgets_the_last_row_of_each_write() -> AbstractContextManager[None]:  # RB4
    return around(Changes, "put", lambda call, self, rows, values: call(self, rows[:-1], values[:-1]))


def what_is_deleted_stays() -> AbstractContextManager[None]:  # RB4
    return skipped(Changes, "delete")


def files_of_checkpoints_that_may_fail_are_shared() -> AbstractContextManager[None]:  # SF15
    def shareable(self: SharedFiles) -> tuple[SnapshotPart, ...]:
        return tuple(self._snapshots[max(self._snapshots)].values())

    return patched(SharedFiles, "shareable", shareable)


def files_go_with_the_checkpoint_that_wrote_them() -> AbstractContextManager[None]:  # SF4
    def needed(self: FileRetention) -> frozenset[str]:
        return frozenset(path for one, files in self._retained.items() for path in files if f"{one:010}/" in path)

    return patched(FileRetention, "_needed", needed)


MUTANTS: dict[Mutant, int] = {
    a_database_forgets_the_last_row_of_each_write: 0,
    what_is_deleted_stays: 4,
    files_of_checkpoints_that_may_fail_are_shared: 22,
    files_go_with_the_checkpoint_that_wrote_them: 10,
}


@pytest.mark.parametrize(("mutant", "seed"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_of_rocksdb_is_found(mutant: Mutant, seed: int) -> None:  # SM48
    assert_found(mutant, lambda seed: run_seed(seed, events_max=60_000).violation, (seed,), range(20))
