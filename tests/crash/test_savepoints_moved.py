"""A pipeline moves house with a savepoint, by the commands of a user, and its driver is killed at every step of it."""

# Rules: F3

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.processes import STEP_S, Child, environment, without_spark
from crash.results import assert_clean, assert_standard
from crash.standing import SPARK_IN_DEEP
from crash.test_stopping import PROGRAM, checkpoints, command_line

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800)]

ROWS = 24_000


class Place:
    """A user's program and directories."""

    def __init__(self, root: Path, what: dict[str, Any], *, with_spark: bool) -> None:
        self.root, self.what, self._with_spark = root, what, with_spark
        self.program = root / "program.py"
        self.program.write_text(PROGRAM)
        self.children: list[Child] = []

    def start(self, *options: str, kill_at: str = "") -> Child:
        """``headgate run``."""
        *command, dashes, arguments = command_line(self.program, self.what)
        points = ";".join(f"{point}:1:{self.root / f'killed-{point}'}" for point in kill_at.split() if point)
        env = {} if self._with_spark else without_spark()
        if points:
            env["HEADGATE_KILL_AT"] = points
        child = Child([*command, *options, dashes, arguments], self.root / "driver", env)
        self.children.append(child)
        return child

    def headgate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command."""
        command = [sys.executable, "-m", "headgate.cli.app", *arguments]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=STEP_S, check=False)

    def stop(self, savepoint: Path) -> subprocess.CompletedProcess[str]:
        where = str(self.root / "checkpoints")
        return self.headgate("stop", self.what["name"], "--dir", where, "--savepoint", str(savepoint))


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
@pytest.mark.deep
@pytest.mark.early
def test_a_pipeline_moves_with_a_savepoint_whatever_is_killed(
    spec: Callable[..., dict[str, Any]], tmp_path: Path, with_spark: bool
) -> None:  # SV2, SV10, SV24
    gate = tmp_path / "gate"
    place = Place(
        tmp_path, spec("standard", rows=ROWS, rate=400, inline_bytes_max=0, gate=str(gate)), with_spark=with_spark
    )
    try:
        for point in ("before-savepoint", "after-savepoint"):
            child = place.start(kill_at=point)
            checkpoints(child, 1)
            stopped = place.stop(tmp_path / point)
            assert child.exit_code() == -9, child.tale(point)
            assert stopped.returncode != 0, stopped
            assert (tmp_path / point / "savepoint").exists() == (point == "after-savepoint")
            child.assert_gone()
        child = place.start()
        checkpoints(child, 1)
        stopped = place.stop(tmp_path / "taken")
        assert stopped.returncode == 0, stopped
        assert child.exit_code() == 0, child.tale("exit code")
        child.assert_gone()

        gate.touch()  # nobody has to meet it any more while it runs
        shutil.rmtree(tmp_path / "checkpoints")
        moved = shutil.move(tmp_path / "taken", tmp_path / "moved")
        for _ in range(3):  # the sinks belong to the pipeline that was: the user does what each of them says
            child = place.start("--restore", str(moved))
            assert child.exit_code() not in (0, -9), child.tale("exit code")
            forget = re.search(r"run: headgate (.*)$", child.stderr(), re.MULTILINE)
            assert forget is not None, child.tale("what to do")
            assert place.headgate(*shlex.split(forget.group(1)), "--yes").returncode == 0
        for expected in (-9, -9, 0):
            child = place.start("--restore", str(moved), kill_at="after-claim after-adoption")
            assert child.exit_code(2 * STEP_S) == expected, child.tale("exit code")
            child.assert_gone()
        notes = [event["text"] for event in child.events if event["event"] == "note"]
        assert any("was restored before" in text for text in notes), notes
    finally:
        for child in place.children:
            child.close()
    assert json.loads(place.headgate("savepoints", "list", str(moved), "--json").stdout)[0]["path"] == ""
    assert_standard(tmp_path, ROWS)
    assert_clean(tmp_path)
