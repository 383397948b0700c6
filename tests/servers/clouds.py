"""Stores of two clouds, on loopback: Azurite, which Microsoft makes for tests, and a stand-in for Google's.

``scripts/setup.sh azure`` gets Azurite. No server of Google's XML protocol, which obstore speaks, is in a registry of
packages: the stand-in answers as Google's documentation of that protocol says.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import signal
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from tests.servers.objects import BUCKET, in_environment
from tests.servers.processes import LOOPBACK, Port, ServerProcess, answers

VERSION = "3.37.0"
AZURITE = Path(__file__).parents[2] / ".cache" / f"azurite-{VERSION}" / "node_modules" / "azurite"
"""Where ``scripts/setup.sh azure`` puts the server."""

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's account, and its key, as its documentation publishes them."""


class AzureServer:
    """Azurite with one container. What was put survives its end."""

    url = f"az://{BUCKET}"

    def __init__(self, directory: Path) -> None:
        self._place = Port()
        self.port = self._place.number
        command = [
            "node", str(AZURITE / "dist/src/blob/main.js"), "--blobHost", LOOPBACK, "--blobPort", str(self.port),
            "--location", str(directory), "--skipApiVersionCheck", "--disableTelemetry",
        ]  # fmt: skip
        self._process = ServerProcess(command, directory / "log", lambda: answers(self.port))
        try:
            self._process.start()
            self._create_container()
        except BaseException:
            self.end()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What a client finds in its environment."""
        return azure_environment(self.port)

    def fail(self) -> None:
        """End it by SIGKILL."""
        self._process.end(signal.SIGKILL)

    def heal(self) -> None:
        """Start it with the data that it has."""
        self._process.start()

    def end(self) -> None:
        """End it for good."""
        self._process.end(signal.SIGKILL)
        self._place.close()

    def _create_container(self) -> None:
        """Send the one request that obstore does not know."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = [f"{name}:{value}" for name, value in headers.items()]
        signed = "\n".join(["PUT", *[""] * 11, *lines, f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}", "restype:container"])
        signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), "sha256")).decode()
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{self.port}/{ACCOUNT}/{BUCKET}?restype=container",
            method="PUT",
            headers={**headers, "Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"},
        )
        urllib.request.urlopen(request).close()


def azure_environment(port: int) -> dict[str, str]:
    """Return what a client of Azurite at ``port`` finds in its environment."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://{LOOPBACK}:{port}/{ACCOUNT}",
        "AZURE_ALLOW_HTTP": "true",
    }


@dataclass
class _Object:
    data: bytes
    generation: int
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class _Google(BaseHTTPRequestHandler):
    """Keeps the objects of one bucket in memory, with a generation each, which a condition may name."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: two would wait for an acknowledgement
    objects: dict[str, _Object]
    lock: threading.Lock
    generations: Iterator[int]

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self._bucket != BUCKET:
            return self._refuse(404, "NoSuchBucket", "The specified bucket does not exist.")
        with self.lock:
            found = self.objects.get(self._key)
            condition = self.headers["x-goog-if-generation-match"]
            if condition is not None and int(condition) != (found.generation if found is not None else 0):
                return self._refuse(412, "PreconditionFailed", "At least one of the pre-conditions did not hold.")
            attributes = {name: value for name, value in self.headers.items() if name.startswith("x-goog-meta-")}
            if (source := self.headers["x-goog-copy-source"]) is not None:
                copied = self.objects.get(unquote(source).lstrip("/").partition("/")[2])
                if copied is None:
                    return self._refuse(404, "NoSuchKey", "The specified key does not exist.")
                data, attributes = copied.data, copied.attributes
            made = self.objects[self._key] = _Object(data, next(self.generations), attributes)
        headers = {"ETag": made.etag, "x-goog-generation": str(made.generation)}
        return self._answer(200, b"", **headers)

    def do_GET(self) -> None:
        if self._bucket != BUCKET:
            return self._refuse(404, "NoSuchBucket", "The specified bucket does not exist.")
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            return self._list(query)
        with self.lock:
            found = self.objects.get(self._key)
        if found is None:
            return self._refuse(404, "NoSuchKey", "The specified key does not exist.")
        if self.headers["If-Match"] not in (None, found.etag):
            return self._refuse(412, "PreconditionFailed", "At least one of the pre-conditions did not hold.")
        headers = {"ETag": found.etag, "x-goog-generation": str(found.generation), **found.attributes}
        if (range_ := self.headers["Range"]) is None:
            return self._answer(200, found.data, **headers)
        first, _, last = range_.removeprefix("bytes=").partition("-")
        data, size = found.data[int(first) : int(last) + 1], len(found.data)
        if not data:
            return self._refuse(416, "InvalidRange", "The requested range cannot be satisfied.")
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{size}"
        return self._answer(206, data, **headers)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        with self.lock:
            found = self.objects.pop(self._key, None)
        if found is None:
            return self._refuse(404, "NoSuchKey", "The specified key does not exist.")
        return self._answer(204, b"")

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, after = (query.get(name, [""])[0] for name in ("prefix", "continuation-token"))
        with self.lock:
            keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
            page = {key: self.objects[key] for key in keys[:1_000]}
        entries = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(found.data)}</Size><ETag>{escape(found.etag)}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, found in page.items()
        ]
        more = f"<NextContinuationToken>{escape(keys[999])}</NextContinuationToken>" if len(keys) > 1_000 else ""
        self._answer(200, f"<ListBucketResult>{''.join(entries)}{more}</ListBucketResult>".encode())

    @property
    def _bucket(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[0]

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(
            status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        )

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class GoogleServer:
    """The stand-in, with one bucket in the memory of this process."""

    url = f"gs://{BUCKET}"

    def __init__(self, directory: Path) -> None:
        handler: dict[str, Any] = {"objects": {}, "lock": threading.Lock(), "generations": iter(range(1, 1 << 62))}
        self._server = ThreadingHTTPServer((LOOPBACK, 0), type("Google", (_Google,), handler))
        self._server.daemon_threads = True
        self.port, self._directory = self._server.server_port, directory
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """What a client finds in its environment."""
        return google_environment(self._directory, self.port)

    def end(self) -> None:
        """End it, with its objects."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def google_environment(directory: Path, port: int) -> dict[str, str]:
    """Return what a client of the stand-in at ``port`` finds; the key file is made in ``directory``."""
    file = directory / f"google-{port}.json"
    account: dict[str, Any] = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
    file.write_text(json.dumps({**account, "gcs_base_url": f"http://{LOOPBACK}:{port}"}))
    return {"GOOGLE_SERVICE_ACCOUNT": str(file), "GOOGLE_ALLOW_HTTP": "true"}


def missing_azurite() -> str | None:
    """Return why there can be no Azurite on this machine, or None."""
    if shutil.which("node") is None:
        return "there is no Node.js for Azurite"
    if not AZURITE.is_dir():
        return "there is no Azurite on this machine (scripts/setup.sh azure gets it, with npm)"
    return None


@contextmanager
def cloud_server(kind: str) -> Iterator[AzureServer | GoogleServer]:
    """Give a store of "azure" or "google", or skip the test that asks for one."""
    if kind == "azure" and (problem := missing_azurite()) is not None:
        pytest.skip(problem)
    directory = Path(tempfile.mkdtemp(prefix=f"headgate-{kind}-"))
    try:
        server = AzureServer(directory) if kind == "azure" else GoogleServer(directory)
        try:
            with in_environment(server.environment):
                yield server
        finally:
            server.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
