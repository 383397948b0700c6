"""From a processor and its options to the specification of an operator, with every refusal there is (SX1, SX2, SX13).

Counterpart: ``api.processors``, which asks.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.checkpointed.functions import CheckpointedFunction, CheckpointListener
from headgate.operators.event_time import event_time
from headgate.operators.key_check import check_keys
from headgate.operators.keyed import key_columns
from headgate.operators.process.by_key import KeyFunctionSpec
from headgate.operators.process.cursor import Cursor
from headgate.operators.process.functions import StateHandle
from headgate.operators.process.row_states import RowStates
from headgate.operators.process.spec import opened
from headgate.operators.types import canonical_schema, to_canonical
from headgate.operators.user_function import copied, shortened
from headgate.spark.processors.function import FrameFunction, ProcessorFunction, RowFunction
from headgate.spark.processors.values import SparkSchema, arrow_schema_of
from headgate.state.memory.factory import MemoryStates
from headgate.state.timers import TimeKind
from headgate.state.ttl import StateTime

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
    columns, states = key_columns(schema, keys), MemoryStates()  # nobody ever puts anything into these
    handles = RowStates(node, Cursor(), lambda d: states.by_row(columns, [d]).cells(d), StateTime())
    learning: ProcessorFunction = copied(node, function)
    declared = StateHandle(node, handles)
    descriptors = opened(node, learning, declared)
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
