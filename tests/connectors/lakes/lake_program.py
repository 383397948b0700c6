"""A program that writes a table; driver and workers are one process, so that a kill takes all of them."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from tests.support.killing import run_long

import headgate as hg
from headgate import fault_points
from headgate.connectors.base import SinkContext
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.testing.sinks.fake_pipeline import SCHEMA

PATIENCE_S = 300
KILLED = -signal.SIGKILL


def sink_of(kind: str, options: dict[str, Any]) -> Any:
    return hg.DeltaSink(**options) if kind == "delta" else hg.IcebergSink(**options)


def program(root: Path, rows: int, kind: str, options: dict[str, Any]) -> hg.Pipeline:
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="50ms", dir=root / "checkpoints"))
    columns = {"number": hg.RowNumber(), "kind": hg.Choice(["a", "b"])}
    source = p.source(hg.Generator(columns, rows=rows, rows_per_second=1_500, splits=2, time="deterministic"))
    stream = source.select("number", "kind")
    if "upsert" in options:
        stream = stream.key_by("kind").agg(records=pl.len())
    stream.sink(sink_of(kind, options), name="out")
    return p


def started(root: Path, rows: int, kind: str, options: dict[str, Any], kill_at: str | None = None) -> int:
    """Run the program in a process of its own; return how that ended."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    if kill_at is not None:
        environment[fault_points.VARIABLE] = kill_at
    words = [sys.executable, __file__, str(root), str(rows), kind, json.dumps(options)]
    return subprocess.run(words, env=environment, timeout=600, check=False).returncode


def killed_and_started_again(root: Path, rows: int, kind: str, options: dict[str, Any], point: str) -> None:
    """Run the program until it is killed at ``point``, and again to its end."""
    assert started(root, rows, kind, options, f"{point}:2:{root / point}") == KILLED
    assert started(root, rows, kind, options) == 0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.05)


def prepared(sink: Any, checkpoint: int, *numbers: int, generation: int = 1, subtask: int = 0) -> Committable:
    writer = sink.open(SinkContext("p", "out", subtask, 2, Generation(generation), SCHEMA))
    writer.write(pa.record_batch([list(numbers), [str(n) for n in numbers]], schema=SCHEMA))
    payload = writer.seal(CheckpointId(checkpoint)).prepare()
    assert payload is not None
    writer.close()
    return Committable("out", CheckpointId(checkpoint), subtask, Generation(generation), payload)


def committer(sink: Any, generation: int = 1) -> Any:
    found = sink.open_committer("p", "out", Generation(generation))
    found.recover(())
    return found


def permit(checkpoint: int, generation: int = 1) -> CommitPermit:
    return CommitPermit(CheckpointId(checkpoint), Generation(generation))


MOMENT = datetime.datetime(2024, 2, 3, 4, 5, 6, 789_012, tzinfo=datetime.UTC)
ROW = {
    "whole": 7,
    "text": "a b/ü%=:x",
    "raw": b"\x00\xff",
    "real": 0.5,
    "moment": MOMENT,
    "local": MOMENT.replace(tzinfo=None),
    "day": datetime.date(2024, 2, 3),
    "price": decimal.Decimal("1.50"),
    "flag": True,
    "many": [1, None],
    "nested": {"a": 1, "b": "x"},
}

if __name__ == "__main__":
    what = program(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    run_long(what, 2, parallelism=2)  # it is killed in the second one
