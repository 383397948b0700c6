"""The examples that publish on completion, with workers that are killed."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
from pyspark import cloudpickle

import headgate as hg
from headgate.connectors.files.commit import read_committed

sys.path.append(str(Path(__file__).resolve().parents[1] / "runtime"))  # the launcher of the runtime's tests

from running import pipeline_at

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Example = Callable[[str], ModuleType]
Start = Callable[[hg.Pipeline], Any]


def test_every_record_is_in_one_published_file(example: Example, start: Start, tmp_path: Path) -> None:
    module = example("publish_files")
    directory = tmp_path / "published"
    directory.mkdir()
    columns = {"id": hg.RowNumber()}
    source = hg.Generator(columns, rows=3_000, rows_per_second=3_000, time="deterministic", batch_rows=50)
    pipeline = pipeline_at(tmp_path)
    pipeline.source(source).map(module.JsonFiles(str(directory)), name="files").sink(hg.Discard())
    run = start(pipeline)
    for kill in range(2):
        run.wait_checkpoints(2)
        run.kill(kill)
        run.wait_restarts(kill + 1)
    assert run.result().is_finished
    found = [json.loads(line)["id"] for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert Counter(found) == Counter(range(3_000))
    assert len(list(directory.glob("*.jsonl"))) > 2, "the final checkpoint is not the only one that published"


def late(pause_s: float, frame: pl.DataFrame) -> pl.DataFrame:
    time.sleep(pause_s)  # slow work: not a wait for anything
    return frame


def test_every_message_is_received_once_and_acknowledged(example: Example, start: Start, tmp_path: Path) -> None:
    module = example("acknowledge_messages")
    inbox, received = tmp_path / "inbox", tmp_path / "received"
    inbox.mkdir()
    for number in range(1, 601):
        (inbox / f"{number}.json").write_text(json.dumps({"id": number}))

    def pipeline(parallelism: int, pause_s: float = 0.0) -> hg.Pipeline:
        made = pipeline_at(tmp_path, parallelism=parallelism, interval="20ms")
        messages = made.source(module.Inbox(str(inbox)), name="inbox").map_batches(partial(late, pause_s), name="late")
        messages.sink(hg.FileSink(received, roll_interval="20ms"), name="out")
        return made

    run = start(pipeline(2, 0.05))  # half a minute for all of them
    run.wait_checkpoints(1)
    run.driver.stop()
    run.result()
    left = {int(path.stem) for path in inbox.iterdir()}
    run = start(pipeline(1))
    assert run.result().is_finished
    assert left, "the stop came before the end, and left messages"
    assert list(inbox.iterdir()) == []
    assert sorted(read_committed(str(received))["number"].to_list()) == list(range(1, 601))
