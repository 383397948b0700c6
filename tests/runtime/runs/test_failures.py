"""Real drivers and workers that are killed, stopped, and fed what they cannot digest: nothing lost, nothing twice."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import generator, recounted, same, windowed

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import BadRecord, FencedError, PipelineFailed
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Start = Any
FENCED = 75


@pytest.mark.parametrize("stage_attempts", [1, 4], ids=["resubmitted", "retried by the stage"])
def test_workers_killed_one_after_the_other_lose_and_repeat_nothing(
    start: Start, tmp_path: Path, stage_attempts: int
) -> None:
    dice = random.Random(stage_attempts)
    source = generator(4_000, 4_000, batch=50)
    run = start(definition_of(windowed(tmp_path, source)), stage_attempts=stage_attempts)
    for kill in range(3):
        if dice.random() < 0.7:
            run.wait_checkpoints(dice.randint(1, 3))
        run.kill(dice.randrange(2))
        run.wait_restarts(kill + 1)
    result = run.result()
    assert result.is_finished
    assert result.restarts == 3
    assert run.launcher.submissions == (1 if stage_attempts == 4 else 4)
    same(read_committed(str(tmp_path / "out")), recounted(source))


def test_a_stopped_worker_that_wakes_beside_its_successor_changes_nothing(start: Start, tmp_path: Path) -> None:
    source = generator(5_000, 3_000, batch=50)
    run = start(definition_of(windowed(tmp_path, source)))
    run.wait_checkpoints(2)
    zombie = run.freeze(1)
    run.wait_restarts(1)
    run.wait_checkpoints(2)
    os.kill(zombie, signal.SIGCONT)
    run.wait(lambda: zombie in run.launcher.codes, "the zombie notices that it is over")
    assert run.launcher.codes[zombie] in (1, FENCED)
    result = run.result()
    assert result.is_finished
    assert result.restarts == 1, "the zombie must not disturb its successor"
    same(read_committed(str(tmp_path / "out")), recounted(source))


def divide(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "value": 1_000 // (row["id"] - 700)}


def test_a_failing_function_is_tried_twice_and_told_with_operator_record_and_own_frames(
    start: Start, tmp_path: Path
) -> None:
    pipeline = pipeline_at(tmp_path)
    stream = pipeline.source(generator(1_000, splits=1)).map(divide, name="divide")
    stream.sink(hg.FileSink(tmp_path / "out"), name="out")
    run = start(definition_of(pipeline))
    with pytest.raises(PipelineFailed) as failed:
        run.result()
    assert "'divide'" in failed.value.reason
    assert "'id': 700" in failed.value.reason
    assert failed.value.detail.endswith("ZeroDivisionError: integer division or modulo by zero")
    assert "headgate/runtime" not in failed.value.detail
    assert len(failed.value.detail.splitlines()) <= 8
    assert len(run.restarts) == 1


def test_a_bad_record_fails_at_once(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    nulls = pl.when(pl.col("id") == 333).then(None).otherwise(pl.col("key"))
    stream = pipeline.source(generator(1_000)).with_columns(key=nulls).with_timestamps("ts")
    counts = stream.key_by("key").window(hg.Tumbling("1s")).agg(n=pl.len())
    counts.sink(hg.FileSink(tmp_path / "out"), name="out")
    run = start(definition_of(pipeline))
    with pytest.raises((PipelineFailed, BadRecord), match=r"operator 'key-by' refused a record.*333"):
        run.result()
    assert run.restarts == []


def stopped_half_way(start: Start, root: Path, source: hg.Generator, **options: Any) -> None:
    run = start(definition_of(windowed(root, source), inline_bytes_max=0), **options)
    run.wait_checkpoints(3)
    run.driver.cancel()
    assert not run.result().is_finished


def windows_of_the_newest(root: Path) -> Path:
    """Return a file of the newest checkpoint that was completed: another may have been under way at the end."""
    log = CheckpointLog(open_storage(str(root / "checkpoints")), "p")
    files = sorted(path for path in candidates(log.observe())[0].files if "/window" in path)
    return root / "checkpoints" / "p" / files[-1]


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    start: Start, tmp_path: Path, damage: str
) -> None:
    source = generator(4_000, 6_000, batch=50)
    stopped_half_way(start, tmp_path, source)
    newest = windows_of_the_newest(tmp_path)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "missing":
        newest.unlink()
    else:
        newest.write_bytes(data)
    with pytest.raises(PipelineFailed, match="would produce again the output that checkpoint"):
        start(definition_of(windowed(tmp_path, source), inline_bytes_max=0)).result()
    going_back = windowed(tmp_path, source, on_damaged_checkpoint="previous")
    run = start(definition_of(going_back, inline_bytes_max=0))
    assert run.result().is_finished
    told = [note for note in run.notes if "cannot be used" in note]
    assert newest.name in "".join(told)
    out = read_committed(str(tmp_path / "out")).unique()
    same(out, recounted(source))


def test_of_two_drivers_that_no_lock_keeps_apart_the_newer_wins(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "headgate.runtime.driver.pipeline_lock.local_directory", lambda root: None
    )  # as on an object store
    source = generator(6_000, 3_000, batch=50)
    older = start(definition_of(windowed(tmp_path, source)))
    older.wait_checkpoints(2)
    newer = start(definition_of(windowed(tmp_path, source)))
    older.wait(older.driver.result.done, "the end, while there is input")
    with pytest.raises(FencedError):
        older.result()
    assert newer.result().is_finished
    assert newer.driver.progress.restarts == 0
    same(read_committed(str(tmp_path / "out")), recounted(source))


def test_the_user_may_cancel_before_anything_runs(start: Start, tmp_path: Path) -> None:
    run = start(definition_of(windowed(tmp_path, generator(1_000_000, 1_000))))
    run.driver.cancel()
    assert not run.result().is_finished


def test_a_stop_that_comes_before_the_workers_still_ends_with_a_checkpoint(start: Start, tmp_path: Path) -> None:
    source = generator(1_000_000, 1_000)
    run = start(definition_of(windowed(tmp_path, source, interval=None)))  # if it comes late, there is no other one
    run.driver.stop()
    result = run.result()
    assert not result.is_finished
    assert run.checkpoints == [result.last_checkpoint]
