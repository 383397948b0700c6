"""Tables of a query: a stream, what the query calls its columns, and the windows that its records belong to.

``FROM`` may also make rows: UNNEST of arrays and maps, and VALUES. In ``SELECT DISTINCT``, ``UNION``, ``INTERSECT`` and
``EXCEPT`` null is equal to null and NaN to NaN. A key of streams has neither, so each column has two columns of the
key: the value, or another one in place of null and NaN, and which of these it is.

Counterpart: ``api.sql.query`` makes them of clauses. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import polars as pl
import pyarrow as pa

from headgate.api.sql.expressions import Scalars
from headgate.api.sql.syntax import PROCTIME, exp, interval_ms, refuse_others
from headgate.api.sql.values import Type, Values, unsupported
from headgate.api.streams.changes import Changes
from headgate.api.streams.stream import Stream
from headgate.api.streams.windowed_stream import Session, Sliding, Tumbling, Window
from headgate.connectors.memory import FromRows
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.changes import INSERT, OP
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


_VALUE, _KIND, _COUNT = "__value_{}", "__kind_{}", "__count"
_IS_VALUE, _IS_NULL, _IS_NAN = range(3)


def distinct(relation: Relation) -> Relation:
    """Return each row once.

    Raises:
        UsageError: rows of such a type cannot be compared.
    """
    _refuse_clocks(relation, "DISTINCT")
    stream, names = relation.stream, [column.actual for column in relation.columns]
    keys = _keys(stream, names, "DISTINCT")
    if stream._change_keys is None:
        rows = {name: pl.col(name) for name in names}
        found = selected(stream, rows | keys).key_by(*keys).deduplicate("first", within=None)
        return replace(relation, stream=selected(found, rows))
    counted = selected(stream, keys).key_by(*keys).agg(pl.len().alias(_COUNT), retractions=True)
    types = {name: Values(stream.schema).type_of(pl.col(name)) for name in names}
    return replace(
        relation, stream=selected(counted, {name: _value(i, dtype) for i, (name, dtype) in enumerate(types.items())})
    )


def union_all(left: Relation, right: Relation) -> Relation:
    """Return the rows of both.

    Raises:
        UsageError: they have different columns.
    """
    one, other = (found.stream for found in _alike(left, right, "UNION"))
    if one._change_keys is not None or other._change_keys is not None:
        one, other = _as_changes(one), _as_changes(other)
    return relation_of(one.union(other), "")


def in_both(left: Relation, right: Relation, *, is_negated: bool) -> Relation:
    """Return each row of ``left`` once that ``right`` has, or has not.

    Raises:
        UsageError: they have different columns.
    """
    what = "EXCEPT" if is_negated else "INTERSECT"
    left, right = _alike(left, right, what)
    rows = {column.actual: pl.col(column.actual) for column in left.columns}
    one, other = distinct(left).stream, right.stream
    keys = _keys(one, list(rows), what)
    joined = selected(one, rows | keys).join(
        selected(other, keys), on=list(keys), how="anti" if is_negated else "semi", ttl=None
    )
    return relation_of(selected(joined, rows), "")


def _alike(left: Relation, right: Relation, what: str) -> tuple[Relation, Relation]:
    """Return both with the names of ``left`` and equal types."""
    if len(left.columns) != len(right.columns):
        raise UsageError(f"sql: {what} of {len(left.columns)} and {len(right.columns)} columns")
    for relation in (left, right):
        _refuse_clocks(relation, what)
    has_changes = any(one.stream._change_keys is not None for one in (left, right))
    if has_changes and any(column.actual == OP for column in left.columns):
        raise UsageError("sql: column 'op' of a result that changes says what changes; give yours another name with AS")
    found: list[dict[str, pl.Expr]] = [{}, {}]
    sides = [(one, Values(one.stream.schema)) for one in (left, right)]
    for pair in zip(left.columns, right.columns, strict=True):
        types = [values.type_of(pl.col(column.actual)) for (_, values), column in zip(sides, pair, strict=True)]
        are_whole = all(dtype.is_integer() for dtype in types)
        if types[0] != types[1] and not are_whole:
            names = " and ".join(f"'{one.name}' of type {dtype}" for one, dtype in zip(pair, types, strict=True))
            raise UsageError(f"sql: {what} of {names}; CAST one of them")
        for columns, column in zip(found, pair, strict=True):
            is_same = types[0] == types[1]
            columns[pair[0].actual] = pl.col(column.actual) if is_same else pl.col(column.actual).cast(pl.Int64)
    one, other = (selected(side.stream, columns) for (side, _), columns in zip(sides, found, strict=True))
    return relation_of(one, ""), relation_of(other, "")


def _refuse_clocks(relation: Relation, what: str) -> None:
    for column in relation.columns:
        if column.actual == PROCTIME:
            raise unsupported(f"{what} of PROCTIME() in column '{column.name}'", "add PROCTIME() in a SELECT around it")


def _as_changes(stream: Stream) -> Stream:
    """Return a stream with changes; records are rows that come."""
    if stream._change_keys is not None:
        return stream
    found = stream.select(*stream.columns, pl.lit(INSERT).alias(OP))
    found._changes = Changes((), retractions=True)
    return found


def _keys(stream: Stream, names: list[str], what: str) -> dict[str, pl.Expr]:
    values, found = Values(stream.schema), dict[str, pl.Expr]()
    for i, name in enumerate(names):
        column, dtype = pl.col(name), values.type_of(pl.col(name))
        kind: Any = pl.when(column.is_null()).then(_IS_NULL)
        value = column.cast(pl.String) if dtype.is_decimal() else column
        if dtype.is_float():
            kind = kind.when(column.is_nan()).then(_IS_NAN)
            value = column.fill_nan(None) + 0.0  # -0.0 is 0.0
        found[_VALUE.format(i)] = value.fill_null(_in_place(dtype, what))
        found[_KIND.format(i)] = kind.otherwise(_IS_VALUE).cast(pl.Int8)
    return found


def _in_place(dtype: Type, what: str) -> pl.Expr:
    """Return a value in place of none."""
    if dtype.is_nested():
        raise unsupported(f"{what} of a column of type {dtype}", "make columns of its parts")
    if dtype.is_decimal() or isinstance(dtype, pl.String | pl.Enum):
        return pl.lit("")
    if isinstance(dtype, pl.Binary):
        return pl.lit(b"")
    return pl.lit(0).cast(dtype)


def _value(place: int, dtype: Type) -> pl.Expr:
    """Return a column of a row of its columns in the key."""
    value, kind = pl.col(_VALUE.format(place)), pl.col(_KIND.format(place))
    found: pl.Expr = pl.when(kind != _IS_NULL).then(value)
    if dtype.is_float():
        found = pl.when(kind == _IS_NAN).then(float("nan")).otherwise(found)
    return found.cast(dtype)


_POSITION = "ordinality"


def is_unnest(join: Expression) -> bool:
    """Whether a join is with UNNEST, which is about each row."""
    item = join.this.this if isinstance(join.this, exp().Lateral) else join.this
    return isinstance(item, exp().Unnest)


def unnested(
    relation: Relation, join: Expression, resolved: Callable[[Expression], Expression], place: int
) -> Relation:
    """Return a row for each element of an array or a map: ``CROSS JOIN UNNEST(items) WITH ORDINALITY AS x (a, n)``.

    Rows of an array have a column for each of their fields, entries of a map one for the key and one for the value.

    Raises:
        UsageError: it is no array, or the names are too few or too many.
    """
    relation = relation.without_top().without_open_windows()
    item: Any = join.this
    alias = item.args.get("alias")
    if isinstance(item, exp().Lateral):
        item = item.this
        alias = alias or item.args.get("alias")
    if len(item.expressions) != 1:
        raise unsupported("UNNEST of several arrays", "join with one UNNEST for each")
    is_left = _is_left(join)
    value = Scalars(relation.stream.schema)(resolved(item.expressions[0]))
    dtype = Scalars(relation.stream.schema).values.type_of(value)
    if not isinstance(dtype, pl.List):
        raise UsageError(f"sql: UNNEST needs an array or a map, and {item.expressions[0].sql('duckdb')} is none")
    element, number = f"__u{place}", f"__n{place}"
    offset = item.args.get("offset")
    stream = relation.stream.with_columns(value.alias(element))
    stream = stream.explode(element, keep_empty=is_left, position=number if offset else None)
    table = "" if alias is None else alias.name
    names = [] if alias is None else [column.name for column in alias.columns]
    fields = {"": pl.col(element)}
    if isinstance(dtype.inner, pl.Struct) and len(names) != 1:
        fields = {one.name: pl.col(element).struct.field(one.name) for one in dtype.inner.fields}
    names = names or [name or table or "unnest" for name in fields]
    if len(names) != len(fields):
        raise UsageError(f"sql: UNNEST names {len(names)} columns, but its elements have {len(fields)}")
    made = {f"__u{place}_{i}": field for i, field in enumerate(fields.values())}
    columns = [Column(table, name, actual) for name, actual in zip(names, made, strict=True)]
    if offset:
        made[number] = pl.col(number) + 1
        columns.append(Column(table, _POSITION if offset is True else offset.name, number))
    stream = stream.with_columns(*(field.alias(name) for name, field in made.items()))
    return replace(relation, stream=stream, columns=(*relation.columns, *columns))


def _is_left(join: Expression) -> bool:
    """Return whether rows without elements stay.

    Raises:
        UsageError: it is another join, or has a condition.
    """
    refuse_others(join)
    side, on = join.args.get("side") or "", join.args.get("on")
    is_true = isinstance(on, exp().Boolean) and bool(on.this)
    if side not in ("", "LEFT") or not (on is None or is_true) or join.args.get("using"):
        raise unsupported(
            f"{side} JOIN UNNEST with a condition".strip(), "write CROSS JOIN UNNEST, or LEFT JOIN UNNEST ... ON TRUE"
        )
    return side == "LEFT"


def written_rows(tree: Expression, tables: Mapping[str, Relation]) -> Relation:
    """Return the rows of ``(VALUES (1, 'a'), (2, 'b')) AS t (id, name)``.

    Raises:
        UsageError: rows have different columns, or no other table says which pipeline they belong to.
    """
    if not tables:
        raise UsageError("sql: VALUES needs a stream in the query, which says what pipeline it belongs to")
    pipeline: Any = next(iter(tables.values())).stream._pipeline
    translate = Scalars(pa.schema([]))
    rows = [
        [translate(cell) for cell in (row.expressions if isinstance(row, exp().Tuple) else [row])]
        for row in tree.expressions
    ]
    if len({len(row) for row in rows}) != 1:
        raise UsageError("sql: the rows of VALUES have different numbers of columns")
    columns = [translate.values.alike(list(cells), "VALUES") for cells in zip(*rows, strict=True)]
    frames = [pl.select(**{f"col{i}": cell for i, cell in enumerate(cells)}) for cells in zip(*columns, strict=True)]
    source = pipeline.source(FromRows(pl.concat(frames, how="vertical_relaxed")))
    return relation_of(source, "").named(tree)
