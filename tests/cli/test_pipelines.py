"""``headgate pipelines`` and ``headgate ui``, as they are typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.api.pipeline_registry import announced_page, remember_pipeline
from headgate.cli.app import app
from headgate.cli.progress import TOKEN
from headgate.codec.json_files import Ending
from headgate.errors import UsageError
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.pipeline_lock import PipelineLock
from headgate.storage.urls import open_storage


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "300")


def started(root: Path, name: str) -> None:
    CheckpointLog(open_storage(str(root)), name).claim("test", 1_700_000_000_000)
    remember_pipeline(name, str(root))


def told(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["pipelines", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_pipelines_are_listed_wherever_they_are(tmp_path: Path) -> None:
    assert told() == "No pipeline is known here; 'headgate run PROGRAM.py' starts one, --dir DIR looks elsewhere.\n"
    assert told("--json") == "[]\n"
    started(tmp_path / "one", "shop")
    started(tmp_path / "two", "bank")
    lock = PipelineLock.acquire(str(tmp_path / "one"), "shop", "process 7 on here")
    PipelineLock.acquire(str(tmp_path / "two"), "bank", "process 8 on here").release(Ending.FAILED, 5, "disk full")
    with announced_page("shop", "http://127.0.0.1:4050/"):
        lines = told().splitlines()
        fields = json.loads(told("--json"))
    assert re.search(rf"^shop +running .*{tmp_path / 'one'} +http://127.0.0.1:4050/", lines[1])
    assert re.search(rf"^bank +failed .*{tmp_path / 'two'}", lines[2])
    assert lines[3] == "bank: disk full"
    assert [(one["name"], one["state"], one["page"]) for one in fields] == [
        ("shop", "running", "http://127.0.0.1:4050/"),
        ("bank", "failed", ""),
    ]
    lock.release()


@pytest.mark.run
def test_the_page_of_all_pipelines_is_served_until_it_is_told_to_end(tmp_path: Path) -> None:
    started(tmp_path / "one", "shop")
    command = [sys.executable, "-m", "headgate.cli.app", "ui", "--port", "0"]
    environment = {**os.environ, TOKEN: "sesame"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        address = re.findall(r"http://[^ ]+", line)[0]
        with urllib.request.urlopen(f"{address}api/state", timeout=60) as answer:
            assert [one["name"] for one in json.load(answer)["pipelines"]] == ["shop"]
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 0
    assert "sesame" not in line
    assert "Ctrl-C ends it" in line


def test_what_cannot_be_a_port_is_told() -> None:
    result = CliRunner().invoke(app, ["ui", "--port", "70000"])
    assert isinstance(result.exception, UsageError)
    assert "--port is 70000" in str(result.exception)
