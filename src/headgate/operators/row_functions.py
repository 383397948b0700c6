"""``map``, ``flat_map`` and ``filter`` with a Python function on rows (dicts): rules OP2 to OP4."""

from __future__ import annotations

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
from headgate.operators.unreadable import divert_unreadable
from headgate.operators.user_function import user_error


class RowVerb(Enum):
    """What is done with the function's result."""

    MAP = "map"
    FLAT_MAP = "flat_map"
    FILTER = "filter"


@dataclass(frozen=True)
class RowFunctionSpec:
    """A Python function on rows.

    ``schema`` describes the results (None: as the input). The function gets a dict of its own, which it may
    change and return.
    """

    verb: RowVerb
    function: Callable[[Row], Any]
    schema: SchemaLike | None = None

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
        if self._spec.verb is RowVerb.FILTER:
            with paused_gc():
                keep = [bool(value) for value in self._call(rows_of(batch))]
            self.output.emit(batch if all(keep) else batch.filter(pa.array(keep)))
            return
        if self._writer is None:
            self._writer = RowWriter(self._spec.output_schema(batch.schema, self.context.node))
        with paused_gc():
            rows = rows_of(batch)
            results = self._call(rows) if self._spec.verb is RowVerb.MAP else self._call_flat(rows)
            result, refused = self._writer.batch(results)
        if refused:
            divert_refused(self, refused)
        self.output.emit(result)

    def _call(self, rows: list[Row]) -> list[Any]:
        function = self._spec.function
        results: list[Any] = []
        append = results.append
        try:
            for row in rows:
                append(function(row))
        except Exception as error:
            raise user_error(self.context.node, rows[len(results)], error) from None
        return results

    def _call_flat(self, rows: list[Row]) -> list[Any]:
        function = self._spec.function
        results: list[Any] = []
        at = 0
        try:
            for at, row in enumerate(rows):  # noqa: B007 (read after a failure)
                results.extend(_each(function(row)))
        except Exception as error:
            raise user_error(self.context.node, rows[at], error) from None
        return results


def _each(result: Any) -> Iterable[Any]:
    """Return the rows of a flat_map's result: an iterable of dicts, or None for nothing."""
    if result is None:
        return ()
    if isinstance(result, dict):
        raise TypeError("flat_map's function must return an iterable of dicts, but returned one dict; use map")
    return result  # type: ignore[no-any-return]


def divert_refused(operator: Operator, refused: list[Refused]) -> None:
    """Hand rows that do not fit the output's schema over as bad records."""
    problems = [r.problem for r in refused]
    records = [r.record for r in refused]
    operator.output.divert(bad_records(operator.context.node, problems, [""] * len(refused), records))
