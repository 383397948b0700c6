"""A schema registry: schemas by their ids, over the HTTP interface that Confluent's, Karapace and Apicurio have.

Schemas of an id never change, so they are asked for once.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from headgate.codec.avro_schema import AvroType, parse_schema
from headgate.environment import Environment
from headgate.errors import StorageError, UsageError

PATIENCE_MS = 30_000
ANSWER_S = 10.0
ANSWER_BYTES_MAX = 16 << 20
PAUSE_MS_MIN, PAUSE_MS_MAX = 100, 2_000

AVRO, PROTOBUF, JSON = "AVRO", "PROTOBUF", "JSON"
"""Kinds of schemas, as registries name them."""

_WAITING_HELPS = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class SchemaRegistry:
    """Where a schema registry is, and how to log in there.

    Attributes:
        url: ``"http://host:8081"`` or ``"https://host"``, with a path if it has one.
        user: the user's name, if the registry demands a login.
        secret: the environment variable of every worker in which the password is found, as ``"env:NAME"``.
        ca_file: the authority that signed the registry's certificate, PEM; "" uses those that the system trusts.
    """

    url: str
    user: str = ""
    secret: str = field(default="", repr=False)
    ca_file: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError("the url of a schema registry must be like 'http://host:8081'")
        if parts.username or parts.password:
            raise UsageError(
                "the url of a schema registry must have no password; give SchemaRegistry(url, user='...', "
                "secret='env:NAME')"
            )
        if bool(self.user) != bool(self.secret) or (self.secret and not self.secret.startswith("env:")):
            raise UsageError("SchemaRegistry needs user='...' together with secret='env:NAME'")


@dataclass(frozen=True, slots=True)
class Reference:
    """What a schema refers to: by which name it does, and where that is registered."""

    name: str
    subject: str
    version: int


@dataclass(frozen=True, slots=True)
class FoundSchema:
    """A schema as the registry has it.

    Attributes:
        references: what it refers to, in the order in which they are defined.
        kind: as registries name it.
    """

    text: str
    references: tuple[str, ...] = ()
    kind: str = AVRO

    def parse(self, where: str, *, is_partial: bool = False) -> AvroType:
        """Return it as Avro. See ``parse_schema``."""
        if self.kind != AVRO:
            raise UsageError(f"{where}: it is a schema of {self.kind}, not of Avro")
        return parse_schema(self.text, where, self.references, is_partial=is_partial)


class RegistryClient:
    """Asks a registry, for one thread at a time.

    Raises of every method:
        StorageError: it does not answer, for as long as ``patience_ms``.
        UsageError: it refuses the login.
    """

    def __init__(self, registry: SchemaRegistry, environment: Environment, patience_ms: int = PATIENCE_MS) -> None:
        self._registry, self._environment, self._patience_ms = registry, environment, patience_ms
        self._parts = urlsplit(registry.url)

    def by_id(self, schema_id: int) -> FoundSchema | None:
        """Return the schema with an id, or None if the registry does not have it."""
        return self._schema(f"/schemas/ids/{schema_id}")

    def by_guid(self, guid: str) -> FoundSchema | None:
        """Return the schema with a GUID, or None if the registry does not have it."""
        return self._schema(f"/schemas/guids/{guid}")

    def latest(self, subject: str) -> FoundSchema:
        """Return the newest schema of a subject.

        Raises:
            UsageError: there is none, or it is none of Avro.
        """
        found = self._schema(f"/subjects/{quote(subject, safe='')}/versions/latest")
        if found is None:
            raise UsageError(
                f"the schema registry at {self._registry.url} has no subject '{subject}'; register a schema, or give "
                "the source schema=..."
            )
        found.parse(f"the newest schema of subject '{subject}'", is_partial=True)
        return found

    def register(self, subject: str, text: str, kind: str = AVRO, references: Sequence[Reference] = ()) -> int:
        """Add a schema to a subject, unless it has it; return its id.

        Raises:
            UsageError: the registry refuses it, such as one that does not go together with an earlier one.
        """
        return self._number("id", f"/subjects/{quote(subject, safe='')}/versions", text, kind, references)

    def version_of(self, subject: str, text: str, kind: str, references: Sequence[Reference]) -> int:
        """Return as which version a subject has a schema that was registered."""
        return self._number("version", f"/subjects/{quote(subject, safe='')}", text, kind, references)

    def _number(self, wanted: str, path: str, text: str, kind: str, references: Sequence[Reference]) -> int:
        sent: dict[str, Any] = {"schema": text}
        if kind != AVRO:
            sent["schemaType"] = kind
        if references:
            sent["references"] = [asdict(one) for one in references]
        found = self._get(path, json.dumps(sent).encode(), wanted)
        if found is None or not isinstance(found.get(wanted), int):
            raise UsageError(
                f"{self._registry.url}{path} does not answer with its {wanted}; is that a schema registry?"
            )
        return int(found[wanted])

    def _schema(self, path: str) -> FoundSchema | None:
        found = self._get(path)
        if found is None:
            return None
        references: list[str] = []
        for one in found.get("references") or ():
            inner = self._schema(f"/subjects/{quote(str(one['subject']), safe='')}/versions/{one['version']}")
            if inner is None:
                raise UsageError(f"{self._registry.url}{path} refers to '{one['subject']}', which is not there")
            references += [*inner.references, inner.text]
        return FoundSchema(str(found["schema"]), tuple(dict.fromkeys(references)), found.get("schemaType", AVRO))

    def _get(self, path: str, sent: bytes | None = None, wanted: str = "schema") -> dict[str, Any] | None:
        deadline_ms, pause_ms = self._environment.monotonic_ms() + self._patience_ms, PAUSE_MS_MIN
        while True:
            try:
                status, body = self._asked(path, sent)
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            else:
                if status == http.client.OK:
                    return self._json(path, body, wanted)
                if status == http.client.NOT_FOUND:
                    return None
                problem = f"it answers with status {status}"
                if sent is not None and status in (http.client.CONFLICT, http.client.UNPROCESSABLE_ENTITY):
                    said = body.decode(errors="replace")[:500]
                    raise UsageError(f"the schema registry at {self._registry.url}{path} refuses the schema: {said}")
                if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
                    who = f"user '{self._registry.user}'" if self._registry.user else "a client without a login"
                    raise UsageError(
                        f"the schema registry at {self._registry.url} refuses {who} (status {status}); give "
                        "SchemaRegistry(url, user='...', secret='env:NAME') with the right password"
                    )
                if status not in _WAITING_HELPS:
                    raise StorageError("ask the schema registry at", self._registry.url + path, problem, False)
            if self._environment.monotonic_ms() + pause_ms >= deadline_ms:
                raise StorageError("ask the schema registry at", self._registry.url + path, problem)
            self._environment.sleep(pause_ms / 1000)
            pause_ms = min(2 * pause_ms, PAUSE_MS_MAX)

    def _asked(self, path: str, sent: bytes | None) -> tuple[int, bytes]:
        host, port = str(self._parts.hostname), self._parts.port
        connection: http.client.HTTPConnection
        if self._parts.scheme == "https":
            context = ssl.create_default_context(cafile=self._registry.ca_file or None)
            connection = http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        if self._registry.user:
            login = base64.b64encode(f"{self._registry.user}:{self._password()}".encode()).decode()
            headers["Authorization"] = f"Basic {login}"
        try:
            if sent is not None:
                headers["Content-Type"] = "application/vnd.schemaregistry.v1+json"
            method = "GET" if sent is None else "POST"
            connection.request(method, self._parts.path.rstrip("/") + path, sent, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(ANSWER_BYTES_MAX)
        finally:
            connection.close()

    def _password(self) -> str:
        name = self._registry.secret.removeprefix("env:")
        if (found := os.environ.get(name)) is None:
            raise UsageError(
                f"the schema registry's password is not there: set the environment variable {name} on every worker"
            )
        return found

    def _json(self, path: str, body: bytes, wanted: str) -> dict[str, Any]:
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict) or wanted not in found:
            raise UsageError(f"{self._registry.url}{path} does not answer with a {wanted}; is that a schema registry?")
        return found
