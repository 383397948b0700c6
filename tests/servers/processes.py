"""What every server of the tests is: one process that this one started, on a port of one address."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOOPBACK = "127.0.0.1"

START_S = 600.0
"""A busy machine may take long; nothing is measured by it."""


class Port:
    """A port for a server that is started, and perhaps again: nobody else is given it meanwhile.

    It is bound here, and nobody listens: a server that says SO_REUSEADDR, as ours and most do, can listen on it.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        self._place = socket.socket()
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind((host, 0))
        self.number = int(self._place.getsockname()[1])

    def close(self) -> None:
        """Let others have it."""
        self._place.close()


class ServerProcess:
    """A process that is started, ended and started again with the same command."""

    def __init__(
        self, command: Sequence[str], log: Path, is_ready: Callable[[], bool], *, user: str | None = None, **env: str
    ) -> None:
        self._command, self._log, self._is_ready, self._user = list(command), log, is_ready, user
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._env, user=self._user, cwd="/"
            )
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.end(signal.SIGKILL)
                raise RuntimeError(f"{self._command[0]} did not start: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def end(self, how: signal.Signals) -> None:
        """End it by a signal, and wait until it is gone."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_S)
            self._process = None

    def wait(self) -> None:
        """Wait until it ends by itself."""
        assert self._process is not None
        self._process.wait(START_S)

    def send(self, what: signal.Signals) -> None:
        """Send a signal. After SIGSTOP all its threads have stopped, which takes a while on a busy machine."""
        assert self._process is not None
        self._process.send_signal(what)
        if what is signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED)


def answers(port: int, host: str = LOOPBACK) -> bool:
    """Whether somebody listens on the port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0
