"""Sources with event times are read side by side, with real workers, through the public API (W20 to W24)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.conftest import few
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate.connectors.files.file_committer import read_committed

STEP_MS, RECORDS = 100, 3_000


def write(directory: Path, name: str, *, every: int) -> None:
    """Write the same five minutes into each file, with more or fewer records."""
    directory.mkdir(exist_ok=True)
    times = range(0, RECORDS * STEP_MS, STEP_MS * every)
    pl.DataFrame({"at": times, "name": [name] * len(times)}).write_parquet(directory / f"{name}.parquet")


@pytest.mark.parametrize("sources", few([2, 1], 1))
def test_a_backlog_of_files_is_not_far_out_of_order_behind_a_shuffle(
    sources: int, start: Callable[..., Run], tmp_path: Path
) -> None:
    for name, every in (("a", 1), ("b", 1), ("c", 30), ("d", 30)):
        write(tmp_path / ("in" if sources == 1 or name in "ac" else "other"), name, every=every)
    # A batch has at most 15 s, of the files with the fewest records.
    pipeline = pipeline_at(tmp_path, parallelism=1, max_drift="5s")
    directories = [tmp_path / "in", tmp_path / "other"][:sources]
    streams: list[Any] = [
        pipeline.source(hg.ParquetFiles(each, batch_rows=5), name=each.name).with_timestamps("at")
        for each in directories
    ]
    rows = streams[0].union(*streams[1:]) if sources > 1 else streams[0]
    mixed = rows.rebalance().with_timestamps("at", out_of_orderness="60s", name="again")
    counts = mixed.key_by("name").window(hg.Tumbling("10s")).agg(count=pl.len())
    counts.sink(hg.FileSink(tmp_path / "counts", "parquet", roll_interval=0), name="counts")
    run = start(definition_of(pipeline))
    result = run.result()
    assert result.late_records == 0
    found = read_committed(str(tmp_path / "counts"))
    totals: Counter[str] = Counter()
    for row in found.to_dicts():
        totals[row["name"]] += row["count"]
    assert totals == {"a": 3_000, "b": 3_000, "c": 100, "d": 100}
