"""Event times in a column, as integers of the column's own unit: timestamp, date, or integer milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.schemas import require_columns
from headgate.state.key_hash import column_words

_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class EventTime:
    """How a time column counts: ``ms = value * ms_per_unit // units_per_ms`` (one of them is 1)."""

    column: str
    units_per_ms: int
    ms_per_unit: int

    def values(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return the column in its own unit (nulls: any number)."""
        return column_words(batch.column(self.column))

    def to_ms(self, value: int) -> int:
        """Return ``value`` in milliseconds since 1970, rounded down."""
        return value * self.ms_per_unit // self.units_per_ms

    def windows(self, values: npt.NDArray[np.int64], size_ms: int) -> npt.NDArray[np.int64]:
        """Return the number of the tumbling window of ``size_ms`` that each value lies in (WN1)."""
        if self.ms_per_unit != 1:
            return values * self.ms_per_unit // size_ms
        return values // (size_ms * self.units_per_ms)


def event_time(node: str, schema: pa.Schema, column: str) -> EventTime:
    """Return how ``column`` counts time.

    Raises:
        UsageError: there is no such column, or it is no timestamp, date or integer.
    """
    require_columns(node, schema, [column])
    dtype = schema.field(column).type
    if pa.types.is_timestamp(dtype):
        return EventTime(column, {"s": 1, "ms": 1, "us": 1_000, "ns": 1_000_000}[dtype.unit], 1)
    if pa.types.is_date32(dtype):
        return EventTime(column, 1, _DAY_MS)
    if pa.types.is_integer(dtype):
        return EventTime(column, 1, 1)
    raise UsageError(
        f"operator '{node}': the time column '{column}' must be a timestamp, a date or integer milliseconds "
        f"since 1970, but is {dtype}"
    )
