"""Checkpoints that earlier versions wrote: kept in ``tests/golden``, restored by real workers, and run to their end."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.test_process_results import events

import headgate as hg
from headgate.codec.snapshot import decode_sections
from headgate.model.config import StartConfig
from headgate.model.manifest import Manifest
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

GOLDEN = Path(__file__).parents[1] / "golden"
SOURCE = hg.Generator(
    columns={"id": hg.RowNumber(), "key": hg.Uniform(0, 50), "value": hg.Uniform(0, 1_000)},
    rows=3_000,
    time="deterministic",
    splits=3,
    batch_rows=100,
    pool_rows=65_536,
)


class Counter(hg.ProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        self.count.put((self.count.get() or 0) + 1)


def added(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "value": total["value"] + row["value"]}


def golden(root: Path, parallelism: int) -> PipelineDefinition:
    """The pipeline that wrote them, at parallelism 2 and with 600 (0.1: 60) rows each second."""
    pipeline = pipeline_at(root, parallelism=parallelism, name="golden")
    stream = pipeline.source(replace(SOURCE, rows_per_second=3_000), name="in").with_timestamps("ts", name="times")
    keyed = stream.key_by("key")
    keyed.window(hg.Tumbling("1s")).agg(n=pl.len(), name="windows").sink(hg.Discard(), name="out1")
    keyed.reduce(added, name="sums").sink(hg.Discard(), name="out2")
    keyed.process(Counter(), name="counts").sink(hg.Discard(), name="out3")
    return definition_of(pipeline)


def newest(root: Path) -> tuple[CheckpointLog, Manifest]:
    log = CheckpointLog(open_storage(str(root / "checkpoints")), "golden")
    return log, candidates(log.observe())[0]


def rows_of(log: CheckpointLog, manifest: Manifest, node: str) -> pl.DataFrame:
    """Return the only state of ``node`` from all subtasks."""
    found: list[Any] = []
    for entry in manifest.entries:
        for part in log.files.sections(entry).get(f"state/{node}", ()):
            (state,) = decode_sections(part, "test").values()
            found.append(pl.from_arrow(pa.ipc.open_stream(pa.py_buffer(state)).read_all()))
    return pl.concat(found)


@pytest.mark.parametrize("directory", ["checkpoints_0_1", "checkpoints_1"])
def test_checkpoints_that_earlier_versions_wrote_are_read(tmp_path: Path, directory: str) -> None:  # SF2
    shutil.copytree(GOLDEN / directory, tmp_path / "checkpoints")
    log, manifest = newest(tmp_path)
    assert manifest.version == 1
    assert log.observe().lost() == ()
    for one in candidates(log.observe()):
        assert log.files.verify(one) == []
        assert all(entry.rows is None for entry in one.entries) is (directory == "checkpoints_0_1")
    assert any(part.path for part in manifest.parts) or directory == "checkpoints_0_1"
    assert any(part.inline for part in manifest.parts)
    assert set(rows_of(log, manifest, "sums").columns) == {"id", "key", "value", "ts"}


@pytest.mark.parametrize(("directory", "parallelism"), [("checkpoints_0_1", 2), ("checkpoints_1", 3)])
def test_a_pipeline_goes_on_from_a_checkpoint_of_an_earlier_version(
    start: Any, tmp_path: Path, directory: str, parallelism: int
) -> None:  # SF2
    shutil.copytree(GOLDEN / directory, tmp_path / "checkpoints")
    before = newest(tmp_path)[1]
    run = start(golden(tmp_path, parallelism))
    run.wait_checkpoints(2)  # as many as are retained beside the final one
    assert run.result().is_finished
    log, manifest = newest(tmp_path)
    assert (manifest.version, manifest.is_final) == (2, True)
    assert manifest.checkpoint > before.checkpoint
    made = events(SOURCE)
    sums = rows_of(log, manifest, "sums").select("key", "value").sort("key")
    assert sums.equals(made.group_by("key").agg(pl.col("value").sum()).sort("key"))
    counts = rows_of(log, manifest, "counts")
    assert counts["value"].sum() == made.height
    swept = log.files.verify(before)
    assert [one.problem for one in swept] == ["the file is missing"] * len(before.files), "nobody needs them any more"


@pytest.mark.parametrize(("place", "pipeline"), [("savepoint_1", "golden"), ("checkpoints_1/golden", "another")])
def test_a_pipeline_begins_at_what_earlier_versions_wrote(
    start: Any, tmp_path: Path, place: str, pipeline: str
) -> None:  # SV6, SV20
    named = shutil.copytree(GOLDEN / place, tmp_path / "named" / pipeline)
    before = {path: path.read_bytes() for path in named.rglob("*") if path.is_file()}
    found = golden(tmp_path, 3)
    begins = replace(found.config, name="golden", start=StartConfig(str(named)))
    run = start(replace(found, config=begins))
    assert run.result().is_finished
    log, manifest = newest(tmp_path)
    made = events(SOURCE)
    sums = rows_of(log, manifest, "sums").select("key", "value").sort("key")
    assert sums.equals(made.group_by("key").agg(pl.col("value").sum()).sort("key"))
    assert {path: path.read_bytes() for path in named.rglob("*") if path.is_file()} == before
    assert any(note.startswith("restored from") for note in run.notes)
