"""Schemas when the pipeline is built: between Arrow and Polars, and errors that name operator and columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.types import canonical_schema, schema_text, to_canonical

SchemaLike: TypeAlias = pa.Schema | pl.Schema | Mapping[str, Any]
"""A schema as users give it: pyarrow's, Polars', or ``{"name": type}`` with Python, Polars or pyarrow types."""


def describe(schema: pa.Schema) -> str:
    """Return the columns there are, for a message."""
    return schema_text(schema) or "none"


def require_columns(node: str, schema: pa.Schema, names: Iterable[str]) -> None:
    """Check that ``names`` are columns of ``schema``.

    Raises:
        UsageError: naming operator, column, and the columns there are.
    """
    for name in names:
        if schema.get_field_index(name) < 0:
            raise UsageError(f"operator '{node}': there is no column '{name}'; the columns are {describe(schema)}")


def frame_of(batch: pa.RecordBatch) -> pl.DataFrame:
    """Return ``batch`` as a Polars frame.

    Not with ``from_arrow`` (nor does ``batch_of`` use ``to_arrow``): those hand over to a thread of Polars' pool, which
    costs a small batch ten times what the conversion does.
    """
    return pl.DataFrame(batch)


def empty_frame(schema: pa.Schema) -> pl.DataFrame:
    """Return a frame with ``schema`` and no rows."""
    return pl.DataFrame(schema.empty_table())


def schema_of_frame(frame: pl.DataFrame) -> pa.Schema:
    """Return the canonical Arrow schema of a frame."""
    return canonical_schema(frame.clear().to_arrow(compat_level=pl.CompatLevel.oldest()).schema)


def batch_of(frame: pl.DataFrame, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of ``schema`` (canonical) as one batch, in its types.

    Raises:
        polars.exceptions.ColumnNotFoundError: the frame lacks one.
        MisfitError: a value does not fit.
    """
    return to_canonical(columns_of_frame(frame, schema), schema)


def columns_of_frame(frame: pl.DataFrame, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of ``schema`` as one batch, in the frame's types.

    Raises:
        polars.exceptions.ColumnNotFoundError: the frame lacks one.
    """
    if frame.columns != schema.names:
        frame = frame.select(schema.names)
    columns = [series.to_arrow(compat_level=pl.CompatLevel.oldest()) for series in frame.get_columns()]
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def as_schema(node: str, given: SchemaLike) -> pa.Schema:
    """Return a user's ``schema=`` argument as canonical Arrow schema.

    Raises:
        UsageError: a type is unknown.
    """
    try:
        return canonical_schema(arrow_schema(given))
    except UsageError as error:
        raise UsageError(f"operator '{node}': {error.message}") from error


def arrow_schema(given: SchemaLike) -> pa.Schema:
    """Return a user's ``schema=`` argument as Arrow schema, pyarrow's own types as they are.

    Raises:
        UsageError: a type is unknown.
    """
    if isinstance(given, pa.Schema):
        return given
    if not isinstance(given, Mapping):
        raise UsageError(f"schema= must be a pyarrow or Polars schema, or {{'name': type}}, not {given!r}")
    fields: list[pa.Field] = []
    for name, dtype in given.items():
        if isinstance(dtype, pa.DataType):
            fields.append(pa.field(name, dtype))
            continue
        try:
            fields.append(schema_of_frame(pl.DataFrame(schema={name: dtype})).field(0))
        except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
            raise UsageError(
                f"schema= gives column '{name}' the type {dtype!r}, which is no Python, Polars or pyarrow type that "
                f"Headgate carries ({error})"
            ) from error
    return pa.schema(fields)
