"""Draining on Spark: what was read comes out completely and once, whatever is killed meanwhile."""

# Rules: F3

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from crash.pipelines import generated, recounted
from crash.processes import STARTED_S, Child, Life, environment, kill, without_spark
from crash.results import assert_clean, assert_equal, read_rows
from crash.standing import SPARK_IN_DEEP
from crash.test_stopping import PROGRAM, checkpoints, command_line
from headgate.connectors.files.file_committer import read_committed

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800)]

ROWS = 400_000
"""Far more than is read before the drain."""

RATE = 4_000
"""Twice what the slow reduce of ``backlog`` can take: the drain lasts as long as the reading before it."""

Spec = Callable[..., dict[str, Any]]


def assert_drained(root: Path, *, reduced_every: int = 1) -> None:
    """Everything that was read, as the plain copy tells, went into the windows and the counts once; splits are
    prefixes."""
    rows = read_rows(root)
    assert 0 < rows.height < ROWS, "it was drained in the middle"
    events = generated(ROWS).filter(pl.col("id").is_in(rows["id"].implode()))
    expected = recounted(events, reduced_every)
    assert_equal(rows, expected["rows"], "rows")
    assert_equal(read_committed(str(root / "windows")), expected["windows"], "windows")
    assert_equal(read_committed(str(root / "counts")), expected["counts"], "counts")
    assert_clean(root)


def draining(life: Life) -> None:
    life.wait("draining", lambda e: e["event"] == "progress" and e["state"] == "draining")


@pytest.mark.spark
def test_a_worker_killed_in_mid_drain_loses_and_doubles_nothing(
    spec: Spec, run: Callable[[dict[str, Any]], Life], tmp_path: Path, told: Callable[[Life], None]
) -> None:  # E7, E9
    life = run(spec("backlog", rows=ROWS, rate=RATE))
    running = life.running()
    life.checkpoint(2)
    life.child.send({"drain": life.name})
    draining(life)
    kill(next(iter(running["workers"].values())))
    life.restart()
    result = life.result()
    told(life)
    assert (result["is_finished"], result["is_drained"], result["restarts"]) == (True, True, 1)
    assert_drained(tmp_path)


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_a_driver_killed_in_mid_drain_forgets_it_and_the_next_one_continues_until_it_is_drained(
    spec: Spec, launch: Callable[..., Life], tmp_path: Path, with_spark: bool
) -> None:  # E9
    what = spec("backlog", rows=ROWS, rate=RATE)
    life = launch(what, with_spark=with_spark)
    life.running()
    life.checkpoint(2)
    life.child.signal(signal.SIGUSR1)
    draining(life)
    life.child.signal(signal.SIGKILL)
    life.child.assert_gone()
    life = launch(what, with_spark=with_spark)
    life.running()
    life.checkpoint()
    life.child.signal(signal.SIGUSR1)
    result = life.result()
    assert (result["is_finished"], result["is_drained"]) == (True, True)
    assert life.child.exit_code() == 0
    assert_drained(tmp_path)


def headgate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headgate.cli.app", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=STARTED_S, check=False)


def test_a_pipeline_of_another_terminal_is_stopped_restored_and_drained(spec: Spec, tmp_path: Path) -> None:
    """Each by its command, and a checkpoint is taken by one."""
    what = spec("standard", rows=ROWS, gate=str(tmp_path / "never"))
    name, where = what["name"], ("--dir", str(tmp_path / "checkpoints"))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    children: list[Child] = []

    def start(*options: str) -> Child:
        *command, dashes, arguments = command_line(program, what)
        children.append(Child([*command, *options, dashes, arguments], tmp_path / "driver", without_spark()))
        return children[-1]

    def ends(child: Child, outcome: str, *options: str) -> None:
        asked = headgate("stop", name, *where, *options)
        assert asked.returncode == 0, asked.stderr
        assert asked.stdout.startswith(f"{name}: {outcome}"), asked
        assert "process" in asked.stderr.splitlines()[0]
        assert child.exit_code() == 0, child.tale("exit code")
        child.assert_gone()

    try:
        first = start()
        checkpoints(first, 1)
        asked = headgate("checkpoints", "take", name, *where)
        found = re.fullmatch(rf"{name}: checkpoint (\d+) is completed\n", asked.stdout)
        assert found, asked.stderr
        first.wait_event(
            lambda e: e["event"] == "checkpoint" and e["checkpoint"] == int(found[1]), 0, STARTED_S, "that checkpoint"
        )
        ends(first, "stopped; started again, it continues from checkpoint ")
        second = start()
        checkpoints(second, 2)
        ends(second, "stopped", "--savepoint", str(tmp_path / "taken"))
        third = start("--restore", str(tmp_path / "taken"))
        checkpoints(third, 2)
        ends(third, "drained; ", "--drain")
        again = start()
        assert again.exit_code() == 0
        notes = [e["text"] for e in again.events if e["event"] == "note"]
        assert any("was drained and does not continue" in text for text in notes), json.dumps(notes)
    finally:
        for child in children:
            child.close()
    assert_drained(tmp_path, reduced_every=20)
    gone = headgate("stop", name, *where)
    assert (gone.returncode, gone.stderr.count("\n")) == (2, 1)
    assert f"Error: no pipeline '{name}' runs" in gone.stderr
