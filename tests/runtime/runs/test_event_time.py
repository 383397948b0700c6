"""Event time with real workers: a source of endless input must not hold it back where nothing can come."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate.connectors.files.file_committer import read_committed

SCHEMA = pa.schema([("key", pa.string()), ("at", pa.int64())])


def append(root: Path, name: str, *times_ms: int) -> None:
    (root / "in").mkdir(exist_ok=True)
    with (root / "in" / name).open("a") as file:
        file.writelines(json.dumps({"key": "k", "at": at_ms}) + "\n" for at_ms in times_ms)


def counts(root: Path) -> list[int]:
    found = read_committed(str(root / "counts"))
    return found["count"].to_list() if found.width else []


def test_a_followed_directory_with_fewer_files_than_subtasks_has_event_time(
    start: Callable[..., Run], tmp_path: Path
) -> None:  # W7
    append(tmp_path, "a.json", 100, 200, 1_100)
    pipeline = pipeline_at(tmp_path, parallelism=2)
    rows = pipeline.source(hg.JsonLines(tmp_path / "in", SCHEMA, follow=True, discovery_interval="20ms"))
    timed = rows.with_timestamps("at", out_of_orderness="0s")
    windows = timed.key_by("key").window(hg.Tumbling("1s")).agg(count=pl.len())
    windows.sink(hg.FileSink(tmp_path / "counts", "parquet", roll_interval=0), name="counts")
    run = start(definition_of(pipeline))
    run.wait(lambda: counts(tmp_path) == [2], "the first window")
    append(tmp_path, "b.json", 2_300)  # the other subtask's, which counts from now on
    append(tmp_path, "a.json", 2_100)
    run.wait(lambda: sorted(counts(tmp_path)) == [1, 2], "the second window")
    run.driver.stop()
    run.result()


def test_windows_of_silent_input_fire_with_the_clock(start: Callable[..., Run], tmp_path: Path) -> None:  # W27, W28
    class HalfASecondBehind(hg.WatermarkGenerator):
        def __init__(self) -> None:
            self.latest = 0

        def on_batch(self, times: npt.NDArray[np.int64]) -> int | None:
            self.latest = max(self.latest, int(times.max()))
            return self.latest - 500

        def snapshot(self) -> int:
            return self.latest

        def restore(self, state: int) -> None:
            self.latest = state

    append(tmp_path, "a.json", 100, 200, 1_100, 7 * 10**12)
    dead = hg.DeadLetter(hg.FileSink(tmp_path / "bad", "jsonl", roll_interval=0))
    pipeline = pipeline_at(tmp_path, parallelism=2, bad_records=dead)
    rows = pipeline.source(hg.JsonLines(tmp_path / "in", SCHEMA, follow=True, discovery_interval="20ms"))
    timed = rows.with_timestamps("at", watermark=HalfASecondBehind(), silent_after="200ms", max_ahead="1h")
    windows = timed.key_by("key").window(hg.Tumbling("1s")).agg(count=pl.len())
    windows.sink(hg.FileSink(tmp_path / "counts", "parquet", roll_interval=0), name="counts")
    run = start(definition_of(pipeline))
    run.wait(lambda: sorted(counts(tmp_path)) == [1, 2], "both windows, although nothing comes after them")
    append(tmp_path, "a.json", 50, 90_000)
    run.wait(lambda: read_committed(str(tmp_path / "bad"))["problem"].to_list() != [], "the bad record")
    run.driver.stop()
    run.result()
    (problem,) = read_committed(str(tmp_path / "bad"))["problem"]
    assert "more than 3600 s ahead of the clock" in problem
