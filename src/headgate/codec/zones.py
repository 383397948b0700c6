"""Time zones of columns: types that differ by nothing else, and columns read with another one.

A moment and a local time are the same number, microseconds since 1970. Releases that knew of no moments stored them as
local times, so what they wrote is read as moments where these are declared (EV12). Counterparts: ``model.zones`` tells
the same by the texts of manifests; ``operators.types`` says which types are canonical. Never changes a number.
"""

from __future__ import annotations

import pyarrow as pa

LOCAL_TIME = pa.timestamp("us")
"""A date and time as a clock on the wall shows it. Which moment that is, the type does not say."""

MOMENT = pa.timestamp("us", tz="UTC")
"""A moment, in whatever zone it was given."""


def unzoned(dtype: pa.DataType) -> pa.DataType:
    """Return a canonical type with local times for moments, at any depth."""
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(field.name, unzoned(field.type)) for field in dtype])
    if pa.types.is_large_list(dtype):
        return pa.large_list(unzoned(dtype.value_type))
    return LOCAL_TIME if dtype == MOMENT else dtype


def unzoned_schema(schema: pa.Schema) -> pa.Schema:
    """Return a canonical schema as it was before there were moments."""
    return pa.schema([pa.field(field.name, unzoned(field.type), field.nullable) for field in schema])


def gains_zones(old: pa.Schema, new: pa.Schema) -> bool:
    """Whether ``old`` is ``new`` but for zones that it does not have."""
    return bool(joined_zones(old, new) == new)


def joined_zones(one: pa.Schema, other: pa.Schema) -> pa.Schema | None:
    """Return moments wherever either of two schemas has them; None if they differ by more than that."""
    if not unzoned_schema(one).equals(unzoned_schema(other)):
        return None
    pairs = zip(one, other, strict=True)
    return pa.schema([pa.field(a.name, _joined(a.type, b.type), a.nullable) for a, b in pairs])


def in_zones_of(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return ``batch`` with the zones of ``schema``, which is all that it may differ by."""
    return batch if batch.schema.equals(schema) else batch.cast(schema)


def _joined(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(one):
        pairs = zip(one, other, strict=True)
        return pa.struct([pa.field(a.name, _joined(a.type, b.type)) for a, b in pairs])
    if pa.types.is_large_list(one):
        return pa.large_list(_joined(one.value_type, other.value_type))
    return MOMENT if MOMENT in (one, other) else one
