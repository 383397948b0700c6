"""A PySpark ``StatefulProcessor`` as a function by key, in both of its forms: the same as under Spark (SX16).

Counterparts: ``operators.process.by_key``, which calls it; ``spark.processors.states``, which the processor sees.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from headgate.codec.exact_values import MisfitError, exact_array
from headgate.codec.zones import unzoned_schema
from headgate.operators.process.by_key import KeyContext, KeyFunction
from headgate.operators.process.functions import StateHandle
from headgate.operators.process.timers import Timer
from headgate.operators.rows import Refused, RowWriter
from headgate.operators.schemas import frame_of
from headgate.operators.types import fitted
from headgate.operators.user_function import shortened
from headgate.spark.processors.states import ProcessorHandle
from headgate.spark.processors.values import Fields, without_zone
from headgate.state.timers import TimeKind


class ProcessorFunction(KeyFunction):
    """Calls the processor's methods; what rows and results are is said by the two forms."""

    def __init__(self, node: str, processor: Any, schema: pa.Schema, kind: TimeKind | None) -> None:
        self._node = node
        self._processor = processor
        self._kind = kind
        self.schema = schema
        self._context: KeyContext

    def open(self, state: StateHandle) -> None:
        """See ``KeyFunction``."""
        self._handle = ProcessorHandle(self._node, self._kind, state)
        self._processor.init(self._handle)

    def begin(self, context: KeyContext) -> None:
        """See ``KeyFunction``."""
        self._context = context
        self._handle.begin(context)

    def process(self, rows: Iterator[Any]) -> Iterable[Any] | None:
        """See ``KeyFunction``."""
        found: Iterable[Any] | None = self._processor.handleInputRows(self._key(), rows, self._times())
        return found

    def begin_with(self, rows: Iterator[Any]) -> None:
        """See ``KeyFunction``. A call for each Row, or for the frame of all of them."""
        for one in rows:
            self._processor.handleInitialState(self._key(), one, self._times())

    def on_timer(self, timer: Timer, context: Any) -> Iterable[Any] | None:
        """See ``KeyFunction``."""
        found: Iterable[Any] | None = self._processor.handleExpiredTimer(
            self._key(), self._times(timer), ExpiredTimerInfo(timer.time_ms)
        )
        return found

    def close(self) -> None:
        """See ``KeyFunction``."""
        self._processor.close()

    def _key(self) -> tuple[Any, ...]:
        key = self._context.key
        return tuple(map(without_zone, key if type(key) is tuple else (key,)))

    def _times(self, timer: Timer | None = None) -> TimerValues:
        """Return what time it is; -1 where the processor has no notion of it (SX11)."""
        if self._kind is None:
            return TimerValues(-1, -1)
        now_ms = self._context.processing_time_ms
        if self._kind is TimeKind.PROCESSING_TIME:
            return TimerValues(now_ms, -1)
        found = self._context.watermark_ms
        passed = [ms for ms in (found, None if timer is None else timer.time_ms) if ms is not None]
        return TimerValues(now_ms, max(passed, default=0))

    @abstractmethod
    def rows(self, batch: pa.RecordBatch) -> Callable[[Sequence[int]], Iterator[Any]]:
        """See ``KeyFunction``."""


class RowFunction(ProcessorFunction):
    """``transformWithState``: Rows in and out."""

    def rows(self, batch: pa.RecordBatch) -> Callable[[Sequence[int]], Iterator[Any]]:
        """See ``KeyFunction``."""
        fields, values = Fields(batch.schema), frame_of(batch).rows()
        return lambda places: (fields.row_of(values[place]) for place in places)

    def begin(self, context: KeyContext) -> None:
        """See ``KeyFunction``."""
        super().begin(context)
        self._writer, self._fields = RowWriter(self.schema), Fields(self.schema)

    def written(self, results: Sequence[Any]) -> tuple[pa.RecordBatch, list[Refused]]:
        """See ``KeyFunction``. A result that does not fit is a bad record (SX8)."""
        rows, refused = [], []
        for result in results:
            try:
                rows.append(self._fields.dict_of(result, by_name=True))
            except (TypeError, ValueError) as error:
                refused.append(Refused(f"the processor returned no row of its schema: {error}", shortened(result)))
        batch, more = self._writer.batch(rows)
        return batch, refused + more


class FrameFunction(ProcessorFunction):
    """``transformWithStateInPandas``: pandas frames in and out."""

    def rows(self, batch: pa.RecordBatch) -> Callable[[Sequence[int]], Iterator[Any]]:
        """See ``KeyFunction``."""
        plain = batch.cast(unzoned_schema(batch.schema))
        whole = plain.to_pandas(coerce_temporal_nanoseconds=True)  # as in Spark

        def frames(places: Sequence[int]) -> Iterator[pd.DataFrame]:
            return iter((whole.iloc[list(places)].reset_index(drop=True),))

        return frames

    def written(self, results: Sequence[Any]) -> tuple[pa.RecordBatch, list[Refused]]:
        """See ``KeyFunction``. A frame that does not fit fails as one (SX8)."""
        batches = [self._batch(result) for result in results]
        table = pa.Table.from_batches(batches, self.schema).combine_chunks()
        found = table.to_batches()
        return found[0] if found else pa.RecordBatch.from_pylist([], schema=self.schema), []

    def _batch(self, frame: Any) -> pa.RecordBatch:
        if not isinstance(frame, pd.DataFrame):
            raise TypeError(f"the processor must yield pandas frames, but yielded {type(frame).__name__}")
        names = list(self.schema.names)
        if all(isinstance(name, str) for name in frame.columns):
            missing = [name for name in names if name not in frame.columns]
            if missing:
                raise ValueError(f"the processor yielded a frame without the column '{missing[0]}'")
            frame = frame[names]
        elif len(frame.columns) != len(names):
            raise ValueError(f"the processor yielded a frame of {len(frame.columns)} columns instead of {names}")
        else:
            frame = frame.set_axis(names, axis="columns")
        if len(frame) == 0:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        columns = [_exact_column(frame[field.name], field) for field in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _exact_column(series: Any, field: pa.Field) -> pa.Array:
    """Return a pandas column in its declared type; what pandas has for missing values is null.

    Raises:
        MisfitError: a value does not fit.
    """
    if series.dtype != object:
        column = pa.Array.from_pandas(series)
        whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        return fitted(whole, field.type, field.name)
    try:
        return exact_array([None if _is_missing(value) else value for value in series], field.type)
    except MisfitError as error:
        raise error.within(field.name) from None


def _is_missing(value: Any) -> bool:
    return value is pd.NA or (isinstance(value, float) and value != value)
