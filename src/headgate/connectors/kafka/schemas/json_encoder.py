"""Encodes records as Kafka's values of JSON that begin with the id of a JSON Schema, which is made from the columns."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headgate.connectors.kafka.changes import lines_of


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
