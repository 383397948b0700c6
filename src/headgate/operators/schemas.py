"""Canonical Arrow types and schemas, and their conversion from and to Polars.

There is one physical type for each meaning, so that batches flow without casts. A column of another type is
taken over exactly (``fitted``): Arrow's casts would cut times to days and parse texts.

They are what Polars exports at its oldest compatibility level: strings are ``large_string``, binaries
``large_binary``, no dictionaries; a map is a list of its entries, because Polars has no maps. A timestamp with a zone
is a moment in UTC, one without is a local time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.arrow import LOCAL_TIME, MOMENT
from headgate.codec.exact_values import MisfitError, exact_array, misfits
from headgate.errors import UsageError

MAP_FIELDS = ("key", "value")
"""Fields of the structs that the entries of a map become, as Spark's ``map_entries`` names them."""

DECIMAL_DIGITS_MAX = 38
"""Of Polars, and of Spark."""


def canonical_type(dtype: pa.DataType, what: str = "column") -> pa.DataType:
    """Return the canonical form of ``dtype``.

    Raises:
        UsageError: the type is not supported; ``what`` names the column.
    """
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype):
        return pa.large_string()
    if _is_binary(dtype):
        return pa.large_binary()
    if pa.types.is_dictionary(dtype):
        return canonical_type(dtype.value_type, what)
    if isinstance(dtype, pa.BaseExtensionType):
        return canonical_type(dtype.storage_type, what)
    if pa.types.is_timestamp(dtype):
        return LOCAL_TIME if dtype.tz is None else MOMENT
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype):
        return pa.large_list(canonical_type(dtype.value_type, what))
    if pa.types.is_struct(dtype):
        names = [f.name for f in dtype]
        if len(set(names)) != len(names):
            raise UsageError(f"{what} has type {dtype}, with two fields of one name; rename one of them")
        return pa.struct([pa.field(f.name, canonical_type(f.type, what)) for f in dtype])
    if pa.types.is_map(dtype):
        entries = zip(MAP_FIELDS, (dtype.key_type, dtype.item_type), strict=True)
        return pa.large_list(pa.struct([pa.field(name, canonical_type(inner, what)) for name, inner in entries]))
    if pa.types.is_decimal(dtype) and 0 <= dtype.scale <= dtype.precision <= DECIMAL_DIGITS_MAX:  # as Polars has them
        return pa.decimal128(dtype.precision, dtype.scale)
    if pa.types.is_time(dtype):
        return pa.time64("ns")
    if pa.types.is_date(dtype):
        return pa.date32()
    if pa.types.is_float16(dtype):
        return pa.float32()
    if pa.types.is_duration(dtype) and dtype.unit == "s":
        return pa.duration("ms")
    ok = (
        pa.types.is_integer(dtype)
        or pa.types.is_floating(dtype)
        or pa.types.is_boolean(dtype)
        or pa.types.is_duration(dtype)
    )
    if not ok:
        raise UsageError(f"{what} has type {dtype}, which Headgate does not carry; cast it before the source")
    return dtype


def canonical_schema(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` in canonical types, without metadata and with every field nullable.

    Raises:
        UsageError: a type is not supported, two columns have one name, or one has none that Polars can carry.
    """
    refuse_twice(schema, "a schema")
    for i, name in enumerate(schema.names, 1):
        problem = _problem_of_name(name)
        if problem:
            raise UsageError(f"column {i} of {len(schema.names)} {problem}; rename it")
    return pa.schema([pa.field(f.name, canonical_type(f.type, f"column '{f.name}'")) for f in schema])


def _problem_of_name(name: str) -> str:
    """Return why Polars does not carry a column with this name, or nothing."""
    if not name:
        return "has no name"
    if "\0" in name:
        return "has a zero byte in its name"
    if name == "*" or (name.startswith("^") and name.endswith("$")):
        return f"has the name '{name}', which is a pattern in pl.col(...)"
    return ""


def refuse_twice(schema: pa.Schema, where: str) -> None:
    """Refuse columns of one name.

    Raises:
        UsageError
    """
    names = schema.names
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{where} has two columns '{twice}'; rename one of them")


def to_canonical(batch: pa.RecordBatch, schema: pa.Schema | None = None) -> pa.RecordBatch:
    """Return ``batch`` with canonical types (of ``schema`` when given; columns in its order). No copy if equal.

    Raises:
        MisfitError: a column has a value that its type cannot hold, such as a part of a microsecond.
    """
    target = canonical_schema(batch.schema) if schema is None else schema
    if batch.schema.equals(target):
        return batch
    columns = [fitted(batch.column(field.name), field.type, field.name) for field in target]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def with_durations(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return ``batch`` with the durations of ``schema`` where it has numbers for them."""
    columns = []
    for field in schema:
        column = batch.column(field.name)
        if _has_duration(field.type) and not column.type.equals(field.type):
            column = _with_maps(_with_lists(column), field.type).cast(field.type)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def _has_duration(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_duration(dtype)) or any(map(_has_duration, _inner_types(dtype)))


def _inner_types(dtype: pa.DataType) -> list[pa.DataType]:
    return [dtype.field(at).type for at in range(dtype.num_fields)]


def fitting_rows(batch: pa.RecordBatch, schema: pa.Schema) -> tuple[pa.RecordBatch, list[tuple[int, str]]]:
    """Return the rows of ``batch`` that fit ``schema`` in its types, and which others there are and why."""
    try:
        return to_canonical(batch, schema), []
    except MisfitError:
        problems: dict[int, str] = {}
    for field in schema:
        column = batch.column(field.name)
        if column.type.equals(field.type):
            continue
        for misfit in misfits(_values(column), field.type):
            problems.setdefault(misfit.index, f"column {misfit.within(field.name)}")
    fits = np.ones(batch.num_rows, np.bool_)
    fits[list(problems)] = False
    return to_canonical(batch.filter(pa.array(fits)), schema), sorted(problems.items())


def carried(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return ``batch`` in the types of ``schema``, which mean the same, as it comes in or goes out.

    Raises:
        UsageError: a value would become another one; ``where`` names the source.
    """
    try:
        return to_canonical(batch, schema)
    except MisfitError as error:
        raise UsageError(f"{where}: column {error}; round or cast the column before") from error


def fitted(column: pa.Array, dtype: pa.DataType, name: str) -> pa.Array:
    """Return ``column`` as ``dtype``, none of its values changed.

    Raises:
        MisfitError: a value does not fit; its path begins with ``name``.
    """
    if column.type.equals(dtype):
        return column
    if _casts_exactly(column.type, dtype):
        try:
            cast = _with_maps(_with_lists(column), dtype).cast(dtype)
        except (pa.ArrowException, OverflowError):
            pass  # which value it was is found below
        else:
            if _infinities(cast) == _infinities(column):
                return cast
    try:
        return exact_array(_values(column), dtype)
    except MisfitError as error:
        raise error.within(name) from None
    except (ValueError, OverflowError) as error:  # times within it that Python does not have
        raise MisfitError(0, name, str(error), dtype) from None


def encoded_text(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return a dictionary of text with its values and places in the types in which it is handed on."""
    places = column.indices.cast(pa.int32())
    return pa.DictionaryArray.from_arrays(places, column.dictionary.cast(pa.large_string()), safe=False)


def _casts_exactly(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether Arrow's cast changes no value or raises, but for floats that become infinite."""
    types = pa.types
    if given.equals(wanted) or types.is_null(given):
        return True
    if types.is_dictionary(given):
        return _casts_exactly(given.value_type, wanted)
    if isinstance(given, pa.BaseExtensionType):
        return _casts_exactly(given.storage_type, wanted)
    if types.is_map(given) or types.is_map(wanted):
        given, wanted = _canonical_or_given(given), _canonical_or_given(wanted)
        return not types.is_map(given) and not types.is_map(wanted) and _casts_exactly(given, wanted)
    if _is_list(given) and _is_list(wanted):
        return _casts_exactly(given.value_type, wanted.value_type)
    if types.is_struct(given) and types.is_struct(wanted):
        pairs = list(zip(given, wanted, strict=False))
        return len(given) == len(wanted) and all(a.name == b.name and _casts_exactly(a.type, b.type) for a, b in pairs)
    if types.is_integer(given):
        return bool(types.is_integer(wanted) or types.is_floating(wanted))
    if types.is_floating(given):
        return bool(types.is_floating(wanted) or types.is_integer(wanted))
    return any(bool(is_kind(given) and is_kind(wanted)) for is_kind in _KINDS)


def _is_binary(dtype: pa.DataType) -> bool:
    types = pa.types
    is_sized = types.is_fixed_size_binary(dtype) and not types.is_decimal(dtype)
    return bool(is_sized or types.is_binary(dtype) or types.is_large_binary(dtype) or types.is_binary_view(dtype))


_KINDS: tuple[Callable[[pa.DataType], bool], ...] = (
    lambda dtype: pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype),
    _is_binary,
    pa.types.is_timestamp,
    pa.types.is_duration,
    pa.types.is_time,
    pa.types.is_date,
    pa.types.is_decimal,
)
"""Types of one of these kinds hold the same values, up to their size."""


def _canonical_or_given(dtype: pa.DataType) -> pa.DataType:
    try:
        return canonical_type(dtype)
    except UsageError:
        return dtype


def _is_list(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype))


def _infinities(column: pa.Array) -> int:
    """Return how many infinite numbers are in a column."""
    dtype = column.type
    if pa.types.is_floating(dtype):
        return int(pc.sum(pc.is_inf(column)).as_py() or 0)
    if pa.types.is_struct(dtype):
        return sum(map(_infinities, column.flatten()))
    if _is_list(dtype):
        return _infinities(column.flatten())
    if pa.types.is_map(dtype):
        return _infinities(column.keys) + _infinities(column.items)
    return 0


def _values(column: pa.Array) -> list[Any]:
    """Return a column as Python values that are equal to its own: times with nanoseconds are numpy's."""
    if pa.types.is_timestamp(column.type) or pa.types.is_duration(column.type):
        return list(column.to_numpy(zero_copy_only=False))
    found: list[Any] = column.to_pylist()
    return found


def _with_lists(column: pa.Array) -> pa.Array:
    """Return ``column`` with the maps in it as lists of their entries, which Arrow does not cast."""
    dtype = column.type
    if pa.types.is_dictionary(dtype):
        return _with_lists(column.dictionary_decode())
    if not has_map(dtype):
        return column
    whole = pa.concat_arrays([column])  # offsets of a slice begin elsewhere
    if pa.types.is_struct(dtype):
        fields = [_with_lists(whole.field(at)) for at in range(dtype.num_fields)]
        return pa.StructArray.from_arrays(fields, names=dtype.names, mask=whole.is_null())
    if pa.types.is_map(dtype):
        fields = [_with_lists(whole.keys), _with_lists(whole.items)]
        values = pa.StructArray.from_arrays(fields, names=list(MAP_FIELDS))
    else:
        values = _with_lists(whole.values)
    return pa.LargeListArray.from_arrays(whole.offsets.cast(pa.int64()), values, mask=whole.is_null())


def _with_maps(column: pa.Array, dtype: pa.DataType) -> pa.Array:
    """Return ``column`` with its lists of entries as maps where ``dtype``, which is a stream's, has them."""
    if not has_map(dtype):
        return column
    whole = pa.concat_arrays([column])
    if pa.types.is_struct(dtype):
        fields = [_with_maps(whole.field(field.name), field.type) for field in dtype]
        return pa.StructArray.from_arrays(fields, names=[field.name for field in dtype], mask=whole.is_null())
    if not pa.types.is_map(dtype):
        values = _with_maps(whole.values, dtype.value_type)
        return pa.LargeListArray.from_arrays(whole.offsets.cast(pa.int64()), values, mask=whole.is_null())
    entries = whole.flatten()
    keys, items = (entries.field(at) for at in range(2))
    if entries.null_count or keys.null_count:
        raise pa.ArrowInvalid("a map has no key that is null")
    keys, items = _with_maps(keys, dtype.key_type).cast(dtype.key_type), _with_maps(items, dtype.item_type)
    lengths = pc.fill_null(pc.list_value_length(whole), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths.cast(pa.int64()))])
    entry = pa.map_(dtype.key_type, dtype.item_type)
    return pa.MapArray.from_arrays(
        offsets.cast(pa.int32()), keys, items.cast(dtype.item_type), entry, mask=whole.is_null()
    )


def has_map(dtype: pa.DataType) -> bool:
    """Whether ``dtype`` is a map or has one in it."""
    if pa.types.is_struct(dtype):
        return any(has_map(field.type) for field in dtype)
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return has_map(dtype.value_type)
    return bool(pa.types.is_map(dtype))


def schema_text(schema: pa.Schema) -> str:
    """Return ``name: type, …`` for messages and manifests."""
    return ", ".join(f"{f.name}: {f.type}" for f in schema)


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


def columns_of(expressions: Iterable[pl.Expr]) -> frozenset[str] | None:
    """Return which columns expressions read; None: one selects by pattern, or cannot be looked into."""
    found: set[str] = set()
    for expression in expressions:
        try:
            if "Selector" in expression.meta.serialize(format="json"):
                return None
        except pl.exceptions.ComputeError:  # a Python function inside
            return None
        found.update(expression.meta.root_names())
    return frozenset(found)


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
    """Return the canonical Arrow schema of a frame.

    Raises:
        UsageError: a type is not supported.
    """
    for name, dtype in frame.schema.items():
        if isinstance(dtype, pl.Int128 | pl.UInt128):  # Arrow has none, and says so in other words
            raise UsageError(f"column '{name}' has type {dtype}, which Headgate does not carry; cast it to an integer")
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
