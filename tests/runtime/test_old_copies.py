"""A pipeline that went on goes back to a copy of an older checkpoint, with real workers and a real store."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runtime.running import Run, definition_of, pipeline_at

import headgate as hg
from headgate.model.config import DeniedOutput, StartConfig
from headgate.model.ids import CheckpointId
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import coordinator_host
from headgate.storage.local import LocalStorage
from headgate.store.store import Store

ROWS = 600


def piped(root: Path) -> PipelineDefinition:
    pipeline = pipeline_at(root, retained=1)
    source = hg.Generator(columns={"n": hg.RowNumber()}, rows=ROWS, rows_per_second=300, batch_rows=20)
    pipeline.source(source).select("n").sink(hg.StreamSink("app/out", store=str(root / "store")), name="out")
    return definition_of(pipeline)


def shown(root: Path) -> Counter[int]:
    with Store.open(root / "store") as store:
        readers = [store.reader("app/out", one) for one in range(store.describe("app/out").segments_count)]
        return Counter(row["n"] for one in readers for batch in iter(one.read, None) for row in batch.to_pylist())


def newest(root: Path) -> CheckpointId:
    return candidates(CheckpointLog(LocalStorage(root / "checkpoints"), "p").observe())[0].checkpoint


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_pipeline_goes_back_to_a_copy_whose_output_was_forgotten(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:  # SV26, WS10, K20
    monkeypatch.setattr(coordinator_host, "DROPS_BETWEEN_FORGETTING", 1)
    first = start(piped(tmp_path))
    first.wait_checkpoints(2)
    first.driver.cancel()
    first.driver.join()
    place = tmp_path / "copy" / "p"
    if is_changed:
        hg.edit_savepoint(tmp_path / "checkpoints" / "p", place).write()
    else:
        shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")
    before = shown(tmp_path)
    second = start(piped(tmp_path))
    assert second.result().is_finished
    assert shown(tmp_path) == Counter(range(ROWS))
    definition = piped(tmp_path)
    begins = replace(definition.config, start=StartConfig(str(place), newest(tmp_path)), on_denied=DeniedOutput.LOSE)
    third = start(replace(definition, config=begins))
    assert third.result().is_finished
    found = shown(tmp_path)
    assert {found[n] for n in before} == {1}, "what the copy had promised is there once"
    assert set(found) == set(range(ROWS))
    assert max(found.values()) == 2, "what came behind it was produced again"
    assert not [note for note in third.notes if "LOST" in note]
