"""What events must be to be stored, found from whole columns.

Counterpart: ``chunks`` refuses what is too large. Source: S37, §2 of docs/spec/stream-store.md.
Never looks at one event at a time.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.errors import UsageError

EVENT_BYTES_MAX = 8 << 20
"""Largest event (S2 of Pravega's defaults): it must fit several times into a reader's memory."""

_Sizes: TypeAlias = npt.NDArray[np.int64]


def check_events(stream: str, batch: pa.RecordBatch) -> None:
    """Check every event of ``batch`` against the limit, and that readers will find the batch sound (SE20).

    Raises:
        UsageError: an event is larger, and the message says which; or a column contradicts itself.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise UsageError(f"a batch for stream '{stream}' cannot be stored: {error}") from error
    if batch.nbytes <= EVENT_BYTES_MAX:
        return
    sizes = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        sizes += value_sizes(column)
    largest = int(sizes.argmax())
    if sizes[largest] > EVENT_BYTES_MAX:
        raise UsageError(
            f"event {largest} of a batch for stream '{stream}' has {sizes[largest]} bytes, the limit is "
            f"{EVENT_BYTES_MAX}; store large objects elsewhere and their path in the event"
        )


def value_sizes(column: pa.Array) -> _Sizes:
    """Return the bytes of each value, offsets and validity not counted; of a type that has no size, its mean."""
    column = _stored(column)
    dtype = column.type
    if _has_bytes(dtype):
        return _filled(pc.binary_length(column))
    if pa.types.is_struct(dtype):
        sizes = np.zeros(len(column), dtype=np.int64)
        for child in column.flatten():
            sizes += value_sizes(child)
        return sizes
    if pa.types.is_map(dtype):
        offsets = column.offsets.to_numpy()
        children = _running(value_sizes(column.keys) + value_sizes(column.items))
        return np.asarray(children[offsets[1:]] - children[offsets[:-1]], dtype=np.int64)
    if _is_list(dtype):
        lengths = _filled(pc.list_value_length(column))
        children, ends = _running(value_sizes(column.flatten())), np.cumsum(lengths)
        return np.asarray(children[ends] - children[ends - lengths], dtype=np.int64)
    return np.full(len(column), _width(column), dtype=np.int64)


def _stored(column: pa.Array) -> pa.Array:
    """Return the same values in a type whose sizes Arrow can tell."""
    dtype = column.type
    if isinstance(dtype, pa.BaseExtensionType):
        return _stored(column.storage)
    if pa.types.is_run_end_encoded(dtype):
        return _stored(pc.run_end_decode(column))
    if pa.types.is_string_view(dtype):
        return column.cast(pa.large_string())
    return column.cast(pa.large_binary()) if pa.types.is_binary_view(dtype) else column


def _running(sizes: _Sizes) -> _Sizes:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


def _width(column: pa.Array) -> int:
    try:
        return max(1, int(column.type.bit_width) // 8)
    except ValueError:  # a union, or nothing but nulls
        return int(-(-column.nbytes // max(1, len(column))))


def _filled(lengths: pa.Array) -> _Sizes:
    return np.asarray(pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False), dtype=np.int64)


def _has_bytes(dtype: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(dtype)
        or pa.types.is_large_string(dtype)
        or pa.types.is_binary(dtype)
        or pa.types.is_large_binary(dtype)
    )


def _is_list(dtype: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(dtype)
        or pa.types.is_large_list(dtype)
        or pa.types.is_fixed_size_list(dtype)
        or pa.types.is_list_view(dtype)
        or pa.types.is_large_list_view(dtype)
    )
