"""What the log of a Delta table says about the columns of a file, so that readers can pass over it.

Counterpart: ``delta_log``. Source: "Per-file Statistics" in the protocol of Delta.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TEXT_MAX = 32
"""So many characters of a text are in its minimum and maximum."""

_HIGHEST = "\U0010ffff"
_DIGITS_MAX = 15
"""Decimals with more are rounded by readers that take numbers of JSON as floats."""


def delta_stats(metadata: pq.FileMetaData, schema: pa.Schema) -> str:
    """Return the statistics of a file, as far as they are exact: rows, nulls, minima and maxima.

    Minima and maxima are those of all columns or of none: the package deltalake takes a missing one for null, and then
    finds no row of the file.
    """
    nulls: dict[str, Any] = {}
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    is_bounded = bool(groups)
    for index, (names, dtype) in enumerate(leaf for field in schema for leaf in _leaves((), field)):
        if dtype is None or pa.types.is_binary(dtype):
            is_bounded &= len(names) == 1  # readers look for bounds within structs only
            continue
        found = [group.column(index).statistics for group in groups]
        if not found or any(one is None or not one.has_null_count for one in found):
            is_bounded = False
            continue
        _put(nulls, names, sum(one.null_count for one in found))
        bounds = _bounds(found, dtype)
        if bounds is None:
            is_bounded = False
        else:
            _put(lowest, names, bounds[0])
            _put(highest, names, bounds[1])
    stats: dict[str, Any] = {"numRecords": metadata.num_rows, "nullCount": nulls}
    if is_bounded:
        stats |= {"minValues": lowest, "maxValues": highest}
    return json.dumps(stats)


def _leaves(around: tuple[str, ...], field: pa.Field) -> Iterator[tuple[tuple[str, ...], pa.DataType | None]]:
    """Yield the columns of Parquet that a field has, in their order; those in lists and maps have no type here."""
    names = (*around, field.name)
    if pa.types.is_struct(field.type):
        for inner in field.type:
            yield from _leaves(names, inner)
    elif field.type.num_fields:  # a map has its entries, a struct, as its one field
        inner_types = [field.type.field(at) for at in range(field.type.num_fields)]
        for _ in [leaf for inner in inner_types for leaf in _leaves(names, inner)]:
            yield names, None
    else:
        yield names, field.type


def _put(values: dict[str, Any], names: Sequence[str], value: Any) -> None:
    for name in names[:-1]:
        values = values.setdefault(name, {})
    values[names[-1]] = value


def _bounds(found: Sequence[Any], dtype: pa.DataType) -> tuple[Any, Any] | None:
    """Return minimum and maximum in the form of the log; None: they are not known, or have none."""
    some = [one for one in found if one.num_values]
    if not some or not all(one.has_min_max for one in some):
        return None
    try:
        low, high = min(one.min for one in some), max(one.max for one in some)
        bounds = _lower(low, dtype), _upper(high, dtype)
    except (OverflowError, ValueError):  # times that Python does not have
        return None
    return None if None in bounds else bounds


def _lower(value: Any, dtype: pa.DataType) -> Any:
    if pa.types.is_string(dtype):
        return value[:TEXT_MAX] if isinstance(value, str) else None
    if pa.types.is_timestamp(dtype):
        return _moment(value.replace(microsecond=value.microsecond // 1_000 * 1_000), dtype)
    return _exact(value, dtype)


def _upper(value: Any, dtype: pa.DataType) -> Any:
    if pa.types.is_string(dtype) and isinstance(value, str) and len(value) > TEXT_MAX:
        return value[:TEXT_MAX] + _HIGHEST if value[TEXT_MAX] < _HIGHEST else None
    if pa.types.is_string(dtype):
        return value if isinstance(value, str) else None
    if pa.types.is_timestamp(dtype):
        return _moment(value + datetime.timedelta(microseconds=-value.microsecond % 1_000), dtype)
    return _exact(value, dtype)


def _moment(value: datetime.datetime, dtype: pa.DataType) -> str:
    """Return a time in milliseconds, as all readers know it."""
    return value.replace(tzinfo=None).isoformat(timespec="milliseconds") + ("" if dtype.tz is None else "Z")


def _exact(value: Any, dtype: pa.DataType) -> Any:
    if pa.types.is_boolean(dtype):
        return bool(value)
    if pa.types.is_integer(dtype):
        return int(value)
    if pa.types.is_date(dtype):
        return value.isoformat()
    if pa.types.is_decimal(dtype) and len(decimal.Decimal(value).as_tuple().digits) <= _DIGITS_MAX:
        return float(value)
    return None  # of floating-point numbers Parquet leaves NaN out, and readers may not
