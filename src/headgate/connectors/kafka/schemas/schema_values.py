"""Values of whole records that have a schema, of Avro, Protobuf or JSON: each begins with its id, with a registry."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from headgate.connectors.kafka.changes import lines_of
from headgate.connectors.kafka.schemas.avro import AvroEncoder, made_envelope, made_schema
from headgate.connectors.kafka.schemas.protobuf import ProtobufEncoder, ProtobufMessage
from headgate.connectors.kafka.schemas.schema_registry import JSON, PROTOBUF, Reference, RegistryClient, SchemaRegistry
from headgate.environment import Environment


class JsonEncoder:
    """Encodes records of any columns that JSON has (``connectors.encode.check_json``)."""

    def encode(self, batch: pa.RecordBatch, head: bytes) -> pa.Array:
        """Return the values, each after ``head``."""
        binary = pa.large_binary()
        return pc.binary_join_element_wise(pa.scalar(head, binary), lines_of(batch), pa.scalar(b"", binary))


def made_json_schema(columns: pa.Schema, title: str) -> str:
    """Return a JSON Schema for what records with these columns are as JSON.

    Every field may be null, and there are no others: so a field that is added later is compatible by the rules of
    registries.
    """
    made = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **_object(columns)}
    return json.dumps(made)


def _object(fields: Any) -> dict[str, Any]:
    properties = {one.name: _or_null(one.type) for one in fields}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _or_null(dtype: pa.DataType) -> dict[str, Any]:
    null = {"type": "null"}
    return null if pa.types.is_null(dtype) else {"oneOf": [null, _type(dtype)]}


def _type(dtype: pa.DataType) -> dict[str, Any]:
    if pa.types.is_boolean(dtype):
        return {"type": "boolean"}
    if pa.types.is_integer(dtype):
        return {"type": "integer"}
    if pa.types.is_floating(dtype):
        return {"type": "number"}
    if pa.types.is_large_list(dtype):
        return {"type": "array", "items": _or_null(dtype.value_type)}
    if pa.types.is_struct(dtype):
        return _object(dtype)
    return {"type": "string"}


SCHEMA_FORMATS = ("avro", "protobuf", "debezium-avro")
"""Formats that need a schema also without a registry."""

_OF_JSON = ("json", "debezium-json")

_Encoder: TypeAlias = AvroEncoder | ProtobufEncoder | JsonEncoder

_ID_BYTES = 4


class SchemaValues:
    """Makes the values of a sink. The schema is registered before the first one."""

    def __init__(
        self,
        topic: str,
        form: str,
        schema: Mapping[str, Any] | str | type | ProtobufMessage | None,
        registry: SchemaRegistry | None,
        environment: Environment,
        part: str = "value",
    ) -> None:
        """Prepare for values of a format of a sink, or for its keys.

        Args:
            schema: a message of Protobuf, or one of Avro; None: it is made from the columns.
            part: of records, ``"value"`` or ``"key"``.
        """
        self._subject = f"{topic}-{part}"
        self._topic, self._form, self._schema, self._registry, self._environment = (
            topic,
            form,
            schema,
            registry,
            environment,
        )
        self._ready: tuple[_Encoder, bytes] | None = None

    def check(self, columns: pa.Schema) -> _Encoder:
        """Return what encodes records.

        Raises:
            UsageError: records do not fit the schema, or a package is not installed.
        """
        if isinstance(self._schema, ProtobufMessage):
            return ProtobufEncoder(self._schema, columns)
        if self._form in _OF_JSON:
            return JsonEncoder()
        return AvroEncoder(self._avro(columns), columns)

    def begin(self, columns: pa.Schema) -> tuple[_Encoder, bytes]:
        """Return what encodes records, and what their values begin with.

        Raises:
            StorageError: the registry does not answer.
            UsageError: it refuses the schema, or records do not fit it.
        """
        encoder, head = self.check(columns), b""
        if self._registry is not None:
            client, subject = RegistryClient(self._registry, self._environment), self._subject
            if isinstance(self._schema, ProtobufMessage):
                number, index = _registered(client, subject, self._schema), self._schema.index
            elif self._form in _OF_JSON:
                number, index = client.register(subject, made_json_schema(columns, self._topic), JSON), b""
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
        if self._schema is None and self._form == "debezium-avro":
            return made_envelope(columns.field("after").type, self._topic)
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
