"""SIGKILL of workers while RocksDB compacts: what a snapshot refers to is whole, whatever becomes of the database."""

# Rules: F1

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests.runtime.runs.test_results import events, generator, same
from tests.runtime.runs.test_rocksdb_increments import manifests, padded

from headgate.connectors.files.file_committer import read_committed
from headgate.model.config import RocksState
from headgate.state.rocksdb.database import Database

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
COMPACTING = "rocksdb.num-running-compactions"


@dataclass(frozen=True)
class KilledWhileCompacting:
    """Has workers compact their databases behind some barriers, and kill themselves in the middle, each marker once."""

    root: Path
    barriers: tuple[int, ...]

    def marker(self, number: int) -> Path:
        return self.root / f"compacted-{number}"

    def missing(self) -> list[int]:
        return [number for number in range(len(self.barriers)) if not self.marker(number).exists()]

    def __call__(self) -> None:
        original, taken = Database.checkpoint, [0]

        def checkpoint(database: Any, path: Path) -> None:
            original(database, path)
            taken[0] += 1
            for number, barrier in enumerate(self.barriers):
                if taken[0] == barrier and not self.marker(number).exists():
                    threading.Thread(target=self._die, args=(database._db, number), daemon=True).start()

        Database.checkpoint = checkpoint  # type: ignore[method-assign]

    def _die(self, db: Any, number: int) -> None:
        over = threading.Event()

        def compact() -> None:
            db.compact_range(None, None)
            over.set()

        threading.Thread(target=compact, daemon=True).start()
        while not over.is_set():
            if db.property_int_value(COMPACTING) and self._is_first(number):
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self, number: int) -> bool:
        try:
            os.close(os.open(self.marker(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_workers_die_while_their_databases_compact(start: Start, tmp_path: Path) -> None:  # SF15
    source = replace(generator(6_000, splits=None), rows_per_second=400)
    rocks = RocksState(32 << 20, str(tmp_path / "local"))
    killed = KilledWhileCompacting(tmp_path, (2, 3, 3, 4))
    run = start(padded(tmp_path, source, 2, rocks), prepare=killed)
    run.wait(lambda: not killed.missing(), "workers died in compactions")
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    run.driver.stop()
    assert not run.result().is_finished
    needed = {path for manifest in manifests(tmp_path) for path in manifest.files}
    root = tmp_path / "checkpoints" / "p"
    assert needed == {str(path.relative_to(root)) for path in root.glob("chk-*/*")}
    assert start(padded(tmp_path, replace(source, rows_per_second=6_000), 3, rocks)).result().is_finished
    found = read_committed(str(tmp_path / "rows"))
    wanted = events(source).select("key", "id")
    same(found.select("key", "id"), wanted)
    last = found.group_by("key").agg(pl.col("n").max())
    same(last, wanted.group_by("key").agg(n=pl.len().cast(pl.Int64)))
