"""Stops by a signal or a command, drains, and moves with a savepoint: the same command continues, nothing is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

from crash.support.pipelines import generated, recounted
from crash.support.processes import STARTED_S, STEP_S, Child, Life, end_session, headgate, kill, without_spark
from crash.support.results import assert_clean, assert_equal, assert_standard, read_rows
from crash.support.standing import SPARK_IN_DEEP
from headgate.connectors.files.file_committer import read_committed
from headgate.spark.jvm import QUICK_COMPILER

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800)]


PROGRAM = """
import json, sys
from crash.support.pipelines import BUILDERS
spec = json.loads(sys.argv[1])
pipeline = BUILDERS[spec["pipeline"]](spec)
"""


def command_line(program: Path, spec: dict[str, Any]) -> list[str]:
    """The command that a user would type."""
    return [sys.executable, "-u", "-m", "headgate.cli", "run", str(program), "--json", "--", json.dumps(spec)]


def checkpoints(child: Child, count: int) -> None:
    start = 0
    for _ in range(count):
        start = 1 + child.wait_event(lambda e: e["event"] == "checkpoint", start, STARTED_S, "a checkpoint")


def command_of_jvm(child: Child) -> list[str]:
    (found,) = [p.cmdline() for p in psutil.Process(child.pid).children(recursive=True) if p.name() == "java"]
    return found


@pytest.mark.spark
@pytest.mark.deep
@pytest.mark.early
def test_ctrl_c_once_and_twice_and_sigterm_end_a_run_and_the_next_one_continues(
    spec: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The second Ctrl-C does not wait for that checkpoint, and loses nothing."""
    gate = tmp_path / "gate"
    what = spec("standard", rows=24_000, gate=str(gate))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    children: list[Child] = []
    try:
        for number, count in ((signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2), (None, 0)):
            if number is None:
                gate.touch()
            child = Child(command_line(program, what), tmp_path / "driver")
            children.append(child)
            if number is not None:
                checkpoints(child, 1)
                assert QUICK_COMPILER in command_of_jvm(child)
            for _ in range(count):
                if number is signal.SIGINT:
                    os.killpg(child.pid, number)  # a terminal tells the whole foreground group, the JVM too
                else:
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


SERVICE = """
import sys
from pathlib import Path
import psutil
import headgate as hg

begun = psutil.Process().children()
java = [str(child.pid) for child in begun if "headgate.spark.python_daemon" not in child.cmdline()]
Path(sys.argv[1] + ".begun").write_text(" ".join(java))

def shout(row):
    print("seen", row["n"])
    return row

checkpointing = hg.Checkpointing(interval="200ms", dir=sys.argv[1])
pipeline = hg.Pipeline("service", parallelism=2, checkpointing=checkpointing)
source = hg.Generator(columns={"n": hg.RowNumber()}, rows_per_second=200, splits=2, batch_rows=10)
pipeline.source(source).map(shout, name="shout").sink(hg.Discard())
"""


def keeps_sigterm_out(process: psutil.Process) -> bool:
    """Whether it does nothing at SIGTERM, by what the system knows: who is told to end may be slow to do so.

    The JVM ignores it, each thread of the process that Spark forks workers from blocks it, and workers handle it.
    """
    parent = process.parent()
    if process.name() == "java":
        return all(has_sigterm(status, "SigIgn") for status in statuses(process))
    if parent is not None and parent.name() == "java":
        return all(has_sigterm(status, "SigBlk") for status in statuses(process))
    return all(has_sigterm(status, "SigCgt") for status in statuses(process))


def statuses(process: psutil.Process) -> list[str]:
    """What the system says of each thread: any one that does not block a signal may be given it."""
    return [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/status")]


def has_sigterm(status: str, name: str) -> bool:
    (mask,) = [line.split(":", 1)[1] for line in status.splitlines() if line.startswith(f"{name}:")]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.spark
def test_sigterm_to_every_process_of_a_service_stops_with_a_last_checkpoint(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SERVICE)
    command = [sys.executable, "-u", "-m", "headgate.cli", "run", str(program), "--json"]
    command += ["--", str(tmp_path / "checkpoints")]
    temporary = tmp_path_factory.mktemp("t")  # short: sockets are in it
    children: list[Child] = []
    try:
        for is_killed in (True, False):
            child = Child(command, tmp_path / "driver", {"TMPDIR": str(temporary)})
            children.append(child)
            checkpoints(child, 1)
            (own,) = [path for path in temporary.glob("headgate-spark-*/*") if path.is_dir()]
            assert [path.name for path in own.glob("blockmgr-*")]
            java = [str(p.pid) for p in psutil.Process(child.pid).children() if p.name() == "java"]
            assert java == (tmp_path / "checkpoints.begun").read_text().split(), "it was there before the program"
            if is_killed:
                end_session(child.pid)
                child.process.wait(timeout=STARTED_S)
                assert own.is_dir()
                continue
            before = max(e["checkpoint"] for e in child.events if e["event"] == "checkpoint")
            driver = psutil.Process(child.pid)
            children_of_all = driver.children(recursive=True)
            others = [p for p in children_of_all if p.name() != "bash"]  # of the JVM, for a moment
            assert [p.name() for p in others if not keeps_sigterm_out(p)] == []
            for process in [driver, *others, driver]:
                process.terminate()  # as systemd does, and timeout
            assert child.exit_code(STARTED_S) == 0, child.tale("exit code")
            child.assert_gone()
            (result,) = [e for e in child.events if e["event"] == "result"]
            assert result["outcome"] == "stopped"
            assert "seen" not in child.stderr()
            assert result["last_checkpoint"] > before
            assert not [e for e in child.events if e["event"] == "restart"], child.tale("nothing was lost")
    finally:
        for child in children:
            child.close()
    assert [path.name for path in temporary.iterdir()] == []
    logs = tmp_path / "driver" / "logs" / "service"
    seen = [
        line for n in (0, 1) for line in (logs / f"worker-{n}.log").read_text().splitlines() if "shout: seen" in line
    ]
    assert len(seen) >= result["records_in"] > 0, "each once, and again what was read again"
    assert " WARN " in (logs / "spark.log").read_text()


# Rules: F3


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

    def stop(self, savepoint: Path) -> subprocess.CompletedProcess[str]:
        where = str(self.root / "checkpoints")
        return headgate("stop", self.what["name"], "--dir", where, "--savepoint", str(savepoint))


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
            assert headgate(*shlex.split(forget.group(1)), "--yes").returncode == 0
        for expected in (-9, -9, 0):
            child = place.start("--restore", str(moved), kill_at="after-claim after-adoption")
            assert child.exit_code(2 * STEP_S) == expected, child.tale("exit code")
            child.assert_gone()
        notes = [event["text"] for event in child.events if event["event"] == "note"]
        assert any("was restored before" in text for text in notes), notes
    finally:
        for child in place.children:
            child.close()
    assert json.loads(headgate("savepoints", "list", str(moved), "--json").stdout)[0]["path"] == ""
    assert_standard(tmp_path, ROWS)
    assert_clean(tmp_path)


# Rules: F3


DRAINED_ROWS = 400_000
"""Far more than is read before the drain."""

RATE = 4_000
"""Twice what the slow reduce of ``backlog`` can take: the drain lasts as long as the reading before it."""

Spec = Callable[..., dict[str, Any]]


def assert_drained(root: Path, *, reduced_every: int = 1) -> None:
    """Everything that was read, as the plain copy tells, went into the windows and the counts once; splits are
    prefixes."""
    rows = read_rows(root)
    assert 0 < rows.height < DRAINED_ROWS, "it was drained in the middle"
    events = generated(DRAINED_ROWS).filter(pl.col("id").is_in(rows["id"].implode()))
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
    life = run(spec("backlog", rows=DRAINED_ROWS, rate=RATE))
    running = life.running()
    life.checkpoint()
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
    what = spec("backlog", rows=DRAINED_ROWS, rate=RATE)
    life = launch(what, with_spark=with_spark)
    life.running()
    life.checkpoint()
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


def test_a_pipeline_of_another_terminal_is_stopped_restored_and_drained(spec: Spec, tmp_path: Path) -> None:
    """Each by its command, and a checkpoint is taken by one."""
    what = spec("standard", rows=DRAINED_ROWS, gate=str(tmp_path / "never"))
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
