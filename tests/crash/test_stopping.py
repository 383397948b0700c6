"""Ctrl-C and SIGTERM stop with a last checkpoint and leave nothing running; the same command continues."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from crash.processes import STARTED_S, Child
from crash.results import assert_clean, assert_standard
from headgate.spark.session import QUICK_COMPILER

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

PROGRAM = """
import json, sys
from crash.pipelines import BUILDERS
spec = json.loads(sys.argv[1])
pipeline = BUILDERS[spec["pipeline"]](spec)
"""


def command_line(program: Path, spec: dict[str, Any]) -> list[str]:
    """The command that a user would type."""
    return [sys.executable, "-u", "-m", "headgate.cli.main", "run", str(program), "--json", "--", json.dumps(spec)]


def checkpoints(child: Child, count: int) -> None:
    start = 0
    for _ in range(count):
        start = 1 + child.wait_event(lambda e: e["event"] == "checkpoint", start, STARTED_S, "a checkpoint")


def command_of_jvm(child: Child) -> list[str]:
    (found,) = [p.cmdline() for p in psutil.Process(child.pid).children(recursive=True) if p.name() == "java"]
    return found


def test_ctrl_c_and_sigterm_keep_the_last_checkpoint_and_the_next_run_continues(
    spec: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    what = spec("standard", rows=24_000)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    children: list[Child] = []
    try:
        for number in (signal.SIGINT, signal.SIGTERM, None):
            child = Child(command_line(program, what), tmp_path / "driver")
            children.append(child)
            if number is not None:
                checkpoints(child, 1)
                assert QUICK_COMPILER in command_of_jvm(child)
            if number is signal.SIGINT:
                os.killpg(child.pid, number)  # a terminal tells the whole foreground group, the JVM too
            elif number is not None:
                child.signal(number)
            assert child.exit_code() == 0, child.tale("exit code")
            child.assert_gone()
            assert "Traceback" not in child.stderr(), child.tale("a traceback")
            if len(children) > 1:
                notes = [e["text"] for e in child.events if e["event"] == "note"]
                assert any("continues from checkpoint" in text for text in notes), notes
        states = [e["state"] for e in child.events if e["event"] == "progress"]
        assert states[-1] == "finished"
    finally:
        for child in children:
            child.close()
    assert_standard(tmp_path, 24_000)
    assert_clean(tmp_path)


def test_a_second_ctrl_c_ends_at_once_and_loses_nothing(
    spec: Callable[..., dict[str, Any]], launch: Callable[..., Any], tmp_path: Path
) -> None:
    what = spec("standard", rows=16_000)
    life = launch(what)
    life.running()
    life.checkpoint()
    life.child.signal(signal.SIGINT)
    life.child.signal(signal.SIGINT)
    life.result()
    assert life.child.exit_code() == 0
    life.child.assert_gone()
    life = launch(what)
    life.result()
    assert life.child.exit_code() == 0
    assert_standard(tmp_path, 16_000)
    assert_clean(tmp_path)
