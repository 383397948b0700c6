"""Streams as the user writes them, without and with a key.

Each verb adds to the pipeline's graph and returns the next stream; verbs without state are in ``base_stream``, windows
in ``windowed_stream``. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import polars as pl
import pyarrow as pa

from headgate.api.collect import ROWS_SHOWN, Bound, run_and_collect, run_to_dataframe, show
from headgate.api.config import StateChoice, operator_state
from headgate.api.streams.base_stream import (
    AsyncOptions,
    Records,
    Row,
    StatelessVerbs,
    async_map,
    expressions_of,
    function_of,
)
from headgate.api.streams.changes import Changes, check_keys_of_changes
from headgate.api.streams.connected_streams import ConnectedStreams, connected
from headgate.api.streams.joins import UNSET, JoinOptions, joined, joined_as_of
from headgate.api.streams.loops import Feedback, LoopOptions, Output, iterate
from headgate.api.streams.over import OverOptions, over
from headgate.api.streams.windowed_stream import (
    Global,
    Sliding,
    Tumbling,
    Window,
    WindowedStream,
    check_trigger,
    has_changes,
    late_tag,
    misses_results,
    trigger_of,
)
from headgate.api.unsupported import (
    KEYED_HINTS,
    STREAM_HINTS,
    not_there_yet,
    raise_no_attribute,
    refuse_foreign_methods,
    refuse_uncalled_methods,
    refused,
)
from headgate.connectors.base import Sink, check_is_sink
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.config import Duration, StateConfig, check_switches, duration_ms
from headgate.model.graph import Edge, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators import catalog
from headgate.operators.async_map import AsyncFunction, Result
from headgate.operators.changes import OP
from headgate.operators.joins.join_plan import How
from headgate.operators.process.batch_process import BatchProcessFunction
from headgate.operators.process.row_process import ProcessFunction
from headgate.operators.reduction import ReduceSpec
from headgate.operators.schemas import SchemaLike, schema_text
from headgate.operators.timestamps import event_time
from headgate.operators.windows.window_plan import END_COLUMN, START_COLUMN, Emission
from headgate.operators.windows.window_trigger import Trigger
from headgate.state.descriptors import NO_EVOLUTION, Evolution, checked_evolution
from headgate.state.ttl import TTL

if TYPE_CHECKING:
    from headgate.operators.process.key_process import KeyFunctionSpec


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
        if self._changes is not None:
            check_keys_of_changes(self._changes, columns)
        checked = self._then("key-by", name, catalog.KeyCheckSpec(columns), refuses=True, changes=self._changes)
        edges = tuple(replace(edge, partitioner=Partitioner.HASH, keys=columns) for edge in checked._all_edges)
        return KeyedStream(checked._pipeline, edges, checked._schema, checked._time_column, columns, self._changes)

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

        A stream with changes is written with its column ``op``, as data, unless the sink writes changes, such as
        ``KafkaSink(upsert=True)``.

        Raises:
            UsageError: the sink cannot write records of this schema.
        """
        check_is_sink(sink)
        builder = self._pipeline._builder
        node = builder.claim_name("sink", name)
        refuse_uncalled_methods(f"sink '{node}'", sink)
        try:
            changes = self._changes
            sink = sink.for_changes(self._change_keys, retractions=changes is not None and changes.retractions)
            sink.check(self._schema)
        except UsageError as error:
            raise UsageError(f"operator '{node}': {error.message}") from None
        builder.add(node, Role.SINK, self._edges_of_any, sink, self._schema)

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

    process = refused("process needs a key, because its state belongs to one; call key_by(...) first")
    transform_with_state = refused(
        "transform_with_state needs a key, because its state belongs to one; call key_by(...) first"
    )

    def side_output(self, name: str) -> Stream:
        """Return a side output of the operator of which this stream is the result.

        ``side_outputs`` of a process function declares it, and its calls of ``context.emit_to`` fill it. Records of a
        side output that no other operator reads are dropped and not counted. Its event time is that of this stream.

        Raises:
            UsageError: the operator has no such side output.
        """
        found = self._side_outputs.get(name) if isinstance(name, str) else None
        if isinstance(found, Stream):
            return found
        upstream = " and ".join(f"'{edge.upstream}'" for edge in self._all_edges)
        if self._side_outputs:
            names = ", ".join(f"'{name}'" for name in self._side_outputs)
            raise UsageError(f"operator {upstream} has no side output {name!r}; it has {names}")
        raise UsageError(
            f"the stream of {upstream} has no side outputs; declare them in the function, such as "
            "side_outputs = {'late': {'id': int}}, and call side_output on the stream that process returns; for "
            "late records of windows it is window(..., late_output='late')"
        )

    def join(
        self,
        right: Stream,
        on: str | Sequence[str] | None = None,
        *,
        how: How = "inner",
        left_on: str | Sequence[str] | None = None,
        right_on: str | Sequence[str] | None = None,
        within: tuple[Duration, Duration] | None = None,
        window: Tumbling | Sliding | None = None,
        ttl: Duration | TTL | None = UNSET,
        suffix: str = "_right",
        wait: bool | None = None,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> Stream:
        """Join records of two streams that have equal keys: ``orders.join(payments, on="id", within=("0s", "1h"))``.

        A result has the columns of the left record, then those of the right one without its key. A null key matches
        nothing. Give exactly one of ``within``, ``window`` and ``ttl``, which says what else must hold, and how long
        records are kept. With ``within`` and ``window`` a record that is not later than the watermark of both streams
        is dropped and counted as late.

        With a broadcast table, ``orders.join(customers.broadcast(), on="customer")``, every subtask keeps the last row
        of each key of the table, and a record is joined with it when it comes. It takes none of the three, and no
        ``state``; ``how`` is "inner", "left", "semi" or "anti".

        Args:
            right: the other stream, or a table, on which ``broadcast()`` was called.
            on: the key columns, if they have the same names on both sides.
            how: "inner" emits pairs. "left", "right" and "full" also emit the records of that side, or of both sides,
                that have no partner, with nulls, as soon as none can come any more. "semi" emits each left record that
                has a partner once, "anti" each that has none, with the left columns only.
            left_on: the key columns of this stream.
            right_on: the key columns of the other stream.
            within: the least and the greatest value of right time - left time, both included.
            window: both records must be in the same window. Results come at its end and have ``window_start`` and
                ``window_end``.
            ttl: how long each record is kept, in processing time; None keeps it for ever. Either stream may have
                changes then. With changes, and for "left", "right", "full" and "anti", the result is a stream with
                changes, because a partner may come at any time. It has no event time.
            suffix: is added to the name of a right column that the left stream has as well.
            wait: only with a table: records wait until it has been read to its end. None: they do if its sources end.
            name: name of the operator.
            state: where records are kept, if not in the state backend of the pipeline.

        Raises:
            UsageError: a column is unknown, keys have different types, an event time is missing, or two columns would
                have the same name.
        """
        options = JoinOptions(on, left_on, right_on, how, within, window, ttl, suffix, wait, name, state)
        return joined(self, right, options, Stream)

    def join_asof(
        self,
        right: Stream,
        *,
        by: str | Sequence[str] | None = None,
        by_left: str | Sequence[str] | None = None,
        by_right: str | Sequence[str] | None = None,
        how: Literal["left", "inner"] = "left",
        tolerance: Duration | None = None,
        suffix: str = "_right",
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> Stream:
        """Join each record with the latest one of ``right`` that has its key and is not later.

        Both streams need event times, which need not be named: the result has that of this stream. A record waits until
        the watermark of both streams has passed it. If ``right`` has changes, it is a table: each record is joined with
        the row of its key as it was at its time, and with none after a delete.

        Args:
            right: the other stream.
            by: the key columns, if they have the same names on both sides.
            by_left: the key columns of this stream.
            by_right: the key columns of the other stream.
            how: "left" emits every record of this stream, "inner" only those with a partner.
            tolerance: by how much the right record may be earlier at most.
            suffix: is added to the name of a right column that the left stream has as well.
            name: name of the operator.
            state: where records are kept, if not in the state backend of the pipeline.

        Raises:
            UsageError: see ``join``.
        """
        keys = (by, by_left, by_right)
        return joined_as_of(self, right, keys, how, tolerance, suffix, name, state, Stream)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise_no_attribute("Stream", name, STREAM_HINTS, dir(Stream))

    def top_per_window(
        self,
        count: int,
        *,
        by: str | Sequence[str],
        descending: bool | Sequence[bool] = True,
        ties: bool = False,
        rank: str | None = None,
        window: Tumbling | Sliding | None = None,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> Stream:
        """Emit the top ``count`` records of each window, of all keys; see ``KeyedStream.top_per_window``."""
        if window is not None:
            keyed = KeyedStream(self._pipeline, self._edges, self._schema, self._time_column)
        elif all(column in self._schema.names for column in WINDOW_COLUMNS):
            keyed = self.key_by(*WINDOW_COLUMNS)
        else:
            raise UsageError(
                "top_per_window takes results of windows, which have window_start and window_end; call it after "
                "window(...).agg(...), give window=, or use key_by(...).top(...)"
            )
        return keyed.top_per_window(
            count, by=by, descending=descending, ties=ties, rank=rank, window=window, name=name, state=state
        )

    group_by = refused("group_by is called key_by: stream.key_by('column')")
    reduce = refused("reduce needs a key, because it keeps one result for each; call key_by(...) first")
    window = refused("window needs a key; call key_by(...) first, by a column that is the same everywhere for one key")
    deduplicate = refused("deduplicate needs a key, of which it keeps one record; call key_by(...) first")
    top = refused("top needs a key, of which it keeps the first records; call key_by(...) first")
    over = refused("over needs a key, of which each record is seen with those before it; call key_by(...) first")
    agg = refused(
        "agg needs a key: stream.key_by('column').agg(...) for a running result, "
        "stream.key_by('column').window(headgate.Tumbling('1m')).agg(...) for one result per window"
    )


WINDOW_COLUMNS = (START_COLUMN, END_COLUMN)


def _lifetime(node: NodeName, option: str, given: TTL | Duration | None, *, retractions: bool = False) -> TTL | None:
    """Return what was given as time to live.

    Raises:
        UsageError: it is none, or there are retractions.
    """
    if given is None:
        return None
    if retractions:
        raise UsageError(
            f"operator '{node}': {option}= does not go with retractions: what a forgotten key sent could not be taken "
            f"back; give {option}=None"
        )
    return given if isinstance(given, TTL) else TTL(given)


def _check_count(node: NodeName, count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"operator '{node}': the number of records must be a whole number from 1 on, not {count!r}")


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

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the key columns."""
        return self._keys

    def __repr__(self) -> str:
        return f"KeyedStream(by {', '.join(self._keys)}: {schema_text(self._schema)})"

    def connect(self, other: Stream | KeyedStream) -> ConnectedStreams[Stream]:
        """Connect this stream with a keyed or a broadcast stream: ``orders.key_by("id").connect(paid.key_by("id"))``.

        With a keyed stream, ``process`` takes a ``CoProcessFunction``: records of both streams that have equal keys,
        of equal types, share state and timers. Event time is the lower one of both streams; if only one of them has
        event time, the result has none, and timers of event time fire at the end of all input. With a broadcast
        stream see ``Stream.connect``; the function also has state per key.

        Raises:
            UsageError: ``other`` is neither.
        """
        return connected(self, other, Stream)

    def reduce(
        self,
        function: Callable[[Row, Row], Row],
        *,
        name: str | None = None,
        state: StateChoice | None = None,
        evolution: Evolution = NO_EVOLUTION,
        ttl: TTL | Duration | None = None,
    ) -> Stream:
        """Combine the records of each key one by one: ``function(total, record)`` returns the new total.

        Both arguments are dicts with the columns of this stream, and so is the result. The first record of a key is its
        first total. The new total is emitted after every record.

        Args:
            function: combines the total so far with a record. A result that does not fit the schema is a bad record.
            name: name of the operator.
            state: where the totals are kept, if not in the state backend of the pipeline.
            evolution: how to convert totals that were stored when this stream had other columns.
            ttl: forget keys that had no record for this long, by processing time. Such a key begins again with its next
                record.
        """
        where = operator_state(state)
        node = self._pipeline._builder.claim_name("reduce", name)
        lifetime = _lifetime(node, "ttl", ttl)
        spec = ReduceSpec(self._keys, function_of("reduce", function), self._schema, evolution, lifetime)
        checked_evolution(f"operator '{node}'", evolution, spec.descriptor.type)
        output = self._add(node, spec, refuses=True)
        self._pipeline._builder.keep_state(node, where)
        return Stream(self._pipeline, (Edge(node),), output, self._time_column)

    def agg(
        self,
        *expressions: pl.Expr,
        retractions: bool = False,
        ttl: TTL | Duration | None = None,
        name: str | None = None,
        state: StateChoice | None = None,
        **named: Any,
    ) -> Stream:
        """Aggregate all records of each key so far: ``agg(bids=pl.len(), highest=pl.col("price").max())``.

        The result is a stream with changes: after each batch, what changed of the results of its keys. Its columns are
        the key columns, the aggregates, and ``op``. For one result per window use ``window(...).agg(...)``.

        Args:
            expressions: ``len``, ``count``, ``sum``, ``min``, ``max``, ``mean``, ``std``, ``var``, ``first``, ``last``,
                ``median``, ``quantile`` and ``n_unique`` of an expression over one record, or of
                ``expression.filter(condition)``, and ``expression.sort_by(other).last()`` or ``max_by(other)``.
            retractions: emit each update as two records: ``update_before`` with the old result, ``update_after`` with
                the new one. Aggregates of these results and ``key_by`` with other columns need it.
            ttl: forget keys that had no record for this long. Such a key begins again with its next record.
            name: name of the operator.
            state: where the aggregates are kept, if not in the state backend of the pipeline.
            named: aggregates by the names of their columns.

        Raises:
            UsageError: an aggregate needs all records at once, a column is unknown, or two have the same name.
        """
        where = operator_state(state)
        builder = self._pipeline._builder
        node = builder.claim_name("agg", name)
        found = tuple(expressions_of("agg", name, expressions, named))
        if self._changes is not None and not self._changes.retractions:
            raise UsageError(
                f"operator '{node}': an aggregate of changes must take the old rows back, and these have no "
                "update_before; give the operator that makes them retractions=True"
            )
        check_switches(f"operator '{node}': ", retractions=retractions)
        lifetime = _lifetime(node, "ttl", ttl, retractions=retractions)
        aggregate = catalog.RunningAggregate(self._keys, found, self._changes is not None, retractions, lifetime)
        spec = catalog.running_aggregate_spec(aggregate, self._schema, str(node))
        with builder.all_or_nothing():
            narrow = self._narrowed(node, catalog.needed_columns(found, self._schema, (*self._keys, OP)))
            output = narrow._add(node, spec, takes_changes=True)
        builder.keep_state(node, where)
        return Stream(self._pipeline, (Edge(node),), output, None, (), Changes(self._keys, retractions))

    def deduplicate(
        self,
        keep: Literal["first", "last"] = "first",
        *,
        within: TTL | Duration | None,
        by: str | None = None,
        retractions: bool = False,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> Stream:
        """Keep one record of each key.

        ``keep="first"`` without ``by`` emits the first record that comes, and drops the others. All else is a stream
        with changes: a record that is kept from now on replaces the one before.

        Args:
            keep: the first or the last record. Of records that are equal in ``by``, it is the first or last that came.
            within: how long a key is remembered after a record of it was emitted, in processing time; None: for ever,
                so that state grows with the number of keys.
            by: the column that orders records, such as their event time. A record without it is never preferred.
                None: records are ordered as they come.
            retractions: emit each change as two records, ``update_before`` and ``update_after``.
            name: name of the operator.
            state: where keys are kept, if not in the state backend of the pipeline.

        Raises:
            UsageError: an argument is wrong.
        """
        where = operator_state(state)
        builder = self._pipeline._builder
        node = builder.claim_name("deduplicate", name)
        if keep not in ("first", "last"):
            raise UsageError(f"operator '{node}': keep is 'first' or 'last', not {keep!r}")
        if by is not None and not isinstance(by, str):
            raise UsageError(f"operator '{node}': by= is the name of a column, not {by!r}")
        check_switches(f"operator '{node}': ", retractions=retractions)
        lifetime = _lifetime(node, "within", within, retractions=retractions)
        spec = catalog.DeduplicateSpec(self._keys, self._schema, keep == "last", by, retractions, lifetime)
        output = self._add(node, spec)
        builder.keep_state(node, where)
        changes = None if spec.is_append_only else Changes(self._keys, retractions)
        return Stream(self._pipeline, (Edge(node),), output, self._time_column_in(output), (), changes)

    def top(
        self,
        count: int,
        *,
        by: str | Sequence[str],
        within: TTL | Duration | None,
        descending: bool | Sequence[bool] = True,
        rank: str | None = "rank",
        retractions: bool = False,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> Stream:
        """Keep the top ``count`` records of each key: ``top(10, by="price", within=None)``.

        The result is a stream with changes. Each rank of a key has one record; a new record in between moves the others
        down. The stream may itself have changes, such as the results of ``agg``: all its rows are kept then, because
        any of them may be among the top when others go.

        Args:
            count: how many records.
            by: the column, or columns, that order records. Of equal ones, that which came first comes first. Nulls come
                last.
            within: how long a key is remembered after its last record, in processing time; None: for ever, so that
                state grows with the number of keys, and of a stream with changes with the number of its rows.
            descending: whether the largest value comes first, for all columns or for each.
            rank: the name of the column with the rank, from 1 on. None: there is none, and a change says which record
                left and which came; this is much less output.
            retractions: emit each update as two records, ``update_before`` and ``update_after``.
            name: name of the operator.
            state: where records are kept, if not in the state backend of the pipeline.

        Raises:
            UsageError: an argument is wrong, or a column is unknown or has no order.
        """
        where = operator_state(state)
        builder = self._pipeline._builder
        node = builder.claim_name("top", name)
        _check_count(node, count)
        check_switches(f"operator '{node}': ", retractions=retractions)
        order = catalog.order_of(str(node), by, descending)
        has_retractions = retractions or (rank is None and count > 1)
        lifetime = _lifetime(node, "within", within, retractions=has_retractions)
        if self._changes is None:
            spec = catalog.TopSpec(self._keys, self._schema, count, order, rank, has_retractions, lifetime)
        else:
            schema = pa.schema([field for field in self._schema if field.name != OP])
            known = self._changes.keys or schema.names
            identity = tuple(column for column in known if column not in self._keys)
            is_upsert = not self._changes.retractions
            spec = catalog.ChangingTopSpec(
                self._keys, schema, count, order, rank, has_retractions, lifetime, identity, is_upsert
            )
        output = self._add(node, spec, takes_changes=True)
        builder.keep_state(node, where)
        changes = Changes(spec.change_keys, has_retractions)
        return Stream(self._pipeline, (Edge(node),), output, self._time_column_in(output), (), changes)

    def top_per_window(
        self,
        count: int,
        *,
        by: str | Sequence[str],
        descending: bool | Sequence[bool] = True,
        ties: bool = False,
        rank: str | None = None,
        window: Tumbling | Sliding | None = None,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> Stream:
        """Emit the top ``count`` records of each key in each window, when the window has ended.

        The records are results of windows, with ``window_start`` and ``window_end``. Or ``window`` says the windows in
        which they lie by their event time; the result then has these two columns after theirs.

        Args:
            count: how many records.
            by: the column, or columns, that order records. Of equal ones, that which came first comes first. Nulls come
                last.
            descending: whether the largest value comes first, for all columns or for each.
            ties: emit all records that are equal to the last one in ``by``, too.
            rank: the name of the column with the rank, from 1 on. With ``ties``, equal records have the same.
            window: of records that are no results of windows: ``Tumbling("10s")`` or ``Sliding("10s", "2s")``. Of each
                batch only those travel to the subtask of their key that may be among the top.
            name: name of the operator.
            state: where records are kept until the end of their window.

        Raises:
            UsageError: an argument is wrong, or the records are no results of windows and have none.
        """
        where = operator_state(state)
        node = self._pipeline._builder.claim_name("top-per-window", name)
        _check_count(node, count)
        check_switches(f"operator '{node}': ", ties=ties)
        order = catalog.order_of(str(node), by, descending)
        keys = (*(key for key in self._keys if key not in WINDOW_COLUMNS), *WINDOW_COLUMNS)
        if window is not None:
            return self._top_of_windows(node, keys, window, count, order, ties, rank, where)
        has_bounds = all(name in self._schema.names for name in WINDOW_COLUMNS)
        if not has_bounds or self._time_column not in WINDOW_COLUMNS:
            raise UsageError(
                f"operator '{node}': top_per_window takes results of windows, which have window_start and window_end, "
                "and one of them as event time; call it after window(...).agg(...), give window=, or use "
                "key_by(...).top(...)"
            )
        return self._top_per_window(node, catalog.WindowTopSpec(keys, self._schema, count, order, rank, ties), where)

    def _top_of_windows(
        self,
        node: NodeName,
        keys: tuple[str, ...],
        window: Tumbling | Sliding,
        count: int,
        order: catalog.Order,
        ties: bool,
        rank: str | None,
        state: StateConfig | None,
    ) -> Stream:
        if not isinstance(window, Tumbling | Sliding) or trigger_of(window) is not None:
            raise UsageError(
                f"operator '{node}': window= is a tumbling or sliding window of event time, such as "
                f"headgate.Tumbling('10s'), not {window!r}"
            )
        if self._time_column is None:
            raise UsageError(
                f"operator '{node}': window= needs event times; call .with_timestamps(column) before and keep that "
                f"column (the columns are {schema_text(self._schema)})"
            )
        windows, time = window.aligned(), event_time(str(node), self._schema, self._time_column)
        holds_back = misses_results(self, window, 0)
        before = tuple(replace(edge, partitioner=Partitioner.FORWARD, keys=()) for edge in self._edges)
        plain = Stream(self._pipeline, before, self._schema, self._time_column)
        with self._pipeline._builder.all_or_nothing():
            candidates = catalog.WindowCandidatesSpec(self._keys, windows, time, count, order, ties)
            found = plain._then(f"{node}-windows", None, candidates, part_of=node)
            keyed = KeyedStream(self._pipeline, found._edges, found._schema, START_COLUMN, keys)
            records = pa.schema([field for field in found._schema if field.name != catalog.LEFT_OUT])
            spec = catalog.WindowTopSpec(keys, records, count, order, rank, ties, windows, holds_back)
            return keyed._top_per_window(node, spec, state)

    def _top_per_window(self, node: NodeName, spec: catalog.WindowTopSpec, state: StateConfig | None) -> Stream:
        edges = tuple(replace(edge, partitioner=Partitioner.HASH, keys=spec.keys) for edge in self._edges)
        output = KeyedStream(self._pipeline, edges, self._schema, self._time_column, spec.keys)._add(node, spec)
        self._pipeline._builder.keep_state(node, state)
        return Stream(self._pipeline, (Edge(node),), output, self._time_column_in(output))

    def over(
        self,
        *expressions: pl.Expr,
        range: Duration | None = None,
        rows: int | Literal["unbounded"] | None = None,
        ttl: TTL | Duration | None = None,
        late_output: str | None = None,
        name: str | None = None,
        state: StateChoice | None = None,
        **named: Any,
    ) -> Stream:
        """Add aggregates over the records before each one: ``over(range="1h", spent=pl.col("price").sum())``.

        The result has all records, each with its aggregates as further columns. Records of a key come in the order of
        their event times, each when the watermark has passed it. A record that is not later than the watermark when it
        arrives is counted as late, and dropped unless ``late_output`` names a side output for it. Give ``range`` or
        ``rows``, which say of which records of the key the aggregates are: its frame.

        Args:
            expressions: aggregates, as for ``window(...).agg(...)``. Over all records so far only ``len``, ``count``,
                ``sum``, ``min``, ``max``, ``mean``, ``std``, ``var``, ``first``, ``last``, ``max_by`` and ``min_by``.
            range: the frame is the records of so much time before the record, both ends included, and all that have its
                very time: ``RANGE BETWEEN INTERVAL '1' HOUR PRECEDING AND CURRENT ROW``. They are kept for so long in
                event time. ``"0s"``: those of its very time. ``"unbounded"``: all records that are not later.
            rows: the frame is so many records before the record, and the record itself: ``rows=10`` is ``ROWS BETWEEN
                10 PRECEDING AND CURRENT ROW``. Records of the same time are in the order in which they came.
                ``"unbounded"``: all records so far.
            ttl: forget a key that had no record for this long, in processing time; None: never, so that state grows
                with the number of keys. With a bounded ``range`` keys are forgotten by event time.
            late_output: the name of a side output that takes late records, as they came. It has no event time.
            name: name of the operator.
            state: where records are kept, if not in the state backend of the pipeline.
            named: aggregates by the names of their columns.

        Raises:
            UsageError: an argument is wrong, the stream has no event time or has changes, a column is unknown, or there
                is one of this name already.
        """
        node = self._pipeline._builder.claim_name("over", name)
        found = expressions_of("over", name, expressions, named)
        lifetime = _lifetime(node, "ttl", ttl, retractions=False)
        return over(self, node, found, OverOptions(range, rows, lifetime, late_output, state), Stream)

    def _narrowed(self, node: NodeName, columns: list[str]) -> KeyedStream:
        """Return this stream with these columns only, so that no others travel to the keys' subtasks."""
        if columns == self._schema.names:
            return self
        before = tuple(replace(edge, partitioner=Partitioner.FORWARD, keys=()) for edge in self._all_edges)
        plain = Stream(self._pipeline, before, self._schema, self._time_column)
        spec = catalog.select_spec(*map(pl.col, columns))
        narrow = plain._then(f"{node}-columns", None, spec, part_of=node)
        edges = tuple(replace(edge, partitioner=Partitioner.HASH, keys=self._keys) for edge in narrow._edges)
        return KeyedStream(self._pipeline, edges, narrow._schema, narrow._time_column, self._keys, self._changes)

    def window(
        self,
        window: Window,
        *,
        allowed_lateness: Duration | None = None,
        late_output: str | None = None,
        early: Duration | None = None,
        accumulate: bool = True,
        trigger: Trigger | None = None,
        retractions: bool = False,
        state: StateChoice | None = None,
    ) -> WindowedStream[Stream]:
        """Group the records of each key into windows, by event time unless the window says otherwise.

        Args:
            window: the kind and size of the windows: ``Tumbling("5m")``, ``Sliding("5m", "1m")``, ``Session("10s")``,
                ``Count(100)`` or ``Global(every="10s")``.
            allowed_lateness: for so much longer than its end a window keeps its state and takes late records. It emits
                the results of their keys again, updated: the last result of a key and a ``window_start`` counts.
                Results of sessions are then a stream with changes, because a late record may join two of them.
            early: so often, in processing time, a window emits the results that changed, before it ends. Results of
                sessions are then a stream with changes.
            accumulate: what is emitted early or again is the whole result of the window. False: it is the result of
                only those records that came since the window emitted last (tumbling windows).
            late_output: the name of a side output that takes late records, as they came. The result has it:
                ``counts.side_output("late")``. It has no event time. All records pass the shuffle then, instead of
                partial results of them.
            trigger: says when the windows emit their results, in place of their end: an instance of a class that
                derives from ``Trigger``. It goes with tumbling and sliding windows of event time, and ``Global()``.
            retractions: for updated sessions: emit each update as two records, ``update_before`` with the result that
                was emitted and ``update_after`` with the new one, and delete whole results. Aggregates of these results
                and ``key_by`` with other columns need it.
            state: where the windows are kept, if not in the state backend of the pipeline.

        Raises:
            UsageError: the stream has no event time yet, and the window needs it.
        """
        if not isinstance(window, Window):
            raise UsageError(f"window needs a window such as headgate.Tumbling('5m'), not {window!r}")
        if trigger is not None:
            check_trigger(window, trigger, is_early=early is not None or not accumulate)
        elif isinstance(window, Global):
            window.trigger()
        upstream, firing, is_global = self._edges[0].upstream, trigger_of(window), isinstance(window, Global)
        if (firing is not None or is_global) and (allowed_lateness or late_output or early or not accumulate):
            raise UsageError(
                f"{type(window).__name__} windows like this have no late records, and emit when they say: leave out "
                "allowed_lateness=, late_output=, early= and accumulate="
            )
        check_switches("window: ", accumulate=accumulate, retractions=retractions)
        emission = _emission(window, allowed_lateness, late_output, early, accumulate)
        if retractions:
            emission = replace(emission, retractions=_with_retractions(window, emission))
        if (firing or trigger) is not None and self._pipeline._builder.loops_of(upstream):
            not_there_yet(f"{type(window).__name__} windows inside loops", "use process with state, or leave the loop")
        needs_time = not is_global if firing is None else firing.is_event_time
        if needs_time and self._time_column is None and self._pipeline._builder.loops_of(upstream):
            raise UsageError(
                f"window after '{upstream}' needs event times, which no loop carries round; call "
                f".with_timestamps(column) within its body or after it, then key_by and window"
            )
        if needs_time and self._time_column is None:
            raise UsageError(
                f"window after '{upstream}' needs event times; call "
                f".with_timestamps(column) before key_by and keep that column (the columns are "
                f"{schema_text(self._schema)})"
            )
        if self._time_column is not None and misses_results(self, window, emission.lateness_ms):
            emission = replace(emission, holds_back=True)
        return WindowedStream(self, window, self._time_column, operator_state(state), Stream, emission, trigger)

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
        self._add(node, catalog.process_spec(str(node), self._keys, function, self._schema), refuses=True)
        self._pipeline._builder.keep_state(node, where)
        return self._result(node, Stream)

    def map_async(
        self,
        function: AsyncFunction | Callable[[Row], Coroutine[Any, Any, Result]],
        schema: SchemaLike | None = None,
        *,
        limit: int = 100,
        timeout: Duration = "5s",
        retries: int = 0,
        retry_delay: Duration = "100ms",
        retry_if: Callable[[Exception], bool] | None = None,
        on_timeout: Callable[[Row], Result] | None = None,
        ordered: bool = True,
        name: str | None = None,
    ) -> Stream:
        """Call an ``async def`` function for each record, in the subtask of its key; see ``Stream.map_async``.

        All results of a key come from one subtask, with ``ordered`` in the order of its records. The result has no key.
        """
        options = AsyncOptions(limit, timeout, retries, retry_delay, retry_if, on_timeout, ordered)
        node, spec = async_map(self, function, schema, options, name)
        self._add(node, spec, refuses=True)
        return self._result(node, Stream)

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

    join = refused("join takes its key by on=; call it on the stream before key_by: stream.join(other, on='id')")


def _emission(
    window: Window, lateness: Duration | None, late_output: str | None, early: Duration | None, accumulate: bool
) -> Emission:
    """Return when windows emit their results.

    Raises:
        UsageError: the options do not fit together.
    """
    lateness_ms = 0 if lateness is None else duration_ms(lateness, "allowed_lateness")
    early_ms = 0 if early is None else duration_ms(early, "early")
    if early is not None and early_ms <= 0:
        raise UsageError("early must be longer than zero, such as '10s'; leave it out for results at the end only")
    if not accumulate and not (lateness_ms or early_ms):
        raise UsageError("accumulate=False needs early= or allowed_lateness=: else a window emits once")
    if not accumulate and not isinstance(window, Tumbling):
        raise UsageError(
            "accumulate=False needs tumbling windows: sliding ones share what they hold, and sessions are joined; "
            "leave it out"
        )
    return Emission(lateness_ms, late_tag(late_output), early_ms, accumulate)


def _with_retractions(window: Window, emission: Emission) -> bool:
    """Return that results have retractions.

    Raises:
        UsageError: the results are no changes.
    """
    if has_changes(window, emission):
        return True
    raise UsageError(
        "retractions=True is for results that are changes: those of session windows with allowed_lateness= or early=; "
        "leave it out"
    )
