"""``KeyedStream.over``: what it gives of whole pipelines, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

import headgate as hg
from headgate.errors import PipelineFailed
from headgate.testing import EOF, PAUSE, Collect, ScriptedSource, run

Rows = list[dict[str, Any]]
START = datetime(2024, 1, 1)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


ROWS = [{"id": i, "k": i % 3 or None, "ts": at(i * 7 % 20 + i // 20 * 20), "x": i % 5 or None} for i in range(100)]


def records(pipeline: hg.Pipeline, rows: Rows = ROWS) -> hg.Stream:
    source = hg.FromRows(rows, splits=2, batch_rows=10)
    return pipeline.source(source).with_timestamps("ts", out_of_orderness="1m")


def pipeline(**options: Any) -> hg.Pipeline:
    return hg.Pipeline("test", bad_records=hg.DeadLetter(hg.Discard()), **options)


def results(stream: hg.Stream, root: Path, **options: Any) -> pl.DataFrame:
    sink = Collect(f"{root}/out")
    stream.sink(sink)
    run(stream._pipeline, checkpoint_dir=root, **{"parallelism": 2, **options})
    return pl.DataFrame(sink.rows(), infer_schema_length=None).sort("id")


def recounted(frame: str, rows: Rows = ROWS) -> pl.DataFrame:
    """DuckDB's results for the records with a key; those without are bad records."""
    records = pl.DataFrame(rows, infer_schema_length=None)
    over = f"OVER (PARTITION BY k ORDER BY ts {frame})"
    query = (
        f"SELECT *, COUNT(*) {over} AS n, SUM(x) {over} AS total, MAX(x) {over} AS most FROM records "
        "WHERE k IS NOT NULL ORDER BY id"
    )
    found: pl.DataFrame = duckdb.sql(query).pl()
    assert records.height
    return found.with_columns(pl.col("n").cast(pl.UInt32), pl.col("total").cast(pl.Int64).fill_null(0))


FRAMES: dict[str, tuple[dict[str, Any], str]] = {
    "a range": ({"range": "5s"}, "RANGE BETWEEN INTERVAL '5' SECOND PRECEDING AND CURRENT ROW"),
    "rows": ({"rows": 3}, "ROWS BETWEEN 3 PRECEDING AND CURRENT ROW"),
    "an unbounded range": ({"range": "unbounded"}, "RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"),
    "all rows": ({"rows": "unbounded"}, "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"),
}


def over(stream: hg.Stream, frame: str) -> hg.Stream:
    aggregates = {"n": pl.len(), "total": pl.col("x").sum(), "most": pl.col("x").max()}
    return stream.key_by("k").over(**FRAMES[frame][0], **aggregates)


@pytest.mark.parametrize("frame", FRAMES)
def test_every_record_with_a_key_has_what_duckdb_says(frame: str, tmp_path: Path) -> None:
    rows = [row | {"ts": at(row["id"] * 7 % 20 + row["id"] / 1_000)} for row in ROWS]
    found = results(over(records(pipeline(), rows), frame), tmp_path)
    assert found.equals(recounted(FRAMES[frame][1], rows))


def test_late_records_are_dropped_or_go_to_their_output(tmp_path: Path) -> None:
    script = [{"k": 1, "id": 0, "ts": at(10)}, PAUSE, PAUSE, {"k": 1, "id": 1, "ts": at(3)}, PAUSE, EOF]
    source = ScriptedSource(script, schema={"k": int, "id": int, "ts": datetime})
    stream = pipeline().source(source).with_timestamps("ts")
    counted = stream.key_by("k").over(range="1m", n=pl.len(), late_output="late")
    late = Collect(tmp_path / "late")
    counted.side_output("late").sink(late, name="late")
    assert counted.side_output("late").schema == stream.schema
    assert results(counted, tmp_path, parallelism=1)["id"].to_list() == [0]
    assert [row["id"] for row in late.rows()] == [1]


def test_results_have_event_time_and_no_op() -> None:
    counted = over(records(pipeline()), "rows")
    assert counted.columns == ["id", "k", "ts", "x", "n", "total", "most"]
    assert counted._time_column == "ts"
    counted.key_by("k").window(hg.Tumbling("1s")).agg(most=pl.col("n").max())


def test_results_of_windows_are_records_like_others(tmp_path: Path) -> None:
    rows = [{"k": 1, "ts": at(i)} for i in range(60)]
    windows = records(pipeline(), rows).key_by("k").window(hg.Tumbling("10s")).agg(n=pl.len())
    counted = windows.key_by("k").over(range="10s", both=pl.col("n").sum()).with_columns(id="window_start")
    assert results(counted, tmp_path)["both"].to_list() == [10, 20, 20, 20, 20, 20]


def test_the_value_before_is_the_first_of_two_rows(tmp_path: Path) -> None:
    rows = [{"id": i, "k": 1, "ts": at(i), "x": i * i} for i in range(4)]
    pairs = records(pipeline(), rows).key_by("k").over(rows=1, first=pl.col("x").first(), n=pl.len())
    changed = pairs.with_columns(before=pl.when(pl.col("n") > 1).then(pl.col("first")))
    assert results(changed, tmp_path)["before"].to_list() == [None, 0, 1, 4]


def test_another_frame_does_not_go_on_with_the_state(tmp_path: Path) -> None:
    results(records(pipeline()).key_by("k").over(range="5s", n=pl.len()), tmp_path)
    with pytest.raises(
        PipelineFailed, match=r"the state of operator 'over' in checkpoint .*range 5000 ms.*range 6000 ms"
    ):
        results(records(pipeline()).key_by("k").over(range="6s", n=pl.len()), tmp_path)


def changing(stream: hg.Stream) -> hg.KeyedStream:
    return stream.with_columns(op=pl.lit("insert")).records_as_changes("id").key_by("id")


REFUSED: dict[str, tuple[Callable[[hg.Stream], Any], str]] = {
    "no key": (lambda s: s.over(rows=1, n=pl.len()), r"over needs a key.*call key_by\(\.\.\.\) first"),
    "no frame": (lambda s: s.key_by("k").over(n=pl.len()), "over needs range= or rows=, and not both: range='1h'"),
    "two frames": (lambda s: s.key_by("k").over(range="1h", rows=2, n=pl.len()), "and not both"),
    "no aggregate": (lambda s: s.key_by("k").over(rows=2), "over needs at least one column or expression"),
    "no rows": (lambda s: s.key_by("k").over(rows=0, n=pl.len()), "from 1 on, or 'unbounded', not 0"),
    "no number": (lambda s: s.key_by("k").over(rows="ten", n=pl.len()), "not 'ten'"),
    "no time": (lambda s: s.key_by("k").over(range="-1s", n=pl.len()), "range="),
    "no unit": (lambda s: s.key_by("k").over(range=10, n=pl.len()), "range= is 10 without a unit"),
    "no event time": (
        lambda s: s.select("k", "x").key_by("k").over(rows=2, n=pl.len()),
        r"operator 'over': over needs event times.*call \.with_timestamps\(column\)",
    ),
    "changes": (lambda s: changing(s).over(rows=2, n=pl.len()), r"has changes.*call \.changes_as_records\(\) before"),
    "a taken name": (lambda s: s.key_by("k").over(pl.col("x").sum(), rows=2), "there is a column 'x' already"),
    "an unknown column": (lambda s: s.key_by("k").over(rows=2, n=pl.col("z").sum()), "z.*the columns are id: int64"),
    "too much to keep": (
        lambda s: s.key_by("k").over(rows="unbounded", n=pl.col("x").median()),
        r"median\(\) over all records so far would have to keep all of them.*Give range= or rows= a bound",
    ),
    "a ttl of what goes by event time": (
        lambda s: s.key_by("k").over(range="1h", ttl="1d", n=pl.len()),
        "ttl= does not go with range=: rows are forgotten when event time",
    ),
    "a reserved name": (lambda s: s.key_by("k").over(rows=2, late_output="main", n=pl.len()), "'main' is reserved"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_says_what_is_wrong(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(hg.UsageError, match=message):
        call(records(pipeline()))
