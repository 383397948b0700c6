"""Values as they are kept: columns of fixed width as numpy arrays, and Python values as what is stored of them.

Python values are checked and immutable, and the same before and after a restore. Structs are stored as tuples of their
fields and lists as tuples; ``load`` makes new dicts and lists of them, so that changing an object does not change
state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from headgate.codec.exact_values import described, exact_array
from headgate.dataclass import dataclass

Array: TypeAlias = npt.NDArray[Any]
Mask: TypeAlias = npt.NDArray[np.bool_]


def is_fixed(dtype: pa.DataType) -> bool:
    """Whether values are kept in a numpy array: numbers, booleans and times."""
    return bool(pa.types.is_primitive(dtype))


def to_numpy(values: pa.Array) -> Array:
    """Return a fixed-width column without nulls; times as integers."""
    dtype = values.type
    if pa.types.is_date32(dtype):
        values = values.view(pa.int32())
    elif pa.types.is_temporal(dtype):
        values = values.view(pa.int64())
    found: Array = values.to_numpy(zero_copy_only=False)
    return found


@lru_cache
def storage_type(dtype: pa.DataType) -> np.dtype[Any]:
    """Return the numpy type of ``to_numpy``."""
    return to_numpy(pa.array([], dtype)).dtype


def to_arrow(values: Array, dtype: pa.DataType, valid: Mask | None = None) -> pa.Array:
    """Return the column of ``dtype`` of which ``values`` are the numbers; null where not ``valid``."""
    mask = None if valid is None or valid.all() else ~valid
    column = pa.array(values, mask=mask)
    return column.view(dtype) if pa.types.is_temporal(dtype) else column


_ZONE = ZoneInfo("UTC")
"""Of moments, as Polars and Arrow make them: what was put reads the same as what was restored."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """How values of one type are stored. ``load`` is None where what is stored is the value itself.

    ``store`` raises ValueError, TypeError or OverflowError for values of other types.
    """

    store: Callable[[Any], Any]
    load: Callable[[Any], Any] | None = None

    def loaded(self, stored: Any) -> Any:
        """Return the value for users; None stays None."""
        return stored if self.load is None or stored is None else self.load(stored)


def conversion(dtype: pa.DataType) -> Conversion:
    """Return the conversion of a canonical type."""
    if pa.types.is_struct(dtype):
        return _struct(dtype)
    if pa.types.is_large_list(dtype):
        return _list(dtype)
    return Conversion(_scalar_store(dtype))


def python_values(column: pa.Array) -> list[Any]:
    """Return a column as Python values, as row functions get them (``operators.functions``)."""
    series = pl.from_arrow(column)
    assert isinstance(series, pl.Series)
    return series.to_list()


def keys_of(columns: Sequence[pa.Array]) -> list[Any]:
    """Return key columns as keys of functions by row: values, or tuples of them if there are several columns."""
    found = [python_values(column) for column in columns]
    return found[0] if len(found) == 1 else list(zip(*found, strict=True))


def column_of(stored: Sequence[Any], dtype: pa.DataType) -> pa.Array:
    """Return what is stored of values of a type as a column."""
    if stored and _is_flat(dtype):
        columns = zip(zip(*stored, strict=True), dtype, strict=True)
        return pa.StructArray.from_arrays([pa.array(list(c), f.type) for c, f in columns], fields=list(dtype))
    load = conversion(dtype).load
    return pa.array(stored if load is None else [load(one) for one in stored], dtype)


def stored_of(column: pa.Array) -> list[Any]:
    """Return what is stored of the values of a column, of which none is null."""
    if _is_flat(column.type):
        return list(zip(*(python_values(field) for field in column.flatten()), strict=True))
    store = conversion(column.type).store
    return [store(value) for value in python_values(column)]


def _is_flat(dtype: pa.DataType) -> bool:
    """Whether what is stored is a tuple of the values themselves."""
    return bool(pa.types.is_struct(dtype)) and len(dtype) > 0 and not any(pa.types.is_nested(one.type) for one in dtype)


def mismatch(value: object, error: Exception) -> str:
    """Return the end of a message about a value that a state cannot hold."""
    return f"{described(value)} ({error})"


class RecordConversion:
    """Makes of the values of a record what a restore would return of them, so that nothing depends on restarts."""

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        self._exact = [_exact_type(dtype) for dtype in types]
        self._kept = [_kept(dtype) for dtype in types]
        self._columns: dict[tuple[type, ...], tuple[int, ...]] = {}
        """Those that have to be converted, by the types of all values."""

    def __call__(self, values: tuple[Any, ...], before: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``values`` as they are kept; ``before`` were kept, and a value that is one of them is.

        Raises:
            ValueError, TypeError, OverflowError: one does not fit.
        """
        types = tuple(map(type, values))
        columns = self._columns.get(types)
        if columns is None:
            columns = self._columns[types] = tuple(
                column
                for column, (found, exact) in enumerate(zip(types, self._exact, strict=True))
                if found is not exact and found is not type(None)
            )
        if not columns:
            return values
        kept = list(values)
        for column in columns:
            if kept[column] is not before[column]:
                kept[column] = self._kept[column](kept[column])
        return tuple(kept)


def _kept(dtype: pa.DataType) -> Callable[[Any], Any]:
    made = conversion(dtype)

    def kept(value: Any) -> Any:
        try:
            return made.loaded(made.store(value))
        except (ValueError, TypeError, OverflowError):  # a null, or what only whole columns may have
            return python_values(exact_array([value], dtype))[0]

    return kept


def _scalar_store(dtype: pa.DataType) -> Callable[[Any], Any]:
    """Return a check that lets exact Python types pass quickly and leaves all others to Arrow."""

    def by_arrow(value: Any) -> Any:
        stored = python_values(exact_array([value], dtype))[0]
        if stored is None:
            raise ValueError("it is null")
        return stored

    if pa.types.is_integer(dtype):
        limits = np.iinfo(dtype.to_pandas_dtype())
        low, high = int(limits.min), int(limits.max)
        return lambda value: value if type(value) is int and low <= value <= high else by_arrow(value)
    if pa.types.is_float64(dtype):
        return lambda value: value if type(value) is float else by_arrow(value)
    if pa.types.is_float32(dtype):
        single = struct.Struct("<f")  # raises where the machine's own makes infinity
        return lambda value: single.unpack(single.pack(value))[0] if type(value) is float else by_arrow(value)
    if pa.types.is_large_string(dtype):
        return lambda value: value if type(value) is str and value.isascii() else by_arrow(value)
    if pa.types.is_timestamp(dtype):
        to_plain = _plain_local_time if dtype.tz is None else _plain_moment
        return lambda value: by_arrow(value) if (plain := to_plain(value)) is None else plain
    if pa.types.is_decimal(dtype):
        precision, scale = dtype.precision, dtype.scale
        return lambda value: value if _is_plain_decimal(value, precision, scale) else by_arrow(value)
    exact = _exact_type(dtype)
    return by_arrow if exact is None else (lambda value: value if type(value) is exact else by_arrow(value))


def _plain_local_time(value: Any) -> datetime | None:
    """Return a local time that may be kept as it is, or None."""
    return value if type(value) is datetime and value.tzinfo is None and value.fold == 0 else None


def _plain_moment(value: Any) -> datetime | None:
    """Return a moment as it is kept; without a zone it is in UTC. None: Arrow has to say which moment it is."""
    if type(value) is not datetime or value.fold:
        return None
    if value.tzinfo is _ZONE:
        return value
    return value.replace(tzinfo=_ZONE) if value.tzinfo is None or value.tzinfo is UTC else None


def _is_plain_decimal(value: Any, precision: int, scale: int) -> bool:
    """Whether a decimal is kept as it is: it has the digits of its column, and is no negative zero."""
    if type(value) is not Decimal:
        return False
    is_negative, digits, exponent = value.as_tuple()
    return exponent == -scale and len(digits) <= precision and not (is_negative and digits == (0,))


def _exact_type(dtype: pa.DataType) -> type | None:
    """Return the type that all values have, if those of it are kept as they are wherever they fit."""
    if pa.types.is_boolean(dtype):
        return bool
    if pa.types.is_integer(dtype):
        return int
    if pa.types.is_float64(dtype):
        return float
    if pa.types.is_large_string(dtype):
        return str
    if pa.types.is_large_binary(dtype):
        return bytes
    return date if pa.types.is_date32(dtype) else None


def _struct(dtype: pa.DataType) -> Conversion:
    names = [field.name for field in dtype]
    wanted = set(names)
    inner = [conversion(field.type) for field in dtype]

    def store(value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() != wanted:
            raise TypeError(f"a dict with the fields {names} is needed")
        return tuple(
            None if value[name] is None else field.store(value[name]) for name, field in zip(names, inner, strict=True)
        )

    def load(stored: Any) -> Any:
        return {name: field.loaded(value) for name, field, value in zip(names, inner, stored, strict=True)}

    return Conversion(store, load)


def _list(dtype: pa.DataType) -> Conversion:
    inner = conversion(dtype.value_type)

    def store(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise TypeError("a list is needed")
        return tuple(None if element is None else inner.store(element) for element in value)

    return Conversion(store, lambda stored: [inner.loaded(element) for element in stored])
