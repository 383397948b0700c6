"""Values of whole records that have a schema, of Avro or Protobuf: each begins with its id, if there is a registry."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from headgate.connectors.kafka.schemas.avro_encoder import AvroEncoder, made_schema
from headgate.connectors.kafka.schemas.protobuf_encoder import ProtobufEncoder
from headgate.connectors.kafka.schemas.protobuf_message import ProtobufMessage
from headgate.connectors.kafka.schemas.schema_registry import PROTOBUF, Reference, RegistryClient, SchemaRegistry
from headgate.environment import Environment

SCHEMA_FORMATS = ("avro", "protobuf")

_ID_BYTES = 4


class SchemaValues:
    """Makes the values of a sink. The schema is registered before the first one."""

    def __init__(
        self,
        topic: str,
        schema: Mapping[str, Any] | str | type | ProtobufMessage | None,
        registry: SchemaRegistry | None,
        environment: Environment,
    ) -> None:
        """``schema``: a message of Protobuf, or one of Avro; None: one of Avro is made from the columns."""
        self._topic, self._schema, self._registry, self._environment = topic, schema, registry, environment
        self._ready: tuple[AvroEncoder | ProtobufEncoder, bytes] | None = None

    def check(self, columns: pa.Schema) -> AvroEncoder | ProtobufEncoder:
        """Return what encodes records.

        Raises:
            UsageError: records do not fit the schema, or a package is not installed.
        """
        if isinstance(self._schema, ProtobufMessage):
            return ProtobufEncoder(self._schema, columns)
        return AvroEncoder(self._avro(columns), columns)

    def begin(self, columns: pa.Schema) -> tuple[AvroEncoder | ProtobufEncoder, bytes]:
        """Return what encodes records, and what their values begin with.

        Raises:
            StorageError: the registry does not answer.
            UsageError: it refuses the schema, or records do not fit it.
        """
        encoder, head = self.check(columns), b""
        if self._registry is not None:
            client, subject = RegistryClient(self._registry, self._environment), f"{self._topic}-value"
            if isinstance(self._schema, ProtobufMessage):
                number, index = _registered(client, subject, self._schema), self._schema.index
            else:
                number, index = client.register(subject, self._avro(columns)), b""
            head = b"\0" + number.to_bytes(_ID_BYTES, "big") + index
        return encoder, head

    def __call__(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the values of records."""
        if self._ready is None:
            self._ready = self.begin(batch.schema)
        encoder, head = self._ready
        return encoder.encode(batch, head)

    def _avro(self, columns: pa.Schema) -> str:
        if self._schema is None:
            return made_schema(columns, self._topic)
        return self._schema if isinstance(self._schema, str) else json.dumps(self._schema)


def _registered(client: RegistryClient, subject: str, message: ProtobufMessage) -> int:
    """Register the files that define a message, each by its name, and the last one as ``subject``; return its id."""
    known: dict[str, Reference] = {}
    *others, own = message.files
    for file in others:
        if not file.is_well_known:
            text, needs = base64.b64encode(file.description).decode(), [known[name] for name in file.needs]
            client.register(file.name, text, PROTOBUF, needs)
            known[file.name] = Reference(file.name, file.name, client.version_of(file.name, text, PROTOBUF, needs))
    text = base64.b64encode(own.description).decode()
    return client.register(subject, text, PROTOBUF, [known[name] for name in own.needs])
