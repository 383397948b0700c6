"""Tables of a query: a stream, what the query calls its columns, and the windows that its records belong to.

Counterpart: ``api.sql.query`` makes them of clauses. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import polars as pl

from headgate.api.sql.expressions import Scalars, exp, interval_ms
from headgate.api.sql.values import unsupported
from headgate.api.streams.stream import Stream
from headgate.api.streams.windowed_stream import Session, Sliding, Tumbling, Window
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.changes import OP
from headgate.operators.windows.window_assigner import FixedWindows

if TYPE_CHECKING:
    from sqlglot.expressions import Expression

START, END = "window_start", "window_end"
WINDOWS = ("TUMBLE", "HOP", "SESSION")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a relation: what the query calls it, and what the stream calls it.

    ``PROCTIME`` is no column of the stream: the clock is read where windows or a join need it.
    """

    table: str
    name: str
    actual: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """Each record belongs to a window: the columns with its start and end ("": not kept), and how windows lie.

    ``windows`` is None for sessions, where those of several keys have no bounds in common, and in processing time.
    """

    start: str
    end: str
    windows: FixedWindows | None

    def again(self) -> Window:
        """Return windows that hold exactly the records with one end: ``last_moment`` is their event time.

        Raises:
            UsageError: the records are those of sessions, or of windows of processing time.
        """
        if self.windows is None:
            what = "GROUP BY the bounds of sessions or of windows of processing time"
            raise unsupported(what, "aggregate them in one query")
        step, size = self.windows.slide_ms, self.windows.size_ms
        return Tumbling(f"{step}ms", f"{(size + self.windows.offset_ms) % step}ms")

    def last_moment(self) -> pl.Expr:
        """Return the last millisecond of the window of a record: no watermark is past it before the record."""
        if self.end:
            return pl.col(self.end) - pl.duration(milliseconds=1)
        assert self.windows is not None, "only again() needs it, and refuses sessions"
        return pl.col(self.start) + pl.duration(milliseconds=self.windows.size_ms - 1)


def fixed_windows(window: Window) -> FixedWindows | None:
    """Return where windows of event time lie; None: sessions, and windows of processing time."""
    if isinstance(window, Tumbling) and window.time == "processing":
        return None
    found = window.aligned() if isinstance(window, Tumbling | Sliding) else None
    return found if isinstance(found, FixedWindows) else None


@dataclass(frozen=True, slots=True)
class Top:
    """ROW_NUMBER() OVER (PARTITION BY keys ORDER BY by), which an outer WHERE bounds: its columns, and its name."""

    name: str
    keys: tuple[str, ...]
    by: tuple[str, ...]
    descending: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A table of the query: a stream, the names of its columns, and its windows."""

    stream: Stream
    columns: tuple[Column, ...]
    bounds: Bounds | None = None
    window: Window | None = None
    top: Top | None = None

    def without_top(self) -> Relation:
        """Return the relation, with the numbers of its rows if these are to be numbered by event time.

        No later row changes such a number.

        Raises:
            UsageError: they are to be numbered in another order, which only a bound on the numbers makes possible.
        """
        if self.top is None:
            return self
        name, time = self.top.name, self.stream._time_column
        if self.stream._changes is not None or (self.top.by, self.top.descending) != ((time,), (False,)):
            raise unsupported(
                "ROW_NUMBER() without a bound",
                f"add WHERE {name} <= 10 in a SELECT around it, or order by the event time alone, ascending",
            )
        stream = self.stream.key_by(*self.top.keys).over(pl.len().alias(name), rows="unbounded")
        stream = stream.with_columns(pl.col(name).cast(pl.Int64))
        return replace(self, stream=stream.select(*(column.actual for column in self.columns)), top=None)

    def without_open_windows(self) -> Relation:
        """Return the relation.

        Raises:
            UsageError: a row may be in several windows, or in one that is not known before others came.
        """
        window = self.window
        if window is not None and (isinstance(window, Sliding) or fixed_windows(window) is None):
            raise unsupported(
                "a table of overlapping windows, of sessions or of processing time without GROUP BY",
                "add GROUP BY ..., window_start, window_end, and join or filter by other tables in another SELECT",
            )
        return self

    def named(self, item: Expression, name: str = "") -> Relation:
        """Return the relation under the alias of an item of FROM or WITH, which may name the columns: ``AS b(x, y)``.

        Raises:
            UsageError: it names another number of columns.
        """
        alias = item.args.get("alias")
        names = [column.name for column in alias.columns] if alias is not None else []
        if names and len(names) != len(self.columns):
            raise UsageError(f"sql: {item.alias} names {len(names)} columns, but there are {len(self.columns)}")
        pairs = zip(self.columns, names or [column.name for column in self.columns], strict=True)
        table = item.alias or name
        return replace(self, columns=tuple(replace(column, table=table, name=name) for column, name in pairs))

    def times(self, names: Mapping[str, str]) -> dict[str, int]:
        """Return which of ``names`` (name → column of the stream) tell its event time, and how much later they are."""
        shifts = {self.stream._time_column: 0}
        if self.bounds is not None and self.bounds.windows is not None and self.bounds.start in shifts:
            shifts[self.bounds.end] = self.bounds.windows.size_ms
        return {name: shifts[actual] for name, actual in names.items() if actual in shifts}

    def has(self, name: str, table: str) -> bool:
        """Whether a query can name a column so, perhaps of several tables."""
        return any(
            column.name.lower() == name.lower() and (not table or column.table.lower() == table.lower())
            for column in self.columns
        )

    def knows(self, node: Any) -> bool:
        """Whether a column, or a field of one, can be what a query names."""
        return self.has(node.name, node.table) or self._field_of(node) is not None

    def resolved(self, node: Any) -> Expression:
        """Return a column under the name that it has in the stream, or a field of one.

        Raises:
            UsageError: there is none, or several.
        """
        found = None if self.has(node.name, node.table) else self._field_of(node)
        name, table, fields = (node.name, node.table, []) if found is None else found
        column: Any = exp().column(self.column(name, table).actual, quoted=True)
        for one in fields:
            column = exp().Dot(this=column, expression=one)
        return cast("Expression", column)

    def _field_of(self, node: Any) -> tuple[str, str, list[Any]] | None:
        """Return the column and its table, and the fields in it, of ``t.row.field`` or ``row.field``."""
        parts = node.parts
        if len(parts) > 2 and self.has(parts[1].name, parts[0].name):
            return parts[1].name, parts[0].name, parts[2:]
        if len(parts) > 1 and self.has(parts[0].name, ""):
            return parts[0].name, "", parts[1:]
        return None

    def column(self, name: str, table: str) -> Column:
        """Return the column that a query names.

        Raises:
            UsageError: there is none, or several.
        """
        candidates = [column for column in self.columns if not table or column.table.lower() == table.lower()]
        found = [column for column in candidates if column.name == name]
        found = found or [column for column in candidates if column.name.lower() == name.lower()]
        shown = f"{table}.{name}" if table else name
        if len({column.actual for column in found}) == 1:
            return found[0]
        if found:
            tables = " and ".join(sorted({column.table for column in found}))
            raise UsageError(f"sql: column '{shown}' is in {tables}; put the name of its table before it")
        known = ", ".join(dict.fromkeys(column.name for column in self.columns))
        raise UsageError(f"sql: there is no column '{shown}'; there are {known}")


def relation_of(stream: Stream, table: str) -> Relation:
    """Return a stream as a table."""
    names = [name for name in stream.columns if not (name == OP and stream._change_keys is not None)]
    return Relation(stream, tuple(Column(table, name, name) for name in names))


def window_of(kind: str, arguments: list[Expression]) -> Window:
    """Return the windows of TUMBLE, HOP or SESSION with these lengths.

    Raises:
        UsageError: the lengths are wrong, or such windows are not there.
    """
    lengths = [f"{interval_ms(argument)}ms" for argument in arguments]
    if kind == "TUMBLE" and len(lengths) in (1, 2):
        return Tumbling(*lengths)
    if kind == "HOP" and len(lengths) in (2, 3):
        slide, size, *offset = lengths
        return Sliding(size, slide, *offset)
    if kind == "SESSION" and len(lengths) == 1:
        return Session(*lengths)
    raise UsageError(f"sql: {kind} does not take {len(lengths)} lengths")


def check_time(relation: Relation, column: str, kind: str) -> None:
    """Refuse windows over another column than the event time.

    Raises:
        UsageError
    """
    time = relation.stream._time_column
    if time is None:
        raise UsageError(f"sql: {kind} needs event times; call .with_timestamps('{column}') on the stream before")
    if column != time:
        raise UsageError(f"sql: {kind} over '{column}', but the event time of the stream is in '{time}'")


def selected(stream: Stream, columns: Mapping[str, pl.Expr]) -> Stream:
    """Select columns; the event time may get another name, and changes keep their ``op``."""
    chosen = [expression.alias(name) for name, expression in columns.items()]
    has_changes = stream._change_keys is not None
    return stream.select(*chosen, *([OP] if has_changes else []))


def kept_rows(stream: Stream, condition: Expression) -> Stream:
    """Return the rows for which a condition is true."""
    return stream.filter(Scalars(stream.schema).condition(condition))
