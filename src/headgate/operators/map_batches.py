"""``map_batches``: a Python function on whole batches, as Polars frame or as Arrow record batch (OP5)."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.base import Operator, OperatorContext, Output
from headgate.operators.checkpoint_listeners import own_copy_of
from headgate.operators.row_functions import divert_misfits
from headgate.operators.schemas import (
    SchemaLike,
    as_schema,
    canonical_schema,
    columns_of_frame,
    frame_of,
    schema_of_frame,
    schema_text,
)
from headgate.operators.user_functions import UserFunctionError, batch_error, user_traceback


@dataclass(frozen=True)
class MapBatchesSpec:
    """A function from batch to batch. How records are batched may change from run to run.

    ``as_arrow`` None means: by the type hint of the function's first parameter, else a Polars frame.
    ``schema`` describes the results; None: found by calling the function with an empty batch.
    """

    function: Callable[[Any], Any]
    schema: SchemaLike | None = None
    as_arrow: bool | None = None

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return MapBatchesOperator(self)

    def wants_arrow(self) -> bool:
        """Whether the function takes ``pa.RecordBatch``."""
        return _hints_arrow(self.function) if self.as_arrow is None else self.as_arrow

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of the results.

        Raises:
            UsageError: the function fails on an empty batch, and no ``schema=`` is given.
        """
        if self.schema is not None:
            return as_schema(node, self.schema)
        empty = pa.RecordBatch.from_pylist([], schema=schema)
        try:
            result = self.function(empty if self.wants_arrow() else frame_of(empty))
        except Exception as error:
            raise UsageError(
                f"operator '{node}': the function failed on an empty batch, by which its schema is found; "
                f"give schema= or correct it.\n{user_traceback(error)}"
            ) from None
        if isinstance(result, pl.DataFrame):
            return schema_of_frame(result)
        if isinstance(result, pa.RecordBatch | pa.Table):
            return canonical_schema(result.schema)
        raise UsageError(
            f"operator '{node}': map_batches' function must return a polars DataFrame or a pyarrow RecordBatch, "
            f"but returned {type(result).__name__}"
        )


class MapBatchesOperator(Operator):
    """Calls the function once per batch."""

    def __init__(self, spec: MapBatchesSpec) -> None:
        self._spec = spec
        self._wants_arrow = spec.wants_arrow()
        self._schema: pa.Schema | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        """See ``Operator``."""
        super().open(context, output)
        self.user_object = own_copy_of(context.node, self._spec.function)
        self._spec = replace(self._spec, function=self.user_object)

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        if self._schema is None:
            self._schema = self._spec.output_schema(batch.schema, self.context.node)
        try:
            result = self._spec.function(batch if self._wants_arrow else frame_of(batch))
        except Exception as error:
            raise batch_error(self.context.node, batch.num_rows, error) from None
        for part in self._batches(result, self._schema):
            self.output.emit(part)

    def _batches(self, result: Any, schema: pa.Schema) -> list[pa.RecordBatch]:
        try:
            if isinstance(result, pl.DataFrame):
                return [divert_misfits(self, columns_of_frame(result, schema), schema)]
            if isinstance(result, pa.RecordBatch | pa.Table):
                result.validate(full=True)  # SE20: what a checkpoint or stream holds of it is read again
            if isinstance(result, pa.RecordBatch):
                return [divert_misfits(self, result, schema)]
            if isinstance(result, pa.Table):
                return [divert_misfits(self, part, schema) for part in result.to_batches()]
        except (pa.ArrowException, pl.exceptions.PolarsError, KeyError, ValueError) as error:
            raise UserFunctionError(
                self.context.node,
                f"a batch of {result.shape[0]} results",
                f"they must have the columns {schema_text(schema)}: {error}",
            ) from None
        raise UserFunctionError(
            self.context.node, f"a result of type {type(result).__name__}", "return a DataFrame or a RecordBatch"
        )


def _hints_arrow(function: Callable[[Any], Any]) -> bool:
    called = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = typing.get_type_hints(called)
    except (NameError, TypeError, AttributeError):
        return False
    hints.pop("return", None)
    first = next(iter(hints.values()), None)
    return first is pa.RecordBatch
