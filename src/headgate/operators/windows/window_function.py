"""Python functions over the records of one window of one key.

The window operator in front, of any kind, keeps the records and emits them as one list per window and key
(``rows_of_window``). This operator calls the function with each list and has no state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.codec.exact_values import MisfitError
from headgate.dataclass import dataclass
from headgate.operators.base import Operator, OperatorContext, Output
from headgate.operators.checkpoint_listeners import own_function_of
from headgate.operators.functions import RowWriter, divert_misfits, divert_refused, paused_gc
from headgate.operators.schemas import columns_of_frame, refuse_twice
from headgate.operators.user_functions import FunctionOperator, UserFunctionError, shortened, user_traceback
from headgate.operators.windows.window_plan import ALL_ROWS


def rows_of_window(schema: pa.Schema) -> pl.Expr:
    """Return the aggregate that keeps the records of a window, in the order in which they came."""
    return pl.struct(*map(pl.col, schema.names)).alias(ALL_ROWS)


@dataclass(frozen=True)
class WindowFunctionSpec:
    """Call a function with each window.

    Attributes:
        keys: the columns of the key.
        function: ``function(key, rows)``, or ``function(total, row)`` if ``is_reduce``.
        values: the schema of what it returns, without the key.
    """

    keys: tuple[str, ...]
    function: Callable[..., Any]
    values: pa.Schema
    is_reduce: bool

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return WindowFunctionOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return what is known of the window, and the columns of the function's results.

        Raises:
            UsageError: two columns have the same name.
        """
        output = pa.schema([*(field for field in schema if field.name != ALL_ROWS), *self.values])
        refuse_twice(output, f"operator '{node}': its result, with the key and the bounds of the window,")
        return output


class WindowFunctionOperator(FunctionOperator):
    """Calls the function once per window."""

    def __init__(self, spec: WindowFunctionSpec) -> None:
        self._spec = spec
        self._writer = RowWriter(spec.values)

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._function = own_function_of(context.node, self._spec.function)
        self._open_function(self._function)

    def process(self, batch: pa.RecordBatch) -> None:
        lists = batch.column(ALL_ROWS)
        rows = pl.DataFrame(pa.RecordBatch.from_struct_array(lists.flatten()))
        ends = np.cumsum(lists.value_lengths().to_numpy()).tolist()
        keys = list(zip(*(batch.column(key).to_pylist() for key in self._spec.keys), strict=True))
        parts: list[pa.RecordBatch] = []
        with paused_gc():
            for key, start, end in zip(keys, [0, *ends], ends, strict=False):
                part = rows.slice(start, end - start)
                try:
                    result = self._call(key if len(key) > 1 else key[0], part)
                    parts.append(self._written(result))
                except UserFunctionError:
                    raise
                except Exception as error:
                    record = f"{part.height} records of key {shortened(key if len(key) > 1 else key[0])}"
                    raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
        of = pa.array(np.repeat(np.arange(len(parts)), [part.num_rows for part in parts]))
        about = batch.drop_columns([ALL_ROWS]).take(of)
        whole = pa.concat_batches(parts)
        output = pa.schema([*about.schema, *self._spec.values])
        self.output.emit(pa.RecordBatch.from_arrays([*about.columns, *whole.columns], schema=output))

    def _call(self, key: Any, rows: pl.DataFrame) -> Any:
        if not self._spec.is_reduce:
            return self._function(key, rows)
        total = functools.reduce(self._function, rows.to_dicts())
        if not isinstance(total, dict):
            raise TypeError(f"reduce's function must return a dict, but returned {shortened(total)}")
        return {name: value for name, value in total.items() if name not in self._spec.keys}

    def _written(self, result: Any) -> pa.RecordBatch:
        """Return what the function returned as a batch; what does not fit is diverted."""
        values = self._spec.values
        if isinstance(result, pl.DataFrame):
            try:
                return divert_misfits(self, columns_of_frame(result, values), values)
            except (pa.ArrowException, pl.exceptions.PolarsError, MisfitError) as error:
                raise TypeError(f"the frame that the function returned does not fit its schema: {error}") from None
        given = [] if result is None else [result] if isinstance(result, dict) else result
        found = [self._writer.taken(row) for row in given]
        batch, refused = self._writer.batch(found)
        divert_refused(self, refused)
        return batch
