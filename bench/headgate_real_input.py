"""Headgate's half of ``bench/real_input``: windows of 5 s over files of bids, exactly once to files.

Run by ``bench/real_input`` in a process of its own: ``python -m bench.headgate_real_input FILES OUTPUT``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

import headgate as hg
from bench.bid_files import COLUMNS
from bench.machine import CpuMeter
from bench.running import wrapped
from headgate.operators.base import Operator, OperatorSpec

PARALLELISM = 2
LOOK_S = 0.02
START_TIMEOUT_S = 600.0


def pipeline(files: Path, output: Path, key: str, directory: str, parallelism: int = PARALLELISM) -> hg.Pipeline:
    """Return the pipeline that reads the directory ``files``, which has the name of its format."""
    p = hg.Pipeline(
        "real-input", parallelism=parallelism, checkpointing=hg.Checkpointing(interval="1s", dir=f"{directory}/c")
    )
    form, path = files.name, str(files)
    source: Any
    if form == "parquet":
        source = hg.ParquetFiles(path)
    elif form == "csv":
        source = hg.CsvFiles(path, COLUMNS)
    else:
        source = hg.JsonLines(path, COLUMNS)
    windows = p.source(source, name="source").with_timestamps("date_time").key_by(key).window(hg.Tumbling("5s"))
    results = windows.agg(bids=pl.len(), total=pl.col("price").sum(), highest=pl.col("price").max())
    results.sink(hg.FileSink(str(output), format="parquet"))
    return p


@dataclass(frozen=True, slots=True)
class Noted:
    """The operator after the source; it notes when its subtask gets the first record."""

    spec: OperatorSpec
    directory: str

    def build(self) -> Operator:
        """Return the operator, which makes a file."""
        operator, directory = self.spec.build(), self.directory
        process = operator.process

        def noted(batch: pa.RecordBatch) -> None:
            note = Path(directory, f"first-{operator.context.subtask_index}")
            note.with_suffix(".new").write_text(str(time.monotonic()))
            note.with_suffix(".new").rename(note)
            operator.process = process  # type: ignore[method-assign]
            process(batch)

        operator.process = noted  # type: ignore[method-assign]
        return operator


def on_spark(files: Path, output: Path, key: str) -> dict[str, float]:
    """Run on Spark with two workers; measure from the first record to the end, the last commit included."""
    from pyspark import cloudpickle

    import bench
    from headgate.spark.session import make_context, start_pipeline

    cloudpickle.register_pickle_by_value(bench)  # the note: workers need not find this directory
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        plain = pipeline(files, output, key, directory).definition()
        definition = wrapped(plain, "key-by", lambda spec: Noted(spec, directory))
        begun_s = time.monotonic()
        spark = make_context("real-input", definition.plan.parallelism, None)  # its workers are there when all is read
        handle = start_pipeline(definition, spark=spark)
        meter = CpuMeter()
        notes: list[Path] = []
        while not notes and time.monotonic() < begun_s + START_TIMEOUT_S:
            meter = CpuMeter()  # the last one before the first record
            handle.wait(LOOK_S)
            notes = list(Path(directory).glob("first-*[0-9]"))
        if not notes:
            raise RuntimeError(f"no record came within {START_TIMEOUT_S:g} s")
        first_s = min(float(note.read_text()) for note in notes)
        handle.wait()
        found = {"s": time.monotonic() - first_s, "cpu_s": meter.cpu_seconds(), "until_first_s": first_s - begun_s}
        spark.stop()
        return found


def in_process(files: Path, output: Path, key: str, parallelism: int) -> dict[str, float]:
    """Run in threads of this process, without Spark: for profiles, and for pairs of two versions."""
    from headgate.testing import run

    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        p, meter = pipeline(files, output, key, directory, parallelism), CpuMeter()
        run(p, timeout_s=900)
        return {"s": meter.seconds(), "cpu_s": meter.cpu_seconds()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--key", default="user")
    parser.add_argument("--in-process", type=int, metavar="PARALLELISM", help="run in threads, without Spark")
    options = parser.parse_args(arguments)
    if options.in_process:
        found = in_process(options.files, options.output, options.key, options.in_process)
    else:
        found = on_spark(options.files, options.output, options.key)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
