"""Streams as the user writes them, without and with a key, and windows over keyed streams.

Each verb adds to the pipeline's graph and returns the next stream; verbs without state are in ``api.base_stream``.
``agg`` becomes two operators where its aggregates permit it: partial results before the shuffle, their merge after it
(docs/spec/windows.md). Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import polars as pl
import pyarrow as pa

from headgate.api.base_stream import Records, Row, StatelessVerbs, expressions_of, function_of
from headgate.api.collect import ROWS_SHOWN, Bound, run_and_collect, run_to_dataframe, show
from headgate.api.config import StateChoice, operator_state
from headgate.api.connected_streams import ConnectedStreams, connected
from headgate.api.loops import Feedback, LoopOptions, Output, iterate
from headgate.api.unsupported import (
    KEYED_HINTS,
    STREAM_HINTS,
    UNION_HINT,
    not_there_yet,
    raise_no_attribute,
    refuse_foreign_methods,
    refuse_uncalled_methods,
)
from headgate.connectors.base import Sink, check_is_sink
from headgate.errors import UsageError
from headgate.model.config import Duration, StateConfig, duration_ms
from headgate.model.graph import Edge, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators import catalog
from headgate.operators.functions import ReduceSpec
from headgate.operators.process.batch_process import BatchProcessFunction
from headgate.operators.process.row_process import ProcessFunction
from headgate.operators.schemas import schema_text
from headgate.operators.timestamps import event_time
from headgate.operators.tumbling_windows import window_operators
from headgate.operators.window_plan import START_COLUMN, TumblingAggregate
from headgate.state.descriptors import NO_EVOLUTION, Evolution, checked_evolution

if TYPE_CHECKING:
    from headgate.operators.process.key_process import KeyFunctionSpec


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Consecutive windows of ``size``, aligned to 1970-01-01 00:00 UTC. Each record falls into exactly one of them."""

    size: Duration

    def __post_init__(self) -> None:
        if self.size_ms <= 0:
            raise UsageError("a window's size must be longer than zero")

    @property
    def size_ms(self) -> int:
        """The size in milliseconds."""
        return duration_ms(self.size, "window size")


class Sliding:
    """Sliding windows are not there yet."""

    def __init__(self, *args: object, **options: object) -> None:
        not_there_yet("a sliding window", "use headgate.Tumbling('5m')")


class Session:
    """Session windows are not there yet."""

    def __init__(self, *args: object, **options: object) -> None:
        not_there_yet("a session window", "use headgate.Tumbling('5m')")


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """The arguments of ``transform_with_state``."""

    processor: Any
    output_schema: Any
    time_mode: str
    initial_state: Any
    event_time_column: str | None
    is_pandas: bool


def processor_operator(keyed: Records, node: NodeName, options: ProcessorOptions) -> KeyFunctionSpec:
    """Return the operator that calls a processor for the records of ``keyed``.

    Raises:
        UsageError: something that is wrong, or not supported.
    """
    from headgate.spark.stateful_processor import processor_spec

    refuse_uncalled_methods(f"operator '{node}'", options.processor)
    return processor_spec(
        str(node),
        keyed._keys,
        options.processor,
        keyed._schema,
        output_schema=options.output_schema,
        time_mode=options.time_mode,
        time_column=keyed._time_column,
        initial_state=options.initial_state,
        is_pandas=options.is_pandas,
    )


def time_column_of(keyed: Records, node: NodeName, output: pa.Schema, options: ProcessorOptions) -> str | None:
    """Return where the event time of the results is: the column that is named, or the one that went in.

    Raises:
        UsageError: there is no such column, it is no time, or the input has no event time.
    """
    column = options.event_time_column
    if column is None:
        return keyed._time_column_in(output)
    if keyed._time_column is None:
        raise UsageError(
            f"operator '{node}': event_time_column needs event times; call .with_timestamps(column) before"
        )
    return event_time(str(node), output, column).column


class Stream(StatelessVerbs):
    """A stream of records of one schema, without a key. Each method adds an operator and returns the next stream."""

    def __repr__(self) -> str:
        return f"Stream({schema_text(self._schema)})"

    def key_by(self, *columns: str, name: str | None = None) -> KeyedStream:
        """Send all records with equal values in ``columns`` to the same subtask.

        A record with a null or NaN in one of these columns is a bad record.
        """
        if any(not isinstance(column, str) for column in columns):
            raise UsageError("key_by takes names of columns; compute a key with with_columns(...) before")
        checked = self._then("key-by", name, catalog.KeyCheckSpec(columns), refuses=True)
        edges = tuple(replace(edge, partitioner=Partitioner.HASH, keys=columns) for edge in checked._edges)
        return KeyedStream(checked._pipeline, edges, checked._schema, checked._time_column, columns)

    def connect(self, broadcast: Stream) -> ConnectedStreams[Stream]:
        """Connect this stream with a broadcast stream: ``stream.connect(rules.broadcast()).process(function)``.

        Every subtask receives all records of the broadcast stream and keeps the same state of them; see
        ``BroadcastProcessFunction``. If the broadcast stream has event time, its watermark holds back the watermark of
        the result. If it has none, the result has the event time of this stream.

        Raises:
            UsageError: ``broadcast`` is not a broadcast stream.
        """
        return connected(self, broadcast, Stream)

    def sink(self, sink: Sink, *, name: str | None = None) -> None:
        """Write the records to ``sink``. A stream may have several sinks.

        Raises:
            UsageError: the sink cannot write records of this schema.
        """
        check_is_sink(sink)
        builder = self._pipeline._builder
        node = builder.claim_name("sink", name)
        refuse_uncalled_methods(f"sink '{node}'", sink)
        try:
            sink.check(self._schema)
        except UsageError as error:
            raise UsageError(f"operator '{node}': {error.message}") from None
        builder.add(node, Role.SINK, self._edges, sink, self._schema)

    def collect(self, *, limit: int | None = None, seconds: float | None = None) -> pl.DataFrame:
        """Run the part of the pipeline that this stream needs, and return its records as a Polars frame.

        Use it to explore data. Every call reads the input from the beginning, whatever ran before under the same name,
        and keeps nothing. It does not touch the output of the pipeline's sinks. Bad records that the pipeline would
        divert are left out.

        Args:
            limit: end the run after this many records, and return no more than these.
            seconds: end the run after this many seconds, and return the records that were committed by then. Windows
                that are still open are not among them.

        Raises:
            UsageError: a source never ends, and neither ``limit`` nor ``seconds`` is given.
        """
        return run_and_collect(self, Bound(limit, seconds))

    def take(self, count: int) -> list[Row]:
        """Return ``count`` records, or all if there are fewer. It is not defined which records; see ``collect``."""
        return run_and_collect(self, Bound(limit=count), "take").to_dicts()

    def show(self, count: int = ROWS_SHOWN) -> None:
        """Print up to ``count`` records as a table; see ``take``."""
        show(self, count)

    def to_dataframe(self, spark: Any = None, *, limit: int | None = None, seconds: float | None = None) -> Any:
        """Run the part of the pipeline that this stream needs, and return its records as a Spark DataFrame.

        See ``collect``. The DataFrame reads files that exist until this process ends.

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
        """Build a loop: records go through ``body``, and the feedback that it returns goes through it again.

        ``iterate`` calls ``body(loop)`` once, immediately, with the stream of all records in the loop. The body returns
        ``(feedback, output)``. The loop ends by itself when bounded input has ended and nothing circulates any more.
        Loops can be nested. Neither ``loop`` nor the output has event time; assign it with ``with_timestamps``.

        Args:
            body: returns the feedback (a stream or a sequence of streams with the columns of ``loop``) and the
                output (a stream or a tuple of streams).
            max_rounds: a record that comes back this many times is dropped.
            round_column: the name of an int64 column that ``loop`` gets. It is 0 when a record enters, and grows by one
                each time the record comes back. The body must pass it on unchanged. Default: "round" if rounds are
                needed, else no column.
            on_round: called in the driver with the number of each round that is finished in all subtasks: at least once
                (unless the driver's process dies), one call after another, and only in an outermost loop.
            name: name of the loop.

        Raises:
            UsageError: the body's result does not fit the loop.
        """
        return iterate(self, body, LoopOptions(max_rounds, round_column, on_round, name))

    def process(self, *args: object, **options: object) -> NoReturn:
        """Not available without a key, because state belongs to keys: use ``key_by(...).process(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError("process needs a key, because its state belongs to one; call key_by(...) first")

    def transform_with_state(self, *args: object, **options: object) -> NoReturn:
        """Not available without a key, because state belongs to keys: use ``key_by(...).transform_with_state(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError("transform_with_state needs a key, because its state belongs to one; call key_by(...) first")

    def side_output(self, *args: object, **options: object) -> NoReturn:
        """Side outputs are not there yet."""
        not_there_yet("a side output", "filter the stream once for each output")

    def join(self, *args: object, **options: object) -> NoReturn:
        """Joins are not there yet."""
        not_there_yet("a join", UNION_HINT)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise_no_attribute("Stream", name, STREAM_HINTS, dir(Stream))

    def group_by(self, *args: object, **options: object) -> NoReturn:
        """Use ``key_by`` instead.

        Raises:
            UsageError: always.
        """
        raise UsageError("group_by is called key_by: stream.key_by('column')")

    def reduce(self, *args: object, **options: object) -> NoReturn:
        """Not available without a key: use ``key_by(...).reduce(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError("reduce needs a key, because it keeps one result for each; call key_by(...) first")

    def window(self, *args: object, **options: object) -> NoReturn:
        """Not available without a key: use ``key_by(...).window(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "window needs a key; call key_by(...) first, by a column that is the same everywhere for one key"
        )

    def agg(self, *args: object, **options: object) -> NoReturn:
        """Not available without a window: use ``key_by(...).window(...).agg(...)``.

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
    """A stream with records grouped by key.

    Records with equal keys reach the same subtask, in the order in which each upstream subtask sent them.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or not hasattr(Stream, name):
                raise_no_attribute("KeyedStream", name, STREAM_HINTS | KEYED_HINTS, dir(KeyedStream))
            raise AttributeError(
                f"a keyed stream has no '{name}': call it before key_by, or after reduce, process or window(...).agg"
            )

    def agg(self, *args: object, **options: object) -> NoReturn:
        """Not available without a window: use ``window(...).agg(...)``.

        Raises:
            UsageError: always.
        """
        raise UsageError(_AGG)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the key columns."""
        return self._keys

    def __repr__(self) -> str:
        return f"KeyedStream(by {', '.join(self._keys)}: {schema_text(self._schema)})"

    def connect(self, broadcast: Stream) -> ConnectedStreams[Stream]:
        """Connect this stream with a broadcast stream. The function has state per key. See ``Stream.connect``."""
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
        """Combine the records of each key one by one: ``function(total, record)`` returns the new total.

        Both arguments are dicts with the columns of this stream, and so is the result. The first record of a key is its
        first total. The new total is emitted after every record.

        Args:
            function: combines the total so far with a record. A result that does not fit the schema is a bad record.
            name: name of the operator.
            state: where the totals are kept, if not in the state backend of the pipeline.
            evolution: how to convert totals that were stored when this stream had other columns.
            ttl: not there yet; totals do not expire.
        """
        if ttl is not None:
            not_there_yet("ttl= of reduce", TTL_OF_REDUCE)
        where = operator_state(state)
        node = self._pipeline._builder.claim_name("reduce", name)
        checked_evolution(f"operator '{node}'", evolution, pa.struct(list(self._schema)))
        spec = ReduceSpec(self._keys, function_of("reduce", function), self._schema, evolution)
        output = self._add(node, spec, refuses=True)
        self._pipeline._builder.keep_state(node, where)
        return Stream(self._pipeline, (Edge(node),), output, self._time_column)

    def window(
        self, window: Tumbling, *, allowed_lateness: Duration | None = None, state: StateChoice | None = None
    ) -> WindowedStream:
        """Group the records of each key into windows by event time.

        Args:
            window: the kind and size of the windows, such as ``Tumbling("5m")``.
            allowed_lateness: not there yet.
            state: where the windows are kept, if not in the state backend of the pipeline.

        Raises:
            UsageError: the stream has no event time yet.
        """
        if not isinstance(window, Tumbling):
            raise UsageError(f"window needs a window such as headgate.Tumbling('5m'), not {window!r}")
        if allowed_lateness is not None:
            not_there_yet("allowed_lateness", "wait longer with with_timestamps(..., out_of_orderness=...)")
        upstream = self._edges[0].upstream
        if self._time_column is None and self._pipeline._builder.loops_of(upstream):
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
        """Process records with a function that has state per key.

        Args:
            function: an instance of ``ProcessFunction``, which is called per record, or of ``BatchProcessFunction``,
                which is called with many keys at a time. Its ``schema`` describes the results (default: the schema of
                the input). A result of a ``ProcessFunction`` that does not fit the schema is a bad record.
            name: name of the operator.
            state: where the function's state and timers are kept, if not in the state backend of the pipeline.

        Raises:
            UsageError: ``function`` is not such an instance, or declares its state wrongly.
        """
        where = operator_state(state)
        node = self._pipeline._builder.claim_name("process", name)
        refuse_foreign_methods(str(node), function)
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
        state: StateChoice | None = None,
    ) -> Stream:
        """Process records with a PySpark ``StatefulProcessor`` that takes and yields Rows.

        Args:
            processor: an instance of the processor; every subtask works on a copy.
            output_schema: the schema of the results: a ``StructType``, DDL text, or a schema as for other operators.
            time_mode: the time of the processor's timers: "none", "processingTime" or "eventTime". A TTL needs
                "processingTime".
            initial_state: a DataFrame or table with the columns of the key. Each key begins with its rows, once.
            event_time_column: the column of the results that has their event time.
            name: name of the operator.
            state: where the processor's state and timers are kept, if not in the state backend of the pipeline.

        Raises:
            UsageError: an argument is wrong, or the processor needs something that is not supported.
        """
        options = ProcessorOptions(processor, output_schema, time_mode, initial_state, event_time_column, False)
        return self._transformed("transform-with-state", name, options, state)

    def transform_with_state_in_pandas(
        self,
        processor: Any,
        output_schema: Any,
        *,
        time_mode: str = "none",
        initial_state: Any = None,
        event_time_column: str | None = None,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> Stream:
        """Process records with a PySpark ``StatefulProcessor`` that takes and yields pandas frames.

        The arguments are those of ``transform_with_state``.
        """
        options = ProcessorOptions(processor, output_schema, time_mode, initial_state, event_time_column, True)
        return self._transformed("transform-with-state-in-pandas", name, options, state)

    def _transformed(self, kind: str, name: str | None, options: ProcessorOptions, state: StateChoice | None) -> Stream:
        where = operator_state(state)
        node = self._pipeline._builder.claim_name(kind, name)
        spec = processor_operator(self, node, options)
        time_column = time_column_of(self, node, spec.function.schema, options)
        output = self._add(node, spec, refuses=True)
        self._pipeline._builder.keep_state(node, where)
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
        """Build a loop in which every record is in the subtask of its key; see ``Stream.iterate``.

        ``loop`` has the key of this stream, so the body can begin with ``loop.process(...)``. The feedback is a stream
        (or several) with the columns of ``loop`` and without a key; the loop sends each record to the subtask of its
        key.

        Raises:
            UsageError: the body's result does not fit the loop.
        """
        return iterate(self, body, LoopOptions(max_rounds, round_column, on_round, name))

    def join(self, *args: object, **options: object) -> NoReturn:
        """Joins are not there yet."""
        not_there_yet("a join", UNION_HINT)


class WindowedStream:
    """A keyed stream that is divided into windows; ``agg`` computes a result for each window of each key."""

    def __init__(self, keyed: KeyedStream, window: Tumbling, time_column: str, state: StateConfig | None) -> None:
        """For ``KeyedStream.window`` only."""
        self._state = state
        self._keyed = keyed
        self._window = window
        self._time_column = time_column

    def agg(self, *expressions: pl.Expr, name: str | None = None, **named: Any) -> Stream:
        """Aggregate each window with Polars expressions: ``agg(errors=pl.len(), last=pl.col("ts").max())``.

        Emits one record per key and window when the window ends. Its columns are the key columns, ``window_start``,
        ``window_end`` (exclusive), and the aggregates. Records that arrive later are dropped and counted as late.

        Raises:
            UsageError: a column is unknown or has the wrong type, or two results have the same name.
        """
        keyed = self._keyed
        builder = keyed._pipeline._builder
        node = builder.claim_name("window", name)
        aggregates = tuple(expressions_of("agg", name, expressions, named))
        aggregate = TumblingAggregate(keyed._keys, self._time_column, self._window.size_ms, aggregates)
        operators = window_operators(aggregate, keyed._schema, str(node))
        edges = keyed._edges
        if operators.combine is not None:
            before = tuple(replace(edge, partitioner=Partitioner.FORWARD, keys=()) for edge in edges)
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
