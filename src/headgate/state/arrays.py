"""Columns of fixed width as numpy arrays, and numpy arrays as columns."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
