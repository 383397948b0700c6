"""Python functions over the records of one window of one key.

The window operator in front, of any kind, keeps the records and emits them as one list per window and key
(``rows_of_window``). This operator calls the function with each list and has no state.

Where results are changes, as those of updated sessions are, a list that goes is what the function was called with
before. With retractions it is called with that again, and what it returns is deleted; so the function must return the
same for the same records. Without, a session has one row at most, which the next one replaces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from headgate.codec.exact_values import MisfitError
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.base import Operator, OperatorContext, Output
from headgate.operators.changes import DELETE, INSERT, OP, OP_FIELD, OPS, UPDATE_AFTER, Codes, op_codes, op_column
from headgate.operators.checkpoint_listeners import own_function_of
from headgate.operators.functions import Refused, RowWriter, divert_refused, fitting_and_refused, paused_gc
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
        has_changes: the windows are changes, with a column ``op``, and so are the results.
        retractions: windows that go are there with their records.
    """

    keys: tuple[str, ...]
    function: Callable[..., Any]
    values: pa.Schema
    is_reduce: bool
    has_changes: bool = False
    retractions: bool = False

    def build(self) -> Operator:
        return WindowFunctionOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return what is known of the window, and the columns of the function's results.

        Raises:
            UsageError: two columns have the same name.
        """
        gone = (ALL_ROWS, OP) if self.has_changes else (ALL_ROWS,)
        about = [field for field in schema if field.name not in gone]
        output = pa.schema([*about, *self.values, *([OP_FIELD] if self.has_changes else [])])
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
        codes = op_codes(batch.column(OP)) if self._spec.has_changes else None
        comes = np.ones(batch.num_rows, np.bool_) if codes is None else _COMES[codes]
        lists = batch.column(ALL_ROWS)
        rows = pl.DataFrame(pa.RecordBatch.from_struct_array(lists.flatten()))
        lengths = lists.value_lengths().fill_null(0).to_numpy()
        ends = np.cumsum(lengths).tolist()
        keys = list(zip(*(batch.column(key).to_pylist() for key in self._spec.keys), strict=True))
        parts: list[pa.RecordBatch] = []
        with paused_gc():
            for key, start, end, is_new in zip(keys, [0, *ends], ends, comes.tolist(), strict=False):
                part = rows.slice(start, end - start)
                try:
                    result = self._call(key if len(key) > 1 else key[0], part) if part.height else None
                    found, refused = self._written(result)
                except UserFunctionError:
                    raise
                except Exception as error:
                    record = f"{part.height} records of key {shortened(key if len(key) > 1 else key[0])}"
                    raise UserFunctionError(self.context.node, record, user_traceback(error)) from None
                parts.append(found)
                if is_new:  # of what goes, it was said when it came
                    divert_refused(self, refused)
        counts = np.array([part.num_rows for part in parts], np.int64)
        of, taken = np.repeat(np.arange(len(parts)), counts), np.arange(counts.sum())
        found_codes: Codes | None = None
        if codes is not None and self._spec.retractions:
            found_codes = np.where(comes[of], OPS.index(INSERT), OPS.index(DELETE)).astype(np.int8)
        elif codes is not None:
            self._check_single(counts, keys)
            of, taken, found_codes = _upserts(codes, counts)
        self._emit(batch, of, pa.concat_batches(parts).take(_with_nulls(taken)), found_codes)

    def _emit(self, batch: pa.RecordBatch, of: Rows, values: pa.RecordBatch, codes: Codes | None) -> None:
        """Send results; ``of`` is the window of each."""
        about = batch.drop_columns([ALL_ROWS] if codes is None else [ALL_ROWS, OP]).take(pa.array(of))
        columns, fields = [*about.columns, *values.columns], [*about.schema, *self._spec.values]
        if codes is not None:
            columns, fields = [*columns, op_column(codes)], [*fields, OP_FIELD]
        self.output.emit(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)))

    def _check_single(self, counts: Rows, keys: list[tuple[Any, ...]]) -> None:
        """Check that no window has several rows, of which each would replace the one before.

        Raises:
            UsageError
        """
        if counts.max(initial=0) > 1:
            at = int(np.argmax(counts > 1))
            key = shortened(keys[at] if len(keys[at]) > 1 else keys[at][0])
            raise UsageError(
                f"operator '{self.context.node}': the function returned {counts[at]} rows for a window of key {key}, "
                "whose results replace each other; return one row at most, or give window(...) retractions=True"
            )

    def _call(self, key: Any, rows: pl.DataFrame) -> Any:
        if not self._spec.is_reduce:
            return self._function(key, rows)
        total = functools.reduce(self._function, rows.to_dicts())
        if not isinstance(total, dict):
            raise TypeError(f"reduce's function must return a dict, but returned {shortened(total)}")
        return {name: value for name, value in total.items() if name not in self._spec.keys}

    def _written(self, result: Any) -> tuple[pa.RecordBatch, list[Refused]]:
        """Return what the function returned as a batch, and what of it does not fit."""
        values = self._spec.values
        if isinstance(result, pl.DataFrame):
            try:
                return fitting_and_refused(columns_of_frame(result, values), values)
            except (pa.ArrowException, pl.exceptions.PolarsError, MisfitError) as error:
                raise TypeError(f"the frame that the function returned does not fit its schema: {error}") from None
        given = [] if result is None else [result] if isinstance(result, dict) else result
        return self._writer.batch([self._writer.taken(row) for row in given])


Rows: TypeAlias = npt.NDArray[np.int64]

_COMES = np.array([op in (INSERT, UPDATE_AFTER) for op in OPS])
"""Of each place in ``OPS``, whether the window comes."""


def _upserts(codes: Codes, counts: Rows) -> tuple[Rows, Rows, Codes]:
    """Return the windows that results are of, the row of each among those returned (-1: none), and their codes.

    A window for which no row was returned has none any more.
    """
    has_row = counts > 0
    is_said = has_row | (codes != OPS.index(INSERT))
    rows = np.where(has_row, np.cumsum(counts) - 1, -1)
    found = np.where(has_row, codes, OPS.index(DELETE)).astype(np.int8)
    return np.flatnonzero(is_said), rows[is_said], found[is_said]


def _with_nulls(rows: Rows) -> pa.Array:
    """Return places as a column to take; null where there is none."""
    return pa.array(rows, mask=rows < 0)
