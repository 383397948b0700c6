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

from crash.processes import STARTED_S, Child, end_session
from crash.results import assert_clean, assert_standard
from headgate.spark.jvm import QUICK_COMPILER

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

PROGRAM = """
import json, sys
from crash.pipelines import BUILDERS
spec = json.loads(sys.argv[1])
pipeline = BUILDERS[spec["pipeline"]](spec)
"""


def command_line(program: Path, spec: dict[str, Any]) -> list[str]:
    """The command that a user would type."""
    return [sys.executable, "-u", "-m", "headgate.cli.app", "run", str(program), "--json", "--", json.dumps(spec)]


def checkpoints(child: Child, count: int) -> None:
    start = 0
    for _ in range(count):
        start = 1 + child.wait_event(lambda e: e["event"] == "checkpoint", start, STARTED_S, "a checkpoint")


def command_of_jvm(child: Child) -> list[str]:
    (found,) = [p.cmdline() for p in psutil.Process(child.pid).children(recursive=True) if p.name() == "java"]
    return found


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


def test_sigterm_to_every_process_of_a_service_stops_with_a_last_checkpoint(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SERVICE)
    command = [sys.executable, "-u", "-m", "headgate.cli.__main__", "run", str(program), "--json"]
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
