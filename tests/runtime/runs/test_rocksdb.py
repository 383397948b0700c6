"""State in RocksDB, with the real driver and real workers that are killed, and another backend at another start."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_increments import check, manifests, padded
from tests.runtime.runs.test_results import events, generator, same

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed
from headgate.model.config import DamagedCheckpoint, MemoryState, RocksState, StateConfig
from headgate.model.plan import PipelineDefinition
from headgate.state.rocksdb.database import Database

# Rules: F10


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
STEP_MS = 100


class Collected(hg.ProcessFunction):
    """Passes each record on with how many of its key there were, and the sum of their ids."""

    schema = {"key": pa.int64(), "id": pa.int64(), "n": pa.int64(), "sum": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.sum = state.value("sum", pa.int64())
        self.ids = state.list("ids", pa.int64())
        self.last = state.map("last", pa.large_string(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.sum.put((self.sum.get() or 0) + row["id"])
        self.ids.append(row["id"])
        place = f"{row['id'] % 7}"
        self.last.put(place, max(row["id"], self.last.get(place, 0)))
        assert self.sum.get() == sum(self.ids.get())
        assert max(found for _, found in self.last.items()) == max(self.ids.get())
        yield {"key": context.key, "id": row["id"], "n": len(self.ids), "sum": self.sum.get()}


class Counted(hg.BatchProcessFunction):
    """The same by batch: one record per key and batch counts for all of them."""

    schema = {"key": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        self.n = state.value("n", pa.int64())
        self.ids = state.list("ids", pa.int64())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        changed = self.n.update(1, "add")
        self.ids.append(batch["id"])
        assert (self.ids.counts() == self.n.get()).all()
        return batch.select("key", n=self.n.get()).filter(changed)


def add(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**total, "id": total["id"] + row["id"]}


def kept(root: Path, source: hg.Generator, parallelism: int, state: StateConfig) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism)
    stream = pipeline.source(source).select("key", "id")
    keyed = stream.key_by("key")
    keyed.process(Collected(), name="collected").sink(hg.FileSink(root / "rows", "parquet"), name="rows")
    keyed.process(Counted(), name="counted").sink(hg.FileSink(root / "batches", "parquet"), name="batches")
    keyed.reduce(add, name="summed").sink(hg.FileSink(root / "sums", "parquet"), name="sums")
    definition = definition_of(pipeline)
    return replace(definition, config=replace(definition.config, state=state))


def test_state_in_rocksdb_is_exactly_once_over_kills_and_goes_on_in_memory_and_back(
    start: Start, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    source = replace(generator(2_000, splits=None, batch=50), rows_per_second=500)
    rocks = RocksState(16 << 20, str(local))
    run = start(kept(tmp_path, source, 2, rocks))
    run.wait_checkpoints(2)
    directories = [path for path in local.rglob("*") if path.is_dir()]
    assert len([path for path in directories if path.name == "db"]) == 6
    (parent,) = local.iterdir()
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700
    assert parent.name == f"headgate-state-{os.getuid()}"
    run.kill(1)
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    assert len(list(local.rglob("db"))) == 6, "what the killed worker left is gone"
    run.driver.stop()
    assert not run.result().is_finished
    assert not list(local.rglob("*.sst")), "nothing stays when the workers end"
    run = start(kept(tmp_path, source, 3, MemoryState()))
    run.wait_checkpoints(2)
    run.driver.stop()
    assert not run.result().is_finished
    run = start(kept(tmp_path, replace(source, rows_per_second=3_000), 1, rocks))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    wanted = events(source).select("key", "id")
    rows = read_committed(str(tmp_path / "rows"))
    same(rows.select("key", "id"), wanted)
    for column in ("n", "sum"):
        last = rows.group_by("key").agg(pl.col(column).max())
        totals = wanted.group_by("key").agg(n=pl.len().cast(pl.Int64), sum=pl.col("id").sum())
        same(last, totals.select("key", column))
    counts = read_committed(str(tmp_path / "batches")).group_by("key").agg(pl.col("n").max())
    same(counts, wanted.group_by("key").agg(n=pl.len().cast(pl.Int64)))
    sums = read_committed(str(tmp_path / "sums")).group_by("key").agg(pl.col("id").max())
    same(sums, wanted.group_by("key").agg(pl.col("id").sum()))


def test_an_operator_has_its_state_where_it_says(start: Start, tmp_path: Path) -> None:
    local = tmp_path / "local"
    source = replace(generator(1_500, splits=None), rows_per_second=750)
    pipeline = pipeline_at(tmp_path, parallelism=2)
    keyed = pipeline.source(source).select("key", "id").key_by("key")
    on_disk = hg.RocksDB(memory="16MB", dir=str(local))
    keyed.reduce(add, name="summed", state=on_disk).sink(hg.FileSink(tmp_path / "sums", "parquet"), name="sums")
    keyed.process(Counted(), name="counted").sink(hg.FileSink(tmp_path / "batches", "parquet"), name="batches")
    run = start(definition_of(pipeline))
    run.wait_checkpoints(1)
    assert len(list(local.rglob("db"))) == 2, "one operator of two, in each of two workers"
    assert run.result().is_finished
    wanted = events(source).select("key", "id")
    sums = read_committed(str(tmp_path / "sums")).group_by("key").agg(pl.col("id").max())
    same(sums, wanted.group_by("key").agg(pl.col("id").sum()))
    counts = read_committed(str(tmp_path / "batches")).group_by("key").agg(pl.col("n").max())
    same(counts, wanted.group_by("key").agg(n=pl.len().cast(pl.Int64)))


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
    source = replace(generator(1_500, splits=None, batch=20), rows_per_second=100)
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
    source = replace(generator(1_500, splits=None, batch=20), rows_per_second=100)
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


# Rules: F1


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
