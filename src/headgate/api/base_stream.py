"""The base classes of streams: records of one schema on edges of a graph, and the verbs that need no key.

Each verb adds a node to the pipeline's graph and returns the next stream. A stream knows its schema, so that a wrong
column or type is an error at the line that names it. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol, Self

import polars as pl
import pyarrow as pa

from headgate.api.graph_builder import GraphBuilder
from headgate.api.unsupported import refuse_life_cycle, refuse_uncalled_methods
from headgate.connectors.memory import FromRows
from headgate.display.html import StreamPicture, stream_html
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.graph import Edge, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import PipelineHandle
from headgate.operators import catalog
from headgate.operators.base import OperatorSpec
from headgate.operators.schemas import SchemaLike, schema_text

Row = dict[str, Any]

ROWS_AT_HAND = 5


class PipelineLike(Protocol):
    """What a stream needs of its pipeline."""

    name: str
    _builder: GraphBuilder

    def definition(self) -> PipelineDefinition:
        """See ``Pipeline``."""
        ...

    def start(self, *, spark: Any = None) -> PipelineHandle:
        """See ``Pipeline``."""
        ...

    def _checkpoint_root(self) -> str:
        """See ``Pipeline``."""
        ...

    def _explored(self, edges: tuple[Edge, ...], root: str, interval: Duration | None) -> PipelineLike:
        """See ``Pipeline``."""
        ...


class Records:
    """Records of one schema on their way through a pipeline: where they come from, their keys and event times."""

    def __init__(
        self,
        pipeline: PipelineLike,
        edges: tuple[Edge, ...],
        schema: pa.Schema,
        time_column: str | None = None,
        keys: tuple[str, ...] = (),
    ) -> None:
        """For the pipeline only; users get streams from ``Pipeline.source`` and from other streams."""
        self._pipeline = pipeline
        self._edges = edges
        self._schema = schema
        self._time_column = time_column
        self._keys = keys

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the records."""
        return self._schema

    def _repr_html_(self) -> str:
        """Return columns, and rows only if they are in memory already: looking at a stream runs nothing."""
        names = " and ".join(sorted({f"'{edge.upstream}'" for edge in self._edges}))
        look = "; show() runs it for a look at rows" if callable(getattr(type(self), "show", None)) else ""
        title = f"{type(self).__name__} of {names} in pipeline '{self._pipeline.name}'{look}"
        columns = [(field.name, str(field.type)) for field in self._schema]
        return stream_html(StreamPicture(title, columns, self._keys, self._time_column, self._rows_at_hand()))

    def _rows_at_hand(self) -> list[Row]:
        """Return the first records if the program itself gave them and nothing happens to them."""
        node = self._pipeline._builder.node(self._edges[0].upstream)
        if len(self._edges) == 1 and isinstance(node.spec, FromRows):
            return node.spec.first(ROWS_AT_HAND)
        return []

    def _like(self, edges: tuple[Edge, ...], schema: pa.Schema, time_column: str | None = None) -> Self:
        """Return a stream of this kind, with the same keys."""
        return type(self)(self._pipeline, edges, schema, time_column, self._keys)

    def _add(self, node: NodeName, spec: OperatorSpec, *, refuses: bool = False) -> pa.Schema:
        """Add an operator for these records and return the schema of its output."""
        schema = catalog.output_schema(spec, self._schema, str(node))
        text, rules = catalog.state_text(spec, str(node)), catalog.state_rules(spec, str(node))
        self._pipeline._builder.add(
            node, Role.OPERATOR, self._edges, spec, schema, state_text=text, state_rules=rules, refuses=refuses
        )
        return schema

    def _time_column_in(self, schema: pa.Schema) -> str | None:
        """The time column survives as long as a column of its name and type does."""
        name = self._time_column
        if name is None or schema.get_field_index(name) < 0:
            return None
        return name if schema.field(name).type.equals(self._schema.field(name).type) else None


def function_of(verb: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` if it is one.

    Raises:
        UsageError
    """
    if not callable(function):
        raise UsageError(f"{verb} needs a function, not {function!r}")
    refuse_uncalled_methods(verb, function)
    refuse_life_cycle(verb, function)
    return function


def expressions_of(
    verb: str, name: object, expressions: tuple[pl.Expr | str, ...], named: dict[str, Any]
) -> list[pl.Expr]:
    """Return the expressions as Polars would read them: text names a column.

    Raises:
        UsageError: there is none, or something that is none.
    """
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


class StatelessVerbs(Records):
    """Records without a key."""

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._schema.names)

    def filter(self, *predicates: pl.Expr | Callable[[Row], object], name: str | None = None) -> Self:
        """Keep the records for which every Polars expression is true, or for which one Python function is.

        An expression sees columns and is fast; a function gets each record as a dict.
        """
        functions = [p for p in predicates if not isinstance(p, pl.Expr)]
        if not functions and predicates:
            return self._then("filter", name, catalog.filter_spec(*(p for p in predicates if isinstance(p, pl.Expr))))
        if len(predicates) != 1 or not callable(functions[0]):
            raise UsageError("filter needs Polars expressions such as pl.col('level') == 'ERROR', or one function")
        function = function_of("filter", functions[0])
        spec = catalog.RowFunctionSpec(catalog.RowVerb.FILTER, function)
        return self._then("filter", name, spec, refuses=True)

    def select(self, *expressions: pl.Expr | str, name: str | None = None, **named: Any) -> Self:
        """Keep exactly these columns; a keyword such as ``total=pl.col("a") + 1`` names the result."""
        return self._then("select", name, catalog.select_spec(*expressions_of("select", name, expressions, named)))

    def with_columns(self, *expressions: pl.Expr | str, name: str | None = None, **named: Any) -> Self:
        """Add or replace columns."""
        found = expressions_of("with_columns", name, expressions, named)
        return self._then("with-columns", name, catalog.with_columns_spec(*found))

    def map(self, function: Callable[[Row], Row], schema: SchemaLike | None = None, *, name: str | None = None) -> Self:
        """Turn each record (a dict) into another one.

        ``schema`` describes the results if their schema is not that of the input. A result that does not fit it is a
        bad record.
        """
        spec = catalog.RowFunctionSpec(catalog.RowVerb.MAP, function_of("map", function), schema)
        return self._then("map", name, spec, refuses=True)

    def flat_map(
        self, function: Callable[[Row], Iterable[Row]], schema: SchemaLike | None = None, *, name: str | None = None
    ) -> Self:
        """Turn each record (a dict) into any number of records; otherwise like ``map``."""
        spec = catalog.RowFunctionSpec(catalog.RowVerb.FLAT_MAP, function_of("flat_map", function), schema)
        return self._then("flat-map", name, spec, refuses=True)

    def map_batches(
        self,
        function: Callable[[Any], Any],
        schema: SchemaLike | None = None,
        *,
        as_arrow: bool | None = None,
        name: str | None = None,
    ) -> Self:
        """Turn each batch into another one.

        Batches may begin and end at other records in each run, so the result must not depend on the division into
        batches.

        Args:
            function: takes and returns a Polars frame, or a ``pyarrow.RecordBatch`` with ``as_arrow=True``.
            schema: the schema of the results. Without it, the function is called once with an empty batch when the
                pipeline is built.
            as_arrow: whether ``function`` works on ``pyarrow.RecordBatch``.
            name: name of the operator.
        """
        spec = catalog.MapBatchesSpec(function_of("map_batches", function), schema, as_arrow)
        return self._then("map-batches", name, spec, refuses=True)

    def with_timestamps(
        self,
        column: str,
        *,
        out_of_orderness: Duration = 0,
        idle_timeout: Duration | None = None,
        name: str | None = None,
    ) -> Self:
        """Take event times from ``column`` (a timestamp, a date or integer milliseconds).

        Args:
            column: the column with the time. A record with a null or an impossible time is a bad record.
            out_of_orderness: how much older than the latest record of its split a record may be without being late.
                Windows wait this long.
            idle_timeout: a split that delivers nothing for this long no longer holds windows back. None: it always
                does.
            name: name of the operator.
        """
        spec = catalog.WithTimestampsSpec(
            column,
            duration_ms(out_of_orderness, "out_of_orderness"),
            None if idle_timeout is None else duration_ms(idle_timeout, "idle_timeout"),
        )
        stream = self._then("with-timestamps", name, spec, refuses=True)
        stream._time_column = column
        return stream

    def union(self, *others: Self) -> Self:
        """Merge this stream with others of the same schema, in no particular order."""
        edges = self._edges
        for other in others:
            if not isinstance(other, StatelessVerbs):
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
        return self._like(edges, self._schema, times.pop() if len(times) == 1 else None)

    def rebalance(self) -> Self:
        """Distribute the records evenly over all subtasks of the next operator."""
        return self._routed(Partitioner.REBALANCE)

    def broadcast(self) -> Self:
        """Send every record to all subtasks of the next operator."""
        return self._routed(Partitioner.BROADCAST)

    def _then(self, kind: str, name: str | None, spec: OperatorSpec, *, refuses: bool = False) -> Self:
        """Add an operator after this stream and return its output."""
        node = self._pipeline._builder.claim_name(kind, name)
        schema = self._add(node, spec, refuses=refuses)
        return self._like((Edge(node),), schema, self._time_column_in(schema))

    def _routed(self, partitioner: Partitioner) -> Self:
        edges = tuple(replace(edge, partitioner=partitioner) for edge in self._edges)
        return self._like(edges, self._schema, self._time_column)
