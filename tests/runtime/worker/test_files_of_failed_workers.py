"""What a worker leaves of its state on the local disk when it ends by itself (RB21)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import CorruptionError, StorageError
from headgate.runtime.worker.chain import NodeError
from headgate.runtime.worker.worker import keeps_local_files
from headgate.state.rocksdb.local_databases import LocalDatabases
from headgate.state.snapshot import LocalDamage
from headgate.testing import Collect, run


class FailsOnce(hg.ProcessFunction):
    """Counts, and raises once at the third record."""

    schema = {"n": pa.int64()}

    def __init__(self, done: Path) -> None:
        self.done = done

    def open(self, state: hg.StateHandle) -> None:
        self.n = state.value("n", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.n.put(self.n.get(0) + 1)
        if self.n.get() == 3 and not self.done.exists():
            self.done.touch()
            raise OSError("a service does not answer")
        yield {"n": self.n.get()}


# RB21
def test_a_worker_that_fails_leaves_its_files_and_one_that_ends_well_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = [], LocalDatabases.close

    def noted(room: LocalDatabases, *, is_left: bool = False) -> None:
        closed.append(is_left)
        close(room, is_left=is_left)

    monkeypatch.setattr(LocalDatabases, "close", noted)
    p = hg.Pipeline("p", state=hg.RocksDB(memory="32MB", dir=str(tmp_path / "local")))
    sink = Collect(tmp_path / "out")
    p.source(hg.FromRows([{"key": 1}] * 4)).key_by("key").process(FailsOnce(tmp_path / "done")).sink(sink)
    run(p, parallelism=1)
    assert sorted(row["n"] for row in sink.rows()) == [1, 2, 3, 4]
    assert closed == [True, False]


# RB21
@pytest.mark.parametrize(
    ("error", "spares"),
    [
        (ValueError("of the user"), True),
        (NodeError("sum", ValueError("of the user")), True),
        (StorageError("put", "s3://bucket/x", "it does not answer", True), True),
        (CorruptionError("chk-1/a", 0, "a", "b"), True),
        (StorageError("write", "/disk/db", "no space is left on this disk", False), False),
        (NodeError("sum", StorageError("write", "/disk/db", "no space is left on this disk", False)), False),
        (NodeError("sum", LocalDamage("/disk/db/000008.sst", 0, "a block", "another")), False),
    ],
)
def test_a_worker_leaves_nothing_on_a_disk_that_failed(error: Exception, spares: bool) -> None:
    assert keeps_local_files(error) == spares
