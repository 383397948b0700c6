"""Streams by key, and windows over them.

``agg`` becomes two operators where its aggregates permit it: partial results before the shuffle, their merge behind
it. That is decided here, once, from the expressions (docs/spec/windows.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import polars as pl
import pyarrow as pa

from headgate.api.not_yet import not_there_yet
from headgate.api.stream import Row, Stream, _expressions, _function
from headgate.api.windows import Tumbling
from headgate.errors import UsageError
from headgate.model.config import Duration
from headgate.model.graph import Edge, Partitioner, Role
from headgate.operators import catalog
from headgate.operators.process.by_batch import BatchProcessFunction
from headgate.operators.process.functions import ProcessFunction
from headgate.operators.reduce import ReduceSpec
from headgate.operators.types import schema_text
from headgate.operators.windows.choice import window_operators
from headgate.operators.windows.plan import START_COLUMN, TumblingAggregate

if TYPE_CHECKING:
    from headgate.api.loops import Feedback
    from headgate.api.pipeline import Pipeline

Output = TypeVar("Output")
"""What the body of a loop gives out: a stream or a tuple of streams."""


class KeyedStream:
    """Records with equal keys come to the same subtask, in the order in which each upstream subtask sent them."""

    def __init__(
        self,
        pipeline: Pipeline,
        edges: tuple[Edge, ...],
        schema: pa.Schema,
        keys: tuple[str, ...],
        time_column: str | None,
    ) -> None:
        """For ``Stream.key_by`` only."""
        self._pipeline = pipeline
        self._edges = edges
        self._schema = schema
        self._keys = keys
        self._time_column = time_column

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the records."""
        return self._schema

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the key."""
        return self._keys

    def __repr__(self) -> str:
        return f"KeyedStream(by {', '.join(self._keys)}: {schema_text(self._schema)})"

    def reduce(self, function: Callable[[Row, Row], Row], *, name: str | None = None) -> Stream:
        """Combine the records of each key one by one: ``function(so far, record)`` returns the new "so far".

        Both are dicts with the columns of this stream, and so is the result. Emits it for every record; the first
        record of a key is its first value. A result that does not fit the schema is a bad record.
        """
        builder = self._pipeline._builder
        node = builder.claim_name("reduce", name)
        spec = ReduceSpec(self._keys, _function("reduce", function), self._schema)
        output = catalog.output_schema(spec, self._schema, str(node))
        text = catalog.state_text(spec)
        builder.add(node, Role.OPERATOR, self._edges, spec, output, state_text=text, refuses=True)
        return Stream(self._pipeline, (Edge(node),), output, self._time_column)

    def window(self, window: Tumbling, *, allowed_lateness: Duration | None = None) -> WindowedStream:
        """Group the records of each key by event time.

        Raises:
            UsageError: the stream has no event time yet.
        """
        if not isinstance(window, Tumbling):
            raise UsageError(f"window needs a window such as headgate.Tumbling('5m'), not {window!r}")
        if allowed_lateness is not None:
            not_there_yet("allowed_lateness", "wait longer with with_timestamps(..., out_of_orderness=...)")
        upstream = self._edges[0].upstream
        if self._time_column is None and self._pipeline._builder.loops_of(upstream):  # L37
            raise UsageError(
                f"window after '{upstream}' needs event times, which no loop carries round; call "
                f".with_timestamps(column) within its body or behind it, then key_by and window"
            )
        if self._time_column is None:
            raise UsageError(
                f"window after '{upstream}' needs event times; call "
                f".with_timestamps(column) before key_by and keep that column (the columns are "
                f"{schema_text(self._schema)})"
            )
        return WindowedStream(self, window, self._time_column)

    def process(self, function: ProcessFunction | BatchProcessFunction, *, name: str | None = None) -> Stream:
        """Process records with state for each key: one by one (``ProcessFunction``) or many keys a call.

        The ``schema`` of the function (an instance) describes the results (default: as the input). A result of a
        ``ProcessFunction`` that does not fit is a bad record.

        Raises:
            UsageError: no such instance, or a wrong declaration of state.
        """
        builder = self._pipeline._builder
        node = builder.claim_name("process", name)
        spec = catalog.process_spec(str(node), self._keys, function, self._schema)
        output = catalog.output_schema(spec, self._schema, str(node))
        text = catalog.state_text(spec)
        builder.add(node, Role.OPERATOR, self._edges, spec, output, state_text=text, refuses=True)
        time_column = Stream(self._pipeline, self._edges, self._schema, self._time_column)._time_column_in(output)
        return Stream(self._pipeline, (Edge(node),), output, time_column)

    def iterate(
        self,
        body: Callable[[KeyedStream], tuple[Feedback, Output]],
        *,
        max_rounds: int | None = None,
        round_column: str | None = None,
        on_round: Callable[[int], object] | None = None,
        name: str | None = None,
    ) -> Output:
        """Build a loop whose records are always where their key belongs; else as ``Stream.iterate``.

        ``loop`` has the key of this stream, so that the body can begin with ``loop.process(...)``. Feedback is a stream
        (or several) with the columns of ``loop`` and without a key: the loop brings each record to its own.

        Raises:
            UsageError: the body's result does not fit the loop.
        """
        from headgate.api.loops import LoopOptions, iterate

        return iterate(self, body, LoopOptions(max_rounds, round_column, on_round, name))

    def join(self, *args: object, **options: object) -> NoReturn:
        """Joins are not there yet."""
        not_there_yet("a join")


class WindowedStream:
    """The windows of each key."""

    def __init__(self, keyed: KeyedStream, window: Tumbling, time_column: str) -> None:
        """For ``KeyedStream.window`` only."""
        self._keyed = keyed
        self._window = window
        self._time_column = time_column

    def agg(self, *expressions: pl.Expr, name: str | None = None, **named: Any) -> Stream:
        """Aggregate each window with Polars expressions: ``agg(errors=pl.len(), last=pl.col("ts").max())``.

        One record a key and window, when the window ends: the key columns, ``window_start``, ``window_end`` (not
        included), then the aggregates. Records that come after that are dropped and counted as late.

        Raises:
            UsageError: unknown column, wrong type, or two results of one name.
        """
        keyed = self._keyed
        builder = keyed._pipeline._builder
        node = builder.claim_name("window", name)
        aggregates = tuple(_expressions("agg", name, expressions, named))
        aggregate = TumblingAggregate(keyed._keys, self._time_column, self._window.size_ms, aggregates)
        operators = window_operators(aggregate, keyed._schema, str(node))
        edges = keyed._edges
        if operators.combine is not None:
            before = tuple(Edge(edge.upstream) for edge in edges)
            combine = builder.claim_name(f"{node}-combine", None)
            partial = catalog.output_schema(operators.combine, keyed._schema, str(combine))
            text = catalog.state_text(operators.combine)
            builder.add(combine, Role.OPERATOR, before, operators.combine, partial, state_text=text)
            edges = (Edge(combine, Partitioner.HASH, operators.keys),)
        text = catalog.state_text(operators.window)
        builder.add(node, Role.OPERATOR, edges, operators.window, operators.output, state_text=text)
        return Stream(keyed._pipeline, (Edge(node),), operators.output, START_COLUMN)

    def reduce(self, *args: object, **options: object) -> NoReturn:
        """A Python reduce over a window is not there yet."""
        not_there_yet("reduce over a window", "use agg with Polars expressions")

    def apply(self, *args: object, **options: object) -> NoReturn:
        """A Python function over a window is not there yet."""
        not_there_yet("apply over a window", "use agg with Polars expressions")
