"""Tumbling event-time windows: which operators an aggregation needs."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from headgate.operators.windows.buffer import WindowBufferSpec
from headgate.operators.windows.combine import WindowCombineSpec
from headgate.operators.windows.merge import WindowMergeSpec
from headgate.operators.windows.plan import TumblingAggregate, WindowShape, decompose, window_shape


@dataclass(frozen=True)
class WindowOperators:
    """The operators of one aggregation.

    ``combine`` (None when an aggregate does not decompose) stands before the hash edge, ``window`` behind it; the
    edge's keys are ``keys``. ``output`` is the schema of the results.
    """

    combine: WindowCombineSpec | None
    window: WindowMergeSpec | WindowBufferSpec
    keys: tuple[str, ...]
    output: pa.Schema


def window_operators(
    aggregate: TumblingAggregate, schema: pa.Schema, node: str, *, may_combine: bool = True
) -> WindowOperators:
    """Return the operators that compute ``aggregate`` over records of ``schema``.

    Args:
        aggregate: what to compute.
        schema: canonical schema of the records.
        node: the operator's name, for messages.
        may_combine: False keeps records even where partial results would do (the results are the same).

    Raises:
        UsageError: unknown column, wrong type, colliding names.
    """
    shape = window_shape(aggregate, schema, node)
    plan = decompose(aggregate, shape, schema) if may_combine else None
    if plan is None:
        kept = _kept(aggregate, shape, schema)
        return WindowOperators(None, WindowBufferSpec(shape, aggregate.aggregates, kept), shape.keys, shape.output)
    return WindowOperators(WindowCombineSpec(plan), WindowMergeSpec(plan), shape.keys, shape.output)


def _kept(aggregate: TumblingAggregate, shape: WindowShape, schema: pa.Schema) -> pa.Schema:
    """Return the columns that have to be kept of each record: all, where an expression selects by pattern."""
    needed = {*shape.keys, shape.time.column}
    for expression in aggregate.aggregates:
        if _selects_by_pattern(expression):
            return schema
        needed.update(expression.meta.root_names())
    return pa.schema([field for field in schema if field.name in needed])


def _selects_by_pattern(expression: pl.Expr) -> bool:
    try:
        return "Selector" in expression.meta.serialize(format="json")
    except pl.exceptions.ComputeError:  # a Python function inside cannot be looked into
        return True
