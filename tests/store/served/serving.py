"""What the tests of served stores share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.forked import CONTEXT
from tests.servers.proxy import Wire

from headgate.store.client.messages import PROTOCOL_VERSION
from headgate.store.client.remote_store import open_remote_store
from headgate.store.server.server import ServerOptions, StoreServer
from headgate.store.store import Store

TOKEN = "a token of more than sixteen characters"
WAIT_S = 300
SPEAKS = f"Headgate-Protocol: {PROTOCOL_VERSION}"
"""The header that says which version a client speaks."""


@contextmanager
def serving(root: Path, port: int = 0, **options: Any) -> Iterator[StoreServer]:
    """Serve the store in a directory, in this process."""
    with ExitStack() as opened:
        own = Store._open_directory(str(root), None, "owner")  # whatever the tests of this room make of ``open``
        opened.callback(own.close)
        yield opened.enter_context(own.serve(ServerOptions("127.0.0.1", port, **options)))


@contextmanager
def over(wire: Wire) -> Iterator[Store]:
    """Open a store over a wire that can be cut."""
    url = f"headgate://127.0.0.1:{wire.port}"
    served = open_remote_store(url)
    with Store(url, served.catalogue, served.storage, clock=served.clock) as opened:
        yield opened


class ServerProcess:
    """``headgate store serve`` in a process of its own, which can be killed and started again at the same port."""

    def __init__(self, root: Path, port: int) -> None:
        self._root, self._port = root, port
        self._process: subprocess.Popen[str] | None = None
        self.said = self.start()
        """What it said then."""

    @property
    def url(self) -> str:
        return f"headgate://127.0.0.1:{self._port}"

    def start(self) -> dict[str, Any]:
        """Start it; return what it says then."""
        command = [sys.executable, "-m", "headgate.cli", "store", "serve", "--json", "--store", str(self._root)]
        self._process = subprocess.Popen(
            [*command, "--port", str(self._port)], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        return self.line()

    def line(self) -> dict[str, Any]:
        """Return the next thing that it says."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the server ended with {self._process.wait(WAIT_S)}"
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        """End it as a power cut does."""
        self._send(signal.SIGKILL)

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Tell it to stop; return its exit code, and what it said until then."""
        return self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> tuple[int, list[dict[str, Any]]]:
        process, self._process = self._process, None
        if process is None:
            return 0, []
        process.send_signal(number)
        said, _ = process.communicate(timeout=WAIT_S)
        return process.returncode, [json.loads(line) for line in said.splitlines()]


class ForkedServer:
    """A server in a process of its own, without the command line and a token; as ``ServerProcess`` otherwise."""

    def __init__(self, root: Path, port: int) -> None:
        self._root, self._port = root, port
        self.url = f"headgate://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        """Start it; it listens when this returns."""
        reading, writing = CONTEXT.Pipe(duplex=False)
        with reading, writing:
            self._process = CONTEXT.Process(target=_serve, args=(self._root, self._port, writing), daemon=True)
            self._process.start()
            assert reading.poll(WAIT_S), "the server does not listen"
            assert reading.recv_bytes() == b"listens"

    def kill(self) -> None:
        """End it as a power cut does."""
        self._process.kill()
        self._process.join()


def _serve(root: Path, port: int, told: Connection) -> None:
    with serving(root, port):
        told.send_bytes(b"listens")
        signal.pause()
