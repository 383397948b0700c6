"""The child processes of the demo: the pipeline (``headgate run … --json``) and the Spark program that writes logs.

Each is started in a process group of its own, and killed by its own id only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parents[1] / "examples" / "log_errors.py"


def log4j_options(log: Path, level: str, detail: str) -> str:
    """Return JVM options with which Spark logs into ``log``."""
    settings = HERE / "log4j2-file.properties"
    return f"-Dlog4j2.configurationFile=file:{settings} -Ddemo.log={log} -Ddemo.level={level} -Ddemo.detail={detail}"


DAEMON = "headgate.spark.python_daemon"
"""Part of the command of the process that forks the workers."""


class PipelineProcess:
    """One run of the pipeline. ``events`` are what ``--json`` printed, each with its time of arrival."""

    def __init__(self, command: list[str], environment: dict[str, str], errors: Path) -> None:
        self.started_s = time.monotonic()
        self._events: list[tuple[float, dict[str, Any]]] = []
        self._errors = errors
        with errors.open("ab") as file:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._events.append((time.monotonic(), json.loads(line)))

    @property
    def pid(self) -> int:
        """Process id of the driver."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def events(self, since_s: float = 0.0) -> list[tuple[float, dict[str, Any]]]:
        """Return the events that arrived at or after ``since_s``."""
        return [(at, event) for at, event in tuple(self._events) if at >= since_s]

    def last_progress(self) -> dict[str, Any] | None:
        """Return the latest progress event."""
        return next((event for _, event in reversed(tuple(self._events)) if event["event"] == "progress"), None)

    def when_processing(self, since_s: float, generation_min: int) -> float | None:
        """Return when records were first seen to flow in a generation, or None."""
        for at, event in self.events(since_s):
            is_new = event["event"] == "progress" and event["generation"] >= generation_min
            if is_new and any(node["records_out"] for node in event["nodes"]):
                return at
        return None

    def checkpoints_count(self, since_s: float) -> int:
        """Return how many checkpoints were completed since then."""
        return sum(event["event"] == "checkpoint" for _, event in self.events(since_s))

    def page(self) -> str:
        """Return where a browser sees it, "" as long as it has not said so."""
        notes = [event["text"] for _, event in self.events() if event["event"] == "note"]
        return next((word for note in notes if note.startswith("page: ") for word in note.split() if "://" in word), "")

    def worker_pids(self) -> list[int]:
        """Return the Python processes that Spark forked for the workers."""
        found = []
        for child in psutil.Process(self.pid).children(recursive=True):
            try:
                is_worker = DAEMON in " ".join(child.cmdline()) and not child.children()
                if is_worker and DAEMON in " ".join(child.parent().cmdline()):
                    found.append(child.pid)
            except (psutil.NoSuchProcess, AttributeError):
                continue
        return sorted(found)

    def kill_driver(self) -> None:
        """SIGKILL the driver; its JVM and workers have to notice by themselves."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; return the exit code.

        Raises:
            subprocess.TimeoutExpired
        """
        code = self._process.wait(timeout_s)
        self._reader.join(5)
        return code

    def terminate(self) -> None:
        """Stop it and wait."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def last_errors(self) -> str:
        """Return the end of what it wrote to standard error."""
        with self._errors.open(encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, 15))


def start_pipeline(root: Path, options: list[str], log: Path | None) -> PipelineProcess:
    """Run the pipeline's command; the same for every start."""
    command = [sys.executable, "-m", "headgate.cli.__main__", "run", str(PROGRAM), "--parallelism", "2", "--json"]
    command += ["--ui", "0", "--"]
    command += ["--store", str(root / "store"), "--checkpoints", str(root / "checkpoints"), *options]
    environment = dict(os.environ)
    if log is not None:
        environment["SPARK_SUBMIT_OPTS"] = log4j_options(log, "info", "info")
    return PipelineProcess(command, environment, root / "pipeline-errors.txt")


def start_workload(root: Path, log: Path) -> subprocess.Popen[bytes]:
    """Run the Spark program that writes the log."""
    environment = {**os.environ, "SPARK_SUBMIT_OPTS": log4j_options(log, "debug", "trace")}
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    with (root / "workload-errors.txt").open("wb") as errors:
        command = [sys.executable, str(HERE / "workload.py"), str(root / "stop-workload")]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)


def kill(pid: int) -> None:
    """SIGKILL one process."""
    os.kill(pid, signal.SIGKILL)
