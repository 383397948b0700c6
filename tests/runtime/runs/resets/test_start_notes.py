"""What a start says: where everything is, whether the name is known elsewhere, and that there is nothing to do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.runtime.running import pipeline_at

import headgate as hg
from headgate.api.launch import announce
from headgate.model.progress import SilentObserver

pytestmark = pytest.mark.usefixtures("started")


class Notes(SilentObserver):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def made(root: Path) -> hg.Pipeline:
    pipeline = pipeline_at(root, name="counts")
    pipeline.source(hg.FromRows([{"n": 1}])).sink(hg.StreamSink("counts", store=str(root / "store")))
    return pipeline


def run(root: Path) -> list[str]:
    notes = Notes()
    assert made(root).run(observer=notes).is_finished
    return notes.texts


def test_a_start_says_where_everything_is_and_whether_the_name_is_known_elsewhere(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(one)[0] == f"checkpoints in {one}/checkpoints, streams in {one}/store; records count exactly once"
    assert not any("of the same name" in note for note in run(one))
    elsewhere = f"a pipeline of the same name has its checkpoints in {one}/checkpoints; this run does not continue it"
    assert run(two)[:2] == [
        f"checkpoints in {two}/checkpoints, streams in {two}/store; records count exactly once",
        elsewhere,
    ]
    (one / "checkpoints" / "counts" / "log").rename(one / "removed")
    assert not any("of the same name" in note for note in run(two)), "it is not there any more"


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"retain_on_cancel": False}, "; the checkpoints are removed when it is cancelled"),
        ({"retain_on_failure": False}, "; the checkpoints are removed when it has failed for good"),
        (
            {"retain_on_cancel": False, "retain_on_failure": False},
            "; the checkpoints are removed when it is cancelled or has failed for good",
        ),
        ({}, "; records count exactly once"),
    ],
)
def test_a_start_says_when_its_checkpoints_do_not_stay(tmp_path: Path, options: dict[str, bool], end: str) -> None:
    pipeline = pipeline_at(tmp_path, **options)
    pipeline.source(hg.FromRows([{"n": 1}])).sink(hg.Discard())
    notes = Notes()
    announce(pipeline.definition(), notes)
    assert notes.texts[0].endswith(end)


def test_a_state_directory_that_cannot_be_written_is_no_matter(tmp_path: Path, state: Path) -> None:
    state.write_text("in the way")
    assert run(tmp_path)[0].startswith("checkpoints in ")


def test_a_program_hears_that_everything_is_processed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda _: False)  # as in a program that knows nothing of logging
    for _ in range(2):
        assert made(tmp_path).run().is_finished
    told = capsys.readouterr().err.splitlines()
    assert (
        told[0]
        == f"counts: checkpoints in {tmp_path}/checkpoints, streams in {tmp_path}/store; records count exactly once"
    )
    assert "counts: pipeline 'counts' has already processed all its input" in told[-1]


def test_a_look_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], state: Path) -> None:
    assert pipeline_at(tmp_path).source(hg.FromRows([{"n": 1}])).take(1) == [{"n": 1}]
    assert capsys.readouterr().err == ""
    assert not state.exists()
