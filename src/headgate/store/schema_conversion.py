"""Events in the schemas that their stream has had: which one they fit, and how they are read in another one.

Counterparts: ``writer``, ``open_transaction`` and ``reader``; ``protocol.store.columns`` decides which schemas a stream
can have one after the other. Source: S77 and S78 of docs/spec/stream-store.md. Never changes a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa

from headgate.errors import CorruptionError
from headgate.model.state_schema import ListOf, Plain, StructOf, ValueType
from headgate.protocol.store.schema_update import Columns, fits_if_small, holds
from headgate.store.schemas import schema_difference
from headgate.store.streams import OtherSchemaError, StreamInfo


class SchemaSource(Protocol):
    """Where schemas are kept: ``catalogue.base.Catalogue``."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    def schemas(self, stream: StreamInfo) -> tuple[pa.Schema, ...]:
        """Return the schemas that a stream has had, by version; the last one is that of now."""


class SchemaHistory:
    """The schemas of one stream. It asks for them when it meets one that it does not know; there are only ever more."""

    def __init__(self, catalogue: SchemaSource, stream: StreamInfo) -> None:
        self._catalogue = catalogue
        self._stream = stream
        self._known: tuple[pa.Schema, ...] = ()

    def of(self, version: int) -> pa.Schema:
        """Return the schema of a version.

        Raises:
            CorruptionError: there is none.
        """
        if version == self._stream.schema_version:
            return self._stream.schema
        if version >= len(self._known):
            self._known = self._catalogue.schemas(self._stream)
        if not 0 <= version < len(self._known):
            where = f"{self._catalogue.path} ({self._stream.name})"
            raise CorruptionError(where, 0, f"schema {version} of the stream", f"{len(self._known)} schemas")
        return self._known[version]

    def fitting(self, schema: pa.Schema) -> int | None:
        """Return the newest version that has these columns; None: the stream has never had them."""
        found = newest_matching(self._known, lambda known: schema_difference(known, schema))
        if found is None:
            self._known = self._catalogue.schemas(self._stream)
            found = newest_matching(self._known, lambda known: schema_difference(known, schema))
        return found


def newest_matching(schemas: Sequence[pa.Schema], difference: Callable[[pa.Schema], str]) -> int | None:
    """Return the newest version from which there is no ``difference``; None if there is none."""
    return next((version for version in reversed(range(len(schemas))) if not difference(schemas[version])), None)


def convert_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return events in ``schema``, another one of their stream: nulls in columns that they do not have (S77).

    Columns that ``schema`` does not have are left out. No copy of columns that stay as they are.

    Raises:
        OtherSchemaError: ``schema`` is an older one, and a value of a widened column does not fit it.
    """
    if batch.schema.equals(schema):
        return batch
    columns = [_column(batch, field) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def columns_of(schema: pa.Schema) -> Columns:
    """Return the columns of a schema without Arrow."""
    return tuple((field.name, _type_of(field.type)) for field in schema)


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    at = batch.schema.get_field_index(field.name)
    if at < 0:
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(at)
    if column.type.equals(field.type):
        return column
    old, new = _type_of(column.type), _type_of(field.type)
    try:
        if holds(old, new) or fits_if_small(old, new):
            return column.cast(field.type)
    except pa.ArrowInvalid:
        pass
    raise OtherSchemaError(f"column '{field.name}' has become {old}, and there is what does not fit {new}")


def _type_of(dtype: pa.DataType) -> ValueType:
    if pa.types.is_large_list(dtype):
        return ListOf(_type_of(dtype.value_type))
    if pa.types.is_struct(dtype):
        return StructOf(tuple((field.name, _type_of(field.type)) for field in dtype))
    return Plain(str(dtype))
