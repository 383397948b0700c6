"""A PySpark ``StatefulProcessor`` as a function by key, in both forms, and its specification."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from headgate.codec.arrow import unzoned_schema
from headgate.codec.exact_values import MisfitError, exact_array
from headgate.errors import UsageError
from headgate.operators.base import key_columns
from headgate.operators.checkpoint_listeners import CheckpointedFunction, CheckpointListener
from headgate.operators.functions import Refused, RowWriter
from headgate.operators.keys import check_keys
from headgate.operators.process.declarations import declare_states
from headgate.operators.process.key_process import KeyContext, KeyFunction, KeyFunctionSpec
from headgate.operators.process.row_process import StateHandle
from headgate.operators.process.row_state import CurrentKey, RowHandleFactory
from headgate.operators.process.timers import Timer
from headgate.operators.schemas import canonical_schema, fitted, frame_of, to_canonical
from headgate.operators.timestamps import event_time
from headgate.operators.user_functions import copied, shortened
from headgate.spark.stateful_handles import Fields, ProcessorHandle, SparkSchema, arrow_schema_of, without_zone
from headgate.state.backend import TimeKind
from headgate.state.ttl import StateTime
from headgate.state.worker_backends import MemoryStates


class ProcessorFunction(KeyFunction):
    """Calls the processor's methods; what rows and results are is said by the two forms."""

    def __init__(self, node: str, processor: Any, schema: pa.Schema, kind: TimeKind | None) -> None:
        self._node = node
        self._processor = processor
        self._kind = kind
        self.schema = schema
        self._context: KeyContext

    def open(self, state: StateHandle) -> None:
        self._handle = ProcessorHandle(self._node, self._kind, state)
        self._processor.init(self._handle)

    def begin(self, context: KeyContext) -> None:
        self._context = context
        self._handle.begin(context)

    def process(self, rows: Iterator[Any]) -> Iterable[Any] | None:
        found: Iterable[Any] | None = self._processor.handleInputRows(self._key(), rows, self._times())
        return found

    def begin_with(self, rows: Iterator[Any]) -> None:
        """See ``KeyFunction``. A call for each Row, or for the frame of all of them."""
        for one in rows:
            self._processor.handleInitialState(self._key(), one, self._times())

    def on_timer(self, timer: Timer, context: Any) -> Iterable[Any] | None:
        found: Iterable[Any] | None = self._processor.handleExpiredTimer(
            self._key(), self._times(timer), ExpiredTimerInfo(timer.time_ms)
        )
        return found

    def close(self) -> None:
        self._processor.close()

    def _key(self) -> tuple[Any, ...]:
        key = self._context.key
        return tuple(map(without_zone, key if type(key) is tuple else (key,)))

    def _times(self, timer: Timer | None = None) -> TimerValues:
        """Return what time it is; -1 where the processor has no notion of it."""
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
        fields, values = Fields(batch.schema), frame_of(batch).rows()
        return lambda places: (fields.row_of(values[place]) for place in places)

    def begin(self, context: KeyContext) -> None:
        super().begin(context)
        self._writer, self._fields = RowWriter(self.schema), Fields(self.schema)

    def taken(self, result: Any) -> dict[str, Any] | Refused:
        """See ``KeyFunction``. A result that does not fit is a bad record."""
        try:
            return self._writer.taken(self._fields.dict_of(result, by_name=True))  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:
            return Refused(f"the processor returned no row of its schema: {error}", shortened(result))

    def written(self, results: Sequence[Any]) -> tuple[pa.RecordBatch, list[Refused]]:
        refused = [result for result in results if isinstance(result, Refused)]
        batch, more = self._writer.batch([result for result in results if not isinstance(result, Refused)])
        return batch, refused + more


class FrameFunction(ProcessorFunction):
    """``transformWithStateInPandas``: pandas frames in and out."""

    def rows(self, batch: pa.RecordBatch) -> Callable[[Sequence[int]], Iterator[Any]]:
        plain = batch.cast(unzoned_schema(batch.schema))
        whole = plain.to_pandas(coerce_temporal_nanoseconds=True)  # as in Spark

        def frames(places: Sequence[int]) -> Iterator[pd.DataFrame]:
            return iter((whole.iloc[list(places)].reset_index(drop=True),))

        return frames

    def taken(self, result: Any) -> pa.RecordBatch:
        """See ``KeyFunction``. A frame that does not fit fails as one."""
        return self._batch(result)

    def written(self, results: Sequence[Any]) -> tuple[pa.RecordBatch, list[Refused]]:
        table = pa.Table.from_batches(results, self.schema).combine_chunks()
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


INITIAL_BYTES_MAX = 256 << 20
"""The initial state travels to every worker with the program."""

TIME_MODES: dict[str, TimeKind | None] = {
    "none": None,
    "processingtime": TimeKind.PROCESSING_TIME,
    "eventtime": TimeKind.EVENT_TIME,
}
_METHODS = ("init", "handleInputRows", "handleExpiredTimer", "handleInitialState", "close")


def processor_spec(
    node: str,
    keys: tuple[str, ...],
    processor: Any,
    schema: pa.Schema,
    *,
    output_schema: SparkSchema,
    time_mode: str,
    time_column: str | None,
    initial_state: Any,
    is_pandas: bool,
) -> KeyFunctionSpec:
    """Return the spec of ``processor`` on a stream of ``schema``, learning its states from a copy.

    Args:
        node: the operator's name.
        keys: of the stream.
        processor: an instance of a ``StatefulProcessor``, or what has its methods.
        schema: of the input.
        output_schema: of the results.
        time_mode: as in Spark.
        time_column: where the event time of the stream is, if it has one.
        initial_state: a frame or table, or None.
        is_pandas: which form the processor is of.

    Raises:
        UsageError: something that is wrong, or not supported.
        UserFunctionError: its ``init`` raised.
    """
    check_keys(node, schema, keys)
    _check_processor(node, processor)
    kind = _kind_of(node, time_mode)
    time = None
    if kind is TimeKind.EVENT_TIME:
        if time_column is None:
            raise UsageError(
                f"operator '{node}': time_mode=\"eventTime\" needs event times; call .with_timestamps(column) before "
                "key_by and keep that column"
            )
        time = event_time(node, schema, time_column)
    form = FrameFunction if is_pandas else RowFunction
    function = form(node, processor, arrow_schema_of(node, "the output schema", output_schema), kind)
    columns, states = key_columns(schema, keys), MemoryStates()  # nothing is ever put into these
    handles = RowHandleFactory(node, CurrentKey(), lambda d: states.by_row(columns, [d]).cells(d), StateTime())
    learning: ProcessorFunction = copied(node, function)
    declared = StateHandle(node, handles)
    descriptors = declare_states(node, learning, declared)
    learning.close()
    initial = None if initial_state is None else initial_rows(node, initial_state, keys, schema)
    return KeyFunctionSpec(
        keys, function, schema, descriptors, declared.forgotten, kind=kind, time=time, initial=initial
    )


def _check_processor(node: str, processor: Any) -> None:
    if isinstance(processor, type):
        raise UsageError(f"operator '{node}': an instance is needed, such as {processor.__name__}(), not the class")
    missing = [name for name in _METHODS if not callable(getattr(processor, name, None))]
    if missing:
        raise UsageError(
            f"operator '{node}': an instance of a pyspark.sql.streaming.StatefulProcessor is needed, but "
            f"{shortened(processor)} has no method {missing[0]}"
        )
    if isinstance(processor, CheckpointListener | CheckpointedFunction):
        raise UsageError(
            f"operator '{node}': {type(processor).__name__} listens to checkpoints or keeps operator state, and would "
            "not be called, because it is a stateful processor; do that in an operator of its own"
        )


def _kind_of(node: str, time_mode: Any) -> TimeKind | None:
    if not isinstance(time_mode, str) or time_mode.lower() not in TIME_MODES:
        raise UsageError(
            f'operator \'{node}\': time_mode must be "none", "processingTime" or "eventTime", not {time_mode!r}'
        )
    return TIME_MODES[time_mode.lower()]


def initial_rows(node: str, given: Any, keys: tuple[str, ...], schema: pa.Schema) -> pa.RecordBatch:
    """Return the initial state as one batch in canonical types, with the stream's types for the key.

    Raises:
        UsageError: it is no frame, without the key's columns, with null keys, or too large.
    """
    table = _table(node, given)
    missing = [key for key in keys if key not in table.column_names]
    if missing:
        raise UsageError(f"operator '{node}': initial_state has no column '{missing[0]}', which is part of the key")
    if table.nbytes > INITIAL_BYTES_MAX:
        raise UsageError(
            f"operator '{node}': initial_state has {table.nbytes:,} bytes, more than the {INITIAL_BYTES_MAX:,} that "
            "travel with a program; process the rows as a stream of their own, in front of the others"
        )
    try:
        canonical = canonical_schema(table.schema)
        wanted = pa.schema([schema.field(one.name) if one.name in keys else one for one in canonical])
        batches = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]
        batch = to_canonical(batches[0], wanted)
    except (pa.ArrowException, ValueError) as error:
        raise UsageError(f"operator '{node}': initial_state does not fit the key of the stream: {error}") from None
    if any(batch.column(key).null_count for key in keys):
        raise UsageError(f"operator '{node}': initial_state has a null key; leave such rows out")
    return batch


def _table(node: str, given: Any) -> pa.Table:
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    if hasattr(given, "toArrow") and not getattr(given, "isStreaming", False):
        return given.toArrow()
    if hasattr(given, "to_arrow"):
        return given.to_arrow()
    if hasattr(given, "iloc"):
        return pa.Table.from_pandas(given, preserve_index=False)
    raise UsageError(
        f"operator '{node}': initial_state takes a DataFrame of Spark that is no stream, of pandas or of Polars, or an "
        f"Arrow table, with the columns of the key, not {type(given).__name__}"
    )
