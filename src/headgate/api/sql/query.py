"""``headgate.sql``: a query in SQL as verbs of streams.

sqlglot parses the text; nothing here does. A ``_Select`` becomes filter, key_by, window, agg and select, so that the
result is an ordinary stream. Expressions are in ``api.sql.expressions``. Never runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import polars as pl

from headgate.api.sql.expressions import (
    PROCTIME,
    Aggregates,
    Scalars,
    exp,
    interval_ms,
    is_proctime,
    parsed,
    refuse_others,
)
from headgate.api.sql.time_range import time_range
from headgate.api.sql.values import type_of_keys, unsupported
from headgate.api.streams.stream import Stream
from headgate.api.streams.windowed_stream import Session, Sliding, Tumbling, Window
from headgate.errors import UsageError
from headgate.operators.changes import OP
from headgate.operators.windows.window_assigner import FixedWindows

if TYPE_CHECKING:
    from sqlglot.expressions import Expression

_KEY, _RESULT = "__key_{}", "__result_{}"
_START, _END, _TIME = "window_start", "window_end", "__time"
_WINDOWS = ("TUMBLE", "HOP", "SESSION")


def sql(query: str, **streams: Stream) -> Stream:
    """Return the stream of the results of a query: ``sql("SELECT * FROM bids WHERE price > 100", bids=bids)``.

    It has what ``docs/guide/sql.md`` lists. Needs ``pip install 'headgate-streams[sql]'``.

    Args:
        query: one SELECT, or several with UNION ALL, in the dialect of DuckDB, with Flink's functions of windows.
        streams: the tables of the query, by name.

    Raises:
        UsageError: the text is wrong, a table or column is unknown, or the query has something that is not there.
    """
    if not isinstance(query, str):
        raise UsageError(f"sql takes the text of a query, not {query!r}")
    for name, stream in streams.items():
        if not isinstance(stream, Stream):
            raise UsageError(f"sql: {name} must be a stream without a key, not {type(stream).__name__}")
    with ExitStack() as stack:
        for builder in {id(s._pipeline): s._pipeline._builder for s in streams.values()}.values():
            stack.enter_context(builder.all_or_nothing())
        relations = {name: _relation_of(stream, name) for name, stream in streams.items()}
        found = _Translation(relations).query(parsed(query)).without_top()
        for column in found.columns:
            if column.actual == PROCTIME:
                raise unsupported(f"PROCTIME() as result column '{column.name}'", "leave it out of the last SELECT")
        return found.stream


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a relation: what the query calls it, and what the stream calls it.

    ``PROCTIME`` is no column of the stream: the clock is read where windows or a join need it.
    """

    table: str
    name: str
    actual: str


@dataclass(frozen=True, slots=True)
class _Bounds:
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


def _fixed(window: Window) -> FixedWindows | None:
    if isinstance(window, Tumbling) and window.time == "processing":
        return None
    found = window.aligned() if isinstance(window, Tumbling | Sliding) else None
    return found if isinstance(found, FixedWindows) else None


@dataclass(frozen=True, slots=True)
class _Top:
    """ROW_NUMBER() OVER (PARTITION BY keys ORDER BY by), which an outer WHERE bounds: its columns, and its name."""

    name: str
    keys: tuple[str, ...]
    by: tuple[str, ...]
    descending: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Relation:
    """A table of the query: a stream, the names of its columns, and its windows."""

    stream: Stream
    columns: tuple[_Column, ...]
    bounds: _Bounds | None = None
    window: Window | None = None
    top: _Top | None = None

    def without_top(self) -> _Relation:
        """Return the relation.

        Raises:
            UsageError: its rows are to be numbered, which only a bound on the numbers makes possible.
        """
        if self.top is not None:
            name = self.top.name
            raise unsupported("ROW_NUMBER() without a bound", f"add WHERE {name} <= 10 in a SELECT around it")
        return self

    def named(self, item: Expression, name: str = "") -> _Relation:
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

    def column(self, name: str, table: str) -> _Column:
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


def _relation_of(stream: Stream, table: str) -> _Relation:
    names = [name for name in stream.columns if not (name == OP and stream._change_keys is not None)]
    return _Relation(stream, tuple(_Column(table, name, name) for name in names))


@dataclass(slots=True)
class _Translation:
    """Turns queries into streams. ``tables``: those that the query can name."""

    tables: dict[str, _Relation]
    retractions: bool = False
    """Whether changes of the results must say what was before."""

    def query(self, tree: Expression) -> _Relation:
        """Return the relation of a SELECT, a UNION ALL, or one in brackets.

        Raises:
            UsageError: something in it is not there.
        """
        scope = _Translation(dict(self.tables), self.retractions)
        with_: Any = tree.args.get("with_") or tree.args.get("with")
        if with_ is not None and with_.args.get("recursive"):
            raise unsupported("WITH RECURSIVE", "use stream.iterate(...)")
        for table in with_.expressions if with_ is not None else ():
            name = table.alias.lower()
            if sum(other.name.lower() == name for other in tree.find_all(exp().Identifier)) < 2:
                continue  # nothing reads it
            found = _Translation(dict(scope.tables), retractions=True).query(table.this).named(table)
            scope.tables = {known: one for known, one in scope.tables.items() if known.lower() != name}
            scope.tables[table.alias] = found
        if isinstance(tree, exp().Union):
            return scope._union(tree)
        if isinstance(tree, exp().Subquery):
            _refuse_clauses(tree)
            return scope.query(tree.this)
        if isinstance(tree, exp().Select):
            return _Select(scope, tree).relation()
        raise unsupported(tree.key.upper(), "write SELECT, or several with UNION ALL between")

    def _union(self, tree: Expression) -> _Relation:
        if type(tree) is not exp().Union or tree.args.get("distinct"):
            raise unsupported(f"{tree.key.upper()} without ALL", "write UNION ALL")
        _refuse_clauses(tree)
        left, right = self.query(tree.this).without_top(), self.query(tree.expression).without_top()
        if len(left.columns) != len(right.columns):
            raise UsageError(f"sql: UNION ALL of {len(left.columns)} and {len(right.columns)} columns")
        pairs = zip(left.columns, right.columns, strict=True)
        renamed = _selected(right.stream, {a.actual: pl.col(b.actual) for a, b in pairs})
        return _relation_of(left.stream.union(renamed), "")

    def table(self, tree: Expression) -> _Relation:
        """Return the relation of one item of FROM or JOIN.

        Raises:
            UsageError: it is unknown, or not there.
        """
        if isinstance(tree, exp().Subquery):
            return self.query(tree).named(tree)
        if not isinstance(tree, exp().Table):
            raise unsupported(f"{tree.key.upper()} in FROM", "name a table, a window function or a subquery")
        if tree.args.get("db"):
            raise UsageError(
                f"sql: there is no table '{tree.db}.{tree.name}'; tables have one name, as in sql(..., bids=stream)"
            )
        refuse_others(tree)
        function = tree.this
        if isinstance(function, exp().Anonymous) and function.name.upper() == "TABLE" and function.expressions:
            function = function.expressions[0]
        if isinstance(function, exp().Anonymous):
            return self._windowed(function).named(tree)
        return self._known(tree.name).named(tree, tree.name)

    def _known(self, name: str) -> _Relation:
        if name not in self.tables:
            near = [known for known in self.tables if known.lower() == name.lower()]
            if len(near) != 1:
                known = ", ".join(self.tables) or "none"
                raise UsageError(f"sql: there is no table '{name}' (there are: {known}); give sql(..., {name}=stream)")
            name = near[0]
        return self.tables[name]

    def _windowed(self, function: Expression) -> _Relation:
        """Return a table with windows: ``TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND)``."""
        kind, arguments = function.name.upper(), function.expressions
        if kind not in _WINDOWS:
            raise unsupported(f"{kind} in FROM", f"use {', '.join(_WINDOWS)}, a table or a subquery")
        if len(arguments) < 3 or not isinstance(arguments[0], exp().Column):
            raise UsageError(f"sql: write {kind}(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND)")
        relation = self._known(arguments[0].name)
        descriptor = arguments[1]
        if not isinstance(descriptor, exp().Anonymous) or descriptor.name.upper() != "DESCRIPTOR":
            raise UsageError(f"sql: the second argument of {kind} is DESCRIPTOR(column), not {descriptor.sql()}")
        time = descriptor.expressions[0]
        actual = relation.column(time.name, time.table).actual
        window = window_of(kind, arguments[2:])
        if actual == PROCTIME:
            window = _by_the_clock(window, kind)
        else:
            check_time(relation, actual, kind)
        stream = relation.stream
        taken = [name for name in (_START, _END) if name in stream.columns]
        if taken:
            raise UsageError(
                f"sql: {kind} makes a column '{taken[0]}', which {arguments[0].name} has; rename it before"
            )
        columns = (*relation.columns, _Column("", _START, _START), _Column("", _END, _END))
        fixed = _fixed(window)
        if fixed is not None and isinstance(window, Tumbling):  # may be selected without GROUP BY
            time = pl.col(cast(str, stream._time_column)).cast(pl.Datetime("us"))
            moved, size = pl.duration(milliseconds=fixed.offset_ms), pl.duration(milliseconds=fixed.size_ms)
            start = (time - moved).dt.truncate(f"{fixed.size_ms}ms") + moved
            stream = stream.with_columns(start.alias(_START), (start + size).alias(_END))
        return _Relation(stream, columns, _Bounds(_START, _END, fixed), window)


def _by_the_clock(window: Window, kind: str) -> Window:
    """Return the same windows in processing time.

    Raises:
        UsageError: such windows are not there.
    """
    if not isinstance(window, Tumbling):
        raise unsupported(f"{kind} over PROCTIME()", "use TUMBLE, or the event time")
    return replace(window, time="processing")


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


def check_time(relation: _Relation, column: str, kind: str) -> None:
    """Refuse windows over another column than the event time.

    Raises:
        UsageError
    """
    time = relation.stream._time_column
    if time is None:
        raise UsageError(f"sql: {kind} needs event times; call .with_timestamps('{column}') on the stream before")
    if column != time:
        raise UsageError(f"sql: {kind} over '{column}', but the event time of the stream is in '{time}'")


def _selected(stream: Stream, columns: Mapping[str, pl.Expr]) -> Stream:
    """Select columns; the event time may get another name, and changes keep their ``op``."""
    chosen = [expression.alias(name) for name, expression in columns.items()]
    has_changes = stream._change_keys is not None
    return stream.select(*chosen, *([OP] if has_changes else []))


def _kept(stream: Stream, condition: Expression) -> Stream:
    return stream.filter(Scalars(stream.schema).condition(condition))


_REFUSED = {
    "distinct": ("SELECT DISTINCT", "use GROUP BY all columns and a window"),
    "order": ("ORDER BY", "a stream has no end to sort at"),
    "limit": ("LIMIT", "use take(n) or collect(limit=n) on the result"),
    "offset": ("OFFSET", "a stream has no end to sort at"),
    "qualify": ("QUALIFY", "filter the row number in an outer SELECT"),
    "laterals": ("LATERAL", "use flat_map"),
    "windows": ("WINDOW", "write the window where it is used"),
    "pivots": ("PIVOT", "use select"),
    "sample": ("TABLESAMPLE", "use filter"),
}


def _refuse_clauses(tree: Expression) -> None:
    for clause, (name, instead) in _REFUSED.items():
        if tree.args.get(clause) and not (clause == "distinct" and isinstance(tree, exp().Union)):
            raise unsupported(name, instead)
    refuse_others(tree)


@dataclass(slots=True)
class _Select:
    """One SELECT."""

    scope: _Translation
    tree: Expression
    relation_in: _Relation = field(init=False)

    def relation(self) -> _Relation:
        """Return its result.

        Raises:
            UsageError: something in it is not there.
        """
        _refuse_clauses(self.tree)
        source = self.tree.args.get("from_") or self.tree.args.get("from")
        if source is None:
            raise UsageError("sql: a query needs FROM")
        group = self.tree.args.get("group")
        is_grouping = group is not None or any(_has_aggregates(node) for node in self.tree.expressions)
        needs_all = is_grouping or bool(self.tree.args.get("joins"))
        inner = replace(self.scope, retractions=True) if needs_all else self.scope
        if source.this.args.get("version") is not None:
            raise unsupported("FOR SYSTEM_TIME AS OF after FROM", "put that table after JOIN")
        self.relation_in = inner.table(source.this)
        for i, join in enumerate(self.tree.args.get("joins") or ()):
            left, right = self.relation_in.without_top(), inner.table(join.this).without_top()
            self.relation_in = self._joined(left, right, join, i)
        where = self.tree.args.get("where")
        parts = _all_of(where.this if where is not None else None)
        for part in self._ranked(parts):
            condition = self.resolved(part)
            _refuse_aggregates(condition, "WHERE", "use HAVING")
            self.relation_in = replace(self.relation_in, stream=_kept(self.relation_in.stream, condition))
        outputs = [(name, self.resolved(node)) for name, node in self._outputs()]
        having = self.tree.args.get("having")
        if is_grouping or having is not None:
            return _Grouping(self, outputs).relation()
        ranks = [name for name, node in outputs if isinstance(node, exp().Window)]
        return self._numbered(outputs, ranks) if ranks else self._projected(outputs)

    def _numbered(self, outputs: list[tuple[str, Expression]], ranks: list[str]) -> _Relation:
        """Return the other columns, and what ROW_NUMBER() is to number."""
        window: Any = dict(outputs)[ranks[0]]
        if len(ranks) > 1 or not isinstance(window.this, exp().RowNumber) or window.args.get("spec"):
            raise unsupported(
                f"{window.this.sql()} OVER", "use ROW_NUMBER() OVER (PARTITION BY ... ORDER BY ...), once"
            )
        order = window.args.get("order")
        if order is None or not window.args.get("partition_by"):
            raise UsageError("sql: ROW_NUMBER() needs OVER (PARTITION BY ... ORDER BY ...)")
        if any(node.args.get("nulls_first") for node in order.expressions):
            raise unsupported("ORDER BY with NULLS FIRST", "nulls come last; filter them, or order by COALESCE")
        keys = {f"__part_{i}": node for i, node in enumerate(window.args["partition_by"])}
        by = {f"__order_{i}": node.this for i, node in enumerate(order.expressions)}
        known = {node: name for name, node in outputs if isinstance(node, exp().Column)}
        names = {hidden: known.get(node, hidden) for hidden, node in (keys | by).items()}
        more = [(hidden, node) for hidden, node in (keys | by).items() if names[hidden] == hidden]
        found = self._projected([(name, node) for name, node in outputs if name not in ranks] + more)
        top = _Top(
            ranks[0],
            tuple(names[hidden] for hidden in keys),
            tuple(names[hidden] for hidden in by),
            tuple(bool(node.args.get("desc")) for node in order.expressions),
        )
        shown = tuple(column for column in found.columns if not column.name.startswith(("__part_", "__order_")))
        return replace(found, columns=(*shown, _Column("", ranks[0], ranks[0])), top=top)

    def _ranked(self, parts: list[Expression]) -> list[Expression]:
        """Keep the rows with small row numbers; return the other conditions."""
        top = self.relation_in.top
        if top is None:
            return parts
        for part in parts:
            kind, left, right = type(part), part.this, part.args.get("expression")
            if kind not in (exp().LTE, exp().LT, exp().EQ) or not isinstance(left, exp().Column):
                continue
            if left.name != top.name or not isinstance(right, exp().Literal) or right.is_string:
                continue
            count = int(right.name) - (kind is exp().LT) if right.name.isdecimal() else 0
            if count < 1 or (kind is exp().EQ and count != 1):
                raise UsageError(f"sql: {part.sql()} must be {top.name} <= a number from 1 on")
            others = [other for other in parts if other is not part]
            self._keep_top(top, count, others)
            return others
        self.relation_in.without_top()
        raise AssertionError("rows that are to be numbered were taken for others")

    def _keep_top(self, top: _Top, count: int, others: list[Expression]) -> None:
        relation = self.relation_in
        read = [*self.tree.expressions, *others]
        used = [node.name for one in read for node in one.find_all(exp().Column)]
        has_star = any(one.find(exp().Star) for one in self.tree.expressions if not one.find(exp().AggFunc))
        is_used = top.name in used or has_star
        rest = [column for column in relation.columns if column.actual != top.name]
        bounds, order = relation.bounds, {"by": list(top.by), "descending": list(top.descending)}
        if bounds is not None and {bounds.start, bounds.end} & set(top.keys):
            if (bounds.start, bounds.end) != (_START, _END):
                raise unsupported("ROW_NUMBER() over windows with other names", "keep window_start and window_end")
            keys = [key for key in top.keys if key not in (_START, _END)]
            rank = top.name if is_used else None
            keyed = relation.stream.key_by(*keys, _START, _END)
            stream = keyed.top_per_window(count, **order, rank=rank)  # type: ignore[arg-type]
        elif count == 1 and len(top.by) == 1 and not is_used:
            names = [column.name for column in rest]
            kept = set(top.keys) <= set(used) or (has_star and set(top.keys) <= set(names))
            keep: Any = "last" if top.descending[0] else "first"
            retractions = self.scope.retractions or not kept
            keyed = relation.stream.key_by(*top.keys)
            stream = keyed.deduplicate(keep, by=top.by[0], within=None, retractions=retractions)
        else:
            keyed = relation.stream.key_by(*top.keys)
            stream = keyed.top(count, **order, within=None, rank=top.name, retractions=True)  # type: ignore[arg-type]
        columns = (*rest, *([_Column("", top.name, top.name)] if is_used else []))
        self.relation_in = _Relation(stream, columns, bounds)

    def _joined(self, left: _Relation, right: _Relation, join: Expression, place: int) -> _Relation:
        """Return two relations side by side: by equal columns, in equal windows if both have some."""
        sides = {"": "inner", "LEFT": "left", "RIGHT": "right", "FULL": "full"}
        how: Any = {"SEMI": "semi", "ANTI": "anti"}.get(
            join.args.get("kind") or "", sides.get(join.args.get("side") or "")
        )
        if how is None or join.args.get("method"):
            raise unsupported(join.sql().split(" ON ")[0], "use JOIN ... ON with equal columns")
        refuse_others(join)
        both = _Relation(
            left.stream,
            tuple(_moved(column, f"__l{place}_{i}") for i, column in enumerate(left.columns))
            + tuple(_moved(column, f"__r{place}_{i}") for i, column in enumerate(right.columns)),
        )
        names = dict(zip([column.actual for column in both.columns], [*left.columns, *right.columns], strict=True))
        using: list[Any] = join.args.get("using") or []
        pairs: list[tuple[Expression, Expression]] = [
            (_column_of(left, one.name), _column_of(right, one.name)) for one in using
        ]
        rest: list[Expression] = []
        on = join.args.get("on")
        wheres = self._wheres(both) if how == "inner" else []
        conditions = [self.resolved(part, both) for part in _all_of(on)]
        for resolved in conditions or wheres:
            pair = _sides(resolved, names)
            if pair is not None and all(isinstance(side, exp().Column) for side in pair):
                pairs.append(pair)
            elif conditions:
                rest.append(resolved)
        if not pairs:  # equal expressions of columns
            equal = [(one, pair) for one in rest or wheres for pair in [_sides(one, names)] if pair is not None]
            pairs = [pair for _, pair in equal]
            rest = [one for one in rest if all(one is not other for other, _ in equal)]
        if not pairs:
            raise unsupported("JOIN without equal columns", "add ON a.column = b.column")
        times = [
            side.times({name: one.actual for name, one in names.items() if name[2] == mark})
            for mark, side in (("l", left), ("r", right))
        ]
        near = time_range([*rest, *wheres], times[0], times[1])
        if near is not None and how != "inner":
            rest = [condition for condition in rest if condition not in near.conditions]
        if rest and how != "inner":
            raise unsupported(f"{how.upper()} JOIN with a condition that is no equality", "filter a table before")
        windows = [
            bounds
            if bounds is not None
            and any(isinstance(pair[i], exp().Column) and pair[i].name in (bounds.start, bounds.end) for pair in pairs)
            else None
            for i, bounds in enumerate((left.bounds, right.bounds))
        ]
        in_window = windows[0] is not None and windows[1] is not None and windows[0].windows == windows[1].windows
        values = [Scalars(side.stream.schema) for side in (left, right)]
        dtypes = [
            type_of_keys([one.values.type_of(one(side)) for one, side in zip(values, pair, strict=True)], _shown(pair))
            for pair in pairs
        ]
        streams = []
        for i, (relation, mark) in enumerate(((left, "l"), (right, "r"))):
            chosen = {
                f"__{mark}{place}_{n}": pl.col(column.actual)
                for n, column in enumerate(relation.columns)
                if column.actual != PROCTIME
            }
            translate = values[i]
            chosen |= {
                f"__key{mark}_{n}": translate(pair[i]).cast(dtype)
                for n, (pair, dtype) in enumerate(zip(pairs, dtypes, strict=True))
            }
            bounds = windows[i]
            if in_window and bounds is not None:
                chosen[f"__time{mark}"] = bounds.last_moment()
            elif near is not None:
                chosen[f"__time{mark}"] = pl.col(str(relation.stream._time_column))
            stream = _selected(relation.stream, chosen)
            if in_window:
                stream._time_column = f"__time{mark}"
            elif near is not None:
                exact = next((name for name, shift_ms in times[i].items() if shift_ms == 0), "")
                stream._time_column = exact or f"__time{mark}"
            streams.append(stream)
        keys: dict[str, Any] = {
            f"{side}_on": [f"__key{side[0]}_{n}" for n in range(len(pairs))] for side in ("left", "right")
        }
        window: Any = None if windows[0] is None or not in_window else windows[0].again()
        limit: dict[str, Any] = {"ttl": None}
        if in_window:
            limit = {"window": window}
        elif near is not None:
            finer = 1 if how == "inner" else 0  # the conditions are checked again, with what is finer than milliseconds
            ends = (near.lower_ms - finer, near.upper_ms + finer)
            limit = {"within": tuple(timedelta(milliseconds=end) for end in ends)}
        if self._is_lookup(join.this, both):
            if how not in ("inner", "left"):
                raise unsupported(f"{how.upper()} JOIN FOR SYSTEM_TIME AS OF", "use JOIN or LEFT JOIN")
            stream = streams[0].join(streams[1].broadcast(), how=how, **keys)
        else:
            stream = streams[0].join(streams[1], how=how, **keys, **limit)
        for condition in rest:
            stream = _kept(stream, condition)
        columns = both.columns if how not in ("semi", "anti") else both.columns[: len(left.columns)]
        kept = None
        if in_window and windows[0] is not None:
            actual = {column.actual: f"__l{place}_{n}" for n, column in enumerate(left.columns)}
            kept = replace(windows[0], start=actual.get(windows[0].start, ""), end=actual.get(windows[0].end, ""))
        return _Relation(stream, columns, kept)

    def _is_lookup(self, table: Expression, both: _Relation) -> bool:
        """Whether each record is joined with what the table has when it comes: ``FOR SYSTEM_TIME AS OF p_time``.

        Raises:
            UsageError: the time is not the clock's.
        """
        version: Any = table.args.get("version")
        if version is None:
            return False
        time = version.expression
        if isinstance(time, exp().Column) and both.column(time.name, time.table).actual == PROCTIME:
            return True
        raise unsupported(
            f"FOR SYSTEM_TIME AS OF {time.sql()}", "name a column that is PROCTIME(), or call join_asof on the streams"
        )

    def _wheres(self, relation: _Relation) -> list[Expression]:
        """Return the conditions of WHERE that are about ``relation`` alone."""
        found = []
        where = self.tree.args.get("where")
        for part in _all_of(where.this if where is not None else None):
            with suppress(UsageError):
                found.append(self.resolved(part, relation))
        return found

    def resolved(self, tree: Expression, relation: _Relation | None = None) -> Expression:
        """Return an expression in which columns have the names of the stream, so that equal ones are equal."""
        within = relation or self.relation_in

        def resolve(node: Expression) -> Expression:
            if isinstance(node, exp().Column) and not isinstance(node.this, exp().Star):
                actual = within.column(node.name, node.table).actual
                return cast("Expression", exp().column(actual, quoted=True))
            if isinstance(node, exp().Subquery | exp().Select | exp().Exists):
                raise unsupported("a subquery in an expression", "join with it")
            if isinstance(node, exp().Paren):
                return self.resolved(node.this, within)  # nothing looks into what takes the place of a node
            return node

        return tree.copy().transform(resolve)

    def _outputs(self) -> list[tuple[str, Expression]]:
        """Return the name and the expression of each result column; ``*`` is all columns."""
        found: list[tuple[str, Expression]] = []
        for i, node in enumerate(self.tree.expressions):
            is_star = isinstance(node, exp().Star)
            if is_star or (isinstance(node, exp().Column) and isinstance(node.this, exp().Star)):
                if any(
                    (node if is_star else node.this).args.get(word)
                    for word in ("except_", "except", "replace", "rename")
                ):
                    raise unsupported("SELECT * with EXCLUDE, REPLACE or RENAME", "name the columns")
                table = "" if is_star else node.table
                columns = [one for one in self.relation_in.columns if not table or one.table.lower() == table.lower()]
                if not columns:
                    raise UsageError(f"sql: there is no table '{table}' in FROM")
                found += [(one.name, exp().column(one.name, table=one.table or None, quoted=True)) for one in columns]
                continue
            bare = node.this if isinstance(node, exp().Alias) else node
            found.append((node.alias_or_name or f"_col{i}", bare))
        names = [name for name, _ in found]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"sql: two result columns are called '{name}'; give one another name with AS")
        return found

    def _projected(self, outputs: list[tuple[str, Expression]]) -> _Relation:
        bounds = self.relation_in.bounds
        window = self.relation_in.window
        if window is not None and (isinstance(window, Sliding) or _fixed(window) is None):
            raise unsupported(
                "a table of overlapping windows, of sessions or of processing time without GROUP BY",
                "add GROUP BY ..., window_start, window_end",
            )
        stream = self.relation_in.stream
        return self.made(stream, outputs, Scalars(stream.schema), bounds)

    def made(
        self,
        stream: Stream,
        outputs: list[tuple[str, Expression]],
        translate: Callable[[Expression], pl.Expr],
        bounds: _Bounds | None,
    ) -> _Relation:
        """Return the relation of the result columns."""
        for name, node in outputs:
            if isinstance(node, exp().Null):
                raise UsageError(f"sql: NULL needs a type to be column '{name}'; write CAST(NULL AS BIGINT) AS {name}")
        clocks = [name for name, node in outputs if is_proctime(node)]
        expressions = {name: translate(node) for name, node in outputs if name not in clocks}
        if not expressions:
            raise unsupported("SELECT of nothing but PROCTIME()", "select a column, too")
        result = _relation_of(_selected(stream, expressions), "")
        result = replace(result, columns=(*result.columns, *(_Column("", name, PROCTIME) for name in clocks)))
        if bounds is None:
            return result
        names = {
            expression.meta.root_names()[0]: name
            for name, expression in reversed(expressions.items())
            if expression.meta.is_column()
        }
        if bounds.start in names or bounds.end in names:
            kept = _Bounds(names.get(bounds.start, ""), names.get(bounds.end, ""), bounds.windows)
            return replace(result, bounds=kept)
        return result


def _column_of(relation: _Relation, name: str) -> Expression:
    return cast("Expression", exp().column(relation.column(name, "").actual, quoted=True))


def _moved(column: _Column, actual: str) -> _Column:
    return column if column.actual == PROCTIME else replace(column, actual=actual)


def _sides(condition: Expression, names: Mapping[str, _Column]) -> tuple[Expression, Expression] | None:
    """Return the sides of an equality of two tables in the columns of their streams, that of the left table first."""
    if not isinstance(condition, exp().EQ):
        return None
    sides: dict[str, Expression] = {}
    for side in (condition.this, condition.expression):
        marks = {column.name[:3] for column in side.find_all(exp().Column)}
        if len(marks) == 1:
            renamed = side.copy().transform(
                lambda node: (
                    exp().column(names[node.name].actual, quoted=True)
                    if isinstance(node, exp().Column) and node.name in names
                    else node
                )
            )
            sides[marks.pop()] = renamed
    return (sides["__l"], sides["__r"]) if sides.keys() == {"__l", "__r"} else None


def _shown(pair: tuple[Expression, Expression]) -> str:
    return " = ".join(side.sql() for side in pair)


def _all_of(condition: Expression | None) -> list[Expression]:
    """Return what ``AND`` brings together."""
    if condition is None:
        return []
    return list(condition.flatten()) if isinstance(condition, exp().And) else [condition]


def _has_aggregates(node: Expression) -> bool:
    return any(not isinstance(found.parent, exp().Window) for found in node.find_all(exp().AggFunc))


def _refuse_aggregates(node: Expression, clause: str, instead: str) -> None:
    if _has_aggregates(node):
        raise UsageError(f"sql: {clause} cannot have an aggregate; {instead}")


class _Grouping:
    """A SELECT with GROUP BY or aggregates: keys, the window, and what is computed of each group."""

    def __init__(self, select: _Select, outputs: list[tuple[str, Expression]]) -> None:
        self._select, self._outputs = select, outputs
        self._relation = select.relation_in
        self._window: Window | None = None
        self._again: _Bounds | None = None
        self._names: dict[Expression, str] = {}
        self._keys: dict[str, Expression] = {}

    def relation(self) -> _Relation:
        tree = self._select.tree
        group = tree.args.get("group")
        for node in group.expressions if group is not None else ():
            self._add_key(self._at(node))
        for clause in ("rollup", "cube", "grouping_sets", "all", "totals"):
            if group is not None and group.args.get(clause):
                raise unsupported(f"GROUP BY {clause.upper().replace('_', ' ')}", "write one query for each grouping")
        having = tree.args.get("having")
        condition = None if having is None else self._select.resolved(having.this)
        aggregates = self._aggregates(condition)
        wanted = aggregates.expressions or {_RESULT.format(0): pl.len()}
        if not self._keys:
            self._keys[_KEY.format(0)] = exp().Literal.number(0)
        scalar = Scalars(self._relation.stream.schema)
        inputs = {name: scalar(node) for name, node in self._keys.items()}
        used = dict.fromkeys(name for found in wanted.values() for name in found.meta.root_names())
        inputs |= {name: pl.col(name) for name in used}
        named = [found.alias(name) for name, found in wanted.items()]
        if self._window is None:
            keyed = _selected(self._relation.stream, inputs).key_by(*self._keys)
            return self._result(keyed.agg(*named, retractions=self._needs_retractions()), aggregates, condition)
        time = self._relation.stream._time_column
        if self._again is not None:
            inputs[_TIME] = self._again.last_moment()
        elif time is not None:
            inputs[time] = pl.col(time)
        stream = _selected(self._relation.stream, inputs)
        stream._time_column = time if self._again is None else _TIME
        results = stream.key_by(*self._keys).window(self._window).agg(*named)
        fixed = _fixed(self._window) if self._again is None else self._again.windows
        if self._again is not None and fixed is not None and fixed.is_sliding:
            results = results.with_columns((pl.col(_END) - pl.duration(milliseconds=fixed.size_ms)).alias(_START))
        return self._result(results, aggregates, condition, _Bounds(_START, _END, fixed))

    def _needs_retractions(self) -> bool:
        """Whether the changes of a running aggregate must say what was before: for others, or without the keys."""
        kept = {self._names.get(node) for _, node in self._outputs}
        return self._select.scope.retractions or not set(self._keys) <= kept

    def _aggregates(self, condition: Expression | None) -> Aggregates:
        found = Aggregates(_RESULT, self._relation.stream.schema)
        for node in [node for _, node in self._outputs] + ([] if condition is None else [condition]):
            found.add_all(node)
        return found

    def _result(
        self, results: Stream, aggregates: Aggregates, condition: Expression | None, bounds: _Bounds | None = None
    ) -> _Relation:
        translate = Scalars(results.schema, self._value(aggregates))
        if condition is not None:
            results = results.filter(translate.condition(condition))
        return self._select.made(results, self._outputs, translate, bounds)

    def _value(self, aggregates: Aggregates) -> Callable[[Expression], pl.Expr | None]:
        """Return what gives the column of a key, a bound or an aggregate, and refuses any other column."""

        def value(node: Expression) -> pl.Expr | None:
            name = self._names.get(node)
            if name is not None:
                return pl.col(name)
            kind, _, bound = (node.name.upper() if isinstance(node, exp().Anonymous) else "").partition("_")
            if kind in _WINDOWS and bound in ("START", "END"):
                return pl.col(_START if bound == "START" else _END)
            found = aggregates.result(node)
            if found is None and isinstance(node, exp().Column):
                raise UsageError(f"sql: column '{node.name}' is neither in GROUP BY nor in an aggregate")
            return found

        return value

    def _at(self, node: Expression) -> Expression:
        """Return a key; a number is the place of a result column, and a name may be that of one."""
        if isinstance(node, exp().Literal) and not node.is_string:
            place = int(node.name) if node.name.isdecimal() else 0
            if not 1 <= place <= len(self._outputs):
                raise UsageError(f"sql: GROUP BY {node.name}, but there are {len(self._outputs)} result columns")
            return self._outputs[place - 1][1]
        if isinstance(node, exp().Column) and not node.table:
            known = {column.name.lower() for column in self._relation.columns}
            named = dict(self._outputs)
            if node.name.lower() not in known and node.name in named:
                return named[node.name]
        return self._select.resolved(node)

    def _add_key(self, node: Expression) -> None:
        kind = node.name.upper() if isinstance(node, exp().Anonymous) else ""
        bounds = self._relation.bounds
        if kind in _WINDOWS:
            time, *lengths = node.expressions
            if not isinstance(time, exp().Column):
                raise UsageError(f"sql: write {kind}(ts, INTERVAL '10' SECOND)")
            check_time(self._relation, time.name, kind)
            self._set_window(window_of(kind, lengths))
        elif bounds is not None and isinstance(node, exp().Column) and node.name in (bounds.start, bounds.end):
            if self._relation.window is None:
                self._again = bounds
            self._set_window(bounds.again() if self._relation.window is None else self._relation.window)
            self._names[node] = _START if node.name == bounds.start else _END
        elif node not in self._names:
            own = node.name in (_START, _END, OP) or node.name.startswith("__")
            is_named = isinstance(node, exp().Column) and not own
            name = node.name if is_named else _KEY.format(len(self._keys))
            self._names[node] = name
            self._keys[name] = node

    def _set_window(self, window: Window) -> None:
        if self._window is not None and self._window != window:
            raise UsageError("sql: GROUP BY has two windows; group in two queries, one inside the other")
        self._window = window
