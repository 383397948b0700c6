"""How a windowed aggregation is computed: which aggregates decompose into partial results, and into which.

``len``, ``count``, ``sum``, ``min``, ``max`` and ``mean`` of an expression that looks at one record only decompose:
partial results are made before the shuffle and merged after it (docs/spec/windows.md). If any
aggregate does not, the window keeps its records and Polars aggregates them when it fires.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.errors import UsageError
from headgate.model.state_schema import Form, StateIdentity
from headgate.operators.expressions import elementwise_problem, group_problem
from headgate.operators.keys import check_keys
from headgate.operators.schemas import batch_of, describe, empty_frame, frame_of, schema_of_frame
from headgate.operators.timestamps import EventTime, event_time
from headgate.state.key_index import words_to_array
from headgate.state.window_aggregates import Accumulator, FrozenTable, Kind, Values, wide_values

WINDOW_COLUMN = "__window"
ROWS_COLUMN = "__rows"
START_COLUMN, END_COLUMN = "window_start", "window_end"


class Aggregate(Enum):
    """Aggregates that decompose; the value is the name of Polars' method."""

    LEN = "len"
    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"


@dataclass(frozen=True)
class Measure:
    """One partial result: an accumulator over the values of ``inner`` or (``is_count``) over which are not null."""

    accumulator: Accumulator
    inner: int
    is_count: bool = False


@dataclass(frozen=True)
class Result:
    """One output column: an aggregate of measures (by index), of type ``dtype``."""

    name: str
    aggregate: Aggregate
    measures: tuple[int, ...]
    dtype: pa.DataType


@dataclass(frozen=True)
class TumblingAggregate:
    """A windowed aggregation as the user wrote it: aggregates have the names of their output columns."""

    keys: tuple[str, ...]
    time_column: str
    size_ms: int
    aggregates: tuple[pl.Expr, ...]


@dataclass(frozen=True)
class WindowShape:
    """What every window operator knows: keys, time, size, and the schemas of records and results."""

    keys: tuple[str, ...]
    key_types: tuple[pa.DataType, ...]
    time: EventTime
    size_ms: int
    output: pa.Schema

    def end_ms(self, window: int) -> int:
        """Return the end (excluded) of the window with this number."""
        return (window + 1) * self.size_ms


@dataclass(frozen=True)
class WindowPlan:
    """A decomposed aggregation: expressions over records, partial results of them, and output columns."""

    shape: WindowShape
    inners: tuple[pl.Expr, ...]
    measures: tuple[Measure, ...]
    results: tuple[Result, ...]

    def partial_schema(self) -> pa.Schema:
        """Return the schema of partial results: keys, number of the window, count of records, measures."""
        names = [*self.shape.keys, WINDOW_COLUMN, ROWS_COLUMN]
        types = [*self.shape.key_types, pa.int64(), pa.int64()]
        for i, measure in enumerate(self.measures):
            names.append(f"__partial_{i}")
            types.append(pa.type_for_alias(measure.accumulator.dtype))
        return pa.schema(list(zip(names, types, strict=True)))


def window_shape(aggregate: TumblingAggregate, schema: pa.Schema, node: str) -> WindowShape:
    """Check an aggregation against its input and return its shape.

    Raises:
        UsageError: unknown column, wrong type, no or colliding names, or a size of zero.
    """
    check_keys(node, schema, aggregate.keys)
    time = event_time(node, schema, aggregate.time_column)
    if aggregate.size_ms <= 0:
        raise UsageError(f"operator '{node}': a window must be at least 1 ms long, not {aggregate.size_ms} ms")
    if not aggregate.aggregates:
        raise UsageError(f"operator '{node}': agg needs at least one aggregate, for example n=pl.len()")
    for expression in aggregate.aggregates:
        problem = group_problem(expression)
        if problem:
            raise UsageError(f"operator '{node}': the expression {expression} {problem}")
    try:
        frame = empty_frame(schema).group_by(*aggregate.keys).agg(*aggregate.aggregates)
    except (pl.exceptions.PolarsError, TypeError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise UsageError(f"operator '{node}': {first}; the columns are {describe(schema)}") from error
    types = tuple(schema.field(key).type for key in aggregate.keys)
    keys = [pa.field(name, dtype) for name, dtype in zip(aggregate.keys, types, strict=True)]
    bounds = [pa.field(START_COLUMN, pa.timestamp("us")), pa.field(END_COLUMN, pa.timestamp("us"))]
    found = schema_of_frame(frame)
    output = pa.schema([*keys, *bounds, *(found.field(i) for i in range(len(keys), len(found)))])
    if len(set(output.names)) != len(output.names):
        raise UsageError(f"operator '{node}': two result columns have the same name; they would be {describe(output)}")
    return WindowShape(aggregate.keys, types, time, aggregate.size_ms, output)


def decompose(aggregate: TumblingAggregate, shape: WindowShape, schema: pa.Schema) -> WindowPlan | None:
    """Return the plan of partial results, or None when an aggregate does not decompose."""
    builder = _Builder(schema)
    for expression in aggregate.aggregates:
        if not builder.add(expression, shape.output):
            return None
    return WindowPlan(shape, tuple(builder.inners), tuple(builder.measures), tuple(builder.results))


class _Builder:
    """Collects expressions, measures and results, each measure once."""

    def __init__(self, schema: pa.Schema) -> None:
        self._frame = empty_frame(schema)
        self.inners: list[pl.Expr] = []
        self.measures: list[Measure] = []
        self.results: list[Result] = []

    def add(self, expression: pl.Expr, output: pa.Schema) -> bool:
        """Add one aggregate; return False when it does not decompose."""
        name = expression.meta.output_name(raise_if_undetermined=False)
        recognised = _recognise(expression.meta.undo_aliases(), self._frame)
        if name is None or recognised is None:
            return False
        aggregate, inner = recognised
        measures: tuple[int, ...] = ()
        if inner is not None:
            dtype = schema_of_frame(self._frame.select(inner.alias("x"))).field(0).type
            accumulators = _accumulators(aggregate, dtype)
            if accumulators is None:
                return False
            at = self._inner(inner)
            measures = tuple(self._measure(Measure(a, at, is_count)) for a, is_count in accumulators)
        self.results.append(Result(name, aggregate, measures, output.field(name).type))
        return True

    def _inner(self, inner: pl.Expr) -> int:
        for i, known in enumerate(self.inners):
            if known.meta.eq(inner):
                return i
        self.inners.append(inner)
        return len(self.inners) - 1

    def _measure(self, measure: Measure) -> int:
        if measure not in self.measures:
            self.measures.append(measure)
        return self.measures.index(measure)


def _recognise(expression: pl.Expr, frame: pl.DataFrame) -> tuple[Aggregate, pl.Expr | None] | None:
    """Return the aggregate and its inner expression (None for ``len``), or None when it is no such thing."""
    if expression.meta.eq(pl.len()):
        return Aggregate.LEN, None
    inputs = expression.meta.pop()
    if len(inputs) != 1:
        return None
    inner = inputs[0]
    for aggregate in Aggregate:
        if getattr(inner, aggregate.value)().meta.eq(expression):
            if not _is_simple(inner, frame):
                return None
            return aggregate, None if aggregate is Aggregate.LEN else inner
    return None


def _is_simple(inner: pl.Expr, frame: pl.DataFrame) -> bool:
    """Whether ``inner`` gives one value per record, from that record alone."""
    text = inner.meta.serialize(format="json")
    has_columns = bool(inner.meta.root_names()) and not inner.meta.has_multiple_outputs()
    if not has_columns or '"Selector"' in json.dumps(json.loads(text)):
        return False
    return not elementwise_problem(inner, frame.lazy().with_columns(inner.alias("x")))


def _accumulators(aggregate: Aggregate, dtype: pa.DataType) -> list[tuple[Accumulator, bool]] | None:
    """Return accumulators (and whether each counts non-nulls), or None when ``dtype`` does not decompose."""
    is_float = pa.types.is_floating(dtype)
    is_number = is_float or pa.types.is_integer(dtype) or pa.types.is_boolean(dtype)
    count = (Accumulator(Kind.ADD, "int64"), True)
    match aggregate:
        case Aggregate.COUNT:
            return [count]
        case Aggregate.SUM if is_number:
            return [(Accumulator(Kind.ADD, "float64" if is_float else "int64"), False)]
        case Aggregate.MEAN if is_number:
            return [(Accumulator(Kind.ADD, "float64"), False), count]
        case Aggregate.MIN | Aggregate.MAX:
            is_time = pa.types.is_timestamp(dtype) or pa.types.is_date32(dtype) or pa.types.is_duration(dtype)
            if not (is_number or is_time):
                return None
            kind = Kind.MIN if aggregate is Aggregate.MIN else Kind.MAX
            wide = "float64" if is_float else "uint64" if pa.types.is_uint64(dtype) else "int64"
            return [(Accumulator(kind, wide), False)]
    return None


def window_state_text(shape: WindowShape, form: Form, parts: Sequence[str]) -> str:
    """Return the identity of a window operator's state."""
    keys = [(name, str(dtype)) for name, dtype in zip(shape.keys, shape.key_types, strict=True)]
    return StateIdentity.of_windows(form, shape.size_ms, shape.time.column, keys, parts).text


class InputReader:
    """Evaluates a plan's expressions on batches of records."""

    def __init__(self, plan: WindowPlan) -> None:
        self._measures = plan.measures
        self._names = [e.meta.output_name() if e.meta.is_column() else None for e in plan.inners]
        self._computed = [e.alias(str(i)) for i, e in enumerate(plan.inners) if not e.meta.is_column()]

    def read(self, batch: pa.RecordBatch) -> list[Values]:
        """Return the input of each measure's accumulator."""
        computed: dict[str, pa.Array] = {}
        if self._computed:
            frame = frame_of(batch).select(self._computed)
            result = batch_of(frame, schema_of_frame(frame))
            computed = dict(zip(result.schema.names, result.columns, strict=True))
        columns = [computed[str(i)] if name is None else batch.column(name) for i, name in enumerate(self._names)]
        return [_values(measure, columns[measure.inner]) for measure in self._measures]


def _values(measure: Measure, column: pa.Array) -> Values:
    valid: npt.NDArray[np.bool_] | None = None
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    if measure.is_count:
        return Values(1, valid)
    return Values(wide_values(column, measure.accumulator.dtype), valid)


def uncombined_batch(
    plan: WindowPlan, schema: pa.Schema, batch: pa.RecordBatch, inputs: Sequence[Values]
) -> pa.RecordBatch:
    """Return each record as a partial result of its own, of ``plan.partial_schema()``."""
    shape, ones = plan.shape, np.ones(batch.num_rows, np.int64)
    windows = shape.time.windows(shape.time.values(batch), shape.size_ms)
    arrays = [*(batch.column(key) for key in shape.keys), pa.array(windows), pa.array(ones)]
    for given in inputs:
        if isinstance(given.values, int):
            arrays.append(pa.array(ones if given.valid is None else given.valid.astype(np.int64)))
        else:
            arrays.append(pa.array(given.values, mask=None if given.valid is None else ~given.valid))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def results(plan: WindowPlan, table: FrozenTable) -> list[pa.Array]:
    """Return the output columns after keys and window bounds, with Polars' nulls and types."""
    return [_result(result, table) for result in plan.results]


def _result(result: Result, table: FrozenTable) -> pa.Array:
    if result.aggregate is Aggregate.LEN:
        return words_to_array(table.rows, result.dtype)
    first = result.measures[0]
    values, seen = table.values[first], table.seen[first]
    if result.aggregate is Aggregate.MEAN:
        counts = table.values[result.measures[1]]
        seen = counts > 0
        values = values / np.maximum(counts, 1)
    if values.dtype == np.float64:
        column = pa.array(values.astype(result.dtype.to_pandas_dtype(), copy=False))
    else:
        column = words_to_array(values.view(np.int64), result.dtype)
    if seen is None or seen.all():
        return column
    return pc.if_else(pa.array(seen), column, pa.scalar(None, result.dtype))
