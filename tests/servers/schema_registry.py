"""A schema registry in memory, on loopback: the few requests that readers make."""

from __future__ import annotations

import base64
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.servers.processes import LOOPBACK


class Registry:
    """What it has, and how it answers.

    Attributes:
        asked: the paths of all requests.
        failures: so many of the next requests are answered with status 503.
        refusal: why a schema that is sent is refused, or "".
        login: ``user:password`` that it demands, or "".
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.failures = 0
        self.login = ""
        self.refusal = ""
        self._schemas: list[dict[str, Any]] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, found = registry._answer(self.path, self.headers.get("Authorization", ""))
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, found = registry._add(self.path, sent)
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self.url = f"http://{LOOPBACK}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def register(self, subject: str, schema: Any, **more: Any) -> int:
        """Add a version of a subject; return the id of its schema."""
        number = len(self._schemas) + 1
        version = 1 + sum(one["subject"] == subject for one in self._schemas)
        text = schema if isinstance(schema, str) else json.dumps(schema)
        made = {
            "subject": subject,
            "version": version,
            "id": number,
            "guid": str(uuid.UUID(int=number)),
            "schema": text,
        }
        self._schemas.append({**made, **more})
        return number

    def _add(self, path: str, sent: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Add a schema, or find the one that is the same."""
        self.asked.append(path)
        if self.refusal:
            return 409, {"error_code": 409, "message": self.refusal}
        _, _, subject, *versions = path.split("/")
        for reference in sent.get("references", ()):
            if not self._found(reference["subject"], str(reference["version"])):
                return 422, {"error_code": 42201, "message": f"no reference {reference['name']}"}
        same = [one for one in self._schemas if one["subject"] == subject and sent.items() <= one.items()]
        if not versions:
            return (200, same[0]) if same else (404, {"error_code": 40403, "message": "not found"})
        text = sent.pop("schema")
        return 200, {"id": same[0]["id"] if same else self.register(subject, text, **sent)}

    def _found(self, subject: str, version: str) -> list[dict[str, Any]]:
        found = [one for one in self._schemas if one["subject"] == subject]
        return [one for one in found if version in ("latest", str(one["version"]))]

    def schemas(self) -> list[dict[str, Any]]:
        """Return all that it has, in the order in which they came."""
        return list(self._schemas)

    def end(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, path: str, authorization: str) -> tuple[int, dict[str, Any]]:
        self.asked.append(path)
        if self.failures > 0:
            self.failures -= 1
            return 503, {"error_code": 50003, "message": "not now"}
        if self.login and authorization != "Basic " + base64.b64encode(self.login.encode()).decode():
            return 401, {"error_code": 401, "message": "Unauthorized"}
        match path.strip("/").split("/"):
            case ["schemas", "ids", number]:
                found = [one for one in self._schemas if str(one["id"]) == number]
            case ["schemas", "guids", guid]:
                found = [one for one in self._schemas if one["guid"] == guid]
            case ["subjects", subject, "versions", version]:
                found = self._found(subject, version)
            case _:
                found = []
        return (200, found[-1]) if found else (404, {"error_code": 40403, "message": "not found"})


@contextmanager
def schema_registry() -> Iterator[Registry]:
    """Give a registry that ends with the block."""
    registry = Registry()
    try:
        yield registry
    finally:
        registry.end()
