"""The note of where a pipeline has its checkpoints is its user's alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headgate.api import pipeline_registry
from headgate.api.pipeline_registry import (
    KnownPipeline,
    KnownState,
    PipelineRegistry,
    announced_page,
    page_of,
    remember_pipeline,
)
from headgate.codec.json_files import Ending, encode_holder
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.pipeline_lock import PipelineLock, read_holder
from headgate.storage.urls import open_storage


def test_where_the_checkpoints_are_is_noted_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for root in ("one", "two"):
        (tmp_path / root / "p" / "log").mkdir(parents=True)
    before = os.umask(0)
    try:
        assert remember_pipeline("p", str(tmp_path / "one")) == []
        assert remember_pipeline("p", str(tmp_path / "two")) == [str(tmp_path / "one")]
        assert remember_pipeline("p", str(tmp_path / "one")) == [str(tmp_path / "two")], "again"
    finally:
        os.umask(before)
    (tmp_path / "state" / "headgate" / "pipelines" / "p" / "a directory").mkdir()
    assert remember_pipeline("p", str(tmp_path / "one")) == [str(tmp_path / "two")], "what cannot be read is left out"
    made = list((tmp_path / "state").rglob("*"))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "state" / "headgate").stat().st_mode) == 0o700


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "headgate"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory in which pipeline ``p`` has claimed, but completed nothing."""
    CheckpointLog(open_storage(str(tmp_path / "root")), "p").claim("test", 1_700_000_000_000)
    remember_pipeline("p", str(tmp_path / "root"))
    return tmp_path / "root"


def manifest(checkpoint: int, generation: Generation) -> Manifest:
    return Manifest(
        CheckpointId(checkpoint),
        generation,
        1,
        128,
        (),
        trigger_wall_ms=1_700_000_000_000 + checkpoint,
        duration_ms=42,
    )


def seen(looker: PipelineRegistry | None = None) -> KnownPipeline:
    (found,) = (looker or PipelineRegistry()).look()
    return found


def test_what_a_pipeline_does_is_told_by_its_lock(root: Path) -> None:
    assert seen().state is KnownState.UNKNOWN, "nobody ever held it"
    lock = PipelineLock.acquire(str(root), "p", "process 7 on here")
    assert (seen().state, seen().owner) == (KnownState.RUNNING, "process 7 on here")
    content = (root / "p" / "lock").read_bytes()
    for ending in Ending:
        if ending not in (Ending.NONE, Ending.REPLACED):
            lock.release(ending, 5, "the disk is full" if ending is Ending.FAILED else "")
            assert seen().state.value == ending.value
            assert seen().detail == ("the disk is full" if ending is Ending.FAILED else "")
            lock = PipelineLock.acquire(str(root), "p", "process 7 on here")
    lock.release()
    (root / "p" / "lock").write_bytes(content)  # as one leaves it that is killed; its number is another process's now
    assert seen().state is KnownState.DIED
    holder = read_holder(str(root), "p")
    assert holder is not None
    (root / "p" / "lock").write_bytes(encode_holder(replace(holder, host="elsewhere")))
    assert seen().state is KnownState.ELSEWHERE
    (root / "p" / "lock").write_bytes(b"half")
    assert seen().state is KnownState.UNKNOWN
    assert "does not say which process runs it" in seen().detail


def test_what_is_gone_is_left_out_and_what_cannot_be_read_says_why(root: Path, tmp_path: Path) -> None:
    remember_pipeline("q", str(tmp_path / "elsewhere"))
    remember_pipeline("r", "s3://bucket/checkpoints")
    (tmp_path / "state" / "headgate" / "pipelines" / "a file").write_text("of somebody else")
    CheckpointLog(open_storage(str(tmp_path / "given")), "z").claim("test", 1_700_000_000_000)
    found = PipelineRegistry(
        [str(tmp_path / "given"), str(tmp_path / "given"), str(tmp_path / "missing"), str(root)]
    ).look()
    assert [(one.name, one.place) for one in found] == [
        ("p", str(root)),
        ("r", "s3://bucket/checkpoints"),
        ("z", str(tmp_path / "given")),
    ]
    assert "object store" in found[1].detail
    for entry in (root / "p" / "log").iterdir():
        entry.unlink()
    (root / "p" / "log").rmdir()
    assert [one.name for one in PipelineRegistry().look()] == ["r"]


def test_the_newest_checkpoint_is_shown(root: Path) -> None:
    assert seen().checkpoint is None
    log = CheckpointLog(open_storage(str(root)), "p")
    generation = log.claim("test", 1_700_000_000_000).next.generation
    log.append(manifest(1, generation))
    log.append(manifest(2, generation))
    found = seen()
    assert (found.checkpoint, found.triggered_ms, found.duration_ms) == (2, 1_700_000_000_002, 42)


def test_a_log_is_read_again_when_it_has_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CheckpointLog(open_storage(str(root)), "p")
    generation = log.claim("test", 1_700_000_000_000).next.generation
    log.append(manifest(1, generation))
    looks = []
    observe = CheckpointLog.observe
    monkeypatch.setattr(CheckpointLog, "observe", lambda self: looks.append(self) or observe(self))
    looker = PipelineRegistry()
    assert [seen(looker).checkpoint for _ in range(3)] == [1, 1, 1]
    assert len(looks) == 1
    log.append(manifest(2, generation))
    assert [seen(looker).checkpoint for _ in range(3)] == [2, 2, 2]
    assert len(looks) == 2


def test_whoever_looks_changes_nothing(root: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    PipelineRegistry([str(tmp_path / "missing")]).look()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_page_is_found_as_long_as_its_process_serves_it(root: Path, state: Path) -> None:
    lock = PipelineLock.acquire(str(root), "p", "process 7 on here")
    assert seen().page == ""
    with announced_page("p", "http://127.0.0.1:4050/"):
        assert seen().page == "http://127.0.0.1:4050/"
        assert page_of("q", os.getpid()) == "", "of another pipeline"
        (note,) = (state / "pages").iterdir()
        assert stat.S_IMODE(note.stat().st_mode) == 0o600
    assert list((state / "pages").iterdir()) == []
    assert seen().page == ""
    with announced_page("p", "http://127.0.0.1:4050/"):
        lock.release(Ending.STOPPED, 5, "")
        assert seen().page == "", "the run is over"


def test_a_note_of_another_process_with_the_same_number_counts_for_nothing(root: Path, state: Path) -> None:
    lock = PipelineLock.acquire(str(root), "p", "process 7 on here")
    (state / "pages").mkdir()
    note = state / "pages" / f"{os.getpid()}-p"
    note.write_bytes(b'{"address":"http://127.0.0.1:1/","started_s":1.0}')
    assert seen().page == ""
    note.write_bytes(b"half a no")
    assert seen().page == ""
    with announced_page("p", "http://127.0.0.1:2/"):
        assert seen().page == "http://127.0.0.1:2/"
    lock.release()


def test_notes_of_processes_that_died_are_swept(state: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(120)
    (state / "pages").mkdir(parents=True)
    for name in (f"{child.pid}-p", "readme", f"{os.getpid()}-other"):
        (state / "pages" / name).write_bytes(b"")
    with announced_page("p", "http://127.0.0.1:2/"):
        left = {path.name for path in (state / "pages").iterdir()}
    assert left == {"readme", f"{os.getpid()}-other", f"{os.getpid()}-p"}


def test_without_a_home_there_is_a_page_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(pipeline_registry, "user_state_directory", homeless)
    with announced_page("p", "http://127.0.0.1:2/"):
        assert page_of("p", os.getpid()) == ""
