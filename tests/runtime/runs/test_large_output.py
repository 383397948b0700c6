"""Output too large for a manifest: prepared into files, and committed once, whoever is killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests


def everything_is_large() -> None:
    from headgate.runtime.checkpoints import snapshot_writer

    snapshot_writer.PAYLOAD_BYTES_MAX = 0


def manifests(root: Path) -> list[Manifest]:
    entries = CheckpointLog(open_storage(str(root / "checkpoints")), "p").observe().counted()
    return [entry.content for entry in entries if isinstance(entry.content, Manifest)]


def test_large_output_of_a_killed_run_is_committed_once(start: Any, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path, parallelism=2)
    source = generator(3_000, 600)
    pipeline.source(source).sink(hg.FileSink(tmp_path / "rows", "parquet", roll_interval=0), name="rows")
    run = start(definition_of(pipeline), prepare=everything_is_large)
    run.wait_checkpoints(2)
    run.kill(0)
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    assert run.result().is_finished
    same(read_committed(str(tmp_path / "rows")), events(source))
    (newest,) = (m for m in manifests(tmp_path) if m.is_final)
    assert all(c.stored is not None and not c.payload for c in newest.committables)
    left = [path for path in (tmp_path / "checkpoints" / "p").glob("chk-*/*") if ".o" in path.name]
    kept = {c.stored.path for m in manifests(tmp_path) for c in m.committables if c.stored is not None}
    assert {str(path.relative_to(tmp_path / "checkpoints" / "p")) for path in left} == kept
