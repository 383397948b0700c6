"""Starting, watching and ending the processes of a test.

Every child is the leader of a session of its own; Spark's JVM, daemons and workers stay in it. So a test can list
and end exactly what it started, whatever died before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from headgate.spark.jvm import QUICK_COMPILER
from headgate.spark.prerequisites import JVM_OPTIONS

TESTS = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("program.py")
HOOK = Path(__file__).parents[1] / "hook"

STARTED_S = 300.0
"""JVM start and registration on a busy machine."""

STEP_S = 600.0
"""Anything that takes longer hangs."""

GONE_S = 120.0
"""Spark waits up to ten seconds for some of its threads; a JVM without driver ends when its input closes."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What has a driver stop, or drain."""

Event = dict[str, Any]


def session_processes(session: int) -> list[psutil.Process]:
    """Return what still runs in the session that a child leads."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_session(session: int) -> None:
    """Kill everything in the session; only of processes that this test started."""
    for process in session_processes(session):
        with contextlib.suppress(psutil.Error):
            process.kill()


def until(condition: Callable[[], Any], what: str, timeout_s: float = STEP_S) -> Any:
    """Look until ``condition`` is true; return what it returned."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(0.02)


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HEADGATE_", "SPARK_", "PYSPARK_"))}
    jvm = os.environ.get(JVM_OPTIONS, "")  # see ``class_archive``
    # The code beside these tests; their parent for those that say where they are from, ``tests.runtime`` for example.
    path = os.pathsep.join([str(HOOK), str(TESTS), str(TESTS.parent / "src"), str(TESTS.parent)])
    return {
        **kept,
        "PYTHONPATH": path,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        JVM_OPTIONS: jvm,
        "HEADGATE_PREPARE": "never",
        **(extra or {}),
    }


def without_spark() -> dict[str, str]:
    """Return the environment of commands and programs that start workers as plain processes, and no JVM."""
    path = [TESTS / "crash" / "without_spark", TESTS, TESTS.parent / "src", TESTS.parent]
    return {"PYTHONPATH": os.pathsep.join(map(str, path))}


def quick_jvm() -> dict[str, str]:
    """Return what ``headgate run`` tells its JVM, for programs that do not tell theirs."""
    return {JVM_OPTIONS: f"{QUICK_COMPILER} {os.environ.get(JVM_OPTIONS, '')}".strip()}


def headgate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "headgate.cli", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=STARTED_S, check=False)


class Child:
    """A process of ``program.py`` (or another command) and what it has told so far."""

    def __init__(self, command: list[str], directory: Path, env: dict[str, str] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / f"stderr-{time.monotonic_ns()}.txt"
        self.events: list[Event] = []
        self.asked_to_end: set[str] = set()
        """Names of its pipelines that this test has told to stop or to drain; "": all of them, by a signal."""
        self._changed = threading.Condition()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,
                env=environment({"HEADGATE_LOG_DIR": str(directory / "logs"), **(env or {})}),
                start_new_session=True,
            )
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                event = {"run": None, "event": "text", "text": line.decode(errors="replace")}
            with self._changed:
                self.events.append(event)
                self._changed.notify_all()
        with self._changed:
            self.events.append({"run": None, "event": "closed"})
            self._changed.notify_all()

    def stderr(self) -> str:
        return self.log.read_text(errors="replace")

    def send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.asked_to_end |= {command[how] for how in ("stop", "drain") if how in command}
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def wait_event(self, is_wanted: Callable[[Event], bool], start: int, timeout_s: float, what: str) -> int:
        """Return the index of the first wanted event at or after ``start``."""
        deadline = time.monotonic() + timeout_s
        index = start
        with self._changed:
            while True:
                while index < len(self.events):
                    if is_wanted(self.events[index]):
                        return index
                    assert self.events[index]["event"] != "closed", self.tale(f"the process ended before {what}")
                    index += 1
                left = deadline - time.monotonic()
                assert left > 0, self.tale(f"{what} did not happen within {timeout_s:.0f} s")
                self._changed.wait(left)

    def tale(self, problem: str) -> str:
        """Return ``problem`` with the last events and the end of the error output."""
        told = [e for e in self.events if e["event"] != "progress"][-25:]
        lines = "\n  ".join(json.dumps(e)[:400] for e in told)
        return f"{problem}\nlast events:\n  {lines}\nstderr:\n{self.stderr()[-4000:]}"

    def signal(self, number: int) -> None:
        if number in ENDING:
            self.asked_to_end.add("")
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the driver process alone."""
        self.process.kill()
        self.process.wait(STEP_S)

    def exit_code(self, timeout_s: float = STEP_S) -> int:
        """Wait for the end of the process."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.tale(f"the process did not end within {timeout_s:.0f} s")) from None
        self._reader.join(STEP_S)
        return code

    def jvm(self) -> int:
        """Return the process id of the driver's JVM."""
        found = [p for p in session_processes(self.pid) if p.name() == "java"]
        assert len(found) == 1, f"{len(found)} JVMs"
        return found[0].pid

    def assert_gone(self) -> None:
        """Nothing that this child started is left: no JVM, no daemon, no worker."""
        deadline = time.monotonic() + GONE_S
        while left := session_processes(self.pid):
            if time.monotonic() > deadline:
                names = [" ".join(p.cmdline())[:200] for p in left]
                raise AssertionError(self.tale(f"still running: {names}"))
            time.sleep(0.05)

    def close(self) -> None:
        end_session(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GONE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    self._reader.join(GONE_S)
                    pipe.close()


class Life:
    """One pipeline in a child; remembers how far its events have been read.

    ``gate``: a file that lets its input end; see ``pipelines.make``.
    """

    def __init__(self, child: Child, name: str, gate: Path | None = None) -> None:
        self.child = child
        self.name = name
        self._gate = gate
        if gate is not None:
            gate.unlink(missing_ok=True)  # of a life before this one
        self.cursor = len(child.events)
        self.begun = self.cursor

    def wait(self, what: str, is_wanted: Callable[[Event], bool], timeout_s: float = STEP_S) -> Event:
        """Return the next wanted event of this pipeline; a failure of the pipeline is one of the test."""

        def fits(event: Event) -> bool:
            if event["run"] != self.name:
                return False
            wanted = is_wanted(event)
            if not wanted and event["event"] in ("failed", "result"):
                raise AssertionError(self.child.tale(f"pipeline ended before {what}: {event}"))
            return wanted

        index = self.child.wait_event(fits, self.cursor, timeout_s, what)
        self.cursor = index + 1
        return self.child.events[index]

    def running(self, after: int = 0, workers: int = 2) -> Event:
        """Wait until a generation above ``after`` runs with all its workers."""
        return self.wait(
            f"a generation above {after} running",
            lambda e: e["event"] == "running" and e["generation"] > after and len(e["workers"]) >= workers,
            STARTED_S,
        )

    def checkpoint(self, count: int = 1) -> Event:
        """Wait for ``count`` more completed checkpoints."""
        event: Event = {}
        for _ in range(count):
            event = self.wait("a checkpoint", lambda e: e["event"] == "checkpoint")
        return event

    def note(self, text: str) -> Event:
        return self.wait(f"a note '{text}'", lambda e: e["event"] == "note" and text in e["text"])

    def restart(self) -> Event:
        return self.wait("a restart", lambda e: e["event"] == "restart")

    def result(self, timeout_s: float = STEP_S) -> Event:
        """Let the input end, unless the pipeline was asked to end before, and wait for the end."""
        if self._gate is not None and not self.child.asked_to_end & {"", self.name}:
            self._gate.touch()
        return self.wait("the result", lambda e: e["event"] == "result", timeout_s)

    def failed(self, timeout_s: float = STEP_S) -> Event:
        return self.wait("the failure", lambda e: e["event"] == "failed", timeout_s)

    def seen(self, kind: str) -> list[Event]:
        """Return every event of one kind so far."""
        return [e for e in self.child.events[self.begun :] if e["run"] == self.name and e["event"] == kind]

    def recoveries_ms(self) -> list[int]:
        """Return how long the recoveries took: from the driver learning of the failure to the next generation."""
        found = (
            re.search(r" runs (?:(\d+) min )?([\d.]+) (ms|s) after the failure", e["text"]) for e in self.seen("note")
        )
        unit = {"ms": 1, "s": 1_000}
        return [int(one[1] or 0) * 60_000 + round(float(one[2]) * unit[one[3]]) for one in found if one is not None]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
