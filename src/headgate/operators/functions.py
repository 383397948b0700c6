"""``map``, ``flat_map``, ``filter`` and ``map_batches`` with a Python function.

Rows are dicts: reading costs about 1 µs and writing about 0.5 µs per record of four columns. A batch is a Polars
frame or an Arrow record batch.
"""

from __future__ import annotations

import gc
import inspect
import traceback
import typing
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from operator import itemgetter
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa

from headgate.codec.exact_values import MisfitError, described, elements_of, exact_array, exact_value
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.base import Operator, OperatorContext, OperatorMetrics, Output
from headgate.operators.checkpoint_listeners import own_function_of
from headgate.operators.schemas import (
    SchemaLike,
    as_schema,
    canonical_schema,
    columns_of_frame,
    fitting_rows,
    frame_of,
    schema_of_frame,
    schema_text,
)
from headgate.operators.user_functions import (
    FunctionOperator,
    UserFunctionError,
    bad_records,
    batch_error,
    bind_counters,
    copied,
    described_rows,
    divert_unreadable,
    has_counters,
    has_life_cycle,
    shortened,
    user_error,
    user_traceback,
)

Row: TypeAlias = dict[str, Any]


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the cyclic garbage collector for one batch of rows.

    The rows are thousands of live objects without cycles: the collector would walk them again and again, for half
    of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """Return one new dict per record. Moments are ``datetime`` in UTC, local times have no zone."""
    names = batch.schema.names
    return [dict(zip(names, values)) for values in frame_of(batch).rows()]  # noqa: B905 (strict costs 10 %)


_UNCHANGING = frozenset({type(None), bool, int, float, str, bytes})
"""Types of most values; looked up first, because it is quick."""


def own_copy(value: Any) -> Any:
    """Return what a column may hold with all that is within, to be changed freely: structs as dicts, lists as lists."""
    if type(value) in _UNCHANGING:
        return value
    if isinstance(value, Mapping):
        return {name: own_copy(inner) for name, inner in value.items()}
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    elements = elements_of(value)
    return value if elements is None else [own_copy(inner) for inner in elements]


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that does not fit the schema, and why."""

    problem: str
    record: str


class RowWriter:
    """Makes batches of ``schema`` from dicts that have exactly its columns.

    ``declared_in``: where a user adds a field to the schema, for messages.
    """

    def __init__(self, schema: pa.Schema, declared_in: str = "schema=") -> None:
        self._schema = schema
        self._declared_in = declared_in
        self._names: list[str] = schema.names
        self._changeable = [
            field.name for field in schema if pa.types.is_nested(field.type) or pa.types.is_large_binary(field.type)
        ]
        getter = itemgetter(*self._names)
        self._values: Callable[[Row], tuple[Any, ...]] = getter if len(self._names) > 1 else lambda row: (getter(row),)

    def taken(self, result: Any) -> Any:
        """Return a row as it is now: a function may change its own afterwards, and return or yield it again."""
        if not isinstance(result, dict):
            return result
        row = result.copy()
        for name in self._changeable:
            if row.get(name) is not None:
                row[name] = own_copy(row[name])
        return row

    def values(self, row: Row) -> tuple[Any, ...]:
        """Return the columns of ``row`` as a tuple.

        Raises:
            KeyError, TypeError: a column is missing or ``row`` is no mapping; see ``problem``.
        """
        if len(row) != len(self._names):
            raise KeyError
        return self._values(row)

    def batch(
        self, rows: Sequence[Row], input_of: Callable[[int], object] | None = None
    ) -> tuple[pa.RecordBatch, list[Refused]]:
        """Return the rows that fit as a batch, and of those that do not, what they were made of.

        ``input_of``: the record that the row with this number was made of; by default a refused row stands for itself.
        """
        try:
            return self.batch_of_values([self.values(row) for row in rows]), []
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            return self._slowly(rows, input_of or rows.__getitem__)

    def batch_of_values(self, values: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        """Return a batch of tuples in the order of the schema's columns.

        Raises:
            MisfitError: a value does not fit its column's type.
        """
        columns = zip(*values, strict=True) if values else [()] * len(self._names)
        arrays = [exact_array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _slowly(self, rows: Sequence[Row], input_of: Callable[[int], object]) -> tuple[pa.RecordBatch, list[Refused]]:
        good: list[tuple[Any, ...]] = []
        refused: list[Refused] = []
        for number, row in enumerate(rows):
            problem = self.problem(row)
            if problem:
                refused.append(Refused(problem, shortened(input_of(number))))
            else:
                good.append(self.values(row))
        return self.batch_of_values(good), refused

    def problem(self, row: object) -> str:
        """Return why ``row`` does not fit the schema, or ""."""
        if not isinstance(row, dict):
            returned = "None, as a function does without return," if row is None else type(row).__name__
            return f"the function returned {returned} instead of a dict"
        missing = [name for name in self._names if name not in row]
        if missing:
            return f"the function returned no field '{missing[0]}'"
        unknown = [name for name in row if name not in self._names]
        if unknown:
            return f"the function returned the unknown field {unknown[0]!r}; declare it with {self._declared_in}"
        for column in self._schema:
            try:
                exact_value(row[column.name], column.type)
            except MisfitError as error:
                misfit = error.within(column.name)
                return (
                    f"the function returned {described(misfit.value)} for field '{misfit.path}', which is {misfit.type}"
                )
        return ""


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
    change and return. ``diverts_exceptions``: a record for which the function raises is a bad record.
    """

    verb: RowVerb
    function: Callable[[Row], Any]
    schema: SchemaLike | None = None
    diverts_exceptions: bool = False

    def build(self) -> Operator:
        return RowFunctionOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of the results.

        Raises:
            UsageError: ``schema`` has an unknown type.
        """
        return schema if self.schema is None else as_schema(node, self.schema)


class RowFunctionOperator(FunctionOperator):
    """Calls the function once per record."""

    def __init__(self, spec: RowFunctionSpec) -> None:
        self._spec = spec
        self._writer: RowWriter | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._spec = replace(self._spec, function=own_function_of(context.node, self._spec.function))
        self._open_function(self._spec.function)

    def process(self, batch: pa.RecordBatch) -> None:
        batch = divert_unreadable(self, batch)
        results: list[Any] = []
        ends: list[int] = []
        verb = self._spec.verb
        if verb is RowVerb.FILTER:
            with paused_gc():
                failed = [one for _, one in self._call(rows_of(batch), results, results.append)]
            divert_refused(self, failed)
            keep = [bool(value) for value in results]
            self.output.emit(batch if all(keep) else batch.filter(pa.array(keep)))
            return
        if self._writer is None:
            self._writer = RowWriter(self._spec.output_schema(batch.schema, self.context.node))
        # All rows of a flat_map's result, or, if it raises half-way, none.
        taken = self._writer.taken

        def extend(result: Any) -> None:
            results.extend([taken(row) for row in _each(result)])
            ends.append(len(results))

        is_map = verb is RowVerb.MAP
        kept: Callable[[Any], None] = (lambda result: results.append(taken(result))) if is_map else extend
        with paused_gc():
            raised = self._call(rows_of(batch), results if is_map else ends, kept)
            skipped = [at for at, _ in raised]

            def input_of(number: int) -> object:  # not what the function was given: it may have changed that
                call = number if is_map else bisect_right(ends, number)
                return described_rows(batch.slice(call + bisect_right(skipped, call), 1))[0]

            result, refused = self._writer.batch(results, input_of)
        divert_refused(self, [one for _, one in raised] + refused)
        self.output.emit(result)

    def _call(self, rows: list[Row], returned: list[Any], keep: Callable[[Any], None]) -> list[tuple[int, Refused]]:
        """Give ``keep`` what the function returns, which adds to ``returned`` once for each call.

        Returns:
            The records for which it raised, with the number of calls before that returned.

        Raises:
            UserFunctionError: it raised, and exceptions are not diverted.
        """
        function = self._spec.function
        failed: list[tuple[int, Refused]] = []
        rest = iter(rows)
        row: Row = {}
        while True:
            try:
                for row in rest:  # after a failure it goes on after the record that failed
                    keep(function(row))
            except Exception as error:
                if not self._spec.diverts_exceptions:
                    raise user_error(self.context.node, row, error) from None
                failed.append((len(returned), failure(row, error)))
                if self._spec.verb is RowVerb.FILTER:
                    returned.append(False)
            else:
                return failed


def failure(record: object, error: Exception) -> Refused:
    """Return the bad record that ``record`` becomes for ``error``; its problem ends with the traceback."""
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
    fitting, refused = fitting_and_refused(batch, schema)
    divert_refused(operator, refused)
    return fitting


def fitting_and_refused(batch: pa.RecordBatch, schema: pa.Schema) -> tuple[pa.RecordBatch, list[Refused]]:
    """Return the results that fit ``schema``, in its types, and the others."""
    fitting, problems = fitting_rows(batch, schema)
    refused = []
    for row, problem in problems:
        try:
            record: object = described_rows(batch.slice(row, 1))[0]
        except (ValueError, OverflowError):  # a part of a microsecond
            record = batch.slice(row, 1)
        refused.append(Refused(problem, shortened(record)))
    return fitting, refused


def divert_refused(operator: Operator, refused: list[Refused]) -> None:
    """Hand rows that do not fit the output's schema, or that a function failed on, over as bad records."""
    if not refused:
        return
    problems = [r.problem for r in refused]
    records = [r.record for r in refused]
    operator.output.divert(bad_records(operator.context.node, problems, [""] * len(refused), records))


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
        if has_life_cycle(self.function):
            raise UsageError(
                f"operator '{node}': give schema=; it is else found by calling the function with an empty batch, but "
                f"{type(self.function).__name__} is opened on the workers only"
            )
        empty = pa.RecordBatch.from_pylist([], schema=schema)
        function = self.function
        if has_counters(function):
            function = copied(node, function)
            bind_counters(function, OperatorMetrics())
        try:
            result = function(empty if self.wants_arrow() else frame_of(empty))
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


class MapBatchesOperator(FunctionOperator):
    """Calls the function once per batch."""

    def __init__(self, spec: MapBatchesSpec) -> None:
        self._spec = spec
        self._wants_arrow = spec.wants_arrow()
        self._schema: pa.Schema | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._spec = replace(self._spec, function=own_function_of(context.node, self._spec.function))
        self._open_function(self._spec.function)

    def process(self, batch: pa.RecordBatch) -> None:
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
                result.validate(full=True)  # what a checkpoint or stream holds of it is read again
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
