"""A Spark standalone cluster from the PySpark that pip installed: one master, and workers on it or on other machines.

On loopback it is one master and two workers of one core.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil
import pyspark

from crash.support.processes import STARTED_S, end_session, environment, quick_jvm, session_processes, until
from headgate.spark.prerequisites import JVM_OPTIONS

_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
EXECUTOR = "CoarseGrainedExecutorBackend"
PYTHON = "headgate.spark.python_daemon"
LOOPBACK = "127.0.0.1"


class Cluster:
    """Master and workers; each leads a session of its own, in which its executors and their workers run."""

    def __init__(
        self, directory: Path, host: str = LOOPBACK, cores: Sequence[int] = (1, 1), options_of_all: str = ""
    ) -> None:
        """``cores``: of each worker on the master's machine. ``options_of_all``: of the JVMs of master and workers."""
        self._directory, self._options = directory, options_of_all
        self._home = Path(pyspark.__file__).parent
        self._processes: list[subprocess.Popen[bytes]] = []
        options = ("--host", host, "--port", "0", "--webui-port", "0")
        master_log = self._start("master", "master.Master", *options, host=host)
        found = until(lambda: _MASTER.search(master_log.read_text()), "a Spark master", STARTED_S)
        self.url = found.group(1)
        for number, count in enumerate(cores):
            self.add_worker(f"worker-{number}", host, count, directory / f"work-{number}")

    def add_worker(self, name: str, host: str, cores: int, work: Path, at: Sequence[str] = (), **extra: str) -> None:
        """Start a worker and wait until the master knows it. ``at``: the command that starts others on its machine."""
        options = (
            "--host",
            host,
            "--cores",
            str(cores),
            "--memory",
            f"{cores}g",  # an executor takes one, so that each core may be of another application
            "--webui-port",
            "0",
            "--work-dir",
            str(work),
        )
        log = self._start(name, "worker.Worker", *options, self.url, host=host, at=at, **extra)
        until(lambda: "Successfully registered with master" in log.read_text(), "a Spark worker", STARTED_S)

    def _start(self, name: str, main: str, *arguments: str, host: str, at: Sequence[str] = (), **extra: str) -> Path:
        log = self._directory / f"{name}.txt"
        own = {
            "SPARK_LOCAL_DIRS": str(self._directory / "local"),
            "JDK_JAVA_OPTIONS": quick_jvm()[JVM_OPTIONS],  # of executors, too
            **extra,
        }
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [*at, str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=environment({**self._around(host), **own}),
                start_new_session=True,
            )
        self._processes.append(process)
        return log

    def _around(self, host: str) -> Mapping[str, str]:
        return {
            "SPARK_HOME": str(self._home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": self._options,
            "SPARK_LOCAL_IP": host,
            "SPARK_LOCAL_HOSTNAME": host,
        }

    def executors(self) -> list[psutil.Process]:
        """Return the executor JVMs that are alive."""
        return [p for p in self._own() if EXECUTOR in " ".join(_command(p)) and _name(p) == "java"]

    def strangers(self) -> list[psutil.Process]:
        """Return everything alive that is not the master or a Spark worker: executors, daemons, our workers."""
        daemons = {process.pid for process in self._processes}
        return [p for p in self._own() if p.pid not in daemons and os.path.basename(_name(p)) not in ("bash", "")]

    def pythons(self, but: Collection[int] = ()) -> dict[int, int]:
        """Return the processes in which executors run Python, but for some, and the executor of each."""
        found = {}
        for process in self._own():
            with contextlib.suppress(psutil.Error):
                if process.pid not in but and PYTHON in process.cmdline():
                    executors = [p.pid for p in process.parents() if EXECUTOR in " ".join(_command(p))]
                    found |= dict.fromkeys([process.pid], executors[0]) if executors else {}
        return found

    def assert_idle(self) -> None:
        """No executor and no Python worker is left after an application."""
        until(lambda: not self.strangers(), "the end of all executors and Python workers")

    def close(self) -> None:
        for process in self._processes:
            end_session(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STARTED_S)

    def _own(self) -> list[psutil.Process]:
        return [found for process in self._processes for found in session_processes(process.pid)]


def _name(process: psutil.Process) -> str:
    """Return what it is called; "" when it has ended."""
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []
