from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.web.shop import Asked, definition, progress

from headgate.cli.options import RunOptions, StartPoint
from headgate.cli.progress import TOKEN, PageAddress, PageObserver, QuietObserver
from headgate.errors import PipelineFailed, UsageError
from headgate.model.ids import CheckpointId
from headgate.model.progress import LogPlace, RunResult


class Heard(QuietObserver):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.notes: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.calls.append(name)
        return super().__getattribute__(name)

    def on_note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def heard() -> Heard:
    return Heard()


def shown(heard: Heard, root: Path, port: int = 0) -> PageObserver:
    return PageObserver(heard, definition(root), PageAddress(port))


def state_at(note: str, token: str = "", path: str = "state") -> dict[str, Any]:
    address = re.findall(r"http://[^ ]+", note)[0]
    request = urllib.request.Request(f"{address}api/{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_everything_that_is_heard_is_shown_and_passed_on(heard: Heard, tmp_path: Path) -> None:
    with shown(heard, tmp_path) as page:
        page.on_start(Asked())  # type: ignore[arg-type]
        page.on_note(LogPlace(str(tmp_path / "logs")))
        page.on_checkpoint(CheckpointId(7), 30, 2_048)
        page.on_progress(progress())
        page.on_restart("it failed", 5)
        page.on_result(RunResult(is_finished=True, restarts=1))
        state = state_at(heard.notes[0])
        logs = state_at(heard.notes[0], path="logs")
    assert [note["text"] for note in state["notes"]] == [f"the workers' logs are in {tmp_path / 'logs'}"]
    assert logs == {"place": str(tmp_path / "logs"), "logs": []}
    assert state["restarts"][0]["reason"] == "it failed"
    assert state["checkpoints"][0]["checkpoint"] == 7
    assert state["checkpoints"][0]["longest"] == {"subtask": "latest[1]", "aligned_us": 4_321, "frozen_us": 8}
    assert state["ended"]["outcome"] == "finished"
    assert state["ended"]["text"].startswith("finished after")
    assert heard.calls == [
        "on_note", "on_start", "on_note", "on_checkpoint", "on_progress", "on_restart", "on_result",
    ]  # fmt: skip


def test_a_failure_is_shown(heard: Heard, tmp_path: Path) -> None:
    with shown(heard, tmp_path) as page:
        error = PipelineFailed("shop", "worker 1 was lost")
        page.on_failure(error)
        assert state_at(heard.notes[0])["ended"] == {
            "outcome": "failed",
            "text": str(error),
            "at_ms": page._story.to_json()["ended"]["at_ms"],
        }
    assert heard.calls[-1] == "on_failure"


def test_the_token_is_not_for_workers(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "sesame")
    with shown(heard, tmp_path):
        assert TOKEN not in os.environ
        assert state_at(heard.notes[0], "sesame")["may_ask"] is True
        assert "sesame" not in heard.notes[0]


def test_a_port_that_is_taken_is_said_before_anything_begins(heard: Heard, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UsageError, match="--ui takes another"):
        shown(heard, tmp_path, other.getsockname()[1]).__enter__()
    assert heard.calls == []


def test_who_goes_on_in_anothers_place_runs_without_a_page(heard: Heard, tmp_path: Path) -> None:  # PG7
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = PageAddress(other.getsockname()[1])
        with PageObserver(heard, definition(tmp_path), place, must_run=True) as page:
            page.on_progress(progress())
    assert heard.calls == ["on_note", "on_progress"]
    assert "running without a page" in heard.notes[0]


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_is_a_port(port: int) -> None:
    with pytest.raises(UsageError, match="a port is a number"):
        options(port).check()


def test_the_packages_of_the_page_are_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("headgate.cli.progress.find_spec", lambda name: None if name == "uvicorn" else find(name))
    with pytest.raises(UsageError, match=re.escape("pip install 'headgate-streams[ui]'")):
        options(4050).check()


def test_a_keeper_tells_its_drivers_where_the_page_is() -> None:
    assert {"--ui=4050", "--ui-host=127.0.0.1"} <= set(options(4050).of_a_driver())
    assert not any("--ui" in word for word in options(None).of_a_driver())


def options(port: int | None) -> RunOptions:
    page = None if port is None else PageAddress(port)
    return RunOptions(None, None, None, StartPoint(None, None, ()), False, False, False, False, None, page=page)
