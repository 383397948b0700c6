"""Checkpoint storage that fails while much state is written, then workers that die: what is restored is whole."""

# Rules: F9

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from crash.pipelines import MANY_KEYS
from crash.processes import Life, kill
from crash.results import assert_clean
from headgate.connectors.files.file_committer import read_committed
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

ROWS = 80_000
Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]


def assert_counted(root: Path) -> int:
    """Every record was counted once, in both ways; return how many keys there are."""
    keys = 0
    for name in ("reduced", "processed"):
        counts = read_committed(str(root / name))
        by_key = counts.group_by("key").agg(most=pl.col("n").max(), distinct=pl.col("n").n_unique(), rows=pl.len())
        total = by_key["most"].sum()
        assert total == ROWS, f"the counts of '{name}' add up to {total} of {ROWS} records"
        assert by_key.filter((pl.col("most") != pl.col("rows")) | (pl.col("distinct") != pl.col("rows"))).is_empty()
        keys = by_key.height
    return keys


def last_manifest(root: Path, name: str) -> Manifest:
    log = CheckpointLog(open_storage(str(root / "checkpoints")), name).observe()
    return [entry.content for entry in log.entries if isinstance(entry.content, Manifest)][-1]


def rows_of(manifest: Manifest, node: str, state: str) -> int:
    return sum((entry.rows or {}).get(node, {}).get(state, 0) for entry in manifest.entries)


def test_state_written_at_the_second_try_is_whole_when_workers_die(
    spec: Spec, run: Run, tmp_path: Path, storage_fault: Path
) -> None:
    """First every snapshot file fails once; then the disk is full for a while. After each a worker is killed."""
    what = spec("many_keys", rows=ROWS, rate=5_000, inline_bytes_max=0, tolerable_failures=1_000)
    told = tmp_path / "told"
    fault = {"errno": errno.ENOSPC, "part": f"{tmp_path}/checkpoints/{what['name']}/chk-", "operations": ["put"]}
    storage_fault.write_text(json.dumps({**fault, "told": str(told)}))
    life = run(what)
    running = life.running()
    life.checkpoint(4)
    assert len(told.read_text().splitlines()) >= 2 * 4, "every snapshot was written twice"
    kill(next(iter(running["workers"].values())))
    life.restart()
    running = life.running(after=running["generation"])
    life.checkpoint(2)
    storage_fault.write_text(json.dumps(fault))
    life.note("No space left on device")
    storage_fault.unlink()
    life.checkpoint(2)
    kill(list(running["workers"].values())[-1])
    life.restart()
    result = life.result()
    assert (result["is_finished"], result["restarts"]) == (True, 2)
    keys = assert_counted(tmp_path)
    assert 0 < keys <= MANY_KEYS
    manifest = last_manifest(tmp_path, what["name"])
    assert rows_of(manifest, "reduced", "accumulators") == keys
    assert rows_of(manifest, "processed", "count") == keys
    assert_clean(tmp_path)
