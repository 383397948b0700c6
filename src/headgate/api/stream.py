"""Streams as the user writes them, without and with a key, and windows over those with one.

Each verb adds to the pipeline's graph and returns the next stream; those without state are in ``api.stateless``. The
three kinds of stream make each other, so they are in one file. ``agg`` becomes two operators where its aggregates
permit it: partial results before the shuffle, their merge behind it. That is decided here, once, from the expressions
(docs/spec/windows.md). Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import polars as pl
import pyarrow as pa

from headgate.api.connected import ConnectedStreams, connected
from headgate.api.loops import Feedback, LoopOptions, Output, iterate
from headgate.api.not_yet import not_there_yet, refuse_methods_to_come, refuse_unheard
from headgate.api.other_words import KEYED, STREAM, no_attribute
from headgate.api.processors import ProcessorOptions, processor_operator, time_column_of
from headgate.api.records import Records, Row, expressions_of, function_of
from headgate.api.results import ROWS_SHOWN, Bound, run_and_collect, run_to_dataframe, show
from headgate.api.state import StateChoice, operator_state
from headgate.api.stateless import StatelessVerbs
from headgate.api.windows import Tumbling
from headgate.connectors.base import Sink
from headgate.errors import UsageError
from headgate.model.config import Duration, StateConfig
from headgate.model.graph import Edge, Partitioner, Role
from headgate.operators import catalog
from headgate.operators.process.by_batch import BatchProcessFunction
from headgate.operators.process.functions import ProcessFunction
from headgate.operators.reduce import ReduceSpec
from headgate.operators.types import schema_text
from headgate.operators.windows.choice import window_operators
from headgate.operators.windows.plan import START_COLUMN, TumblingAggregate
from headgate.state.evolution import NO_EVOLUTION, Evolution, checked


class Stream(StatelessVerbs):
    """Records of one schema on their way through a pipeline."""

    def __repr__(self) -> str:
        return f"Stream({schema_text(self._schema)})"

    def key_by(self, *columns: str, name: str | None = None) -> KeyedStream:
        """Bring records with equal values in ``columns`` together. A null or NaN key is a bad record."""
        if any(not isinstance(column, str) for column in columns):
            raise UsageError("key_by takes names of columns; compute a key with with_columns(...) before")
        checked = self._then("key-by", name, catalog.KeyCheckSpec(columns), refuses=True)
        edges = tuple(replace(edge, partitioner=Partitioner.HASH, keys=columns) for edge in checked._edges)
        return KeyedStream(checked._pipeline, edges, checked._schema, checked._time_column, columns)

    def connect(self, broadcast: Stream) -> ConnectedStreams[Stream]:
        """Have a broadcast stream beside this one: ``stream.connect(rules.broadcast()).process(function)``.

        Every subtask gets all its records, and keeps the same of them; see ``BroadcastProcessFunction``. Its event
        times, if it has any, hold back those of the result; without any they are those of this stream.

        Raises:
            UsageError: it is not broadcast.
        """
        return connected(self, broadcast, Stream)

    def sink(self, sink: Sink, *, name: str | None = None) -> None:
        """End the stream in ``sink``. A stream may have several sinks.

        Raises:
            UsageError: the sink cannot take records of this schema.
        """
        if not callable(getattr(sink, "open_committer", None)):
            raise UsageError(f"a sink such as headgate.StreamSink('scope/stream') is needed, not {sink!r}")
        builder = self._pipeline._builder
        node = builder.claim_name("sink", name)
        refuse_unheard(f"sink '{node}'", sink)
        try:
            sink.check(self._schema)
        except UsageError as error:
            raise UsageError(f"operator '{node}': {error.message}") from None
        builder.add(node, Role.SINK, self._edges, sink, self._schema)

    def collect(self, *, limit: int | None = None, seconds: float | None = None) -> pl.DataFrame:
        """Run what this stream needs and return its records as a Polars frame. For a look: nothing is kept.

        Every call reads its input from the beginning and gives the records of this program, whatever ran before under
        the same name; what the pipeline's sinks have is not touched. Bad records that the pipeline would divert are
        left out.

        Args:
            limit: end when there are so many records, and return no more than these.
            seconds: end so long after it began to run, with what had been committed until then; windows that are open
                then are not in it.

        Raises:
            UsageError: a source never ends, and neither ``limit`` nor ``seconds`` is given.
        """
        return run_and_collect(self, Bound(limit, seconds))

    def take(self, count: int) -> list[Row]:
        """Return ``count`` records, fewer if there are not so many. Which ones is not defined. See ``collect``."""
        return run_and_collect(self, Bound(limit=count), "take").to_dicts()

    def show(self, count: int = ROWS_SHOWN) -> None:
        """Print some records as a table. See ``take``."""
        show(self, count)

    def to_dataframe(self, spark: Any = None, *, limit: int | None = None, seconds: float | None = None) -> Any:
        """Run what this stream needs and return its records as a Spark DataFrame; see ``collect``.

        The DataFrame reads files that are there until this process ends.

        Raises:
            UsageError: a source never ends, and neither ``limit`` nor ``seconds`` is given; or there is no
                SparkSession.
        """
        return run_to_dataframe(self, Bound(limit, seconds), spark)

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
        return iterate(self, body, LoopOptions(max_rounds, round_column, on_round, name))

    def process(self, *args: object, **options: object) -> NoReturn:
        """State belongs to keys: ``key_by(...).process(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError("process needs a key, because its state belongs to one; call key_by(...) first")

    def transform_with_state(self, *args: object, **options: object) -> NoReturn:
        """State belongs to keys: ``key_by(...).transform_with_state(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError("transform_with_state needs a key, because its state belongs to one; call key_by(...) first")

    def side_output(self, *args: object, **options: object) -> NoReturn:
        """Side outputs are not there yet."""
        not_there_yet("a side output", "filter the stream once for each output")

    def join(self, *args: object, **options: object) -> NoReturn:
        """Joins are not there yet."""
        not_there_yet("a join")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute("Stream", name, STREAM)

    def group_by(self, *args: object, **options: object) -> NoReturn:
        """It is called ``key_by``.

        Raises:
            UsageError: always.
        """
        raise UsageError("group_by is called key_by: stream.key_by('column')")

    def reduce(self, *args: object, **options: object) -> NoReturn:
        """It needs a key: ``key_by(...).reduce(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError("reduce needs a key, because it keeps one result for each; call key_by(...) first")

    def window(self, *args: object, **options: object) -> NoReturn:
        """It needs a key: ``key_by(...).window(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "window needs a key; call key_by(...) first, by a column that is the same everywhere for one key"
        )

    def agg(self, *args: object, **options: object) -> NoReturn:
        """It needs a window: ``key_by(...).window(...).agg(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError(_AGG)


TTL_OF_REDUCE = (
    "keep the result of each key in a headgate.ProcessFunction after key_by, as state.value(name, type, "
    "ttl=headgate.TTL('1h'))"
)

_AGG = (
    "agg needs a window, which says when an aggregate is ready: "
    "stream.key_by('column').window(headgate.Tumbling('1m')).agg(...); for a running result use reduce or process"
)


class KeyedStream(Records):
    """Records with equal keys come to the same subtask, in the order in which each upstream subtask sent them."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or not hasattr(Stream, name):
                no_attribute("KeyedStream", name, STREAM | KEYED)
            raise AttributeError(
                f"a keyed stream has no '{name}': call it before key_by, or after reduce, process or window(...).agg"
            )

    def agg(self, *args: object, **options: object) -> NoReturn:
        """It needs a window: ``window(...).agg(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError(_AGG)

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the key."""
        return self._keys

    def __repr__(self) -> str:
        return f"KeyedStream(by {', '.join(self._keys)}: {schema_text(self._schema)})"

    def connect(self, broadcast: Stream) -> ConnectedStreams[Stream]:
        """Have a broadcast stream beside this one, with state for each key. See ``Stream.connect``."""
        return connected(self, broadcast, Stream)

    def reduce(
        self,
        function: Callable[[Row, Row], Row],
        *,
        name: str | None = None,
        state: StateChoice | None = None,
        evolution: Evolution = NO_EVOLUTION,
        ttl: object = None,
    ) -> Stream:
        """Combine the records of each key one by one: ``function(so far, record)`` returns the new "so far".

        Both are dicts with the columns of this stream, and so is the result. Emits it for every record; the first
        record of a key is its first value. A result that does not fit the schema is a bad record. ``state`` says where
        the results are, if not where the pipeline has its state; ``evolution`` what becomes of results that were kept
        when this stream had other columns. Results do not expire: ``ttl`` is not there yet.
        """
        if ttl is not None:
            not_there_yet("ttl= of reduce", TTL_OF_REDUCE)
        where = operator_state(state)
        node = self._pipeline._builder.claim_name("reduce", name)
        checked(f"operator '{node}'", evolution, pa.struct(list(self._schema)))
        spec = ReduceSpec(self._keys, function_of("reduce", function), self._schema, evolution)
        output = self._add(node, spec, refuses=True)
        self._pipeline._builder.keep_state(node, where)
        return Stream(self._pipeline, (Edge(node),), output, self._time_column)

    def window(
        self, window: Tumbling, *, allowed_lateness: Duration | None = None, state: StateChoice | None = None
    ) -> WindowedStream:
        """Group the records of each key by event time.

        ``state`` says where the windows are, if not where the pipeline has its state.

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
                f".with_timestamps(column) within its body or after it, then key_by and window"
            )
        if self._time_column is None:
            raise UsageError(
                f"window after '{upstream}' needs event times; call "
                f".with_timestamps(column) before key_by and keep that column (the columns are "
                f"{schema_text(self._schema)})"
            )
        return WindowedStream(self, window, self._time_column, operator_state(state))

    def process(
        self,
        function: ProcessFunction | BatchProcessFunction,
        *,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> Stream:
        """Process records with state for each key: one by one (``ProcessFunction``) or many keys a call.

        The ``schema`` of the function (an instance) describes the results (default: as the input). A result of a
        ``ProcessFunction`` that does not fit is a bad record. ``state`` says where the function's state and timers are,
        if not where the pipeline has its state.

        Raises:
            UsageError: no such instance, or a wrong declaration of state.
        """
        where = operator_state(state)
        node = self._pipeline._builder.claim_name("process", name)
        refuse_methods_to_come(str(node), function)
        spec = catalog.process_spec(str(node), self._keys, function, self._schema)
        output = self._add(node, spec, refuses=True)
        self._pipeline._builder.keep_state(node, where)
        return Stream(self._pipeline, (Edge(node),), output, self._time_column_in(output))

    def transform_with_state(
        self,
        processor: Any,
        output_schema: Any,
        *,
        time_mode: str = "none",
        initial_state: Any = None,
        event_time_column: str | None = None,
        name: str | None = None,
    ) -> Stream:
        """Process records with a ``StatefulProcessor`` of PySpark's that takes and yields Rows.

        Args:
            processor: an instance; every subtask works on a copy.
            output_schema: of the results: a ``StructType``, DDL text, or a schema as elsewhere.
            time_mode: "none", "processingTime" or "eventTime": what timers go by. A TTL needs "processingTime".
            initial_state: rows that keys begin with, once: a DataFrame or table with the columns of the key.
            event_time_column: where the event time of the results is.
            name: of the operator.

        Raises:
            UsageError: something is wrong, or not supported.
        """
        options = ProcessorOptions(processor, output_schema, time_mode, initial_state, event_time_column, False)
        return self._transformed("transform-with-state", name, options)

    def transform_with_state_in_pandas(
        self,
        processor: Any,
        output_schema: Any,
        *,
        time_mode: str = "none",
        initial_state: Any = None,
        event_time_column: str | None = None,
        name: str | None = None,
    ) -> Stream:
        """Process records with a ``StatefulProcessor`` that takes and yields pandas frames.

        Everything else is as with ``transform_with_state``.
        """
        options = ProcessorOptions(processor, output_schema, time_mode, initial_state, event_time_column, True)
        return self._transformed("transform-with-state-in-pandas", name, options)

    def _transformed(self, kind: str, name: str | None, options: ProcessorOptions) -> Stream:
        node = self._pipeline._builder.claim_name(kind, name)
        spec = processor_operator(self, node, options)
        time_column = time_column_of(self, node, spec.function.schema, options)
        output = self._add(node, spec, refuses=True)
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
        return iterate(self, body, LoopOptions(max_rounds, round_column, on_round, name))

    def join(self, *args: object, **options: object) -> NoReturn:
        """Joins are not there yet."""
        not_there_yet("a join")


class WindowedStream:
    """The windows of each key."""

    def __init__(self, keyed: KeyedStream, window: Tumbling, time_column: str, state: StateConfig | None) -> None:
        """For ``KeyedStream.window`` only."""
        self._state = state
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
        aggregates = tuple(expressions_of("agg", name, expressions, named))
        aggregate = TumblingAggregate(keyed._keys, self._time_column, self._window.size_ms, aggregates)
        operators = window_operators(aggregate, keyed._schema, str(node))
        edges = keyed._edges
        if operators.combine is not None:
            before = tuple(Edge(edge.upstream) for edge in edges)
            combine = builder.claim_name(f"{node}-combine", None, node)
            partial = catalog.output_schema(operators.combine, keyed._schema, str(combine))
            text = catalog.state_text(operators.combine)
            builder.add(combine, Role.OPERATOR, before, operators.combine, partial, state_text=text)
            edges = (Edge(combine, Partitioner.HASH, operators.keys),)
        text = catalog.state_text(operators.window)
        builder.add(node, Role.OPERATOR, edges, operators.window, operators.output, state_text=text)
        builder.keep_state(node, self._state)
        return Stream(keyed._pipeline, (Edge(node),), operators.output, START_COLUMN)

    def reduce(self, *args: object, **options: object) -> NoReturn:
        """A Python reduce over a window is not there yet."""
        not_there_yet("reduce over a window", "use agg with Polars expressions")

    def apply(self, *args: object, **options: object) -> NoReturn:
        """A Python function over a window is not there yet."""
        not_there_yet("apply over a window", "use agg with Polars expressions")
