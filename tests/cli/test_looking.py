"""Whoever looks at what is not there is told so, and makes nothing (CT13)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli.app import app
from headgate.errors import UsageError

COMMANDS = {
    "checkpoints list": "There are no checkpoints in",
    "checkpoints list p": "there are no checkpoints at",
    "checkpoints show p": "there are no checkpoints at",
    "checkpoints discard p": "there are no checkpoints at",
    "savepoints list here": "there is no directory",
    "savepoints show here": "there is no directory",
    "sinks list out": "No sink has written to",
    "sinks forget p/out out -y": "no pipeline has written to",
    "stop p": "no pipeline 'p' runs",
    "cancel p": "no pipeline 'p' runs",
    "streams list": "no streams in",
    "streams describe app/log": "there is no stream store at",
    "streams read app/log": "there is no stream store at",
    "streams seal app/log": "there is no stream store at",
    "streams delete app/log -y": "there is no stream store at",
    "streams forget p/out -y": "there is no stream store at",
    "streams check": "there is no stream store at",
    "streams write app/log": "there is no stream store at",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADGATE_STORE", raising=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_looking_at_what_is_not_there_makes_nothing(tmp_path: Path, command: str) -> None:  # CT13
    result = CliRunner().invoke(app, command.split(), input="a line\n")
    said = str(result.exception) if isinstance(result.exception, UsageError) else result.output
    assert COMMANDS[command] in said
    assert os.listdir(tmp_path) == []


def test_streams_are_made_by_who_creates_one(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["streams", "create", "app/log"]).exit_code == 0
    assert CliRunner().invoke(app, ["streams", "write", "app/more", "--create"], input="a\n").exit_code == 0
    assert "app/more" in CliRunner().invoke(app, ["streams", "list", "--json"]).output
