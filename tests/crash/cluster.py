"""A Spark standalone cluster on loopback, from the PySpark that pip installed: one master, two workers of one core."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

import psutil
import pyspark

from crash.processes import STARTED_S, end_session, environment, quick_jvm, session_processes, until
from headgate.spark.session import JVM_OPTIONS

_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
EXECUTOR = "CoarseGrainedExecutorBackend"


class Cluster:
    """Master and workers; each leads a session of its own, in which its executors and their workers run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._home = Path(pyspark.__file__).parent
        self._processes: list[subprocess.Popen[bytes]] = []
        master_log = self._start("master", "master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        found = until(lambda: _MASTER.search(master_log.read_text()), "a Spark master", STARTED_S)
        self.url = found.group(1)
        for number in range(2):
            work = directory / f"work-{number}"
            options = ("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0")
            log = self._start(f"worker-{number}", "worker.Worker", *options, "--work-dir", str(work), self.url)
            until(lambda log=log: "Successfully registered with master" in log.read_text(), "a Spark worker", STARTED_S)

    def _start(self, name: str, main: str, *arguments: str) -> Path:
        log = self._directory / f"{name}.txt"
        extra = {
            "SPARK_HOME": str(self._home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_LOCAL_DIRS": str(self._directory / "local"),
            "SPARK_LOCAL_HOSTNAME": "127.0.0.1",
            "JDK_JAVA_OPTIONS": quick_jvm()[JVM_OPTIONS],  # of executors, too
        }
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=environment(extra),
                start_new_session=True,
            )
        self._processes.append(process)
        return log

    def executors(self) -> list[psutil.Process]:
        """Return the executor JVMs that are alive."""
        return [p for p in self._own() if p.name() == "java" and EXECUTOR in " ".join(_command(p))]

    def strangers(self) -> list[psutil.Process]:
        """Return everything alive that is not the master or a Spark worker: executors, daemons, our workers."""
        daemons = {process.pid for process in self._processes}
        return [p for p in self._own() if p.pid not in daemons and os.path.basename(p.name()) != "bash"]

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


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []
