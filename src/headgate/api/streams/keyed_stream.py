"""Verbs of keyed streams: what becomes of the records of each key. ``stream.KeyedStream`` has them.

Each verb adds to the pipeline's graph and returns the next stream, which has no key. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import polars as pl
import pyarrow as pa

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
from headgate.api.streams.changes import Changes
from headgate.api.streams.windowed_stream import (
    Global,
    OverOptions,
    Sliding,
    Tumbling,
    Window,
    WindowedStream,
    check_trigger,
    has_changes,
    late_tag,
    misses_results,
    over,
    trigger_of,
)
from headgate.api.unsupported import not_there_yet, refuse_foreign_methods, refuse_uncalled_methods
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.config import Duration, StateConfig, check_switches, duration_ms
from headgate.model.graph import Edge, Partitioner
from headgate.model.ids import NodeName
from headgate.operators.aggregation.running_aggregate import RunningAggregate, needed_columns, running_aggregate_spec
from headgate.operators.async_map import AsyncFunction, Result
from headgate.operators.changes import OP
from headgate.operators.deduplication import DeduplicateSpec
from headgate.operators.expressions import select_spec
from headgate.operators.process.batch_process import BatchProcessFunction
from headgate.operators.process.connected_process import process_spec
from headgate.operators.process.row_process import ProcessFunction
from headgate.operators.reduction import ReduceSpec
from headgate.operators.row_order import LEFT_OUT, Order, WindowCandidatesSpec, order_of
from headgate.operators.schemas import SchemaLike, schema_text
from headgate.operators.timestamps import event_time
from headgate.operators.top_rows import ChangingTopSpec, TopSpec, WindowTopSpec
from headgate.operators.windows.window_plan import END_COLUMN, START_COLUMN, Emission
from headgate.operators.windows.window_trigger import Trigger
from headgate.state.descriptors import NO_EVOLUTION, Evolution, checked_evolution
from headgate.state.ttl import TTL

if TYPE_CHECKING:
    from headgate.operators.process.key_process import KeyFunctionSpec

S = TypeVar("S", bound=StatelessVerbs)
"""The stream that a verb returns."""

WINDOW_COLUMNS = (START_COLUMN, END_COLUMN)


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


class KeyedVerbs(Records, Generic[S]):
    """Records grouped by key, and what can be done with them."""

    _stream: type[S]

    def reduce(
        self,
        function: Callable[[Row, Row], Row],
        *,
        name: str | None = None,
        state: StateChoice | None = None,
        evolution: Evolution = NO_EVOLUTION,
        ttl: TTL | Duration | None = None,
    ) -> S:
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
        return self._stream(self._pipeline, (Edge(node),), output, self._time_column)

    def agg(
        self,
        *expressions: pl.Expr,
        retractions: bool = False,
        ttl: TTL | Duration | None = None,
        name: str | None = None,
        state: StateChoice | None = None,
        **named: Any,
    ) -> S:
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
        aggregate = RunningAggregate(self._keys, found, self._changes is not None, retractions, lifetime)
        spec = running_aggregate_spec(aggregate, self._schema, str(node))
        with builder.all_or_nothing():
            narrow = self._narrowed(node, needed_columns(found, self._schema, (*self._keys, OP)))
            output = narrow._add(node, spec, takes_changes=True)
        builder.keep_state(node, where)
        return self._stream(self._pipeline, (Edge(node),), output, None, (), Changes(self._keys, retractions))

    def deduplicate(
        self,
        keep: Literal["first", "last"] = "first",
        *,
        within: TTL | Duration | None,
        by: str | None = None,
        retractions: bool = False,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> S:
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
        spec = DeduplicateSpec(self._keys, self._schema, keep == "last", by, retractions, lifetime)
        output = self._add(node, spec)
        builder.keep_state(node, where)
        changes = None if spec.is_append_only else Changes(self._keys, retractions)
        return self._stream(self._pipeline, (Edge(node),), output, self._time_column_in(output), (), changes)

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
    ) -> S:
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
        order = order_of(str(node), by, descending)
        has_retractions = retractions or (rank is None and count > 1)
        lifetime = _lifetime(node, "within", within, retractions=has_retractions)
        if self._changes is None:
            spec = TopSpec(self._keys, self._schema, count, order, rank, has_retractions, lifetime)
        else:
            schema = pa.schema([field for field in self._schema if field.name != OP])
            known = self._changes.keys or schema.names
            identity = tuple(column for column in known if column not in self._keys)
            is_upsert = not self._changes.retractions
            spec = ChangingTopSpec(
                self._keys, schema, count, order, rank, has_retractions, lifetime, identity, is_upsert
            )
        output = self._add(node, spec, takes_changes=True)
        builder.keep_state(node, where)
        changes = Changes(spec.change_keys, has_retractions)
        return self._stream(self._pipeline, (Edge(node),), output, self._time_column_in(output), (), changes)

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
    ) -> S:
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
        order = order_of(str(node), by, descending)
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
        return self._top_per_window(node, WindowTopSpec(keys, self._schema, count, order, rank, ties), where)

    def _top_of_windows(
        self,
        node: NodeName,
        keys: tuple[str, ...],
        window: Tumbling | Sliding,
        count: int,
        order: Order,
        ties: bool,
        rank: str | None,
        state: StateConfig | None,
    ) -> S:
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
        plain = self._stream(self._pipeline, before, self._schema, self._time_column)
        with self._pipeline._builder.all_or_nothing():
            candidates = WindowCandidatesSpec(self._keys, windows, time, count, order, ties)
            found = plain._then(f"{node}-windows", None, candidates, part_of=node)
            keyed = type(self)(self._pipeline, found._edges, found._schema, START_COLUMN, keys)
            records = pa.schema([field for field in found._schema if field.name != LEFT_OUT])
            spec = WindowTopSpec(keys, records, count, order, rank, ties, windows, holds_back)
            return keyed._top_per_window(node, spec, state)

    def _top_per_window(self, node: NodeName, spec: WindowTopSpec, state: StateConfig | None) -> S:
        edges = tuple(replace(edge, partitioner=Partitioner.HASH, keys=spec.keys) for edge in self._edges)
        output = type(self)(self._pipeline, edges, self._schema, self._time_column, spec.keys)._add(node, spec)
        self._pipeline._builder.keep_state(node, state)
        return self._stream(self._pipeline, (Edge(node),), output, self._time_column_in(output))

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
    ) -> S:
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
        return over(self, node, found, OverOptions(range, rows, lifetime, late_output, state), self._stream)

    def _narrowed(self, node: NodeName, columns: list[str]) -> Self:
        """Return this stream with these columns only, so that no others travel to the keys' subtasks."""
        if columns == self._schema.names:
            return self
        before = tuple(replace(edge, partitioner=Partitioner.FORWARD, keys=()) for edge in self._all_edges)
        plain = self._stream(self._pipeline, before, self._schema, self._time_column)
        spec = select_spec(*map(pl.col, columns))
        narrow = plain._then(f"{node}-columns", None, spec, part_of=node)
        edges = tuple(replace(edge, partitioner=Partitioner.HASH, keys=self._keys) for edge in narrow._edges)
        return type(self)(self._pipeline, edges, narrow._schema, narrow._time_column, self._keys, self._changes)

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
    ) -> WindowedStream[S]:
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
        return WindowedStream(self, window, self._time_column, operator_state(state), self._stream, emission, trigger)

    def process(
        self,
        function: ProcessFunction | BatchProcessFunction,
        *,
        name: str | None = None,
        state: StateChoice | None = None,
    ) -> S:
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
        self._add(node, process_spec(str(node), self._keys, function, self._schema), refuses=True)
        self._pipeline._builder.keep_state(node, where)
        return self._result(node, self._stream)

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
    ) -> S:
        """Call an ``async def`` function for each record, in the subtask of its key; see ``Stream.map_async``.

        All results of a key come from one subtask, with ``ordered`` in the order of its records. The result has no key.
        """
        options = AsyncOptions(limit, timeout, retries, retry_delay, retry_if, on_timeout, ordered)
        node, spec = async_map(self, function, schema, options, name)
        self._add(node, spec, refuses=True)
        return self._result(node, self._stream)

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
    ) -> S:
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
    ) -> S:
        """Process records with a PySpark ``StatefulProcessor`` that takes and yields pandas frames.

        The arguments are those of ``transform_with_state``.
        """
        options = ProcessorOptions(processor, output_schema, time_mode, initial_state, event_time_column, True)
        return self._transformed("transform-with-state-in-pandas", name, options, state)

    def _transformed(self, kind: str, name: str | None, options: ProcessorOptions, state: StateChoice | None) -> S:
        where = operator_state(state)
        node = self._pipeline._builder.claim_name(kind, name)
        spec = processor_operator(self, node, options)
        time_column = time_column_of(self, node, spec.function.schema, options)
        output = self._add(node, spec, refuses=True)
        self._pipeline._builder.keep_state(node, where)
        return self._stream(self._pipeline, (Edge(node),), output, time_column)


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
