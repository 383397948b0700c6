"""A look at a stream: rows of this program, each time, and nothing is left behind or written elsewhere."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.runtime.running import pipeline_at

import headgate as hg
from headgate.api.collect import SCRATCH, temporary_directory
from headgate.api.foreground import loading_only
from headgate.connectors.files.file_committer import read_committed
from headgate.model.plan import PipelineDefinition

pytestmark = pytest.mark.usefixtures("started")


def numbers(pipeline: hg.Pipeline, count: int = 10) -> hg.Stream:
    return pipeline.source(hg.FromRows(pa.table({"n": list(range(count))})), name="numbers")


def endless(pipeline: hg.Pipeline) -> hg.Stream:
    return pipeline.source(hg.Generator({"n": hg.RowNumber()}, rows_per_second=2_000, splits=2), name="endless")


def test_each_look_gives_the_rows_of_this_program(tmp_path: Path) -> None:
    for least in (3, 7, 7):
        stream = numbers(pipeline_at(tmp_path)).filter(pl.col("n") >= least)
        for _ in range(2):
            assert sorted(stream.collect()["n"]) == list(range(least, 10))
    wider = numbers(pipeline_at(tmp_path)).with_columns(text=pl.col("n").cast(pl.String))
    assert wider.collect().columns == ["n", "text"], "another schema is no matter"


def test_nothing_is_left_behind_and_the_pipeline_runs_as_if_nobody_had_looked(tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    stream = numbers(pipeline)
    small = stream.filter(pl.col("n") < 2)
    assert small.collect().height == 2
    assert list((tmp_path / "checkpoints").iterdir()) == []
    stream.sink(hg.FileSink(tmp_path / "out"))
    assert small.collect().height == 2
    assert not (tmp_path / "out").exists() or read_committed(str(tmp_path / "out")).is_empty(), "no sink is touched"
    assert [str(node.name) for node in pipeline.definition().graph.nodes] == ["numbers", "sink"], "nothing reads it"
    assert pipeline.run().is_finished
    assert read_committed(str(tmp_path / "out")).height == 10
    assert stream.collect().height == 10, "it has finished, but can be looked at"


def test_a_stream_that_nobody_looked_at_still_has_to_lead_somewhere(tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    stream = numbers(pipeline)
    stream.sink(hg.Discard())
    stream.filter(pl.col("n") < 2, name="forgotten")
    stream.filter(pl.col("n") < 3, name="seen").take(1)
    with pytest.raises(hg.UsageError, match="nothing reads the stream of operator 'forgotten'"):
        pipeline.definition()


def test_a_look_runs_only_what_the_stream_needs(tmp_path: Path, started: list[PipelineDefinition]) -> None:
    pipeline = pipeline_at(tmp_path)
    few = numbers(pipeline)
    endless(pipeline).sink(hg.FileSink(tmp_path / "out"), name="out")
    assert few.collect().height == 10
    assert [str(node.name) for node in started[0].graph.nodes] == ["numbers", "result"]


@pytest.mark.parametrize("bounds", [[{"limit": 25}], [{"seconds": 0.3 * 4**n} for n in range(5)]])
def test_input_without_end_ends_at_a_bound(tmp_path: Path, bounds: list[dict[str, Any]]) -> None:
    for bound in bounds:
        found = endless(pipeline_at(tmp_path)).filter(pl.col("n") >= 0).collect(**bound)["n"].to_list()
        assert len(found) == len(set(found))
        assert list((tmp_path / "checkpoints").iterdir()) == []
        if found:  # the workers of a busy machine may have had no turn in so short a time
            break
    assert len(found) == 25 if "limit" in bound else len(found) > 0


def test_bounded_input_that_ends_before_its_bound_gives_all_there_is(tmp_path: Path) -> None:
    stream = numbers(pipeline_at(tmp_path))
    assert stream.collect(limit=1_000, seconds=3_600).height == 10
    assert sorted(row["n"] for row in stream.take(99)) == list(range(10))
    assert stream.collect(limit=0).schema == {"n": pl.Int64}


def test_a_loop_can_be_looked_at(tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)

    def body(rows: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        more = rows.with_columns(n=pl.col("n") + 1)
        return more.filter(pl.col("n") < 20), more.filter(pl.col("n") >= 20)

    assert numbers(pipeline).iterate(body).collect()["n"].to_list() == [20] * 10


def test_show_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers(pipeline_at(tmp_path), 2).with_columns(word=pl.lit("x" * 50)).show()
    shown = capsys.readouterr().out
    assert "word" in shown
    assert shown.count("x" * 50) == 2


def test_bad_records_are_left_out_where_the_pipeline_would_divert_them(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"n": 1}\nnonsense\n')
    dead = hg.FileSink(tmp_path / "dead")
    for policy in (hg.DeadLetter(dead), hg.Fail()):
        stream = pipeline_at(tmp_path, bad_records=policy, restart=hg.NoRestart()).source(
            hg.JsonLines(tmp_path / "in", {"n": pa.int64()})
        )
        if isinstance(policy, hg.Fail):
            with pytest.raises(hg.PipelineFailed, match="JSON"):
                stream.collect()
        else:
            assert stream.collect()["n"].to_list() == [1]
    assert not list((tmp_path / "dead").glob("*")) or read_committed(str(tmp_path / "dead")).is_empty()
    assert list((tmp_path / "checkpoints").iterdir()) == [], "a failed look leaves nothing either"


def test_a_program_that_looks_is_not_for_the_command_line(tmp_path: Path) -> None:
    with (
        loading_only(),
        pytest.raises(hg.UsageError, match=r"calls take\(\), which runs by itself: start it with python"),
    ):
        numbers(pipeline_at(tmp_path)).take(1)


@pytest.mark.parametrize(
    ("bound", "problem"),
    [
        ({"limit": -1}, "limit must not be negative, but is -1"),
        ({"limit": 1.5}, "limit must be a number of records, not 1.5"),
        ({"seconds": 0}, "seconds must be more than zero, but is 0"),
        ({"seconds": "5s"}, "seconds must be a number, not '5s'"),
    ],
)
def test_a_bound_that_makes_no_sense_is_refused(tmp_path: Path, bound: dict[str, Any], problem: str) -> None:
    with pytest.raises(hg.UsageError, match=problem):
        numbers(pipeline_at(tmp_path)).collect(**bound)


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    living = temporary_directory(str(tmp_path))
    abandoned = tmp_path / SCRATCH / "0123456789abcdef"
    (abandoned / "p").mkdir(parents=True)
    abandoned.with_suffix(".lock").touch()
    other = temporary_directory(str(tmp_path))
    assert not abandoned.exists()
    assert not abandoned.with_suffix(".lock").exists()
    assert living.path.is_dir()
    with open(living.path.with_suffix(".lock")) as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for made in (living, other, other):
        made.remove()
    assert os.listdir(tmp_path) == []
