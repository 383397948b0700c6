"""Streams as the user writes them, without and with a key.

Each verb adds to the pipeline's graph and returns the next stream; verbs without state are in ``base_stream``, those of
a key in ``keyed_stream``, windows in ``windowed_stream``. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import polars as pl

from headgate.api.collect import ROWS_SHOWN, Bound, run_and_collect, run_to_dataframe, show
from headgate.api.config import StateChoice
from headgate.api.streams.base_stream import Row, StatelessVerbs
from headgate.api.streams.changes import check_keys_of_changes
from headgate.api.streams.connected_streams import ConnectedStreams, connected
from headgate.api.streams.joins import UNSET, JoinOptions, joined, joined_as_of
from headgate.api.streams.keyed_stream import WINDOW_COLUMNS, KeyedVerbs
from headgate.api.streams.loops import Feedback, LoopOptions, Output, iterate
from headgate.api.streams.windowed_stream import Sliding, Tumbling
from headgate.api.unsupported import KEYED_HINTS, STREAM_HINTS, raise_no_attribute, refuse_uncalled_methods, refused
from headgate.connectors.base import Sink, check_is_sink
from headgate.errors import UsageError
from headgate.model.config import Duration
from headgate.model.graph import Partitioner, Role
from headgate.operators.joins.join_plan import How
from headgate.operators.keys import KeyCheckSpec
from headgate.operators.schemas import schema_text
from headgate.state.ttl import TTL


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
        checked = self._then("key-by", name, KeyCheckSpec(columns), refuses=True, changes=self._changes)
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


class KeyedStream(KeyedVerbs[Stream]):
    """A stream with records grouped by key.

    Records with equal keys reach the same subtask, in the order in which each upstream subtask sent them.
    """

    _stream = Stream

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
