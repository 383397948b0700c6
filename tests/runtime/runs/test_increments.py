"""Checkpoints of RocksDB that share files, with the real driver and real workers that are killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import IS_DEEP
from tests.runtime.running import WAIT_S, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same
from tests.runtime.runs.test_unaligned import KilledAt

import headgate as hg
from headgate.codec.snapshot import DATABASE_DESCRIPTION, FILES_PREFIX
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import HeadgateError
from headgate.model.config import MemoryState, RocksState, StateConfig
from headgate.model.manifest import Manifest
from headgate.model.plan import PipelineDefinition
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any

PADS = 300
"""Each key begins with so many kilobytes that cannot be compressed, so that there is something to share."""

TIMERS = 8
"""Of each record: more in all than are in memory."""

FAR_MS = 1 << 50


class Padded(hg.ProcessFunction):
    """Counts the records of a key, beside a map that is large from the beginning and changes little."""

    schema = {"key": pa.int64(), "id": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.n = state.value("n", pa.int64())
        self.pads = state.map("pads", pa.int64(), pa.large_binary())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        n = (self.n.get() or 0) + 1
        if n == 1:
            for at in range(PADS):
                self.pads.put(at, random_bytes(context.key, at))
        self.n.put(n)
        self.pads.put(n % PADS, random_bytes(context.key, n % PADS))
        yield {"key": context.key, "id": row["id"], "n": n}


class Timed(Padded):
    """The same with a map that expires, and with timers that fire when all input has ended."""

    def open(self, state: hg.StateHandle) -> None:
        self.n = state.value("n", pa.int64())
        self.pads = state.map("pads", pa.int64(), pa.large_binary(), ttl=hg.TTL("1000d"))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        for number in range(TIMERS):
            context.timers.register_event_time(FAR_MS + row["id"] * TIMERS + number)
        yield from super().process(row, context)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> list[dict[str, Any]]:
        return [{"key": context.key, "id": FAR_MS - 1 - timer.time_ms, "n": 0}]


def random_bytes(key: int, at: int) -> bytes:
    import hashlib

    return hashlib.shake_128(f"{key}/{at}".encode()).digest(1_000)


def padded(
    root: Path, source: hg.Generator, parallelism: int, state: StateConfig, function: hg.ProcessFunction | None = None
) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism, interval="300ms", retained=2)
    stream = pipeline.source(source).select("key", "id")
    results = stream.key_by("key").process(function or Padded(), name="padded")
    results.sink(hg.FileSink(root / "rows", "parquet"), name="rows")
    definition = definition_of(pipeline)
    return replace(definition, config=replace(definition.config, state=state))


def manifests(root: Path) -> list[Manifest]:
    observed = CheckpointLog(open_storage(str(root / "checkpoints")), "p").observe()
    return [entry.content for entry in observed.counted() if isinstance(entry.content, Manifest)]


def shared(manifest: Manifest) -> set[str]:
    """Return the files of databases that an earlier checkpoint wrote."""
    own = f"chk-{manifest.checkpoint:010d}/"
    return {p.path for p in manifest.parts if p.section.startswith(FILES_PREFIX) and p.path and own not in p.path}


def has_shared(root: Path) -> bool:
    """Whether a checkpoint that is retained refers to files of an earlier one."""
    try:
        return any(shared(manifest) for manifest in manifests(root))
    except HeadgateError:  # an entry was removed meanwhile
        return False


def on_disk(directories: set[Path]) -> set[tuple[int, int]]:
    """Return which files databases have in these directories of workers: links are the same ones."""
    found = set()
    for directory in directories:
        with contextlib.suppress(FileNotFoundError):
            for path in directory.rglob("*.sst"):
                found.add((path.stat().st_ino, path.stat().st_mtime_ns))
    return found


def has_some_of(files: set[tuple[int, int]], local: Path, former: set[Path]) -> bool:
    """Whether a directory that is not among the ``former`` has some of ``files``."""
    return bool(files & on_disk(set(local.glob("*/*")) - former))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Look often: what is looked for may not stay."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


# SF15
def test_files_are_shared_exactly_once_over_kills_and_another_backend(start: Start, tmp_path: Path) -> None:
    local = tmp_path / "local"
    source = replace(generator(2_000, splits=None, batch=20), rows_per_second=100)
    rocks = RocksState(32 << 20, str(local))
    run = start(padded(tmp_path, source, 2, rocks))
    run.wait_checkpoints(4)
    for restarts in (1, 2) if IS_DEEP else (1,):
        run.wait(lambda: has_shared(tmp_path), "a checkpoint that refers to files of an earlier one")
        directories = set(local.glob("*/*"))
        before = on_disk(directories)
        is_used_again = partial(has_some_of, before, local, directories)
        run.kill(restarts % 2)
        wait_until(is_used_again, "what was on the disk is used")
        run.wait_restarts(restarts)
        run.wait_checkpoints(2)
        assert len(list(local.rglob("db"))) == 2, "what killed workers left is gone"
    run.driver.stop()
    assert not run.result().is_finished
    assert not list(local.rglob("*.sst"))
    kept = manifests(tmp_path)
    needed = {path for manifest in kept for path in manifest.files}
    root = tmp_path / "checkpoints" / "p"
    there = {str(path.relative_to(root)) for path in root.glob("chk-*/*")}
    assert needed == there, "nothing that is needed is gone, nothing else stays"
    run = start(padded(tmp_path, source, 3, MemoryState()))
    run.wait_checkpoints(2)
    run.driver.stop()
    assert not run.result().is_finished
    run = start(padded(tmp_path, replace(source, rows_per_second=3_000), 1, rocks))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    check(tmp_path, source)


# F1, F22
def test_workers_that_die_while_they_write_and_restore_files_lose_nothing(start: Start, tmp_path: Path) -> None:
    source = replace(generator(1_500, splits=None, batch=20), rows_per_second=100)
    killed = KilledAt(tmp_path, (("in-put", 8), ("after-snapshot-before-ack", 4), ("in-restore", 2), ("in-restore", 3)))
    rocks = RocksState(32 << 20, str(tmp_path / "local"))
    run = start(padded(tmp_path, source, 2, rocks, Timed()), prepare=killed)
    run.wait(lambda: not killed.missing(), "all have died")
    run.wait(lambda: has_shared(tmp_path), "a checkpoint that refers to files of an earlier one")
    assert any(part.name == DATABASE_DESCRIPTION for manifest in manifests(tmp_path) for part in manifest.parts)
    assert run.result().is_finished
    check(tmp_path, source, TIMERS)


def check(tmp_path: Path, source: hg.Generator, timers: int = 0) -> None:
    """Make sure that every record counted once, and so did its timers."""
    rows = read_committed(str(tmp_path / "rows"))
    fired, rows = rows.filter(pl.col("id") < 0)["id"], rows.filter(pl.col("id") >= 0)
    assert sorted(-1 - fired) == list(range(timers * len(rows)))
    wanted = events(source).select("key", "id")
    same(rows.select("key", "id"), wanted)
    counts = rows.group_by("key").agg(pl.col("n").max())
    same(counts, wanted.group_by("key").agg(n=pl.len().cast(pl.Int64)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root may mount a file system of a few megabytes")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a file system of a few megabytes cannot be mounted here: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_local_disk_that_is_full_is_one_sentence_and_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    from tests.state.rocksdb.increments import Restored, Subtask

    from headgate.errors import StorageError

    subtask = Subtask(small_disk)
    subtask.claim()
    subtask.put(range(4_000))
    manifest = subtask.checkpoint(1)
    held = []

    def fill() -> None:
        for number in range(2, 60):
            subtask.put(range(4_000), version=number)
            held.append(subtask.backend.freeze())

    with pytest.raises(StorageError, match="no space is left on this disk; free some") as caught:
        fill()
    assert str(small_disk) in str(caught.value)
    subtask.worker.close()
    restored = Restored(subtask.storage, manifest, tmp_path / "other")
    assert len(restored.found) == 4_000
    restored.states.close()


class PaddedInMemory(hg.BatchProcessFunction):
    """Counts the records of a key, beside a map that is large from the beginning and changes little."""

    schema = {"key": pa.int64(), "id": pa.int64(), "n": pa.int64()}

    def open(self, state: hg.BatchStateHandle) -> None:
        self.n = state.value("n", pa.int64())
        self.pads = state.map("pads", pa.int64(), pa.large_binary())

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        in_batch = batch.select(pl.int_range(1, pl.len() + 1).over("key")).to_series()
        found = batch.select("key", "id", n=self.n.get().fill_null(0) + in_batch)
        self.n.put(found["n"])
        pads = pl.DataFrame({"at": range(PADS)}, schema={"at": pl.Int64})
        new = found.filter(pl.col("n") == 1).select("key").join(pads, how="cross")
        if len(new):
            self.pads.put(new["at"], padded_with(new["key"], new["at"]), keys=context.lookup(new))
        at = found["n"] % PADS
        self.pads.put(at, padded_with(found["key"], at))
        return found


def padded_with(keys: pl.Series, at: pl.Series) -> pl.Series:
    return pl.Series([random_bytes(key, place) for key, place in zip(keys, at, strict=True)], dtype=pl.Binary)


def padded_in_memory(root: Path, source: hg.Generator, parallelism: int, state: Any = None) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism, interval="300ms", retained=2)
    stream = pipeline.source(source).select("key", "id")
    stream.key_by("key").process(PaddedInMemory(), name="padded").sink(
        hg.FileSink(root / "rows", "parquet"), name="rows"
    )
    definition = definition_of(pipeline)
    return replace(definition, config=replace(definition.config, state=state or MemoryState()))


def shares_again(root: Path) -> bool:
    """Whether the newest checkpoint refers to a file of a generation before its own."""
    kept = manifests(root)
    return bool(kept) and any(".g" in p.path and f".g{kept[-1].generation}" not in p.path for p in kept[-1].parts)


# SF15
def test_chunks_are_shared_exactly_once_over_kills_rescaling_and_another_backend(start: Start, tmp_path: Path) -> None:
    source = replace(generator(2_000, splits=None, batch=20), rows_per_second=100)
    run = start(padded_in_memory(tmp_path, source, 2))
    for restarts in (1, 2) if IS_DEEP else (1,):
        run.wait(lambda: has_shared(tmp_path), "a checkpoint that refers to chunks of an earlier one")
        run.kill(restarts % 2)
        run.wait_restarts(restarts)
        run.wait(lambda: shares_again(tmp_path), "a checkpoint that refers to chunks of a former generation")
        run.wait_checkpoints(1)
    run.driver.stop()
    assert not run.result().is_finished
    needed = {path for manifest in manifests(tmp_path) for path in manifest.files}
    root = tmp_path / "checkpoints" / "p"
    there = {str(path.relative_to(root)) for path in root.glob("chk-*/*")}
    assert needed == there, "nothing that is needed is gone, nothing else stays"
    run = start(padded_in_memory(tmp_path, source, 3, RocksState(32 << 20, str(tmp_path / "local"))))
    run.wait_checkpoints(1)
    run.driver.stop()
    assert not run.result().is_finished
    run = start(padded_in_memory(tmp_path, replace(source, rows_per_second=3_000), 1))
    run.wait_checkpoints(1)
    run.kill(0)
    assert run.result().is_finished
    check(tmp_path, source)


# F1, F22
@pytest.mark.deep
def test_workers_that_die_while_they_write_and_restore_chunks_lose_nothing(start: Start, tmp_path: Path) -> None:
    source = replace(generator(1_500, splits=None, batch=20), rows_per_second=100)
    killed = KilledAt(tmp_path, (("in-put", 8), ("after-snapshot-before-ack", 4), ("in-restore", 2), ("in-restore", 3)))
    run = start(padded_in_memory(tmp_path, source, 2), prepare=killed)
    run.wait(lambda: not killed.missing(), "all have died")
    run.wait(lambda: has_shared(tmp_path), "a checkpoint that refers to chunks of an earlier one")
    assert run.result().is_finished
    check(tmp_path, source)
