"""What is left of the checkpoints when a run ends in another way than asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator

import headgate as hg
from headgate.cli.output import result_text
from headgate.codec.json_files import Ending
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed, PutCheckpointsBack, StorageError
from headgate.model.progress import ControlRequest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.protocol.supervision.supervisor import Phase
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.pipeline_lock import RequestFile, read_holder
from headgate.storage.urls import open_storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any


def kept(root: Path) -> list[int]:
    log = CheckpointLog(open_storage(str(root / "checkpoints")), "p")
    return [int(manifest.checkpoint) for manifest in candidates(log.observe())]


def pipeline(root: Path, *, fails_beside: Path | None = None, **options: Any) -> hg.Pipeline:
    def passed(row: dict[str, Any]) -> dict[str, Any]:
        if fails_beside is not None and fails_beside.exists():
            raise ValueError("asked to fail")
        return row

    options.setdefault("restart", hg.NoRestart())
    made = pipeline_at(root, retained=2, **options)
    made.source(generator(3_000, 2_000, batch=20)).map(passed, name="passed").sink(
        hg.FileSink(root / "out", roll_interval=0), name="out"
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


def written(root: Path) -> list[int]:
    return read_committed(str(root / "out"))["id"].sort().to_list()


def snapshots(root: Path) -> list[Path]:
    return sorted((root / "checkpoints" / "p").glob("chk-*/*"))


@pytest.mark.parametrize("how", ["cancelled", "cancelled while it restarts", "failed"])
def test_checkpoints_that_are_not_retained_are_removed(start: Start, tmp_path: Path, how: str) -> None:  # C32, C71
    marker = tmp_path / "fails"
    restart = hg.FixedDelay(delay="1h") if how.endswith("restarts") else hg.NoRestart()
    given = {"retain_on_cancel": False, "retain_on_failure": False, "restart": restart}
    run = start(definition_of(pipeline(tmp_path, fails_beside=marker, **given), inline_bytes_max=0))
    run.wait_checkpoints(3)
    if how == "failed":
        marker.touch()
        with pytest.raises(PipelineFailed, match="asked to fail"):
            run.result()
    else:
        if how.endswith("restarts"):
            run.kill(0)
            run.wait(lambda: bool(run.restarts), "the pause before the restart")
        run.driver.cancel()
        result = run.result()
        assert (result.is_finished, result.has_removed_checkpoints, result.last_checkpoint) == (False, True, None)
    assert any("were removed, because the pipeline does not retain them" in note for note in run.notes)
    assert kept(tmp_path) == []
    assert snapshots(tmp_path) == []
    found = written(tmp_path)
    assert len(found) == len(set(found)) > 0, "what was committed is there once"
    assert not list((tmp_path / "out").glob("_staging/*/*")), "what nobody promised is aborted"
    again = start(definition_of(pipeline(tmp_path)))
    with pytest.raises(PipelineFailed, match=r"former checkpoints of the same name .* removed since") as refused:
        again.result()
    assert refused.value.remedy == PutCheckpointsBack()
    assert written(tmp_path) == found, "nothing is produced again before the sink is made to forget"
    hg.FileSink(tmp_path / "out").target("p", "out").forget()
    anew = start(definition_of(pipeline(tmp_path)))
    assert anew.result().is_finished
    assert written(tmp_path) == sorted(found + events(generator(3_000))["id"].to_list())


def test_a_cancel_in_doubt_is_told_as_one(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # C72
    def lost(*arguments: Any) -> None:
        raise StorageError("claim", "the log", "the answer was lost", is_transient=False)

    run = start(definition_of(pipeline(tmp_path, retain_on_cancel=False)))
    run.wait_checkpoints(1)
    monkeypatch.setattr(CheckpointLog, "give_up", lost)
    run.driver.cancel()
    result = run.result()
    assert (result.has_removed_checkpoints, result.is_removal_in_doubt) == (False, True)
    assert "the same command begins from nothing, or continues" in result_text(result)
    run.driver.join()
    holder = read_holder(str(tmp_path / "checkpoints"), "p")
    assert holder is not None
    assert (holder.ending, holder.is_in_doubt) == (Ending.STOPPED, True)
    assert any(note.startswith("it is not known whether the checkpoints") for note in run.notes)


def test_a_stop_keeps_the_checkpoints_that_a_cancel_would_remove(start: Start, tmp_path: Path) -> None:  # C70
    options = {"retain_on_cancel": False, "restart": hg.FixedDelay(delay="1h")}
    run = start(definition_of(pipeline(tmp_path, **options)))
    run.wait_checkpoints(2)
    run.kill(0)
    run.wait(lambda: bool(run.restarts), "the pause before the restart")
    run.driver.stop()  # between two generations there is nothing to take a last checkpoint of
    assert not run.result().has_removed_checkpoints
    assert kept(tmp_path)[0] >= max(run.checkpoints)
    second = start(definition_of(pipeline(tmp_path, **options)))
    second.wait_checkpoints(1)
    second.driver.cancel(retain=True)
    assert not second.result().has_removed_checkpoints
    assert len(kept(tmp_path)) == 2
    assert start(definition_of(pipeline(tmp_path))).result().is_finished
    assert written(tmp_path) == events(generator(3_000))["id"].to_list()


def test_a_savepoint_outlives_the_checkpoints_of_its_pipeline(start: Start, tmp_path: Path) -> None:  # SV1
    """Even one below the pipeline's own directory."""
    where = tmp_path / "checkpoints" / "p" / "mine"
    run = start(definition_of(pipeline(tmp_path, retain_on_cancel=False), inline_bytes_max=0))
    run.wait_checkpoints(1)
    outcome = run.driver.take_savepoint(str(where)).result(120)
    assert outcome.savepoint is not None, outcome.reason
    before = {path: path.read_bytes() for path in where.rglob("*") if path.is_file()}
    run.driver.cancel()
    assert run.result().has_removed_checkpoints
    assert {path: path.read_bytes() for path in where.rglob("*") if path.is_file()} == before
    assert len(before) > 1
    assert snapshots(tmp_path) == []


def test_a_cancel_that_was_meant_for_an_earlier_run_ends_no_later_one(start: Start, tmp_path: Path) -> None:
    """Whoever asked has died with that run, and another process has its number now: in a container that is usual."""
    (tmp_path / "checkpoints" / "p").mkdir(parents=True)
    stale = RequestFile.leave(str(tmp_path / "checkpoints"), "p", ControlRequest(cancels=True))
    run = start(definition_of(pipeline(tmp_path, retain_on_cancel=False)))
    run.wait_checkpoints(1)
    run.driver.is_asked_to_end = True
    run.driver.answer_asks()
    assert stale.answered() is None
    assert run.driver.supervision.machine.phase is Phase.RUNNING
    assert kept(tmp_path) != []
    assert list((tmp_path / "checkpoints" / "p").glob("checkpoint-*")) == []
