"""Windows over keyed streams: their kinds, and what is computed of each.

``agg`` becomes two operators where its aggregates permit it: partial results before the shuffle, their merge after it
(docs/spec/windows.md). Nothing runs here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from zoneinfo import ZoneInfo

import polars as pl
import pyarrow as pa

from headgate.api.config import StateChoice, operator_state
from headgate.api.graph_builder import GraphBuilder, check_name
from headgate.api.streams.base_stream import Records, expressions_of, function_of
from headgate.api.streams.changes import Changes
from headgate.errors import UsageError
from headgate.model.config import Duration, StateConfig, check_switches, duration_ms
from headgate.model.graph import BAD_RECORDS, MAIN, MAIN_INPUT, Edge, OutputTag, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators.aggregation.frame import Frame
from headgate.operators.aggregation.over_aggregates import over_spec
from headgate.operators.functions import Row
from headgate.operators.schemas import SchemaLike, as_schema
from headgate.operators.specs import output_schema, output_schemas, state_rules, state_text
from headgate.operators.timestamps import WithTimestampsSpec, event_time
from headgate.operators.windows.aligned_windows import WindowOperators, window_operators
from headgate.operators.windows.session_windows import SessionMergeSpec, session_operators
from headgate.operators.windows.triggered_windows import Firing, triggered_operators
from headgate.operators.windows.window_assigner import (
    BOUNDS,
    AlignedWindows,
    AssignWindowsSpec,
    CalendarWindows,
    FixedWindows,
    lacking_ms,
    tumbling,
)
from headgate.operators.windows.window_function import WindowFunctionSpec, rows_of_window
from headgate.operators.windows.window_plan import END_COLUMN, START_COLUMN, Emission, WindowedAggregate
from headgate.operators.windows.window_trigger import Trigger, commanded_window, trigger_spec
from headgate.state.ttl import TTL

S = TypeVar("S", bound=Records)


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Consecutive windows of ``size``: each record falls into exactly one of them.

    ``Tumbling("5m")`` are windows of 5 minutes from 1970-01-01 00:00 UTC on, or ``offset`` after that.

    ``Tumbling("1d", zone="Europe/Berlin")`` are days by the clocks of a time zone: one with 23 or 25 hours when they
    are moved. In the same way there are weeks from Monday on (``"1w"``), months (``"1mo"``), quarters (``"1q"``) and
    years (``"1y"``); these four are in UTC if no zone is given. ``offset`` moves their beginning by the clock:
    with ``offset="6h"`` a day begins at 6:00.

    With ``time="processing"`` a record falls into the window in which it arrives. Such windows need no event time, and
    another run has other results.
    """

    size: Duration
    offset: Duration = 0
    zone: str | None = None
    time: Literal["event", "processing"] = field(default="event", kw_only=True)

    def __post_init__(self) -> None:
        self.aligned()
        if self.time not in ("event", "processing"):
            raise UsageError(f"time= of a window is 'event' or 'processing', not {self.time!r}")
        if self.time == "processing" and not isinstance(self.aligned(), FixedWindows):
            raise UsageError("windows of processing time have a length such as '10s', and no zone")
        if self.time == "processing" and self.offset:
            raise UsageError("windows of processing time have no offset")

    def trigger(self) -> Firing | None:
        """Return what ends these windows, if it is processing time."""
        if self.time == "event":
            return None
        return Firing(interval_ms=_positive_ms(self.size, "size"), has_bounds=True)

    def aligned(self) -> AlignedWindows:
        """Return how times fall into these windows."""
        calendar = _calendar(self.size, self.zone)
        if calendar is not None:
            offset_ms = duration_ms(self.offset, "offset")
            if offset_ms >= calendar.span_ms:
                raise UsageError(f"the offset, {self.offset}, must be shorter than the size, {self.size}")
            return replace(calendar, offset_ms=offset_ms)
        size_ms = _positive_ms(self.size, "size")
        return tumbling(size_ms, _offset_ms(self.offset, "size", self.size))


_CALENDAR = re.compile(r"\s*(\d{1,4})\s*([a-z]+)\s*")
_CALENDAR_NAMES = {
    **dict.fromkeys(["d", "day", "days"], ("d", 1)),
    **dict.fromkeys(["w", "week", "weeks"], ("w", 1)),
    **dict.fromkeys(["mo", "month", "months"], ("mo", 1)),
    **dict.fromkeys(["q", "quarter", "quarters"], ("mo", 3)),
    **dict.fromkeys(["y", "year", "years"], ("mo", 12)),
}


def _calendar(size: Duration, zone: str | None) -> CalendarWindows | None:
    """Return windows of the calendar; None: ``size`` is a length of time.

    Raises:
        UsageError: there is no such zone, or ``size`` is not of the calendar, but has one.
    """
    found = _CALENDAR.fullmatch(size) if isinstance(size, str) else None
    unit, factor = _CALENDAR_NAMES.get(found.group(2), ("", 0)) if found else ("", 0)
    if zone is None:
        if unit in ("", "d"):
            return None
        zone = "UTC"
    if not found or not unit:
        raise UsageError(
            f"windows by the clocks of a zone are days, weeks, months, quarters or years, such as '1d', '1w', '1mo', "
            f"'1q' or '1y', not {size!r}; use offset= to move shorter ones"
        )
    count = int(found.group(1)) * factor
    if count == 0:
        raise UsageError("a window's size must be longer than zero")
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError, TypeError, OSError):
        raise UsageError(f"zone must be the name of a time zone, such as 'Europe/Berlin', not {zone!r}") from None
    return CalendarWindows(unit, count, zone)


@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows of ``size`` that start every ``slide``, so that they overlap: a record falls into several of them.

    They are aligned to 1970-01-01 00:00 UTC, or ``offset`` after that. The size need not be a multiple of the slide.
    A record is processed and kept once, whatever the size and the slide are.
    """

    size: Duration
    slide: Duration
    offset: Duration = 0

    def __post_init__(self) -> None:
        self.aligned()

    def aligned(self) -> AlignedWindows:
        """Return how times fall into these windows."""
        size_ms, slide_ms = _positive_ms(self.size, "size"), _positive_ms(self.slide, "slide")
        if slide_ms > size_ms:
            raise UsageError(
                f"the slide, {self.slide}, is longer than the windows, {self.size}, so that records between them would "
                "be in none; filter them out, and use a slide that is at most the size"
            )
        return FixedWindows(size_ms, slide_ms, _offset_ms(self.offset, "slide", self.slide))


def _positive_ms(length: Duration, what: str) -> int:
    """Return the ``size`` or ``slide`` of windows."""
    length_ms = duration_ms(length, f"window {what}")
    if length_ms <= 0:
        raise UsageError(f"a window's {what} must be longer than zero")
    return length_ms


def _offset_ms(offset: Duration, step: str, of_step: Duration) -> int:
    """Return by how much windows are moved, less than from one of them to the next."""
    offset_ms = duration_ms(offset, "offset")
    if offset_ms >= duration_ms(of_step):
        raise UsageError(f"the offset, {offset}, must be shorter than the {step}, {of_step}")
    return offset_ms


@dataclass(frozen=True, slots=True)
class Session:
    """Windows of records of a key that follow each other in less than ``gap``.

    A session begins with its first record and ends, excluded, at its last record plus the gap. It also takes
    late records while it is open, which may join it with another one. With ``allowed_lateness=`` or ``early=`` its
    results are a stream with changes, with the key columns and ``window_start`` as key.
    """

    gap: Duration

    def __post_init__(self) -> None:
        if duration_ms(self.gap, "gap") <= 0:
            raise UsageError("the gap between sessions must be longer than zero")

    def aligned(self) -> AlignedWindows:
        """Return windows of the length of the gap, of which sessions are put together."""
        return tumbling(duration_ms(self.gap, "gap"))


@dataclass(frozen=True, slots=True)
class Count:
    """Windows of ``size`` records of a key each, in the order in which they arrive; they need no event time.

    The last window of a key waits until it is full: it has no result when the input ends before.
    """

    size: int

    def __post_init__(self) -> None:
        _records("the size of a count window", self.size)

    def trigger(self) -> Firing:
        """Return what ends these windows."""
        return Firing(records=self.size, fires_at_end=False)


@dataclass(frozen=True, slots=True)
class Global:
    """All records of a key are one window, which a trigger has emit a result now and then. It needs no event time.

    When the input ends, what has come since the last result is emitted, too. ``Global()`` is for
    ``window(Global(), trigger=...)``.

    Args:
        every: a number of records of the key, or an interval, such as ``"10s"``: a result comes at multiples of it, if
            records came.
        when: instead of ``every``, a Polars expression: a result comes after each record for which it is true.
        time: of which time an interval is, ``"processing"`` or ``"event"``.
        discard: begin again after each result. Otherwise each result is of all records so far, and the key's state is
            kept for ever.
    """

    every: int | Duration | None = None
    when: pl.Expr | None = field(default=None, compare=False)
    time: Literal["processing", "event"] = "processing"
    discard: bool = False

    def __post_init__(self) -> None:
        check_switches("a global window: ", discard=self.discard)
        if self.every is not None or self.when is not None:
            self.trigger()

    def trigger(self) -> Firing:
        """Return what has it emit results."""
        if self.time not in ("processing", "event"):
            raise UsageError(f"time= of a global window is 'processing' or 'event', not {self.time!r}")
        if (self.every is None) == (self.when is None):
            raise UsageError(
                "a global window needs every= or when=, and not both, or window(Global(), trigger=...); for example "
                "Global(every='10s')"
            )
        if self.when is not None:
            if not isinstance(self.when, pl.Expr):
                raise UsageError(f"when= of a global window is a Polars expression, not {self.when!r}")
            return Firing(when=self.when, discards=self.discard)
        if isinstance(self.every, int):
            return Firing(records=_records("every= of a global window", self.every), discards=self.discard)
        interval_ms = duration_ms(self.every or 0, "every= of a global window")
        if interval_ms <= 0:
            raise UsageError("every= of a global window must be longer than zero")
        return Firing(interval_ms=interval_ms, is_event_time=self.time == "event", discards=self.discard)


def _records(what: str, count: int) -> int:
    """Return a number of records.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"{what} must be at least one record, not {count!r}")
    return count


Window: TypeAlias = Tumbling | Sliding | Session | Count | Global


def trigger_of(window: Window) -> Firing | None:
    """Return what ends windows that have no place in event time; None for all others, and ``Global()``."""
    if isinstance(window, Global) and window.every is None and window.when is None:
        return None
    return window.trigger() if isinstance(window, Tumbling | Count | Global) else None


def check_trigger(window: Window, trigger: object, *, is_early: bool) -> None:
    """Refuse what a trigger of the user does not go with.

    Raises:
        UsageError
    """
    if not isinstance(trigger, Trigger):
        given = trigger.__name__ if isinstance(trigger, type) else repr(trigger)
        raise UsageError(
            f"trigger= of window takes an instance of a class that derives from headgate.Trigger, not {given}"
        )
    kind = type(trigger)
    if kind.on_element is Trigger.on_element and kind.on_batch is Trigger.on_batch:
        raise UsageError(f"{kind.__name__} needs on_element or on_batch, which says what becomes of a window")
    if is_early:
        raise UsageError(
            "a trigger says when results come and what they include, so early= and accumulate= do not go with it; "
            "leave them out, and register timers in the trigger"
        )
    if isinstance(window, Session):
        raise UsageError(
            "session windows take no trigger=, because a record may join two of them; use early= and "
            "allowed_lateness=, or a process function with timers"
        )
    if trigger_of(window) is not None:
        raise UsageError(
            f"a {type(window).__name__} window like this says by itself when it ends; a trigger= goes with "
            "headgate.Global() without arguments, Tumbling and Sliding windows of event time"
        )


def late_tag(late_output: str | None) -> OutputTag | None:
    """Return the side output that takes late records.

    Raises:
        UsageError: the name is reserved, or no name.
    """
    if late_output in (MAIN, BAD_RECORDS):
        raise UsageError(f"the name '{late_output}' is reserved; choose another late_output=, such as 'late'")
    return None if late_output is None else OutputTag(check_name(late_output, "late_output"))


def has_changes(window: Window, emission: Emission) -> bool:
    """Return whether results are changes: sessions that emit more than once may be joined afterwards."""
    return isinstance(window, Session) and bool(emission.lateness_ms or emission.early_ms)


def misses_results(keyed: Records, window: Window, lateness_ms: int) -> bool:
    """Return whether records are results of windows, and may come when a window that they lie in has ended."""
    before = _windows_before(keyed._pipeline._builder, keyed._all_edges)
    return any(_lacking_ms(first, window) > lateness_ms for first in before)


def _lacking_ms(first: AlignedWindows, window: Window) -> int:
    """See ``lacking_ms``; sessions end the gap after their last record."""
    if isinstance(window, Session):
        return max(first.span_ms - duration_ms(window.gap, "gap"), 0)
    return lacking_ms(first, window.aligned()) if isinstance(window, Tumbling | Sliding) else 0


def _windows_before(builder: GraphBuilder, edges: tuple[Edge, ...]) -> set[AlignedWindows]:
    """Return the windows of which the starts are event times on ``edges``."""
    found: set[AlignedWindows] = set()
    seen: set[tuple[NodeName, str]] = set()
    waiting = list(edges)
    while waiting:
        edge = waiting.pop()
        if (edge.upstream, edge.tag) in seen:
            continue
        seen.add((edge.upstream, edge.tag))
        node = builder.node(edge.upstream)
        windows = getattr(node.spec, "result_windows", None)
        has_own_times = isinstance(node.spec, WithTimestampsSpec | SessionMergeSpec)
        if windows is not None:
            found.add(windows)
        elif not has_own_times and not getattr(node.spec, "holds_back", False):
            waiting += node.inputs
    return found


class WindowedStream(Generic[S]):
    """A keyed stream that is divided into windows; ``agg`` computes a result for each window of each key."""

    def __init__(
        self,
        keyed: Records,
        window: Window,
        time_column: str | None,
        state: StateConfig | None,
        stream: type[S],
        emission: Emission,
        trigger: Trigger | None = None,
    ) -> None:
        """For ``KeyedStream.window`` only."""
        self._trigger = trigger
        self._state = state
        self._stream = stream
        self._keyed = keyed
        self._window = window
        self._time_column = time_column
        self._emission = emission

    def agg(self, *expressions: pl.Expr, name: str | None = None, **named: Any) -> S:
        """Aggregate each window with Polars expressions: ``agg(errors=pl.len(), last=pl.col("ts").max())``.

        Emits one record per key and window when the window ends. Its columns are the key columns, ``window_start``,
        ``window_end`` (exclusive), and the aggregates. Records that arrive later are counted as late, and dropped
        unless ``window(..., late_output=...)`` names a side output for them.

        Raises:
            UsageError: a column is unknown or has the wrong type, or two results have the same name.
        """
        return self._aggregated(tuple(expressions_of("agg", name, expressions, named)), name)

    def apply(self, function: Callable[[Any, pl.DataFrame], Any], schema: SchemaLike, *, name: str | None = None) -> S:
        """Call ``function(key, rows)`` with the records of each window of a key when the window ends.

        The results have the key columns, ``window_start``, ``window_end``, and the columns of ``schema``. The window
        keeps its records until then. Each window costs a call: where a Polars expression says the same, ``agg`` is
        faster.

        Results of updated sessions are changes. Each session has one row at most then, and a function that returns none
        for what had one deletes it. With ``retractions=True`` there may be several: they are deleted, and those of now
        inserted. The function is called again with the records it had, and must return the same.

        Args:
            function: gets the key (a tuple if it has several columns) and a Polars frame of the records in the order in
                which they came. It returns a frame, a dict, an iterable of dicts, or None.
            schema: of what it returns. A result that does not fit it is a bad record.
            name: name of the operator.

        Raises:
            UsageError: a column of ``schema`` is one of the key or of the window.
        """
        return self._called("apply", function_of("apply", function), schema, name)

    def reduce(self, function: Callable[[Row, Row], Row], *, name: str | None = None) -> S:
        """Combine the records of each window of a key: ``function(total, record)`` returns the new total.

        Both are dicts with the columns of the stream, and so is the result. The first record of a window is its first
        total; the last total is emitted when the window ends, with ``window_start`` and ``window_end`` after the key
        columns. The window keeps its records until then, as for ``apply``. Results of updated sessions are changes by
        the key columns and ``window_start``; with ``retractions=True`` the function is called again with the records it
        had, for what to take back.
        """
        return self._called("reduce", function_of("reduce", function), None, name)

    def _called(self, verb: str, function: Callable[..., Any], schema: SchemaLike | None, name: str | None) -> S:
        """Add the window, which keeps its records, and after it the function."""
        keyed, has_changes, retractions = self._keyed, self._has_changes, self._emission.retractions
        windowed = self._aggregated((rows_of_window(keyed._schema),), name)
        builder, before = keyed._pipeline._builder, windowed._all_edges[0].upstream
        node = builder.claim_name(f"{before}-{verb}", None, before)
        if schema is None:
            values = pa.schema([field for field in keyed._schema if field.name not in keyed._keys])
        else:
            values = as_schema(str(node), schema)
        spec = WindowFunctionSpec(keyed._keys, function, values, schema is None, has_changes, retractions)
        output = output_schema(spec, windowed._schema, str(node))
        builder.add(node, Role.OPERATOR, windowed._all_edges, spec, output, refuses=True)
        result = self._stream(keyed._pipeline, (Edge(node),), output, windowed._time_column)
        result._side_outputs = windowed._side_outputs
        if has_changes:  # with retractions apply may return several rows, which no key tells apart
            is_single = schema is None or not retractions
            result._changes = Changes((*keyed._keys, START_COLUMN) if is_single else (), retractions)
        return result

    def _aggregated(self, aggregates: tuple[pl.Expr, ...], name: str | None) -> S:
        keyed = self._keyed
        builder = keyed._pipeline._builder
        node = builder.claim_name("window", name)
        if self._trigger is not None:
            with builder.all_or_nothing():
                return self._triggered(self._trigger, aggregates, node)
        operators, time_column = self._operators(aggregates, str(node))
        edges = keyed._edges
        if operators.combine is not None:
            # partial results are made before the shuffle: fewer rows are sent
            before = tuple(replace(edge, partitioner=Partitioner.FORWARD, keys=()) for edge in edges)
            combine = builder.claim_name(f"{node}-combine", None, node)
            partial = output_schema(operators.combine, keyed._schema, str(combine))
            text = state_text(operators.combine)
            builder.add(combine, Role.OPERATOR, before, operators.combine, partial, state_text=text)
            edges = (Edge(combine, Partitioner.HASH, operators.keys),)
        text = state_text(operators.window)
        late = self._emission.late
        sides = {} if late is None else {late: keyed._schema}
        builder.add(node, Role.OPERATOR, edges, operators.window, operators.output, state_text=text, side_outputs=sides)
        builder.keep_state(node, self._state)
        result = self._stream(keyed._pipeline, (Edge(node),), operators.output, time_column)
        if self._has_changes:
            result._changes = Changes((*keyed._keys, START_COLUMN), self._emission.retractions)
        result._side_outputs = {
            str(tag): self._stream(keyed._pipeline, (Edge(node, tag=tag),), schema) for tag, schema in sides.items()
        }
        return result

    def _triggered(self, trigger: Trigger, aggregates: tuple[pl.Expr, ...], node: NodeName) -> S:
        """Add windows with a trigger of the user: what assigns them before the shuffle, the trigger, their content."""
        keyed, window, lateness_ms, late = (self._keyed, self._window, self._emission.lateness_ms, self._emission.late)
        builder, records, edges, keys = keyed._pipeline._builder, keyed._schema, keyed._edges, keyed._keys
        windows = None if isinstance(window, Global) else window.aligned()  # type: ignore[union-attr]
        content = commanded_window(
            str(node),
            keyed._keys,
            aggregates,
            records,
            windows=windows,
            lateness_ms=lateness_ms,
            fires_at_end=trigger.fires_at_end,
        )
        schema = records
        if windows is not None:
            assert self._time_column is not None
            keys = (*keys, *BOUNDS)
            # before the shuffle, since the bounds of its window are part of a row's key from here on
            before = tuple(replace(edge, partitioner=Partitioner.FORWARD, keys=()) for edge in edges)
            assign = builder.claim_name(f"{node}-assign", None, node)
            assigning = AssignWindowsSpec(windows, event_time(str(node), records, self._time_column))
            schema = output_schema(assigning, records, str(assign))
            builder.add(assign, Role.OPERATOR, before, assigning, schema)
            edges = (Edge(assign, Partitioner.HASH, keys),)
        asked = builder.claim_name(f"{node}-trigger", None, node)
        text = "" if windows is None else windows.text
        spec = trigger_spec(
            str(asked),
            keys,
            trigger,
            schema,
            records,
            lateness_ms=lateness_ms,
            late=late,
            windows_text=text,
            holds_back=self._emission.holds_back,
        )
        found = output_schemas(spec, {MAIN_INPUT: schema}, str(asked))
        sides = {tag: side for tag, side in found.items() if tag != MAIN}
        rules, identity = state_rules(spec), state_text(spec)
        builder.add(
            asked,
            Role.OPERATOR,
            edges,
            spec,
            found[MAIN],
            state_text=identity,
            state_rules=rules,
            side_outputs=sides,
            refuses=True,
        )
        output, identity = content.shape.output, state_text(content)
        to_content = (Edge(asked, Partitioner.HASH, keys),)
        builder.add(node, Role.OPERATOR, to_content, content, output, state_text=identity)
        for one in (asked, node):
            builder.keep_state(one, self._state)
        result = self._stream(keyed._pipeline, (Edge(node),), output, None if windows is None else START_COLUMN)
        result._side_outputs = {
            str(tag): self._stream(keyed._pipeline, (Edge(asked, tag=tag),), side) for tag, side in sides.items()
        }
        return result

    @property
    def _has_changes(self) -> bool:
        return has_changes(self._window, self._emission)

    def _operators(self, aggregates: tuple[pl.Expr, ...], node: str) -> tuple[WindowOperators, str | None]:
        """Return the operators, and the column of their results that is an event time, if any is."""
        window, keys, schema, time = self._window, self._keyed._keys, self._keyed._schema, self._time_column
        trigger = trigger_of(window)
        if trigger is not None:
            return triggered_operators(keys, trigger, aggregates, schema, node, time_column=time or ""), None
        assert isinstance(window, Tumbling | Sliding | Session)
        assert time is not None
        aggregate = WindowedAggregate(keys, time, window.aligned(), aggregates, self._emission)
        if isinstance(window, Session):  # it may begin long before the watermark
            return session_operators(aggregate, schema, node), None if self._has_changes else END_COLUMN
        return window_operators(aggregate, schema, node), START_COLUMN


UNBOUNDED = "unbounded"


@dataclass(frozen=True, slots=True)
class OverOptions:
    """The arguments of ``over``."""

    range: Duration | None
    rows: int | str | None
    ttl: TTL | None
    late_output: str | None
    state: StateChoice | None


def over(keyed: Records, node: NodeName, aggregates: Sequence[pl.Expr], options: OverOptions, stream: type[S]) -> S:
    """Return the stream of the records of ``keyed`` with their aggregates.

    Raises:
        UsageError: see ``KeyedStream.over``.
    """
    where = operator_state(options.state)
    builder = keyed._pipeline._builder
    frame = _frame(node, options.range, options.rows)
    _ = keyed._edges  # refuses changes, which have no event time either
    if keyed._time_column is None:
        raise UsageError(
            f"operator '{node}': over needs event times, which order the records of a key; call "
            ".with_timestamps(column) before key_by and keep that column"
        )
    time = event_time(str(node), keyed._schema, keyed._time_column)
    late = late_tag(options.late_output)
    spec = over_spec(str(node), keyed._keys, keyed._schema, time, frame, aggregates, late=late, ttl=options.ttl)
    keyed._add(node, spec)
    builder.keep_state(node, where)
    result = stream(keyed._pipeline, (Edge(node),), spec.output, keyed._time_column)
    if late is not None:
        result._side_outputs = {str(late): stream(keyed._pipeline, (Edge(node, tag=late),), keyed._schema)}
    return result


def _frame(node: NodeName, range: Duration | None, rows: int | str | None) -> Frame:
    """Return the frame that was given.

    Raises:
        UsageError: none or two were given, or it is none.
    """
    if (range is None) == (rows is None):
        raise UsageError(
            f"operator '{node}': over needs range= or rows=, and not both: range='1h' for the records of the last "
            "hour, range='0s' for those of its very time, rows=10 for the record and the 10 before it, "
            "range='unbounded' for all so far"
        )
    if UNBOUNDED in (range, rows):
        return Frame(range is not None, None)
    if range is not None:
        range_ms = duration_ms(range, f"operator '{node}': range=")
        if range_ms < 0:
            raise UsageError(f"operator '{node}': range= must not be negative; give a duration such as '1h'")
        return Frame(True, range_ms)
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise UsageError(
            f"operator '{node}': rows= is how many records before each one are in its frame, from 1 on, or "
            f"'{UNBOUNDED}', not {rows!r}"
        )
    return Frame(False, rows)
