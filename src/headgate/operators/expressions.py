"""``filter``, ``select`` and ``with_columns`` with Polars expressions; adjacent ones run as one pass.

An expression must give each record's result from that record alone: batches have no meaning, so an aggregate or a
shift over one would depend on how records happened to be batched. Such expressions are refused (OP1).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.errors import UsageError
from headgate.operators.base import Operator
from headgate.operators.one_record import not_of_one_record
from headgate.operators.schemas import batch_of, describe, empty_frame, frame_of, schema_of_frame
from headgate.operators.user_function import batch_error


class Verb(Enum):
    """What a step does with its expressions."""

    FILTER = "filter"
    SELECT = "select"
    WITH_COLUMNS = "with_columns"


@dataclass(frozen=True)
class Step:
    """One verb as the user wrote it."""

    verb: Verb
    expressions: tuple[pl.Expr, ...]

    def apply(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        """Return ``frame`` after this step."""
        if self.verb is Verb.FILTER:
            return frame.filter(*self.expressions)
        if self.verb is Verb.SELECT:
            return frame.select(*self.expressions)
        return frame.with_columns(*self.expressions)


@dataclass(frozen=True)
class ExpressionsSpec:
    """One or more steps that run as one pass."""

    steps: tuple[Step, ...]

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return ExpressionsOperator(self.steps)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of the results, found by running the steps on an empty frame.

        Raises:
            UsageError: unknown column, wrong type, or an expression that needs other records.
        """
        frame = empty_frame(schema)
        try:
            for step in self.steps:
                for expression in step.expressions:
                    problem = not_of_one_record(expression, frame.lazy().with_columns(expression))
                    if problem:
                        raise UsageError(f"operator '{node}': the expression {expression} {problem}")
                frame = step.apply(frame.lazy()).collect().clear()
            return schema_of_frame(frame)
        except pl.exceptions.PolarsError as error:
            raise UsageError(f"operator '{node}': {_first_line(error)}; the columns are {describe(schema)}") from error


def filter_spec(*predicates: pl.Expr) -> ExpressionsSpec:
    """Keep the records for which every predicate is true (null counts as false)."""
    return ExpressionsSpec((Step(Verb.FILTER, predicates),))


def select_spec(*expressions: pl.Expr) -> ExpressionsSpec:
    """Make records of exactly these expressions."""
    return ExpressionsSpec((Step(Verb.SELECT, expressions),))


def with_columns_spec(*expressions: pl.Expr) -> ExpressionsSpec:
    """Add or replace columns."""
    return ExpressionsSpec((Step(Verb.WITH_COLUMNS, expressions),))


def fuse(specs: Sequence[ExpressionsSpec]) -> ExpressionsSpec:
    """Return one spec that does what adjacent specs do one after another."""
    return ExpressionsSpec(tuple(step for spec in specs for step in spec.steps))


@dataclass(slots=True)
class Tally:
    """How many records one step was given, and how many it passed on."""

    records_in: int = 0
    records_out: int = 0


class ExpressionsOperator(Operator):
    """Runs the steps on each batch: filters as a mask, what stands between them as one Polars query.

    A filter within a query would hand even a batch of a few rows to Polars' pool, at several times its cost.
    ``tallies``: of each step, from the heights of the batches (OM15).
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.tallies = [Tally() for _ in steps]
        self._parts = [tuple(part) for _, part in itertools.groupby(steps, _part_of)]
        self._only: Step | None = steps[0] if len(steps) == 1 and steps[0].verb is Verb.FILTER else None
        self._schema: pa.Schema | None = None

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``."""
        frame = frame_of(batch)
        try:
            results = self._results(frame) if self._only is None else _kept(batch, frame, self._only)
        except pl.exceptions.PolarsError as error:
            raise batch_error(self.context.node, batch.num_rows, error) from None
        if results is not None and results.num_rows:
            self.output.emit(results)

    def _results(self, frame: pl.DataFrame) -> pa.RecordBatch | None:
        first = 0
        for part in self._parts:
            height = frame.height
            frame = _filtered(frame, part[0]) if part[0].verb is Verb.FILTER else _queried(frame, part)
            for tally in self.tallies[first : first + len(part)]:
                tally.records_in += height
                tally.records_out += (height := frame.height)  # only filters change it, and each is a part of its own
            first += len(part)
            if frame.height == 0:
                return None
        if self._schema is None:
            self._schema = schema_of_frame(frame)
        return batch_of(frame, self._schema)


def _part_of(step: Step) -> int:
    """Return what steps of one part have in common: each filter is one, and so is what stands between two of them."""
    return id(step) if step.verb is Verb.FILTER else 0


def _queried(frame: pl.DataFrame, steps: Sequence[Step]) -> pl.DataFrame:
    query = frame.lazy()
    for step in steps:
        query = step.apply(query)
    found = query.collect(engine="in-memory")  # the default one, for long input, costs more per batch
    if found.height == frame.height:
        return found
    return found[np.zeros(frame.height, np.int64)]  # literals alone are one row to Polars, and one for each record here


def _mask(frame: pl.DataFrame, step: Step) -> pl.Series:
    mask = frame.select(pl.all_horizontal(*step.expressions)).to_series()
    return mask if len(mask) == frame.height else mask.new_from_index(0, frame.height)  # of a literal


def _filtered(frame: pl.DataFrame, step: Step) -> pl.DataFrame:
    mask = _mask(frame, step)
    return pl.DataFrame([series.filter(mask) for series in frame.get_columns()])


def _kept(batch: pa.RecordBatch, frame: pl.DataFrame, step: Step) -> pa.RecordBatch:
    return batch.filter(_mask(frame, step).to_arrow())  # as quick as Polars, and nothing is converted back


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
