"""Streams as the user writes them: each verb adds a node to the pipeline's graph and returns the next stream.

A stream knows its schema, so that a wrong column or type is an error at the line that names it. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import polars as pl
import pyarrow as pa

from headgate.api.not_yet import not_there_yet
from headgate.connectors.base import Sink
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.graph import Edge, Partitioner, Role
from headgate.operators import catalog
from headgate.operators.base import OperatorSpec
from headgate.operators.schemas import SchemaLike
from headgate.operators.types import schema_text

if TYPE_CHECKING:
    from headgate.api.keyed import KeyedStream
    from headgate.api.loops import Feedback
    from headgate.api.pipeline import Pipeline

Output = TypeVar("Output")
"""What the body of a loop gives out: a stream or a tuple of streams."""

Row = dict[str, Any]


class Stream:
    """Records of one schema on their way through a pipeline."""

    def __init__(
        self, pipeline: Pipeline, edges: tuple[Edge, ...], schema: pa.Schema, time_column: str | None = None
    ) -> None:
        """For the pipeline only; users get streams from ``Pipeline.source`` and from other streams."""
        self._pipeline = pipeline
        self._edges = edges
        self._schema = schema
        self._time_column = time_column

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the records."""
        return self._schema

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._schema.names)

    def __repr__(self) -> str:
        return f"Stream({schema_text(self._schema)})"

    def filter(self, *predicates: pl.Expr | Callable[[Row], object], name: str | None = None) -> Stream:
        """Keep the records for which every Polars expression is true, or for which one Python function is.

        An expression sees columns and is fast; a function gets each record as a dict.
        """
        functions = [p for p in predicates if not isinstance(p, pl.Expr)]
        if not functions and predicates:
            return self._then("filter", name, catalog.filter_spec(*(p for p in predicates if isinstance(p, pl.Expr))))
        if len(predicates) != 1 or not callable(functions[0]):
            raise UsageError("filter needs Polars expressions such as pl.col('level') == 'ERROR', or one function")
        return self._then("filter", name, catalog.RowFunctionSpec(catalog.RowVerb.FILTER, functions[0]))

    def select(self, *expressions: pl.Expr | str, name: str | None = None, **named: Any) -> Stream:
        """Make records of exactly these columns; ``total=pl.col("a") + 1`` names one."""
        return self._then("select", name, catalog.select_spec(*_expressions("select", name, expressions, named)))

    def with_columns(self, *expressions: pl.Expr | str, name: str | None = None, **named: Any) -> Stream:
        """Add or replace columns."""
        found = _expressions("with_columns", name, expressions, named)
        return self._then("with-columns", name, catalog.with_columns_spec(*found))

    def map(
        self, function: Callable[[Row], Row], schema: SchemaLike | None = None, *, name: str | None = None
    ) -> Stream:
        """Turn each record (a dict) into another one; ``schema`` describes it when it differs from the input's.

        A result that does not fit the schema is a bad record.
        """
        spec = catalog.RowFunctionSpec(catalog.RowVerb.MAP, _function("map", function), schema)
        return self._then("map", name, spec, refuses=True)

    def flat_map(
        self, function: Callable[[Row], Iterable[Row]], schema: SchemaLike | None = None, *, name: str | None = None
    ) -> Stream:
        """Turn each record (a dict) into any number of records, as ``map`` does into one."""
        spec = catalog.RowFunctionSpec(catalog.RowVerb.FLAT_MAP, _function("flat_map", function), schema)
        return self._then("flat-map", name, spec, refuses=True)

    def map_batches(
        self,
        function: Callable[[Any], Any],
        schema: SchemaLike | None = None,
        *,
        as_arrow: bool | None = None,
        name: str | None = None,
    ) -> Stream:
        """Turn each batch into another one: a Polars frame, or a ``pyarrow.RecordBatch`` if ``as_arrow``.

        Where batches begin and end may differ from run to run; the result must not depend on it. Without ``schema``
        the function is called once with an empty batch when the pipeline is built.
        """
        spec = catalog.MapBatchesSpec(_function("map_batches", function), schema, as_arrow)
        return self._then("map-batches", name, spec)

    def with_timestamps(
        self,
        column: str,
        *,
        out_of_orderness: Duration = 0,
        idle_timeout: Duration | None = None,
        name: str | None = None,
    ) -> Stream:
        """Take event times from ``column`` (a timestamp, a date or integer milliseconds).

        Args:
            column: where the time is; null and absurd times are bad records.
            out_of_orderness: how much earlier than the latest record of its split a record may arrive; windows wait
                for it.
            idle_timeout: a split that delivers nothing for so long does not hold windows back (None: it does).
            name: of the operator.
        """
        spec = catalog.WithTimestampsSpec(
            column,
            duration_ms(out_of_orderness, "out_of_orderness"),
            None if idle_timeout is None else duration_ms(idle_timeout, "idle_timeout"),
        )
        stream = self._then("with-timestamps", name, spec, refuses=True)
        stream._time_column = column
        return stream

    def union(self, *others: Stream) -> Stream:
        """Merge with streams of the same schema, in no particular order."""
        edges = self._edges
        for other in others:
            if not isinstance(other, Stream):
                raise UsageError(f"union takes streams, not {type(other).__name__}")
            if other._pipeline is not self._pipeline:
                raise UsageError("union merges streams of one pipeline; these belong to two")
            if not other._schema.equals(self._schema):
                raise UsageError(
                    f"union needs equal schemas: '{self._edges[0].upstream}' has {schema_text(self._schema)}, "
                    f"'{other._edges[0].upstream}' has {schema_text(other._schema)}"
                )
            edges += other._edges
        if len(set(edges)) != len(edges):
            raise UsageError("union was given one stream twice; its records would be counted twice")
        times = {stream._time_column for stream in (self, *others)}
        return Stream(self._pipeline, edges, self._schema, times.pop() if len(times) == 1 else None)

    def rebalance(self) -> Stream:
        """Spread the records evenly over all subtasks of the next operator."""
        return self._routed(Partitioner.REBALANCE)

    def broadcast(self) -> Stream:
        """Send every record to all subtasks of the next operator."""
        return self._routed(Partitioner.BROADCAST)

    def key_by(self, *columns: str, name: str | None = None) -> KeyedStream:
        """Bring records with equal values in ``columns`` together. A null or NaN key is a bad record."""
        from headgate.api.keyed import KeyedStream

        if any(not isinstance(column, str) for column in columns):
            raise UsageError("key_by takes names of columns; compute a key with with_columns(...) before")
        checked = self._then("key-by", name, catalog.KeyCheckSpec(columns), refuses=True)
        edges = tuple(replace(edge, partitioner=Partitioner.HASH, keys=columns) for edge in checked._edges)
        return KeyedStream(checked._pipeline, edges, checked._schema, columns, checked._time_column)

    def sink(self, sink: Sink, *, name: str | None = None) -> None:
        """End the stream in ``sink``. A stream may have several sinks.

        Raises:
            UsageError: the sink cannot take records of this schema.
        """
        if not callable(getattr(sink, "open_committer", None)):
            raise UsageError(f"a sink such as headgate.StreamSink('scope/stream') is needed, not {sink!r}")
        builder = self._pipeline._builder
        node = builder.claim_name("sink", name)
        try:
            sink.check(self._schema)
        except UsageError as error:
            raise UsageError(f"operator '{node}': {error.message}") from None
        builder.add(node, Role.SINK, self._edges, sink, self._schema)

    def collect(self, *, name: str | None = None) -> pl.DataFrame:
        """Run the pipeline to the end of its (bounded) input; return this stream's records as a Polars frame.

        Raises:
            UsageError: a source never ends.
        """
        from headgate.api.results import run_and_collect

        return run_and_collect(self._pipeline, self, name)

    def to_dataframe(self, spark: Any = None, *, name: str | None = None) -> Any:
        """Run the pipeline to the end of its (bounded) input; return this stream's records as a Spark DataFrame.

        Raises:
            UsageError: a source never ends, or there is no SparkSession.
        """
        from headgate.api.results import run_to_dataframe

        return run_to_dataframe(self._pipeline, self, spark, name)

    def iterate(
        self,
        body: Callable[[Stream], tuple[Feedback, Output]],
        *,
        max_rounds: int | None = None,
        round_column: str | None = None,
        on_round: Callable[[int], object] | None = None,
        name: str | None = None,
    ) -> Output:
        """Build a loop: records go through ``body``, and what it feeds back goes through it again.

        ``body(loop)`` is called once, now, with the stream of all records in the loop, and returns
        ``(feedback, output)``. The loop ends by itself when bounded input has ended and nothing circulates any more.
        Loops nest. Neither ``loop`` nor the output has event time; ``with_timestamps`` gives it to them.

        Args:
            body: returns the feedback, a stream or a sequence of streams with the columns of ``loop``, and the
                output, a stream or a tuple of streams.
            max_rounds: a record that comes back so many times is dropped.
            round_column: ``loop`` gets this int64 column: 0 when a record enters, one more each time it comes back;
                the body passes it on unchanged. Default: "round" if rounds are needed, else none.
            on_round: called in the driver with the number of each round that is finished everywhere: at least once
                (unless the driver's process dies), one call after another, in an outermost loop only.
            name: of the loop.

        Raises:
            UsageError: the body's result does not fit the loop.
        """
        from headgate.api.loops import LoopOptions, iterate

        return iterate(self, body, LoopOptions(max_rounds, round_column, on_round, name))

    def process(self, *args: object, **options: object) -> NoReturn:
        """State belongs to keys: ``key_by(...).process(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError("process needs a key, because its state belongs to one; call key_by(...) first")

    def side_output(self, *args: object, **options: object) -> NoReturn:
        """Side outputs are not there yet."""
        not_there_yet("a side output", "filter the stream once for each output")

    def join(self, *args: object, **options: object) -> NoReturn:
        """Joins are not there yet."""
        not_there_yet("a join")

    def _then(self, kind: str, name: str | None, spec: OperatorSpec, *, refuses: bool = False) -> Stream:
        """Add an operator behind this stream and return its output."""
        builder = self._pipeline._builder
        node = builder.claim_name(kind, name)
        schema = catalog.output_schema(spec, self._schema, str(node))
        text = catalog.state_text(spec)
        builder.add(node, Role.OPERATOR, self._edges, spec, schema, state_text=text, refuses=refuses)
        return Stream(self._pipeline, (Edge(node),), schema, self._time_column_in(schema))

    def _time_column_in(self, schema: pa.Schema) -> str | None:
        """The time column survives as long as a column of its name and type does."""
        name = self._time_column
        if name is None or schema.get_field_index(name) < 0:
            return None
        return name if schema.field(name).type.equals(self._schema.field(name).type) else None

    def _routed(self, partitioner: Partitioner) -> Stream:
        edges = tuple(replace(edge, partitioner=partitioner) for edge in self._edges)
        return Stream(self._pipeline, edges, self._schema, self._time_column)


def _function(verb: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(function):
        raise UsageError(f"{verb} needs a function, not {function!r}")
    return function


def _expressions(
    verb: str, name: object, expressions: tuple[pl.Expr | str, ...], named: dict[str, Any]
) -> list[pl.Expr]:
    """Return the expressions as Polars would read them: text names a column."""
    if isinstance(name, pl.Expr):
        raise UsageError(f"{verb}: name= names the operator; for a column 'name' write expression.alias('name')")
    found: list[pl.Expr] = []
    for expression in expressions:
        if not isinstance(expression, str | pl.Expr):
            raise UsageError(f"{verb} takes column names and Polars expressions, not {expression!r}")
        found.append(pl.col(expression) if isinstance(expression, str) else expression)
    for column, value in named.items():
        given = pl.col(value) if isinstance(value, str) else value
        found.append((given if isinstance(given, pl.Expr) else pl.lit(given)).alias(column))
    if not found:
        raise UsageError(f"{verb} needs at least one column or expression")
    return found
