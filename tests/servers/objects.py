"""A server of objects, as S3 has them: versitygw, which keeps them in files, or moto, which has them in memory."""

from __future__ import annotations

import os
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.servers.processes import LOOPBACK, Port, ServerProcess, answers

KEY, SECRET, BUCKET = "tests", "tests-of-headgate", "headgate"
OWN = Path(__file__).parents[2] / ".venv-servers" / "bin"
"""Where ``scripts/setup.sh servers`` puts what it installs."""


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=f"{OWN}:{Path.home() / 'go' / 'bin'}")


class ObjectServer:
    """A server with one bucket. ``keeps``: what was put survives its end."""

    def __init__(self, directory: Path, host: str = LOOPBACK) -> None:
        self._place = Port(host)
        self.host, self.port = host, self._place.number
        gateway, moto = program("versitygw"), program("moto_server")
        self.keeps = gateway is not None
        if gateway is not None:
            (directory / "files" / BUCKET).mkdir(parents=True)
            command = [gateway, "--port", f"{host}:{self.port}", "posix", str(directory / "files")]
        elif moto is not None:
            command = [moto, "-H", host, "-p", str(self.port)]
        else:
            pytest.skip("there is no server of objects on this machine (scripts/setup.sh servers gets one)")
        env = {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
        self._process = ServerProcess(command, directory / "log", lambda: answers(self.port, host), **env)
        self._process.start()
        if not self.keeps:  # without signatures, so no client is needed
            request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request).close()

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client finds in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def fail(self) -> None:
        """It is gone, or, where its objects would go with it, it answers nobody."""
        if self.keeps:
            self._process.end(signal.SIGKILL)
        else:
            self._process.send(signal.SIGSTOP)

    def heal(self) -> None:
        if self.keeps:
            self._process.start()
        else:
            self._process.send(signal.SIGCONT)

    def end(self) -> None:
        self._process.end(signal.SIGKILL)
        self._place.close()


@contextmanager
def object_server(directory: Path, host: str = LOOPBACK) -> Iterator[ObjectServer]:
    """Give a server, or skip the test that asks for one."""
    server = ObjectServer(directory, host)
    before = dict(os.environ)
    os.environ.update(server.environment)
    try:
        yield server
    finally:
        for name in server.environment:
            os.environ.pop(name, None)
        os.environ.update(before)
        server.end()
