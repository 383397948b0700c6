"""Headgate's half of ``bench/nexmark``: queries over generated events and over the files, their results thrown away.

Two workers on Spark, a checkpoint each second, exactly once. The clock runs from the first record to the end, the
last commit included. Before, the query runs over the small files without Spark, and its results are collected. Runs
as a process of its own; its last printed line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

import headgate as hg
from bench.machine import CpuMeter
from bench.nexmark_results import digest, last_rows
from bench.running import START_TIMEOUT_S, wrapped
from headgate.connectors.base import Source
from headgate.nexmark import QUERIES, Nexmark, Tables
from headgate.nexmark.events import SCHEMAS, Kind
from headgate.operators.base import Operator, OperatorSpec

PARALLELISM = 2
INTERVAL = "1s"
LOOK_S = 0.02
TIMEOUT_S = 600


def from_files(files: Path, kind: Kind) -> Source:
    """Return the source of one kind of events."""
    return hg.ParquetFiles(str(files / kind))


def pipeline(
    query: str, source: Callable[[Kind], Source], sink: hg.Sink, directory: Path, *, sql: bool = False
) -> hg.Pipeline:
    """Return the pipeline that runs a query over the events of ``source`` into ``sink``."""
    p = hg.Pipeline(
        f"nexmark-{query}",
        parallelism=PARALLELISM,
        checkpointing=hg.Checkpointing(interval=INTERVAL, dir=str(directory / "c")),
    )
    tables, found = Tables(p, source), QUERIES[query]
    stream = tables.sql(found.sql) if sql else found.build(tables)
    stream.sink(sink, name="results")
    return p


@dataclass(frozen=True, slots=True)
class Noted:
    """The operator after a source; it notes when its subtask gets the first record."""

    spec: OperatorSpec
    directory: str

    def build(self) -> Operator:
        """Return the operator, which makes a file."""
        operator, directory = self.spec.build(), self.directory
        process = operator.process

        def noted(batch: pa.RecordBatch) -> None:
            Path(directory, "first").touch()
            operator.process = process  # type: ignore[method-assign]
            process(batch)

        operator.process = noted  # type: ignore[method-assign]
        return operator


def results(query: str, files: Path, *, sql: bool) -> dict[str, Any]:
    """Run to the end, in threads, and return how many rows are left of the results, and their digest."""
    from headgate.testing import Collect, run

    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        sink = Collect(Path(directory) / "out")
        run(pipeline(query, partial(from_files, files), sink, Path(directory), sql=sql), timeout_s=TIMEOUT_S)
        return digest(query, last_rows(query, sink.rows()))


def measure(query: str, source: Callable[[Kind], Source], spark: Any, *, sql: bool) -> dict[str, float]:
    """Run on Spark to the end; return the seconds by the clock and of processor time."""
    from headgate.spark.session import start_pipeline

    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        definition = pipeline(query, source, hg.Discard(), Path(directory), sql=sql).definition()
        for kind in SCHEMAS:
            definition = wrapped(definition, f"{kind}-times", lambda spec: Noted(spec, directory))
        first, begun_s = Path(directory, "first"), time.monotonic()
        handle = start_pipeline(definition, spark=spark)
        while not first.exists() and time.monotonic() < begun_s + START_TIMEOUT_S:
            handle.wait(LOOK_S)
        meter = CpuMeter()
        handle.wait()
        return {"s": meter.seconds(), "cpu_s": meter.cpu_seconds()}


def of_query(query: str, options: argparse.Namespace, spark: Any) -> dict[str, Any]:
    """Check one query, then measure it from files and from memory in turns."""
    found = results(query, options.check_files / "whole", sql=options.sql)
    files: list[dict[str, float]] = []
    memory: list[dict[str, float]] = []
    made = partial(Nexmark, events=options.events, tps=options.tps)
    for _ in range(options.turns):
        files.append(measure(query, partial(from_files, options.files / "whole"), spark, sql=options.sql))
        memory.append(measure(query, made, spark, sql=options.sql))
    return found | {"turns": files, "memory": memory}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run queries one after another; print one JSON object as the last line."""
    from pyspark import cloudpickle

    import bench
    from headgate.spark.session import make_context

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("queries", nargs="+", choices=list(QUERIES))
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("--check-files", type=Path, required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--tps", type=int, required=True)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--sql", action="store_true", help="run the queries in SQL")
    options = parser.parse_args(arguments)
    cloudpickle.register_pickle_by_value(bench)  # the note: workers need not find this directory
    spark = make_context("nexmark", PARALLELISM, None)
    found: dict[str, dict[str, Any]] = {}
    for query in options.queries:
        found[query] = of_query(query, options, spark)
        print(query, json.dumps(found[query]), flush=True)
    spark.stop()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
