"""``map``, ``flat_map`` and ``filter`` with a Python function on rows (dicts): rules OP2 to OP4."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pyarrow as pa

from headgate.operators.bad_records import bad_records
from headgate.operators.base import Operator, OperatorContext, Output
from headgate.operators.checkpointed.exploring import own_copy_of
from headgate.operators.rows import Refused, Row, RowWriter, paused_gc, rows_of
from headgate.operators.schemas import SchemaLike, as_schema
from headgate.operators.types import fitting_rows
from headgate.operators.unreadable import described_rows, divert_unreadable
from headgate.operators.user_function import shortened, user_error, user_traceback

PROBLEM_CHARS_MAX = 8_000
"""Of a traceback in a bad record, to bound memory."""


class RowVerb(Enum):
    """What is done with the function's result."""

    MAP = "map"
    FLAT_MAP = "flat_map"
    FILTER = "filter"


@dataclass(frozen=True)
class RowFunctionSpec:
    """A Python function on rows.

    ``schema`` describes the results (None: as the input). The function gets a dict of its own, which it may
    change and return. ``diverts_exceptions``: a record for which the function raises is a bad record (OP9).
    """

    verb: RowVerb
    function: Callable[[Row], Any]
    schema: SchemaLike | None = None
    diverts_exceptions: bool = False

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return RowFunctionOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of the results.

        Raises:
            UsageError: ``schema`` has an unknown type.
        """
        return schema if self.schema is None else as_schema(node, self.schema)


class RowFunctionOperator(Operator):
    """Calls the function once per record."""

    def __init__(self, spec: RowFunctionSpec) -> None:
        self._spec = spec
        self._writer: RowWriter | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``."""
        super().open(context, output)
        self.user_object = own_copy_of(context.node, self._spec.function)
        self._spec = replace(self._spec, function=self.user_object)

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        batch = divert_unreadable(self, batch)
        results: list[Any] = []
        verb = self._spec.verb
        if verb is RowVerb.FILTER:
            with paused_gc():
                failed = self._call(rows_of(batch), results, results.append)
            divert_refused(self, failed)
            keep = [bool(value) for value in results]
            self.output.emit(batch if all(keep) else batch.filter(pa.array(keep)))
            return
        if self._writer is None:
            self._writer = RowWriter(self._spec.output_schema(batch.schema, self.context.node))
        # All rows of a flat_map's result, or, if it raises half-way, none.
        kept = results.append if verb is RowVerb.MAP else lambda result: results.extend(list(_each(result)))
        with paused_gc():
            failed = self._call(rows_of(batch), results, kept)
            result, refused = self._writer.batch(results)
        divert_refused(self, failed + refused)
        self.output.emit(result)

    def _call(self, rows: list[Row], results: list[Any], keep: Callable[[Any], None]) -> list[Refused]:
        """Give ``keep`` what the function returns; return the records for which it raised (OP9).

        Raises:
            UserFunctionError: it raised, and exceptions are not diverted.
        """
        function = self._spec.function
        failed: list[Refused] = []
        rest = iter(rows)
        row: Row = {}
        while True:
            try:
                for row in rest:  # after a failure it goes on behind the record that failed
                    keep(function(row))
            except Exception as error:
                if not self._spec.diverts_exceptions:
                    raise user_error(self.context.node, row, error) from None
                failed.append(failure(row, error))
                if self._spec.verb is RowVerb.FILTER:
                    results.append(False)
            else:
                return failed


def failure(record: object, error: Exception) -> Refused:
    """Return the bad record that ``record`` becomes for ``error``; its problem has the traceback behind it."""
    said = "".join(traceback.format_exception_only(error)).strip()
    text = f"the function raised {said}\n{user_traceback(error)}"
    return Refused(text if len(text) <= PROBLEM_CHARS_MAX else text[:PROBLEM_CHARS_MAX] + "…", shortened(record))


def _each(result: Any) -> Iterable[Any]:
    """Return the rows of a flat_map's result: an iterable of dicts, or None for nothing."""
    if result is None:
        return ()
    if isinstance(result, dict):
        raise TypeError("flat_map's function must return an iterable of dicts, but returned one dict; use map")
    return result  # type: ignore[no-any-return]


def divert_misfits(operator: Operator, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Hand results that do not fit ``schema`` over as bad records; return the others, in its types."""
    fitting, problems = fitting_rows(batch, schema)
    refused = []
    for row, problem in problems:
        try:
            record: object = described_rows(batch.slice(row, 1))[0]
        except (ValueError, OverflowError):  # a part of a microsecond
            record = batch.slice(row, 1)
        refused.append(Refused(problem, shortened(record)))
    divert_refused(operator, refused)
    return fitting


def divert_refused(operator: Operator, refused: list[Refused]) -> None:
    """Hand rows that do not fit the output's schema, or that a function failed on, over as bad records."""
    if not refused:
        return
    problems = [r.problem for r in refused]
    records = [r.record for r in refused]
    operator.output.divert(bad_records(operator.context.node, problems, [""] * len(refused), records))
