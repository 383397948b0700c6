"""A server of objects, as S3 has them: versitygw, which keeps them in files, or moto, which has them in memory."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from tests.servers.processes import LOOPBACK, Port, ServerProcess, answers

KEY, SECRET, BUCKET = "tests", "tests-of-headgate", "headgate"
OWN = Path(__file__).parents[2] / ".venv-servers" / "bin"
"""Where ``scripts/setup.sh servers`` puts what it installs."""


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=f"{OWN}:{Path.home() / 'go' / 'bin'}")


class ObjectServer:
    """A server with one bucket. ``keeps``: what was put survives its end. ``only``: the program that it must be."""

    def __init__(self, directory: Path, host: str = LOOPBACK, only: str = "") -> None:
        self._place = Port(host)
        self.host, self.port = host, self._place.number
        gateway, moto = (program(name) if only in ("", name) else None for name in ("versitygw", "moto_server"))
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
def object_server(directory: Path, host: str = LOOPBACK, only: str = "") -> Iterator[ObjectServer]:
    """Give a server, or skip the test that asks for one."""
    server = ObjectServer(directory, host, only)
    try:
        with in_environment(server.environment):
            yield server
    finally:
        server.end()


@contextmanager
def in_environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


class _Careless(BaseHTTPRequestHandler):
    """Keeps objects in memory; passes over the conditions of a request, as old servers do, and its signature."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        self.objects[self._key] = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self._answer(200, b"")

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if "list-type=2" not in asked.query:
            return self._answer(*((200, self.objects[self._key]) if self._key in self.objects else (404, b"")))
        prefix = parse_qs(asked.query).get("prefix", [""])[0]
        entry = "<Contents><Key>{}</Key><Size>{}</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        found = "".join(entry.format(key, len(self.objects[key])) for key in keys)
        return self._answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        """Delete what the body lists."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", body)
        for key in keys:
            self.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def careless_server() -> Iterator[dict[str, bytes]]:
    """Run a server that replaces what was to be put only if absent; give its objects."""
    objects: dict[str, bytes] = {}
    server = ThreadingHTTPServer((LOOPBACK, 0), type("Careless", (_Careless,), {"objects": objects}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{server.server_port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    try:
        with in_environment(variables):
            yield objects
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
