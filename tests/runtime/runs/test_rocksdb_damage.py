"""A bit that flips in a file of RocksDB, with the real driver and real workers: before it is written, and unseen."""

# Rules: F10

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests.runtime.runs.test_results import events, generator, same
from tests.runtime.runs.test_rocksdb_increments import check, padded

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed
from headgate.model.config import DamagedCheckpoint, RocksState
from headgate.model.plan import PipelineDefinition

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any


@dataclass
class Flipping:
    """Has one worker flip a bit on its disk when it is told to, just before it writes the file to a checkpoint.

    ``is_unseen``: and so with every file from then on, at which nobody looks, as in releases before.
    """

    root: Path
    is_unseen: bool

    def __call__(self) -> None:
        from headgate.state.rocksdb import database_snapshot

        original, is_unseen = database_snapshot._read, self.is_unseen
        order, done = self.root / "flip", self.root / "flipped"

        def read(path: Path) -> bytes:
            data = original(path)
            if path.suffix != ".sst":
                return data
            try:
                order.rename(done)
            except FileNotFoundError:
                if not is_unseen or not done.exists():
                    return data
            at = len(data) // 3
            flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            path.unlink()  # it is a link
            path.write_bytes(flipped)
            return flipped

        database_snapshot._read = read
        if self.is_unseen:
            database_snapshot._check = lambda path, data, known: None

    def flip(self) -> None:
        (self.root / "flip").touch()

    @property
    def has_flipped(self) -> bool:
        return (self.root / "flipped").exists()


def retaining(root: Path, source: hg.Generator, policy: DamagedCheckpoint) -> PipelineDefinition:
    """Return a pipeline that can go back far."""
    made = padded(root, source, 2, RocksState(32 << 20, str(root / "local")))
    checkpoints = replace(made.config.checkpoints, retained=30)
    return replace(made, config=replace(made.config, checkpoints=checkpoints, on_damaged=policy))


def test_a_bit_that_flips_on_a_local_disk_is_in_no_checkpoint_and_loses_nothing(start: Start, tmp_path: Path) -> None:
    source = replace(generator(4_000, splits=None), rows_per_second=300)
    flipping = Flipping(tmp_path, is_unseen=False)
    run = start(retaining(tmp_path, source, DamagedCheckpoint.FAIL), prepare=flipping)
    run.wait_checkpoints(2)
    flipping.flip()
    run.wait_restarts(1)
    assert flipping.has_flipped
    assert "is damaged at byte" in run.restarts[0]
    assert str(tmp_path / "local") in run.restarts[0]
    run.wait_checkpoints(2)
    assert run.result().is_finished
    assert len(run.restarts) == 1
    check(tmp_path, source)


# R57 R10 R14
@pytest.mark.early
def test_a_checkpoint_that_only_workers_find_damaged_is_judged_by_the_policy(start: Start, tmp_path: Path) -> None:
    # R57
    source = replace(generator(4_000, splits=None), rows_per_second=300)
    flipping = Flipping(tmp_path, is_unseen=True)
    run = start(retaining(tmp_path, source, DamagedCheckpoint.FAIL), prepare=flipping)
    run.wait_checkpoints(2)
    flipping.flip()
    run.wait(lambda: flipping.has_flipped, "a bit has flipped")
    run.wait_checkpoints(1)
    run.kill(0)
    with pytest.raises(
        PipelineFailed, match=r"p/chk-\d+/.*block checksum mismatch.*going back to checkpoint"
    ) as caught:
        run.result()
    assert str(tmp_path / "local") not in str(caught.value), "it names the checkpoint's file, not a temporary one"
    run = start(retaining(tmp_path, source, DamagedCheckpoint.PREVIOUS))
    run.wait(lambda: any("block checksum mismatch" in note for note in run.notes), "it goes back")
    run.wait_checkpoints(2)
    assert run.result().is_finished
    assert any(note.startswith("p/chk-") and "cannot be used" in note for note in run.notes)
    rows = read_committed(str(tmp_path / "rows")).select("key", "id").unique()
    same(rows, events(source).select("key", "id"))
    counts = read_committed(str(tmp_path / "rows")).group_by("key").agg(pl.col("n").max())
    same(counts, events(source).group_by("key").agg(n=pl.len().cast(pl.Int64)))
