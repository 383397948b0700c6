"""What is left of the checkpoints when a run ends in another way than asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.test_process_results import events, generator

import headgate as hg
from headgate.connectors.files.commit import read_committed
from headgate.errors import PipelineFailed
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.backends import open_storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any


def kept(root: Path) -> list[int]:
    log = CheckpointLog(open_storage(str(root / "checkpoints")), "p")
    return [int(manifest.checkpoint) for manifest in candidates(log.observe())]


def pipeline(root: Path, *, fails_beside: Path | None = None) -> hg.Pipeline:
    def passed(row: dict[str, Any]) -> dict[str, Any]:
        if fails_beside is not None and fails_beside.exists():
            raise ValueError("asked to fail")
        return row

    made = pipeline_at(root, retained=2, restart=hg.NoRestart())
    made.source(generator(3_000, 2_000, batch=20)).map(passed, name="passed").sink(
        hg.FileSink(root / "out"), name="out"
    )
    return made


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_checkpoints_are_retained_when_a_pipeline_is_cancelled_or_fails(
    start: Start, tmp_path: Path, how: str
) -> None:  # C32
    marker = tmp_path / "fails"
    run = start(definition_of(pipeline(tmp_path, fails_beside=marker)))
    run.wait_checkpoints(3)
    if how == "cancelled":
        run.driver.cancel()
        assert not run.result().is_finished
    else:
        marker.touch()
        with pytest.raises(PipelineFailed, match="asked to fail"):
            run.result()
    assert len(kept(tmp_path)) == 2
    newest = kept(tmp_path)[0]  # it may have been written when nobody listened any more
    assert newest >= max(run.checkpoints)
    again = start(definition_of(pipeline(tmp_path)))
    assert again.result().is_finished
    assert any(f"continues from checkpoint {newest}" in note for note in again.notes)
    found = read_committed(str(tmp_path / "out"))["id"].sort().to_list()
    assert found == events(generator(3_000))["id"].to_list()
