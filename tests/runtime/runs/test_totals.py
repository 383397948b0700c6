"""How many records a pipeline has seen, whoever was killed in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate import testing
from headgate.model.progress import RunResult

ROWS = 6_000

Start = Callable[..., Run]


def counted(root: Path) -> hg.Pipeline:
    pipeline = pipeline_at(root, interval="100ms")
    columns = {"key": hg.Uniform(0, 20), "n": hg.RowNumber()}
    source = hg.Generator(columns=columns, rows=ROWS, rows_per_second=3_000, splits=3, batch_rows=50)
    last = pipeline.source(source).key_by("key").reduce(lambda so_far, record: record)
    last.filter(pl.col("n") >= 0).sink(hg.FileSink(root / "out", "parquet"), name="out")
    return pipeline


def test_a_finished_pipeline_that_is_started_again_reports_what_it_had_counted(tmp_path: Path) -> None:  # OM1
    def run(least: int) -> RunResult:
        pipeline = pipeline_at(tmp_path)
        rows = pipeline.source(hg.FromRows([{"n": n} for n in range(7)]))
        rows.filter(pl.col("n") >= least).sink(hg.FileSink(tmp_path / "out", "parquet"))
        return testing.run(pipeline)

    first, again, changed = run(2), run(2), run(4)
    assert (first.is_finished, first.records_in, first.records_out) == (True, 7, 5)
    for later in (again, changed):
        assert (later.is_finished, later.records_in, later.records_out) == (True, 7, 5)


def test_totals_survive_kills_of_workers_and_the_end_of_a_driver(start: Start, tmp_path: Path) -> None:  # OM1
    first = start(definition_of(counted(tmp_path)))
    first.wait_checkpoints(2)
    first.kill(0)
    first.wait_restarts(1)
    first.wait_checkpoints(2)
    first.driver.stop()
    stopped = first.result()
    second = start(definition_of(counted(tmp_path)))
    second.wait_checkpoints(1)
    second.kill(1)
    result = second.result()
    assert result.is_finished
    assert stopped.records_in < ROWS
    assert (result.records_in, result.records_out) == (ROWS, ROWS)
    found = {str(node.node): (node.records_in, node.records_out) for node in second.driver.progress.nodes}
    assert found["reduce"] == (ROWS, ROWS)
    assert (second.driver.progress.failures, second.driver.progress.restarts) == (1, 1)


def test_what_flows_over_the_edges_of_a_run_is_told(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    rows = pipeline.source(hg.FromRows([{"n": n} for n in range(10)]), name="rows")
    kept = rows.filter(pl.col("n") > 3, name="kept").with_columns(m=pl.col("n") * 2, name="doubled").key_by("n")
    kept.reduce(lambda so_far, record: record, name="last").sink(hg.Discard(), name="end")
    run = start(definition_of(pipeline))
    assert run.result().is_finished
    found = run.driver.progress
    counts = {str(node.node): (node.records_in, node.records_out, node.runs_with) for node in found.nodes}
    assert counts["kept"] == (10, 6, "doubled")
    assert counts["doubled"] == (6, 6, None)
    assert [(edge.source, edge.target) for edge in found.edges] == [("key-by", "last")]
