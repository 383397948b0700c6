"""Which times Python's datetime can hold: those of Arrow reach further, and some are finer.

Counterpart: ``user_functions.divert_unreadable``, which gives functions on rows only records that they can be given
unchanged.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.state.key_hash import column_words

_DAY_US = 86_400_000_000
_YEAR_1_DAY, _YEAR_10000_DAY = -719_162, 2_932_897
"""Days from 1970-01-01 to 0001-01-01 and to 10000-01-01."""

_TIMEDELTA_DAYS_MAX = 999_999_999
_DAY_MS = 86_400_000
_MICROSECOND_NS = 1_000


def unreadable_rows(column: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Return which rows have a time that Python's datetime cannot hold, or None where all can be held."""
    dtype = column.type
    if not _has_times(dtype):
        return None
    if dtype.num_fields:
        return _rows_around(column)
    unreadable = _unreadable(column)
    return unreadable if unreadable.any() else None


def why_unreadable(dtype: pa.DataType) -> str:
    """Return what a time of this type is when ``unreadable_rows`` names it."""
    if _is_fine(dtype):
        return "has a part of a microsecond, which Python's datetime cannot hold; cast it to microseconds before"
    if pa.types.is_duration(dtype):
        return "is longer than Python's timedelta can hold"
    if dtype.num_fields:
        return "has a time or duration that Python's datetime cannot hold"
    return "is outside the years 1 to 9999, which Python's datetime can hold"


def as_numbers(column: pa.Array) -> pa.Array:
    """Return the column with its times as the integers that stand for them."""
    return column.cast(_numbers(column.type))


def _unreadable(column: pa.Array) -> npt.NDArray[np.bool_]:
    words, dtype = column_words(as_numbers(column)), column.type
    if _is_fine(dtype):
        has_part: npt.NDArray[np.bool_] = words % _MICROSECOND_NS != 0
        return has_part
    if pa.types.is_duration(dtype):
        limit = _TIMEDELTA_DAYS_MAX * _DAY_MS
        return (words < -limit) | (words > limit) if dtype.unit == "ms" else np.zeros(len(words), np.bool_)
    day = _DAY_US if pa.types.is_timestamp(dtype) else 1
    return (words < _YEAR_1_DAY * day) | (words >= _YEAR_10000_DAY * day)


def _is_fine(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_time64(dtype) or pa.types.is_duration(dtype)) and dtype.unit == "ns"


def _rows_around(column: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Return in which rows of lists or structs something is unreadable."""
    if pa.types.is_struct(column.type):
        parts = [unreadable_rows(part) for part in column.flatten()]
        found = [part for part in parts if part is not None]
        return np.logical_or.reduce(found) if found else None
    inner = unreadable_rows(column.flatten())
    if inner is None:
        return None
    unreadable = np.zeros(len(column), np.bool_)
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    unreadable[np.repeat(np.arange(len(column)), lengths)[inner]] = True
    return unreadable


def _has_times(dtype: pa.DataType) -> bool:
    if dtype.num_fields:
        return any(_has_times(dtype.field(at).type) for at in range(dtype.num_fields))
    return bool(pa.types.is_timestamp(dtype) or pa.types.is_date32(dtype) or pa.types.is_duration(dtype)) or _is_fine(
        dtype
    )


def _numbers(dtype: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(field.name, _numbers(field.type)) for field in dtype])
    if pa.types.is_large_list(dtype):
        return pa.large_list(_numbers(dtype.value_type))
    if pa.types.is_date32(dtype):
        return pa.int32()
    return pa.int64() if _has_times(dtype) else dtype
