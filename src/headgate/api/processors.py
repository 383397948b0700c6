"""``transform_with_state``: PySpark's stateful processors on a keyed stream (docs/spec/processors.md).

Counterpart: ``spark.processors``, which is imported only when somebody has such a processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headgate.api.not_yet import refuse_unheard
from headgate.api.records import Records
from headgate.errors import UsageError
from headgate.model.ids import NodeName
from headgate.operators.event_time import event_time

if TYPE_CHECKING:
    from headgate.operators.process.by_key import KeyFunctionSpec


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """The arguments of ``transform_with_state``."""

    processor: Any
    output_schema: Any
    time_mode: str
    initial_state: Any
    event_time_column: str | None
    is_pandas: bool


def processor_operator(keyed: Records, node: NodeName, options: ProcessorOptions) -> KeyFunctionSpec:
    """Return the operator that calls a processor behind ``keyed``.

    Raises:
        UsageError: something that is wrong, or not supported.
    """
    from headgate.spark.processors.definition import processor_spec

    refuse_unheard(f"operator '{node}'", options.processor)
    return processor_spec(
        str(node),
        keyed._keys,
        options.processor,
        keyed._schema,
        output_schema=options.output_schema,
        time_mode=options.time_mode,
        time_column=keyed._time_column,
        initial_state=options.initial_state,
        is_pandas=options.is_pandas,
    )


def time_column_of(keyed: Records, node: NodeName, output: pa.Schema, options: ProcessorOptions) -> str | None:
    """Return where the event time of the results is: the column that is named, or the one that went in (SX14).

    Raises:
        UsageError: there is no such column, it is no time, or the input has no event time.
    """
    column = options.event_time_column
    if column is None:
        return keyed._time_column_in(output)
    if keyed._time_column is None:
        raise UsageError(
            f"operator '{node}': event_time_column needs event times; call .with_timestamps(column) before"
        )
    return event_time(str(node), output, column).column
