"""The base classes of streams: records of one schema on edges of a graph, and the verbs that need no key.

Each verb adds a node to the pipeline's graph and returns the next stream. A stream knows its schema, so that a wrong
column or type is an error at the line that names it. Nothing runs here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, Self, TypeVar

import polars as pl
import pyarrow as pa

from headgate.api.graph_builder import GraphBuilder
from headgate.api.streams.changes import Changes, changes_after, filter_of_changes, refused, renamed
from headgate.api.unsupported import check_life_cycle, refuse_uncalled_methods
from headgate.connectors.memory import FromRows
from headgate.dataclass import dataclass
from headgate.display.html import StreamPicture, stream_html
from headgate.errors import UsageError
from headgate.model.config import Duration, check_switches, duration_ms
from headgate.model.graph import BAD_RECORDS, MAIN, MAIN_INPUT, Edge, InputName, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import PipelineHandle
from headgate.operators.async_map import AsyncFunction, AsyncMapSpec, Result, check_async_function
from headgate.operators.base import OperatorSpec
from headgate.operators.changes import ChangeCheckSpec
from headgate.operators.expressions import ExplodeSpec, filter_spec, select_spec, with_columns_spec
from headgate.operators.functions import MapBatchesSpec, RowFunctionSpec, RowVerb
from headgate.operators.schemas import SchemaLike, schema_text
from headgate.operators.specs import output_schemas, state_rules, state_text
from headgate.operators.timestamps import WatermarkGenerator, WithTimestampsSpec

Row = dict[str, Any]
R = TypeVar("R", bound="Records")

ROWS_AT_HAND = 5


class PipelineLike(Protocol):
    """What a stream needs of its pipeline. See ``Pipeline``."""

    name: str
    _builder: GraphBuilder

    def definition(self) -> PipelineDefinition: ...

    def start(self, *, spark: Any = None) -> PipelineHandle: ...

    def _checkpoint_root(self) -> str: ...

    def _explored(self, edges: tuple[Edge, ...], root: str, interval: Duration | None) -> PipelineLike: ...


class Records:
    """Records of one schema on their way through a pipeline: where they come from, their keys and event times."""

    def __init__(
        self,
        pipeline: PipelineLike,
        edges: tuple[Edge, ...],
        schema: pa.Schema,
        time_column: str | None = None,
        keys: tuple[str, ...] = (),
        changes: Changes | None = None,
    ) -> None:
        """For the pipeline only; users get streams from ``Pipeline.source`` and from other streams."""
        self._pipeline = pipeline
        self._all_edges = edges
        self._schema = schema
        self._time_column = time_column
        self._keys = keys
        self._changes = changes
        self._side_outputs: Mapping[str, Records] = {}

    @property
    def _edges(self) -> tuple[Edge, ...]:
        """Where the records come from, for verbs that take plain records. Others: ``_edges_of_any``, ``_all_edges``.

        Raises:
            UsageError: this is a stream with changes.
        """
        if self._changes is not None:
            raise refused(self._all_edges[0].upstream)
        return self._all_edges

    @property
    def _edges_of_any(self) -> tuple[Edge, ...]:
        """Where the records come from, for verbs that take records and changes.

        Raises:
            UsageError: these are changes that every subtask has.
        """
        if self._changes is not None and any(edge.partitioner is Partitioner.BROADCAST for edge in self._all_edges):
            raise UsageError(
                f"the stream of '{self._all_edges[0].upstream}' has changes and is broadcast, so each change would be "
                "made several times; it can only be joined, with stream.join(table.broadcast(), on='id')"
            )
        return self._all_edges

    @property
    def _change_keys(self) -> tuple[str, ...] | None:
        """The keys of a stream with changes (see ``Changes``); None: it has plain records, which are all inserts."""
        return None if self._changes is None else self._changes.keys

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the records."""
        return self._schema

    def _repr_html_(self) -> str:
        """Return columns, and rows only if they are in memory already: looking at a stream runs nothing."""
        names = " and ".join(sorted({f"'{edge.upstream}'" for edge in self._all_edges}))
        look = "; show() runs it for a look at rows" if callable(getattr(type(self), "show", None)) else ""
        title = f"{type(self).__name__} of {names} in pipeline '{self._pipeline.name}'{look}"
        columns = [(field.name, str(field.type)) for field in self._schema]
        return stream_html(StreamPicture(title, columns, self._keys, self._time_column, self._rows_at_hand()))

    def _rows_at_hand(self) -> list[Row]:
        """Return the first records if the program itself gave them and nothing happens to them."""
        node = self._pipeline._builder.node(self._all_edges[0].upstream)
        if len(self._all_edges) == 1 and isinstance(node.spec, FromRows):
            return node.spec.first(ROWS_AT_HAND)
        return []

    def _like(self, edges: tuple[Edge, ...], schema: pa.Schema, time_column: str | None = None) -> Self:
        """Return a stream of this kind, with the same keys."""
        return type(self)(self._pipeline, edges, schema, time_column, self._keys)

    def _add(
        self, node: NodeName, spec: OperatorSpec, *, refuses: bool = False, takes_changes: bool = False
    ) -> pa.Schema:
        """Add an operator for these records and return the schema of its main output."""
        edges = self._edges_of_any if takes_changes else self._edges
        return self._add_with_inputs(node, spec, edges, {MAIN_INPUT: self._schema}, refuses=refuses)

    def _add_with_inputs(
        self,
        node: NodeName,
        spec: OperatorSpec,
        edges: tuple[Edge, ...],
        inputs: Mapping[InputName, pa.Schema],
        *,
        refuses: bool = False,
    ) -> pa.Schema:
        """Add an operator with inputs of these schemas and return the schema of its main output."""
        outputs = dict(output_schemas(spec, inputs, str(node)))
        text, rules = state_text(spec, str(node)), state_rules(spec, str(node))
        self._pipeline._builder.add(
            node,
            Role.OPERATOR,
            edges,
            spec,
            schema := outputs.pop(MAIN),
            state_text=text,
            state_rules=rules,
            refuses=refuses,
            side_outputs=outputs,
        )
        return schema

    def _result(self, node: NodeName, stream: type[R]) -> R:
        """Return the main output of ``node``, which processes these records; its side outputs belong to it."""
        outputs = self._pipeline._builder.outputs[node].items()
        streams = {
            str(tag): stream(self._pipeline, (Edge(node, tag=tag),), schema, self._time_column_in(schema))
            for tag, schema in outputs
            if tag != BAD_RECORDS
        }
        main = streams.pop(MAIN)
        main._side_outputs = streams
        return main

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
    check_life_cycle(verb, function)
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


@dataclass(frozen=True, slots=True)
class AsyncOptions:
    """The options of ``map_async``."""

    limit: int
    timeout: Duration
    retries: int
    retry_delay: Duration
    retry_if: Callable[[Exception], bool] | None
    on_timeout: Callable[[Row], Result] | None
    ordered: bool


def async_map(
    stream: Records, function: Any, schema: SchemaLike | None, options: AsyncOptions, name: str | None
) -> tuple[NodeName, AsyncMapSpec]:
    """Return the name and the spec of an operator that asks for each record of ``stream``.

    Raises:
        UsageError
    """
    builder = stream._pipeline._builder
    node = builder.claim_name("map-async", name)
    check_async_function(str(node), function)
    refuse_uncalled_methods(f"operator '{node}'", function)
    for option, least in (("limit", 1), ("retries", 0)):
        value = getattr(options, option)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"operator '{node}': {option} must be a number from {least} on, not {value!r}")
    check_switches(f"operator '{node}': ", ordered=options.ordered)
    for option, call in (("retry_if", options.retry_if), ("on_timeout", options.on_timeout)):
        if call is not None and (not callable(call) or inspect.iscoroutinefunction(call)):
            raise UsageError(f"operator '{node}': {option} must be an ordinary function, not {call!r}")
    timeout_ms = duration_ms(options.timeout, "timeout")
    if timeout_ms < 1:
        raise UsageError(f"operator '{node}': timeout must be positive, not {options.timeout!r}")
    loops = [loop for edge in stream._edges for loop in builder.loops_of(edge.upstream) if loop in builder.open_loops]
    if loops:
        raise UsageError(
            f"operator '{node}': map_async cannot be in the body of loop '{loops[0]}', because no round waits for its "
            "answers; call it before or after iterate"
        )
    spec = AsyncMapSpec(
        function,
        stream._schema,
        schema,
        stream._keys,
        options.limit,
        timeout_ms,
        options.retries,
        duration_ms(options.retry_delay, "retry_delay"),
        options.retry_if,
        options.on_timeout,
        options.ordered,
    )
    return node, spec


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
        expressions = tuple(p for p in predicates if isinstance(p, pl.Expr))
        if not functions and predicates:
            if self._changes is None:
                return self._then("filter", name, filter_spec(*expressions))
            first, *others = filter_of_changes(self._changes, expressions)
            stream = self._then("filter", name, first, changes=self._changes)
            for other in others:
                node = stream._all_edges[0].upstream
                stream = stream._then(f"{node}-changes", None, other, changes=self._changes, part_of=node)
            return stream
        if len(predicates) != 1 or not callable(functions[0]):
            raise UsageError("filter needs Polars expressions such as pl.col('level') == 'ERROR', or one function")
        function = function_of("filter", functions[0])
        spec = RowFunctionSpec(RowVerb.FILTER, function)
        return self._then("filter", name, spec, refuses=True)

    def select(self, *expressions: pl.Expr | str, name: str | None = None, **named: Any) -> Self:
        """Keep exactly these columns; a keyword such as ``total=pl.col("a") + 1`` names the result.

        The event time is kept with its column, also under another name.
        """
        found = expressions_of("select", name, expressions, named)
        changes = self._changes_after("select", found)
        result = self._then("select", name, select_spec(*found), changes=changes)
        if result._time_column is None and self._time_column is not None:
            sources = renamed(found, self._schema)
            result._time_column = next((one for one in sources if sources[one] == self._time_column), None)
        return result

    def with_columns(self, *expressions: pl.Expr | str, name: str | None = None, **named: Any) -> Self:
        """Add or replace columns."""
        found = expressions_of("with_columns", name, expressions, named)
        changes = self._changes_after("with_columns", found, keeps_others=True)
        return self._then("with-columns", name, with_columns_spec(*found), changes=changes)

    def explode(
        self, column: str, *, keep_empty: bool = False, position: str | None = None, name: str | None = None
    ) -> Self:
        """Make a record of each element of the list in ``column``, which then holds the element.

        A map is a list of structs with ``key`` and ``value``. Changes need retractions.

        Args:
            column: of lists or maps.
            keep_empty: keep a record whose list is empty or null, with null as its element. Else there is none.
            position: a column that is added: the place of the element in its list, from 0 on, as int64.
            name: name of the operator.

        Raises:
            UsageError: there is no such column of lists, or there is a column called ``position``.
        """
        check_switches("explode: ", keep_empty=keep_empty)
        if not isinstance(column, str):
            raise UsageError(f"explode: the name of one column is needed, such as 'items', not {column!r}")
        if position is not None and not (isinstance(position, str) and position):
            raise UsageError(f"explode: position= must be the name of a column to add, such as 'n', not {position!r}")
        changes = None
        if self._changes is not None and self._changes.retractions:
            changes = Changes((), retractions=True)
        return self._then("explode", name, ExplodeSpec(column, keep_empty, position or ""), changes=changes)

    def map(self, function: Callable[[Row], Row], schema: SchemaLike | None = None, *, name: str | None = None) -> Self:
        """Turn each record (a dict) into another one.

        ``schema`` describes the results if their schema is not that of the input. A result that does not fit it is a
        bad record.
        """
        spec = RowFunctionSpec(RowVerb.MAP, function_of("map", function), schema)
        return self._then("map", name, spec, refuses=True)

    def flat_map(
        self, function: Callable[[Row], Iterable[Row]], schema: SchemaLike | None = None, *, name: str | None = None
    ) -> Self:
        """Turn each record (a dict) into any number of records; otherwise like ``map``."""
        spec = RowFunctionSpec(RowVerb.FLAT_MAP, function_of("flat_map", function), schema)
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
        if as_arrow is not None:
            check_switches("map_batches: ", as_arrow=as_arrow)
        spec = MapBatchesSpec(function_of("map_batches", function), schema, as_arrow)
        return self._then("map-batches", name, spec, refuses=True)

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
    ) -> Self:
        """Turn each record into any number of records with an ``async def`` function, many calls at a time.

        Records without an answer are part of each checkpoint and are asked for again after a restore, so results are
        exactly-once, calls are at-least-once.

        Args:
            function: takes a record as a dict and returns a dict, a list of dicts, or None for nothing; or an
                ``AsyncFunction``, which can open a client.
            schema: the schema of the results if it is not that of the input.
            limit: how many calls of a subtask run at most. Then input waits.
            timeout: how long one attempt may take.
            retries: how often a call is repeated that failed or timed out. After that, the record fails the pipeline,
                or is a bad record with ``DeadLetter(sink, exceptions=True)``.
            retry_delay: the pause before the first repetition; each further one takes twice as long.
            retry_if: returns for an exception whether the call is worth repeating. None: every one is.
            on_timeout: returns the result of a record whose last attempt has timed out. None: it has failed.
            ordered: results leave in the order of the records. False: as they come; only watermarks are not overtaken.
            name: name of the operator.
        """
        options = AsyncOptions(limit, timeout, retries, retry_delay, retry_if, on_timeout, ordered)
        node, spec = async_map(self, function, schema, options, name)
        schema = self._add(node, spec, refuses=True)
        return self._like((Edge(node),), schema, self._time_column_in(schema))

    def lookup(
        self,
        url: str,
        table: str,
        on: str | Sequence[str] | Mapping[str, str],
        *,
        columns: Sequence[str] = (),
        how: Literal["left", "inner"] = "left",
        suffix: str = "_right",
        cache: int = 10_000,
        ttl: Duration = "1m",
        connections: int = 2,
        limit: int = 10_000,
        timeout: Duration = "30s",
        retries: int = 3,
        retry_delay: Duration = "100ms",
        ordered: bool = True,
        name: str | None = None,
    ) -> Self:
        """Add columns of a database's table to each record, as they are when the record comes.

        One query asks for the keys of many records. A key with several rows gives several records. Records without an
        answer are part of each checkpoint and are asked for again after a restore; the answer may then be another one.

        Args:
            url: the database, as SQLAlchemy has it, such as ``"postgresql://user@host/db"``, without a password.
            table: the name of the table, such as ``"customers"`` or ``"sales.customers"``.
            on: the column by which rows are found, or several; a dict if the table has other names for them. Null finds
                nothing, and texts must be equal, also where the database ignores case.
            columns: columns of the table to add. Default: all others.
            how: what becomes of a record without a row: ``"left"`` adds nulls, ``"inner"`` drops it.
            suffix: what is added to names of columns that the records have, too.
            cache: for how many keys each subtask keeps rows; 0 keeps none.
            ttl: how long they are kept.
            connections: how many queries a subtask has running at most.
            limit: how many records wait for answers at most, per subtask. Then input waits.
            timeout: how long a record waits for one answer.
            retries: how often records are asked for again after a failure. After that it fails the pipeline; with
                ``DeadLetter(sink, exceptions=True)`` they are asked for one by one, and those that fail are bad
                records.
            retry_delay: the pause before the first repetition; each further one takes twice as long.
            ordered: results leave in the order of the records. False: as they come.
            name: name of the operator.

        Raises:
            UsageError: the table is not there, or a column is not.
            StorageError: the database cannot be asked.
        """
        from headgate.connectors.lookup import Lookup, lookup_table

        if how not in ("left", "inner"):
            raise UsageError(f"lookup: how={how!r} must be 'left' or 'inner'")
        for option, value, least in (("cache", cache, 0), ("connections", connections, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"lookup: {option}={value!r} must be a number from {least} on")
        found = lookup_table(url, table, on, columns, self._schema, suffix)
        function = Lookup(found, how, cache, duration_ms(ttl, "ttl"), connections)
        schema = pa.schema([*self._schema, *(pa.field(*one) for one in found.columns.values())])
        return self.map_async(
            function,
            schema,
            limit=limit,
            timeout=timeout,
            retries=retries,
            retry_delay=retry_delay,
            ordered=ordered,
            name=name,
        )

    def with_timestamps(
        self,
        column: str,
        *,
        out_of_orderness: Duration | None = None,
        watermark: WatermarkGenerator | None = None,
        idle_timeout: Duration | None = None,
        silent_after: Duration | None = None,
        max_ahead: Duration | None = None,
        name: str | None = None,
    ) -> Self:
        """Take event times from ``column`` (a timestamp, a date or integer milliseconds).

        Args:
            column: the column with the time. A record with a null or an impossible time is a bad record.
            out_of_orderness: how much older than the latest record of its split a record may be without being late.
                Windows wait this long. None: no time at all, or, in streams whose writers note event time, as long as
                it takes until no older record can follow.
            watermark: says how far event time has come, in place of ``out_of_orderness``.
            idle_timeout: a split that delivers nothing for this long no longer holds windows back. None: it always
                does.
            silent_after: when a split has delivered nothing for this long, its event time advances with the clock, so
                that windows fire although nothing comes; what comes for them later is late. A split that has had no
                record yet does not hold windows back then. None: event time advances by records alone.
            max_ahead: a record with a time that is later than the clock by more than this is a bad record. Such a
                record would make all others late. None: any time before the year 2200 is taken.
            name: name of the operator.
        """

        def ms(given: Duration | None, what: str) -> int | None:
            return None if given is None else duration_ms(given, what)

        if watermark is not None and not isinstance(watermark, WatermarkGenerator):
            raise UsageError(f"watermark= must be an object of a headgate.WatermarkGenerator, not {watermark!r}")
        if watermark is not None and out_of_orderness is not None:
            raise UsageError("give out_of_orderness= or watermark=, not both: the generator knows how long to wait")
        if idle_timeout is not None and silent_after is not None:
            raise UsageError(
                "give idle_timeout= or silent_after=, not both: with the latter, a silent split holds windows back no "
                "longer than that"
            )
        for option, given in (("idle_timeout", idle_timeout), ("silent_after", silent_after)):
            if given is not None and ms(given, option) == 0:
                raise UsageError(f"{option} must be longer than zero, such as '30s': all splits were silent else")
        spec = WithTimestampsSpec(
            column,
            ms(out_of_orderness, "out_of_orderness"),
            ms(idle_timeout, "idle_timeout"),
            max_ahead_ms=ms(max_ahead, "max_ahead"),
            silent_after_ms=ms(silent_after, "silent_after"),
            generator=watermark,
        )
        stream = self._then("with-timestamps", name, spec, refuses=True, changes=self._changes)
        stream._time_column = column
        return stream

    def union(self, *others: Self) -> Self:
        """Merge this stream with others of the same schema, in no particular order.

        Streams with changes must all have retractions; the keys of the result are not known.
        """
        changes = None
        if all(stream._changes is not None and stream._changes.retractions for stream in (self, *others)):
            changes = Changes((), retractions=True)
        edges = self._edges if changes is None else self._edges_of_any
        for other in others:
            if not isinstance(other, StatelessVerbs):
                raise UsageError(f"union takes streams, not {type(other).__name__}")
            if other._pipeline is not self._pipeline:
                raise UsageError("union merges streams of one pipeline; these belong to two")
            if not other._schema.equals(self._schema):
                raise UsageError(
                    f"union needs equal schemas: '{self._all_edges[0].upstream}' has {schema_text(self._schema)}, "
                    f"'{other._all_edges[0].upstream}' has {schema_text(other._schema)}"
                )
            edges += other._edges if changes is None else other._edges_of_any
        if len(set(edges)) != len(edges):
            raise UsageError("union was given one stream twice; its records would be counted twice")
        times = {stream._time_column for stream in (self, *others)}
        found = self._like(edges, self._schema, times.pop() if len(times) == 1 else None)
        found._changes = changes
        return found

    def rebalance(self) -> Self:
        """Distribute the records evenly over all subtasks of the next operator."""
        return self._routed(Partitioner.REBALANCE)

    def broadcast(self) -> Self:
        """Send every record to all subtasks of the next operator."""
        edges = tuple(replace(edge, partitioner=Partitioner.BROADCAST) for edge in self._all_edges)
        stream = self._like(edges, self._schema, self._time_column)
        stream._changes = self._changes
        return stream

    def changes_as_records(self) -> Self:
        """Take the changes of this stream as ordinary records with a column ``op``.

        Its values are "insert", "update_before", "update_after" and "delete".

        Raises:
            UsageError: this stream has plain records.
        """
        if self._changes is None:
            raise UsageError("changes_as_records: this stream has no changes, its records are ordinary ones")
        return type(self)(self._pipeline, self._all_edges, self._schema, self._time_column, self._keys)

    def records_as_changes(self, *keys: str, retractions: bool = False, name: str | None = None) -> Self:
        """Take records with a column ``op`` as the changes of a table.

        The changes of a row must come in order. A record with another ``op``, or without a key, is a bad record.

        Args:
            keys: the columns that identify a row of the table.
            retractions: whether each update is two records, ``update_before`` with the old row and ``update_after``
                with the new one, and ``delete`` has all columns of the row. If not, ``update_before`` is dropped,
                ``insert`` and ``update_after`` set the row, and ``delete`` removes it.
            name: name of the operator.

        Raises:
            UsageError: there is no column ``op``, or no key.
        """
        if self._changes is not None:
            raise UsageError("records_as_changes: this stream has changes already")
        if any(not isinstance(key, str) for key in keys):
            raise UsageError("records_as_changes takes names of columns")
        if not keys:
            raise UsageError("records_as_changes needs the columns that identify a row, such as 'id'")
        check_switches("records_as_changes: ", retractions=retractions)
        spec = ChangeCheckSpec(keys, retractions)
        return self._then("changes", name, spec, refuses=True, changes=Changes(keys, retractions))

    def _changes_after(self, verb: str, found: list[pl.Expr], *, keeps_others: bool = False) -> Changes | None:
        if self._changes is None:
            return None
        return changes_after(verb, self._changes, found, self._schema, keeps_others=keeps_others)

    def _then(
        self,
        kind: str,
        name: str | None,
        spec: OperatorSpec,
        *,
        refuses: bool = False,
        changes: Changes | None = None,
        part_of: NodeName | None = None,
    ) -> Self:
        """Add an operator after this stream and return its output. ``changes``: it takes changes, and this is left."""
        node = self._pipeline._builder.claim_name(kind, name, part_of)
        schema = self._add(node, spec, refuses=refuses, takes_changes=changes is not None)
        stream = self._like((Edge(node),), schema, self._time_column_in(schema))
        stream._changes = changes
        return stream

    def _routed(self, partitioner: Partitioner) -> Self:
        edges = tuple(replace(edge, partitioner=partitioner) for edge in self._edges)  # changes would lose their order
        return self._like(edges, self._schema, self._time_column)
