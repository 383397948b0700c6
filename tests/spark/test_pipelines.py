"""Pipelines on local Spark without any fault: every operator and connector between real workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from crash.pipelines import WORDS
from crash.processes import Life
from crash.results import assert_clean, assert_equal, assert_standard, read_stream
from headgate.connectors.files.file_committer import read_committed
from headgate.store.store import Store

pytestmark = pytest.mark.spark

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]


def test_a_windowed_count_ends_with_everything_committed_and_is_not_repeated(
    spec: Spec, run: Run, tmp_path: Path
) -> None:
    what = spec("standard", rows=100_000, rate=None)
    result = run(what).result()
    assert result["is_finished"]
    assert result["restarts"] == 0
    assert_standard(tmp_path, 100_000)
    assert_clean(tmp_path)
    again = run(what)
    again.note("has already processed all its input")
    assert again.result()["is_finished"]
    assert_standard(tmp_path, 100_000)


def test_every_operator_between_real_workers(spec: Spec, run: Run, tmp_path: Path) -> None:
    rows = 3_000
    run(spec("every_operator", rows=rows)).result()
    words = pl.DataFrame({"id": range(rows)}).with_columns(word=pl.Series([WORDS[i % len(WORDS)] for i in range(rows)]))
    late = pl.DataFrame({"id": range(-rows, 0)}).with_columns(word=pl.lit("late"))
    merged = pl.concat([words, late]).filter(pl.col("word").str.len_chars() > 4)
    marked = pl.concat([merged.with_columns(word=pl.col("word").str.to_uppercase() + mark) for mark in ".!"])
    found = read_stream(tmp_path / "store", "reduced")
    assert_equal(found, marked.with_columns(even=pl.col("id") % 2 == 0), "records")
    counts = marked.select("word", n=(pl.int_range(pl.len()) + 1).over("word").cast(pl.Int64))
    assert_equal(found, counts, "running counts")
    copies = pl.concat([words.filter(pl.col("id") < 10)] * 2)
    assert_equal(read_stream(tmp_path / "store", "copies"), copies, "broadcast records")
    assert_clean(tmp_path)


def test_a_dataframe_goes_in_and_a_dataframe_comes_out(spec: Spec, run: Run) -> None:
    result = run(spec("dataframes")).result()
    assert result["columns"] == ["id", "key", "text"]
    assert result["rows"] == [[i, i % 7, str(i)] for i in range(1_000) if i % 7 != 3]


def write_lines(root: Path, count: int) -> pl.DataFrame:
    lines = [f"w{i} w{i % 10}" for i in range(count)]
    with Store.open(root / "store") as store:
        store.create_stream("lines", pa.schema([("line", pa.large_string())]), segments=3)
        writer = store.writer("lines")
        for start in range(0, count, 1_000):
            writer.append(pa.record_batch({"line": pa.array(lines[start : start + 1_000], pa.large_string())}))
        writer.close()
    return pl.DataFrame({"word": [word for line in lines for word in line.split()]})


def test_a_stream_feeds_another_stream(spec: Spec, run: Run, tmp_path: Path) -> None:
    expected = write_lines(tmp_path, 20_000)
    run(spec("stream_to_stream")).result()
    assert_equal(read_stream(tmp_path / "store", "words"), expected, "words")
    assert_clean(tmp_path)


def test_a_stream_is_followed_until_it_is_sealed(spec: Spec, run: Run, tmp_path: Path) -> None:
    expected = write_lines(tmp_path, 2_000)
    life = run(spec("stream_to_stream", follow=True))
    life.running()
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("lines")
        writer.append(pa.record_batch({"line": pa.array(["at last"], pa.large_string())}))
        writer.close()
        store.seal("lines")
    assert life.result()["is_finished"]
    more = pl.DataFrame({"word": ["at", "last"]})
    assert_equal(read_stream(tmp_path / "store", "words"), pl.concat([expected, more]), "words")


def test_text_files_are_copied_line_by_line(spec: Spec, run: Run, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    lines = [[f"{name} line {i}" for i in range(500)] for name in ("a", "b", "c")]
    for number, content in enumerate(lines):
        (logs / f"{number}.log").write_text("\n".join(content) + "\n")
    run(spec("text_files")).result()
    expected = pl.DataFrame({"line": [line for content in lines for line in content]})
    assert_equal(read_committed(str(tmp_path / "copied")), expected, "lines")
