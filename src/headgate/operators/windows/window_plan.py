"""How a windowed aggregation is computed: which aggregates decompose into partial results, and into which.

Those of an expression that looks at one record only decompose (``aggregates``), but for quantiles: partial results are
made before the shuffle and merged after it (docs/spec/windows.md). If any aggregate does not, the window keeps its
records and Polars aggregates them when it fires.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.graph import MAIN, OutputTag
from headgate.model.state_schema import Form, StateIdentity
from headgate.operators.aggregation.aggregates import Aggregate, Order, Recognised, encoding_text, recognise
from headgate.operators.expressions import expression_text, group_problem
from headgate.operators.keys import check_keys
from headgate.operators.schemas import batch_of, describe, empty_frame, frame_of, schema_of_frame
from headgate.operators.timestamps import EventTime, event_time
from headgate.operators.windows.window_assigner import AlignedWindows
from headgate.state.descriptors import column_identity
from headgate.state.key_hash import column_words
from headgate.state.key_index import words_to_array
from headgate.state.window_aggregates import (
    TEXT,
    Accumulator,
    FrozenTable,
    Kind,
    Values,
    accumulated_column,
    too_large,
    wide_values,
)

WINDOW_COLUMN = "__window"
ROWS_COLUMN = "__rows"
START_COLUMN, END_COLUMN = "window_start", "window_end"

ALL_ROWS = "__window_rows"
"""The column with the list of a window's records, for a function."""

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1

_LIMB_DIGITS = 9
"""Decimals are added up in limbs of so many digits, so that a sum of nine billion of them is an int64."""

_WORD_DIGITS = 18
"""Decimals of so many digits are compared as int64."""

_DECIMAL_END = 1e38


class Input(Enum):
    """What an accumulator gets of the values of an expression."""

    VALUE = ""
    VALIDITY = "validity of "
    """1 for each value that is not null."""

    ZERO = "squares of "
    """0: a single value has no distance from itself."""

    RANK = "rank of "
    REVERSED_RANK = "reversed rank of "


@dataclass(frozen=True)
class Measure:
    """One partial result: an accumulator, and what it gets of the values of ``inner``; -1: of any.

    ``encoding``: what its integers stand for (``encoding_text``), such as times in microseconds.
    """

    accumulator: Accumulator
    inner: int
    given: Input = Input.VALUE
    encoding: str = ""


@dataclass(frozen=True)
class Result:
    """One output column: an aggregate of measures (by index), of type ``dtype``; ``ddof`` as in ``aggregates``.

    ``scale``: of decimals, how many digits are after the point. The first measures are their limbs.
    """

    name: str
    aggregate: Aggregate
    measures: tuple[int, ...]
    dtype: pa.DataType
    ddof: int = 1
    scale: int | None = None


@dataclass(frozen=True)
class Emission:
    """When a window emits its results, and what becomes of late records.

    Attributes:
        lateness_ms: so much longer than its end a window takes records, and emits its results again.
        late: the side output of records that come still later; None: they are dropped.
        early_ms: so often, in processing time, a window emits what it has before its end; 0: never.
        accumulates: what is emitted early or again is the whole result; False: only of what came since.
        holds_back: records are results of other windows, which may come when a window that they lie in has ended: the
            watermark is held back by that.
        retractions: where results are changes, they have ``update_before``, and ``delete`` has the whole row.
    """

    lateness_ms: int = 0
    late: OutputTag | None = None
    early_ms: int = 0
    accumulates: bool = True
    holds_back: bool = False
    retractions: bool = False


@dataclass(frozen=True)
class WindowedAggregate:
    """A windowed aggregation as the user wrote it: aggregates have the names of their output columns."""

    keys: tuple[str, ...]
    time_column: str
    windows: AlignedWindows
    aggregates: tuple[pl.Expr, ...]
    emission: Emission = Emission()


@dataclass(frozen=True)
class WindowShape:
    """What every window operator knows: keys, time, windows, the schema of results, and when to emit them."""

    keys: tuple[str, ...]
    key_types: tuple[pa.DataType, ...]
    time: EventTime
    windows: AlignedWindows
    output: pa.Schema
    emission: Emission

    @property
    def delay_ms(self) -> int:
        """By how much ``window_start`` may be earlier than the watermark."""
        return self.windows.span_ms + self.emission.lateness_ms

    def outputs(self, records: pa.Schema) -> dict[OutputTag, pa.Schema]:
        """Return the schemas of all outputs; ``records``: the schema of the input."""
        late = self.emission.late
        return {MAIN: self.output} if late is None else {MAIN: self.output, late: records}

    def panes(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return the number of the pane that each record lies in."""
        return self.windows.panes(self.time, self.time.values(batch))


@dataclass(frozen=True)
class WindowPlan:
    """A decomposed aggregation: expressions over records, partial results of them, and output columns."""

    shape: WindowShape
    inners: tuple[pl.Expr, ...]
    measures: tuple[Measure, ...]
    results: tuple[Result, ...]

    def partial_schema(self) -> pa.Schema:
        """Return the schema of partial results: keys, number of the pane, count of records, measures."""
        names = [*self.shape.keys, WINDOW_COLUMN, ROWS_COLUMN]
        types = [*self.shape.key_types, pa.int64(), pa.int64()]
        for i, measure in enumerate(self.measures):
            names.append(f"__partial_{i}")
            types.append(measure.accumulator.type)
        return pa.schema(list(zip(names, types, strict=True)))

    @property
    def is_ordered(self) -> bool:
        """Whether results may depend on the order in which records came."""
        return any(measure.accumulator.is_ordered for measure in self.measures)


def window_shape(aggregate: WindowedAggregate, schema: pa.Schema, node: str) -> WindowShape:
    """Check an aggregation against its input and return its shape.

    Raises:
        UsageError: unknown column, wrong type, no or colliding names.
    """
    check_keys(node, schema, aggregate.keys)
    time = event_time(node, schema, aggregate.time_column)
    output = aggregated_schema(node, schema, aggregate.keys, aggregate.aggregates)
    types = tuple(schema.field(key).type for key in aggregate.keys)
    return WindowShape(aggregate.keys, types, time, aggregate.windows, output, aggregate.emission)


_OWN_NAMES = {WINDOW_COLUMN, ROWS_COLUMN, "__start", "__end", "__group", ALL_ROWS}
_OWN_PREFIXES = ("__partial_", "__headgate_")


def _refuse_own_names(node: str, names: Iterable[str]) -> None:
    """Refuse columns that windows have themselves beside those of records and results.

    Raises:
        UsageError
    """
    for name in names:
        if name in _OWN_NAMES or name.startswith(_OWN_PREFIXES):
            raise UsageError(f"operator '{node}': windows have a column '{name}' themselves; give yours another name")


def aggregated_schema(
    node: str, schema: pa.Schema, keys: tuple[str, ...], aggregates: tuple[pl.Expr, ...], *, has_bounds: bool = True
) -> pa.Schema:
    """Return the schema of results: keys, the bounds of the window, aggregates.

    Raises:
        UsageError: no aggregate, an unknown column, colliding names.
    """
    if not aggregates:
        raise UsageError(f"operator '{node}': agg needs at least one aggregate, for example n=pl.len()")
    for expression in aggregates:
        problem = group_problem(expression)
        if problem:
            raise UsageError(f"operator '{node}': the expression {expression} {problem}")
    try:
        frame = empty_frame(schema).group_by(*keys).agg(*aggregates)
        _refuse_extremes_without_order(schema, aggregates)
    except (pl.exceptions.PolarsError, TypeError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise UsageError(f"operator '{node}': {first}; the columns are {describe(schema)}") from error
    found = schema_of_frame(frame)
    fields = [schema.field(key) for key in keys]
    if has_bounds:
        fields += [pa.field(name, pa.timestamp("us")) for name in (START_COLUMN, END_COLUMN)]
    output = pa.schema([*fields, *(found.field(i) for i in range(len(keys), len(found)))])
    _refuse_own_names(node, [*schema.names, *(name for name in output.names if name != ALL_ROWS)])
    if len(set(output.names)) != len(output.names):
        raise UsageError(f"operator '{node}': two result columns have the same name; they would be {describe(output)}")
    return output


def _refuse_extremes_without_order(schema: pa.Schema, aggregates: tuple[pl.Expr, ...]) -> None:
    """Refuse the highest or lowest list or struct: for groups Polars gives null, and only for a column an error.

    Raises:
        polars.exceptions.InvalidOperationError
    """
    for expression in aggregates:
        try:
            empty_frame(schema).select(expression)
        except pl.exceptions.InvalidOperationError as error:
            if _NO_ORDER.search(str(error)):
                raise
        except (pl.exceptions.PolarsError, TypeError):
            continue  # an expression about a group need not be one about a column


_NO_ORDER = re.compile("`(max|min)` operation not supported for dtype")


def decompose(aggregate: WindowedAggregate, shape: WindowShape, schema: pa.Schema) -> WindowPlan | None:
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
        found = recognise(expression, self._frame)
        if name is None or found is None:
            return False
        measures: tuple[int, ...] | None = ()
        scale = None
        if found.inner is not None:
            dtype = self._type(found.inner)
            if pa.types.is_decimal(dtype):
                measures, scale = self._measures_of_decimals(found, found.inner, dtype), dtype.scale
            else:
                measures = self._measures_of(found, found.inner, dtype)
        if measures is None:
            return False
        self.results.append(Result(name, found.aggregate, measures, output.field(name).type, found.ddof, scale))
        return True

    def _measures_of_decimals(
        self, found: Recognised, inner: pl.Expr, dtype: pa.Decimal128Type
    ) -> tuple[int, ...] | None:
        """Return the measures of an aggregate of decimals: of limbs, lowest first; None: it does not decompose."""
        match found.aggregate:
            case Aggregate.COUNT:
                return (self._count(inner),)
            case Aggregate.SUM | Aggregate.MEAN:
                limbs = [self._measure(limb, Accumulator(Kind.ADD, "int64")) for limb in _limbs(inner, dtype)]
                return (*limbs, self._count(inner)) if found.aggregate is Aggregate.MEAN else tuple(limbs)
            case Aggregate.MIN | Aggregate.MAX if dtype.precision <= _WORD_DIGITS:
                kind = Kind.MIN if found.aggregate is Aggregate.MIN else Kind.MAX
                return (self._measure(_unscaled(inner, dtype), Accumulator(kind, "int64")),)
        return None

    def _measures_of(self, found: Recognised, inner: pl.Expr, dtype: pa.DataType) -> tuple[int, ...] | None:
        """Return the measures of an aggregate, the first of which has its values; None: it does not decompose."""
        is_float = pa.types.is_floating(dtype)
        is_number = is_float or pa.types.is_integer(dtype) or pa.types.is_boolean(dtype)
        match found.aggregate:
            case Aggregate.COUNT:
                return (self._count(inner),)
            case Aggregate.SUM if is_number:
                return (self._measure(inner, Accumulator(Kind.ADD, _wide(dtype))),)
            case Aggregate.MEAN if is_number:
                return self._measure(inner, Accumulator(Kind.ADD, "float64")), self._count(inner)
            case Aggregate.VAR | Aggregate.STD if is_number:
                count = self._count(inner)
                mean = self._measure(inner, Accumulator(Kind.MEAN, "float64", count))
                return self._measure(inner, Accumulator(Kind.SQUARES, "float64", mean), Input.ZERO), count
            case Aggregate.MIN | Aggregate.MAX if is_number or _is_time(dtype):
                kind = Kind.MIN if found.aggregate is Aggregate.MIN else Kind.MAX
                return (self._measure(inner, Accumulator(kind, _wide(dtype))),)
            case Aggregate.PICK if is_number or _is_time(dtype) or pa.types.is_large_string(dtype):
                return self._pick(inner, TEXT if pa.types.is_large_string(dtype) else _wide(dtype), found.order)
        return None

    def _pick(self, inner: pl.Expr, wide: str, order: Order | None) -> tuple[int, ...] | None:
        assert order is not None
        if order.by is None:
            return (self._measure(inner, Accumulator(Kind.PICK, wide, is_last=order.is_last)),)
        by = self._type(order.by)
        if not (pa.types.is_floating(by) or pa.types.is_integer(by) or pa.types.is_boolean(by) or _is_time(by)):
            return None
        accumulator = Accumulator(Kind.RANK, "int64", is_last=order.is_last, nulls_win=order.nulls_win)
        rank = self._measure(order.by, accumulator, Input.REVERSED_RANK if order.is_least else Input.RANK)
        return (self._measure(inner, Accumulator(Kind.PICK, wide, rank)),)

    def _type(self, inner: pl.Expr) -> pa.DataType:
        return schema_of_frame(self._frame.select(inner.alias("x"))).field(0).type

    def _count(self, inner: pl.Expr) -> int:
        return self._measure(inner, Accumulator(Kind.ADD, "int64"), Input.VALIDITY)

    def _inner(self, inner: pl.Expr) -> int:
        for i, known in enumerate(self.inners):
            if known.meta.eq(inner):
                return i
        self.inners.append(inner)
        return len(self.inners) - 1

    def _measure(self, inner: pl.Expr, accumulator: Accumulator, given: Input = Input.VALUE) -> int:
        is_encoded = given in (Input.VALUE, Input.RANK, Input.REVERSED_RANK)
        encoding = encoding_text(self._type(inner)) if is_encoded else ""
        measure = Measure(accumulator, self._inner(inner), given, encoding)
        if measure not in self.measures:
            self.measures.append(measure)
        return self.measures.index(measure)


def _unscaled(inner: pl.Expr, dtype: pa.Decimal128Type) -> pl.Expr:
    """Return decimals as integers. The cast has the scale, so that state of another scale is other state."""
    whole = inner.cast(pl.Decimal(38, dtype.scale)).to_physical()
    return whole.cast(pl.Int64) if dtype.precision <= _WORD_DIGITS else whole  # far quicker than 128 bits


def _limbs(inner: pl.Expr, dtype: pa.Decimal128Type) -> list[pl.Expr]:
    """Return the digits of decimals as integers, lowest first; none but the highest is negative."""
    rest, found = _unscaled(inner, dtype), []
    for _ in range(_LIMB_DIGITS, dtype.precision, _LIMB_DIGITS):
        found.append((rest % 10**_LIMB_DIGITS).cast(pl.Int64))
        rest = rest // 10**_LIMB_DIGITS
    return [*found, rest.cast(pl.Int64)]


def _is_time(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(dtype) or pa.types.is_date32(dtype) or pa.types.is_duration(dtype))


def _wide(dtype: pa.DataType) -> str:
    """Return the type in which values are compared and kept."""
    return "float64" if pa.types.is_floating(dtype) else "uint64" if pa.types.is_uint64(dtype) else "int64"


def measure_text(plan: WindowPlan | Decomposed, i: int) -> str:
    """Return what a measure is of, for the identity of state."""
    measure = plan.measures[i]
    accumulator = measure.accumulator
    of = f"{measure.given.value}{expression_text(plan.inners[measure.inner])}"
    text = f"{accumulator.kind.value} {accumulator.dtype} {of}"
    if measure.encoding:
        text += f" as {measure.encoding}"
    if accumulator.is_ordered:
        text += f", {'last' if accumulator.is_last else 'first'}, nulls {'win' if accumulator.nulls_win else 'lose'}"
    return (
        f"{text} by {measure_text(plan, accumulator.of)}"
        if accumulator.kind is Kind.PICK and accumulator.of >= 0
        else text
    )


def content_texts(plan: WindowPlan | None, kept: pa.Schema) -> list[str]:
    """Return what identifies the content of windows: partial results of ``plan``, or without one columns of records."""
    if plan is None:
        return list(map(column_identity, kept))
    return [measure_text(plan, i) for i in range(len(plan.measures))]


def window_state_text(shape: WindowShape, form: Form, parts: Sequence[str]) -> str:
    """Return the identity of a window operator's state."""
    keys = [(name, str(dtype)) for name, dtype in zip(shape.keys, shape.key_types, strict=True)]
    lateness_ms = shape.emission.lateness_ms
    windows = f"{shape.windows.text} kept {lateness_ms} ms" if lateness_ms else shape.windows.text
    return StateIdentity.of_windows(form, windows, shape.time.column, keys, parts).text


class InputReader:
    """Evaluates a plan's expressions on batches of records."""

    def __init__(self, plan: WindowPlan | Decomposed) -> None:
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
    match measure.given:
        case Input.VALIDITY:
            return Values(1, valid)
        case Input.ZERO:
            return Values(np.zeros(len(column)), valid)
        case Input.RANK:
            return Values(ranks(column), valid)
        case Input.REVERSED_RANK:
            return Values(~ranks(column), valid)
        case Input.VALUE:
            return Values(wide_values(column, measure.accumulator.dtype), valid)


def ranks(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return whole numbers that are ordered as the values of a column are: NaN is the highest (nulls: any number)."""
    words = column_words(column)
    if pa.types.is_floating(column.type):
        return np.where(words < 0, words ^ _INT_MAX, words)
    return words ^ _INT_MIN if pa.types.is_uint64(column.type) else words


def uncombined_batch(
    plan: WindowPlan, schema: pa.Schema, batch: pa.RecordBatch, inputs: Sequence[Values]
) -> pa.RecordBatch:
    """Return each record as a partial result of its own, of ``plan.partial_schema()``."""
    shape, ones = plan.shape, np.ones(batch.num_rows, np.int64)
    arrays = [*(batch.column(key) for key in shape.keys), pa.array(shape.panes(batch)), pa.array(ones)]
    for given in inputs:
        if isinstance(given.values, int):
            arrays.append(pa.array(ones if given.valid is None else given.valid.astype(np.int64)))
        else:
            arrays.append(accumulated_column(given.values, given.valid))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def results(plan: WindowPlan | Decomposed, table: FrozenTable) -> list[pa.Array]:
    """Return the output columns after keys and window bounds, with Polars' nulls and types."""
    return [_result(result, table) for result in plan.results]


def _result(result: Result, table: FrozenTable) -> pa.Array:
    if result.aggregate is Aggregate.LEN:
        return words_to_array(table.rows, result.dtype)
    if result.scale is not None and result.aggregate is not Aggregate.COUNT:
        return _result_of_decimals(result, result.scale, table)
    first = result.measures[0]
    values, seen = table.values[first], table.seen[first]
    if result.aggregate is Aggregate.MEAN:
        counts = table.values[result.measures[1]]
        seen = counts > 0
        values = values / np.maximum(counts, 1)
    elif result.aggregate in (Aggregate.VAR, Aggregate.STD):
        counts = table.values[result.measures[1]]
        seen = counts > result.ddof
        values = values / np.maximum(counts - result.ddof, 1)
        values = np.sqrt(values) if result.aggregate is Aggregate.STD else values
    if pa.types.is_large_string(result.dtype):
        return accumulated_column(values, seen)
    if values.dtype == np.float64:
        column = pa.array(values.astype(result.dtype.to_pandas_dtype(), copy=False))
    else:
        if result.aggregate is Aggregate.SUM and len(values):
            limits = np.iinfo(result.dtype.to_pandas_dtype())
            if values.max() > limits.max or values.min() < limits.min:
                raise too_large(str(result.dtype))
        column = words_to_array(values.view(np.int64), result.dtype)
    if seen is None or seen.all():
        return column
    return pc.if_else(pa.array(seen), column, pa.scalar(None, result.dtype))


def _result_of_decimals(result: Result, scale: int, table: FrozenTable) -> pa.Array:
    """Return a sum, mean, minimum or maximum of decimals.

    Raises:
        UsageError: a sum has more digits than a decimal.
    """
    is_mean = result.aggregate is Aggregate.MEAN
    limbs = [table.values[place] for place in (result.measures[:-1] if is_mean else result.measures)]
    near, total, base = np.zeros(len(table.rows)), pl.lit(0, pl.Int128), 10**_LIMB_DIGITS
    for place, limb in reversed(list(enumerate(limbs))):
        near, total = near * float(base) + limb, total * base + pl.col(str(place)).cast(pl.Int128)
    whole = pl.DataFrame({str(place): limb for place, limb in enumerate(limbs)}).select(total).to_series()
    if (np.abs(near) >= _DECIMAL_END).any():
        raise too_large(f"decimal(38, {scale})")
    if is_mean:
        counts = table.values[result.measures[-1]]
        means = whole.cast(pl.Float64).to_numpy() / 10.0**scale / np.maximum(counts, 1)
        return pa.array(means, mask=counts == 0).cast(result.dtype)
    words = whole.cast(pl.Decimal(38, 0)).to_arrow()
    found = pa.Array.from_buffers(result.dtype, len(words), words.buffers(), offset=words.offset)
    seen = table.seen[result.measures[0]]
    return found if seen is None else pc.if_else(pa.array(seen), found, pa.scalar(None, result.dtype))


@dataclass(frozen=True)
class Decomposed:
    """Aggregates without a window as measures: see ``WindowPlan``."""

    inners: tuple[pl.Expr, ...]
    measures: tuple[Measure, ...]
    results: tuple[Result, ...]


def decomposed(expressions: Sequence[pl.Expr], output: pa.Schema, schema: pa.Schema) -> Decomposed | pl.Expr:
    """Return aggregates over records of ``schema`` as measures, or the first one that does not decompose."""
    builder = _Builder(schema)
    for expression in expressions:
        if not builder.add(expression, output):
            return expression
    return Decomposed(tuple(builder.inners), tuple(builder.measures), tuple(builder.results))
