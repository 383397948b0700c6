"""Sources read the columns that the pipeline uses, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.testing import Collect, run

ROWS = [
    {"k": "a", "n": 1, "at": 1_000, "more": "x", "url": "u"},
    {"k": "b", "n": 2, "at": 2_000, "more": "y", "url": "v"},
    {"k": "a", "n": 4, "at": 3_000, "more": "z", "url": "w"},
]
TYPES = {"k": str, "n": int, "at": int, "more": str, "url": str}


def json_lines(directory: Path, **options: Any) -> hg.JsonLines:
    pl.DataFrame(ROWS).write_ndjson(directory / "in.json")
    return hg.JsonLines(directory / "in.json", TYPES, **options)


def csv(directory: Path) -> hg.CsvFiles:
    pl.DataFrame(ROWS).write_csv(directory / "in.csv")
    return hg.CsvFiles(directory / "in.csv", TYPES)


def parquet(directory: Path) -> hg.ParquetFiles:
    pl.DataFrame(ROWS).write_parquet(directory / "in.parquet")
    return hg.ParquetFiles(directory / "in.parquet")


def columns_read(p: hg.Pipeline, node: str = "source") -> list[str]:
    definition = p.definition()
    schema = next(definition.schema(each.name) for each in definition.graph.nodes if each.name == node)
    assert isinstance(schema, pa.Schema)
    return schema.names


def windowed(stream: Any) -> Any:
    windows = stream.with_timestamps("at").key_by("k").window(hg.Tumbling("10s"))
    return windows.agg(rows=pl.len(), total=pl.col("n").sum())


@pytest.mark.parametrize("source", [json_lines, csv, parquet])
def test_a_window_reads_key_time_and_values(source: Callable[[Path], Any], tmp_path: Path) -> None:
    p, sink = hg.Pipeline("p"), Collect(tmp_path / "out")
    windowed(p.source(source(tmp_path), name="source")).sink(sink)
    assert columns_read(p) == ["k", "n", "at"]
    assert columns_read(p, "key-by") == ["k", "n", "at"]
    run(p)
    assert sorted((row["k"], row["rows"], row["total"]) for row in sink.rows()) == [("a", 2, 5), ("b", 1, 2)]


def test_expressions_read_what_they_name(tmp_path: Path) -> None:
    p, sink = hg.Pipeline("p"), Collect(tmp_path / "out")
    read = p.source(parquet(tmp_path), name="source").filter(pl.col("url") != "v")
    read.with_columns(n=pl.col("n") * 2, more=pl.lit("more")).select("n", "more").sink(sink)
    assert columns_read(p) == ["n", "url"]
    run(p)
    assert sorted(row["n"] for row in sink.rows()) == [2, 8]
    assert {row["more"] for row in sink.rows()} == {"more"}


def whole(stream: Any) -> Any:
    return stream


def by_function(stream: Any) -> Any:
    return windowed(stream.map(lambda row: row, pl.Schema({"k": pl.String, "n": pl.Int64, "at": pl.Int64})))


def by_pattern(stream: Any) -> Any:
    return stream.select(pl.all())


@pytest.mark.parametrize("use", [whole, by_function, by_pattern])
def test_what_cannot_be_looked_into_reads_all(use: Callable[[Any], Any], tmp_path: Path) -> None:
    p = hg.Pipeline("p")
    use(p.source(parquet(tmp_path), name="source")).sink(Collect(tmp_path / "out"))
    assert columns_read(p) == list(TYPES)


def test_two_readers_of_a_source_get_what_either_uses(tmp_path: Path) -> None:
    p = hg.Pipeline("p")
    read = p.source(parquet(tmp_path), name="source")
    windowed(read).sink(Collect(tmp_path / "out"))
    read.select("url").sink(Collect(tmp_path / "urls"))
    assert columns_read(p) == ["k", "n", "at", "url"]


def test_required_fields_are_read_and_checked(tmp_path: Path) -> None:
    p = hg.Pipeline("p")
    windowed(p.source(json_lines(tmp_path, required=["more"]), name="source")).sink(Collect(tmp_path / "out"))
    assert columns_read(p) == ["k", "n", "at", "more"]


def test_records_are_diverted_whole(tmp_path: Path) -> None:
    p = hg.Pipeline("p", bad_records=hg.DeadLetter(Collect(tmp_path / "bad")))
    windowed(p.source(json_lines(tmp_path), name="source")).sink(Collect(tmp_path / "out"))
    assert columns_read(p) == list(TYPES)
