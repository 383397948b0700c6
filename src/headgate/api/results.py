"""Bounded results: a stream's records as a Polars frame or a Spark DataFrame, after the pipeline has run to its end.

The records are committed files in the pipeline's directory, so a result is exactly-once like any other sink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from headgate.api.placed import place
from headgate.api.records import Origin, Records
from headgate.connectors.base import Committer, EndlessSource, Sink, SinkContext, SinkWriter
from headgate.connectors.files.commit import committed_files
from headgate.connectors.files.sink import FileSink
from headgate.errors import HeadgateError, UsageError
from headgate.model.graph import Role
from headgate.model.ids import Generation

RESULTS = "results"


class ResultSink:
    """Parquet files in the pipeline's own directory. Only its ``at`` is ever opened."""

    is_placed = True

    def __repr__(self) -> str:
        return "ResultSink()"

    def at(self, root: str, pipeline: str, node: str) -> Sink:
        """See ``PlacedSink``."""
        return FileSink.within(place(root, pipeline, RESULTS, node), "parquet")

    def check(self, schema: pa.Schema) -> None:
        """Every canonical schema can be Parquet."""

    def open(self, context: SinkContext) -> SinkWriter:
        """Never called: the sink is placed first."""
        raise AssertionError("a result sink must be placed before it is opened")

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        """Never called: the sink is placed first."""
        raise AssertionError("a result sink must be placed before it is opened")


def run_and_collect(pipeline: Origin, stream: Records, name: str | None) -> pl.DataFrame:
    """Run to the end; return the records of ``stream``."""
    _refuse_endless(pipeline, "collect")
    files = _run(pipeline, stream, name, lambda: pipeline.run().is_finished)
    tables = [pq.read_table(file).cast(stream.schema) for file in files]
    table = pa.concat_tables(tables) if tables else stream.schema.empty_table()
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def run_to_dataframe(pipeline: Origin, stream: Records, spark: Any, name: str | None) -> Any:
    """Run to the end; return the records of ``stream`` as a Spark DataFrame."""
    from headgate.spark.dataframes import active_session, read_parquet

    _refuse_endless(pipeline, "to_dataframe")
    session = spark or active_session()
    if session is None:
        raise UsageError("to_dataframe needs a SparkSession; give spark=, or use collect() for a Polars frame")
    files = _run(pipeline, stream, name, lambda: pipeline.run(spark=session).is_finished)
    return read_parquet(session, files, stream.schema)


def _refuse_endless(pipeline: Origin, call: str) -> None:
    """Refuse what would never return and fill the disk meanwhile (N40): every source has to end."""
    for node in pipeline._builder.nodes:
        end = node.spec.how_to_end() if node.role is Role.SOURCE and isinstance(node.spec, EndlessSource) else None
        if end is not None:
            raise UsageError(
                f"{call}() returns when all input has ended, but source '{node.name}' never ends: {end}, or write to "
                "a sink such as headgate.FileSink and call run()"
            )


def _run(pipeline: Origin, stream: Records, name: str | None, run: Callable[[], bool]) -> Sequence[str]:
    node = pipeline._builder.claim_name("result", name)
    sink = ResultSink()
    pipeline._builder.add(node, Role.SINK, stream._edges, sink, stream.schema)
    where = Path(place(pipeline.definition().config.checkpoint_root, pipeline.name, RESULTS, str(node)))
    if not run():
        raise HeadgateError(f"pipeline '{pipeline.name}' was stopped before its input ended: there is no result yet")
    return [str(where / file) for file in committed_files(str(where))] if where.is_dir() else []
