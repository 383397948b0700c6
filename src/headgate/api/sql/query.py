"""``headgate.sql``: a query in SQL as verbs of streams.

sqlglot parses the text; nothing here does. A ``Select`` becomes filter, key_by, window, agg and select, so that the
result is an ordinary stream. Expressions are in ``api.sql.expressions``. Never runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, cast

import polars as pl

from headgate.api.sql.aggregation import Grouping
from headgate.api.sql.expressions import Scalars
from headgate.api.sql.joins import LINK, SubqueryCondition, all_of, check_no_nulls, joined, subquery_condition
from headgate.api.sql.over import is_of_over, is_over, with_named_windows, with_overs
from headgate.api.sql.relations import (
    END,
    START,
    WINDOWS,
    Bounds,
    Column,
    Relation,
    Top,
    check_time,
    distinct,
    fixed_windows,
    in_both,
    is_unnest,
    kept_rows,
    relation_of,
    selected,
    union_all,
    unnested,
    window_of,
    written_rows,
)
from headgate.api.sql.syntax import PROCTIME, exp, is_proctime, parsed, refuse_others
from headgate.api.sql.values import unsupported
from headgate.api.streams.stream import Stream
from headgate.api.streams.windowed_stream import Tumbling, Window
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.changes import OP

if TYPE_CHECKING:
    from sqlglot.expressions import Expression


_OWN_NAMES = re.compile(
    r"__(count|time[lr]?|(value|kind|key[lr]?|result|link|in|part|order)_\d+|(over|rank)\d+(_\w+)?|[lrun]\d+(_\d+)?)"
)
"""What a query calls columns that it makes for itself, here and in the modules beside."""


def sql(query: str, **streams: Stream) -> Stream:
    """Return the stream of the results of a query: ``sql("SELECT * FROM bids WHERE price > 100", bids=bids)``.

    It has what ``docs/guide/sql.md`` lists. Needs ``pip install 'headgate-streams[sql]'``.

    Args:
        query: one SELECT, or several with UNION, INTERSECT or EXCEPT, in the dialect of DuckDB, with Flink's
            functions of windows.
        streams: the tables of the query, by name.

    Raises:
        UsageError: the text is wrong, a table or column is unknown, or the query has something that is not there.
    """
    if not isinstance(query, str):
        raise UsageError(f"sql takes the text of a query, not {query!r}")
    for name, stream in streams.items():
        if not isinstance(stream, Stream):
            raise UsageError(f"sql: {name} must be a stream without a key, not {type(stream).__name__}")
        own = next((column for column in stream.columns if _OWN_NAMES.fullmatch(column)), None)
        if own is not None:
            raise UsageError(
                f"sql: {name} has a column '{own}', as queries name columns of their own; rename it before"
            )
    with ExitStack() as stack:
        for builder in {id(s._pipeline): s._pipeline._builder for s in streams.values()}.values():
            stack.enter_context(builder.all_or_nothing())
        relations = {name: relation_of(stream, name) for name, stream in streams.items()}
        found = _Translation(relations).query(parsed(query)).without_top()
        for column in found.columns:
            if column.actual == PROCTIME:
                raise unsupported(f"PROCTIME() as result column '{column.name}'", "leave it out of the last SELECT")
        return found.stream


@dataclass(slots=True)
class _Translation:
    """Turns queries into streams. ``tables``: those that the query can name."""

    tables: dict[str, Relation]
    retractions: bool = False
    """Whether changes of the results must say what was before."""
    around: Relation | None = None
    """The table of the query around this subquery, whose conditions may name its columns."""
    links: list[Expression] = field(default_factory=list)
    """Those conditions, with what they name of the subquery as ``__link_0`` and so on."""

    def inside(self, *, retractions: bool) -> _Translation:
        """Return the translation of a query in FROM, which sees the same tables."""
        return _Translation(dict(self.tables), self.retractions or retractions)

    def query(self, tree: Expression) -> Relation:
        """Return the relation of a SELECT, a UNION or the like, or one in brackets.

        Raises:
            UsageError: something in it is not there.
        """
        scope = replace(self, tables=dict(self.tables))
        with_: Any = tree.args.get("with_") or tree.args.get("with")
        if with_ is not None and with_.args.get("recursive"):
            raise unsupported("WITH RECURSIVE", "use stream.iterate(...)")
        for table in with_.expressions if with_ is not None else ():
            name = table.alias.lower()
            if sum(other.name.lower() == name for other in tree.find_all(exp().Identifier)) < 2:
                continue  # nothing reads it
            found = scope.inside(retractions=True).query(table.this).named(table)
            scope.tables = {known: one for known, one in scope.tables.items() if known.lower() != name}
            scope.tables[table.alias] = found
        if isinstance(tree, exp().SetOperation):
            return scope._set_operation(tree)
        if isinstance(tree, exp().Subquery):
            _refuse_clauses(tree)
            return scope.query(tree.this)
        if isinstance(tree, exp().Select):
            return Select(scope, tree).relation()
        if isinstance(tree, exp().Values):
            raise unsupported("VALUES as a query", "write SELECT * FROM (VALUES ...) AS t (a, b)")
        raise unsupported(tree.key.upper(), "write SELECT, or several with UNION between")

    def _set_operation(self, tree: Expression) -> Relation:
        kind, is_distinct = type(tree), bool(tree.args.get("distinct"))
        if not is_distinct and kind is not exp().Union:
            raise unsupported(f"{tree.key.upper()} ALL", f"write {tree.key.upper()}, which gives each row once")
        _refuse_clauses(tree)
        sides = [replace(self, retractions=True, links=[]) for _ in range(2)]
        parts = (tree.this, tree.expression)
        left, right = (side.query(part).without_top() for side, part in zip(sides, parts, strict=True))
        if sides[0].links != sides[1].links:
            what = f"{tree.key.upper()} of queries with different conditions about columns of the query around them"
            raise unsupported(what, "write a condition with IN or EXISTS for each")
        self.links.extend(sides[0].links)
        if kind is not exp().Union:
            return in_both(left, right, is_negated=kind is exp().Except)
        both = union_all(left, right)
        return distinct(both) if is_distinct else both

    def table(self, tree: Expression) -> Relation:
        """Return the relation of one item of FROM or JOIN.

        Raises:
            UsageError: it is unknown, or not there.
        """
        if isinstance(tree, exp().Subquery):
            return self.query(tree).named(tree)
        if isinstance(tree, exp().Values):
            return written_rows(tree, self.tables)
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

    def _known(self, name: str) -> Relation:
        if name not in self.tables:
            near = [known for known in self.tables if known.lower() == name.lower()]
            if len(near) != 1:
                known = ", ".join(self.tables) or "none"
                raise UsageError(f"sql: there is no table '{name}' (there are: {known}); give sql(..., {name}=stream)")
            name = near[0]
        return self.tables[name]

    def _windowed(self, function: Expression) -> Relation:
        """Return a table with windows: ``TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND)``."""
        kind, arguments = function.name.upper(), function.expressions
        if kind not in WINDOWS:
            raise unsupported(f"{kind} in FROM", f"use {', '.join(WINDOWS)}, a table or a subquery")
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
        taken = [name for name in (START, END) if name in stream.columns]
        if taken:
            raise UsageError(
                f"sql: {kind} makes a column '{taken[0]}', which {arguments[0].name} has; rename it before"
            )
        columns = (*relation.columns, Column("", START, START), Column("", END, END))
        fixed = fixed_windows(window)
        if fixed is not None and isinstance(window, Tumbling):  # may be selected without GROUP BY
            time = pl.col(cast(str, stream._time_column)).cast(pl.Datetime("us"))
            moved, size = pl.duration(milliseconds=fixed.offset_ms), pl.duration(milliseconds=fixed.size_ms)
            start = (time - moved).dt.truncate(f"{fixed.size_ms}ms") + moved
            stream = stream.with_columns(start.alias(START), (start + size).alias(END))
        return Relation(stream, columns, Bounds(START, END, fixed), window)


def _by_the_clock(window: Window, kind: str) -> Window:
    """Return the same windows in processing time.

    Raises:
        UsageError: such windows are not there.
    """
    if not isinstance(window, Tumbling):
        raise unsupported(f"{kind} over PROCTIME()", "use TUMBLE, or the event time")
    return replace(window, time="processing")


_REFUSED = {
    "order": ("ORDER BY", "a stream has no end to sort at"),
    "limit": ("LIMIT", "use take(n) or collect(limit=n) on the result"),
    "offset": ("OFFSET", "a stream has no end to sort at"),
    "qualify": ("QUALIFY", "filter the row number in an outer SELECT"),
    "laterals": ("LATERAL", "use flat_map"),
    "pivots": ("PIVOT", "use select"),
    "sample": ("TABLESAMPLE", "use filter"),
}


def _refuse_clauses(tree: Expression) -> None:
    for clause, (name, instead) in _REFUSED.items():
        if tree.args.get(clause):
            raise unsupported(name, instead)
    refuse_others(tree)


@dataclass(slots=True)
class Select:
    """One SELECT."""

    scope: _Translation
    tree: Expression
    relation_in: Relation = field(init=False)
    _needs_all: bool = field(init=False)
    """Whether changes of its tables must say what was before."""

    @property
    def retractions(self) -> bool:
        """Whether changes of the result must say what was before."""
        return self.scope.retractions or self._is_ranking or self._is_distinct

    @property
    def _is_distinct(self) -> bool:
        return self.tree.args.get("distinct") is not None

    @property
    def _is_ranking(self) -> bool:
        windows = [found for node in self.tree.expressions for found in node.find_all(exp().Window)]
        return any(not is_over(window) for window in windows)

    def relation(self) -> Relation:
        """Return its result.

        Raises:
            UsageError: something in it is not there.
        """
        self.tree = with_named_windows(self.tree)
        _refuse_clauses(self.tree)
        if self._is_distinct and self.tree.args["distinct"].args.get("on"):
            raise unsupported("DISTINCT ON", "use ROW_NUMBER() OVER (PARTITION BY ... ORDER BY ...)")
        source = self.tree.args.get("from_") or self.tree.args.get("from")
        if source is None:
            raise UsageError("sql: a query needs FROM")
        group = self.tree.args.get("group")
        is_grouping = group is not None or any(_has_aggregates(node) for node in self.tree.expressions)
        where = self.tree.args.get("where")
        parts = all_of(where.this if where is not None else None)
        subqueries = [(part, found) for part in parts for found in [subquery_condition(part)] if found is not None]
        self._needs_all = (
            is_grouping
            or self._is_ranking
            or self._is_distinct
            or bool(self.tree.args.get("joins"))
            or bool(subqueries)
        )
        inner = self.scope.inside(retractions=self._needs_all)
        if source.this.args.get("version") is not None:
            raise unsupported("FOR SYSTEM_TIME AS OF after FROM", "put that table after JOIN")
        self.relation_in = inner.table(source.this)
        joins = -1
        for joins, join in enumerate(self.tree.args.get("joins") or ()):
            if is_unnest(join):
                self.relation_in = unnested(self.relation_in, join, self.resolved, joins)
            else:
                self.relation_in = self._joined(self.relation_in, inner.table(join.this), join, joins)
        links = []
        for part in self._ranked(parts):
            if any(part is other for other, _ in subqueries):
                continue
            if self._names_others(part):
                links.append(part)
                continue
            condition = self.resolved(part)
            _refuse_aggregates(condition, "WHERE", "use HAVING")
            self.relation_in = replace(self.relation_in, stream=kept_rows(self.relation_in.stream, condition))
        for _, found in subqueries:
            joins += 1
            self.relation_in = self._with_subquery(found, joins)
        outputs = [(name, self.resolved(node)) for name, node in self._outputs()]
        having = self.tree.args.get("having")
        if links:
            if is_grouping or having is not None:
                raise unsupported(
                    "an aggregate in a subquery that names a column of the query around it", "join with it"
                )
            outputs += self._linked(links)
        if not outputs and self.scope.around is not None:
            raise unsupported("EXISTS of a query that names no column of the one around it", LINK)
        is_grouping = is_grouping or having is not None
        made = (lambda chosen: Grouping(self, chosen).relation()) if is_grouping else self._projected
        overs = [window for _, node in outputs for window in node.find_all(exp().Window) if is_over(window)]
        if overs and is_grouping:
            raise unsupported(f"{overs[0].this.sql()} OVER beside GROUP BY or an aggregate", "group in a subquery")
        ranks = [name for name, node in outputs if isinstance(node, exp().Window) and not is_over(node)]
        result = self._numbered(outputs, ranks, made) if ranks else made(outputs)
        return distinct(result.without_top()) if self._is_distinct else result

    def _names_others(self, part: Expression) -> bool:
        """Whether a condition names a column of the query around this subquery."""
        if self.scope.around is None:
            return False
        return not all(self.relation_in.knows(one) for one in part.find_all(exp().Column))

    def _linked(self, links: list[Expression]) -> list[tuple[str, Expression]]:
        """Give the query around the conditions that name its columns; return the columns that it needs for them."""
        found: dict[Expression, str] = {}

        def link(node: Expression) -> Expression:
            if not isinstance(node, exp().Column) or not self.relation_in.has(node.name, node.table):
                return node
            name = found.setdefault(self.resolved(node), f"__link_{len(found)}")
            return cast("Expression", exp().column(name, quoted=True))

        self.scope.links.extend(part.copy().transform(link) for part in links)
        return [(name, column) for column, name in found.items()]

    def _with_subquery(self, condition: SubqueryCondition, place: int) -> Relation:
        """Return the rows for which a query has a row, or has none."""
        left, query, e = self.relation_in, condition.query.copy(), exp()
        tree = query.unnest()
        if isinstance(tree, e.Select):
            if (distinct_of := tree.args.get("distinct")) is not None and not distinct_of.args.get("on"):
                tree.set("distinct", None)
            if not condition.values and not any(_has_aggregates(node) for node in tree.expressions):
                tree.set("expressions", [])
        if condition.how == "anti":
            check_no_nulls(condition, self.tree)
        scope = replace(self.scope.inside(retractions=True), around=left, links=[])
        right = scope.query(query)
        found = [one for one in right.columns if not one.name.startswith("__link_")]
        if condition.values and len(found) != len(condition.values):
            raise UsageError(f"sql: {condition.name} compares {len(condition.values)} values with {len(found)} columns")
        if not condition.values and not scope.links:
            raise unsupported("EXISTS of a query that names no column of the one around it", LINK)
        names = [f"__in_{found.index(one)}" if one in found else one.name for one in right.columns]
        columns = tuple(replace(one, table="", name=name) for one, name in zip(right.columns, names, strict=True))
        values = [e.EQ(this=value, expression=e.column(f"__in_{i}")) for i, value in enumerate(condition.values)]
        join = e.Join(this=e.Table(), kind=condition.how.upper(), on=e.and_(*values, *scope.links))
        return self._joined(left, replace(right, columns=columns), join, place, condition.name)

    def _numbered(
        self,
        outputs: list[tuple[str, Expression]],
        ranks: list[str],
        made: Callable[[list[tuple[str, Expression]]], Relation],
    ) -> Relation:
        """Return the other columns, and what ROW_NUMBER() is to number. ``made`` makes a relation of columns."""
        window: Any = dict(outputs)[ranks[0]]
        if len(ranks) > 1 or window.args.get("spec"):
            raise unsupported(f"{window.this.sql()} OVER", "write ROW_NUMBER() once, without ROWS or RANGE")
        order = window.args.get("order")
        if order is None:
            raise UsageError("sql: ROW_NUMBER() needs OVER (PARTITION BY ... ORDER BY ...)")
        if any(node.args.get("nulls_first") for node in order.expressions):
            raise unsupported("ORDER BY with NULLS FIRST", "nulls come last; filter them, or order by COALESCE")
        keys = {
            f"__part_{i}": node for i, node in enumerate(window.args.get("partition_by") or [exp().Literal.number(0)])
        }
        by = {f"__order_{i}": node.this for i, node in enumerate(order.expressions)}
        known = {node: name for name, node in outputs if isinstance(node, exp().Column | exp().AggFunc)}
        names = {hidden: known.get(node, hidden) for hidden, node in (keys | by).items()}
        more = [(hidden, node) for hidden, node in (keys | by).items() if names[hidden] == hidden]
        found = made([(name, node) for name, node in outputs if name not in ranks] + more)
        top = Top(
            ranks[0],
            tuple(names[hidden] for hidden in keys),
            tuple(names[hidden] for hidden in by),
            tuple(bool(node.args.get("desc")) for node in order.expressions),
        )
        shown = tuple(column for column in found.columns if not column.name.startswith(("__part_", "__order_")))
        return replace(found, columns=(*shown, Column("", ranks[0], ranks[0])), top=top)

    def _ranked(self, parts: list[Expression]) -> list[Expression]:
        """Keep the rows with small row numbers; return the other conditions."""
        top = self.relation_in.top
        if top is None:
            return parts
        for part in parts:
            kind, left, right = type(part), part.this, part.args.get("expression")
            if kind not in (exp().LTE, exp().LT, exp().EQ) or not isinstance(left, exp().Column):
                continue
            if self._actual(left) != top.name or not isinstance(right, exp().Literal) or right.is_string:
                continue
            count = int(right.name) - (kind is exp().LT) if right.name.isdecimal() else 0
            if count < 1 or (kind is exp().EQ and count != 1):
                raise UsageError(f"sql: {part.sql()} must be {top.name} <= a number from 1 on")
            others = [other for other in parts if other is not part]
            self._keep_top(top, count, others)
            return others
        self.relation_in = self.relation_in.without_top()
        return parts

    def _actual(self, column: Expression) -> str:
        """Return what the stream calls a column; "": it is none of the tables."""
        name, table = column.name, cast(Any, column).table
        return self.relation_in.column(name, table).actual if self.relation_in.has(name, table) else ""

    def _keep_top(self, top: Top, count: int, others: list[Expression]) -> None:
        relation = self.relation_in
        read = [*self.tree.expressions, *others]
        used = {self._actual(node) for one in read for node in one.find_all(exp().Column)}
        has_star = any(one.find(exp().Star) for one in self.tree.expressions if not one.find(exp().AggFunc))
        is_used = top.name in used or has_star
        rest = [column for column in relation.columns if column.actual != top.name]
        bounds, order = relation.bounds, {"by": list(top.by), "descending": list(top.descending)}
        if bounds is not None and {bounds.start, bounds.end} & set(top.keys):
            if (bounds.start, bounds.end) != (START, END):
                raise unsupported("ROW_NUMBER() over windows with other names", "keep window_start and window_end")
            keys = [key for key in top.keys if key not in (START, END)]
            rank = top.name if is_used else None
            keyed = relation.stream.key_by(*keys, START, END)
            stream = keyed.top_per_window(count, **order, rank=rank)  # type: ignore[arg-type]
        elif count == 1 and len(top.by) == 1 and not is_used and relation.stream._change_keys is None:
            names = {column.actual for column in rest}
            kept = set(top.keys) <= (names if has_star else used)
            keep: Any = "last" if top.descending[0] else "first"
            # a change without its key cannot replace a row, so it has to say what was before
            retractions = self.scope.retractions or self._needs_all or not kept
            keyed = relation.stream.key_by(*top.keys)
            stream = keyed.deduplicate(keep, by=top.by[0], within=None, retractions=retractions)
        else:
            keyed = relation.stream.key_by(*top.keys)
            stream = keyed.top(count, **order, within=None, rank=top.name, retractions=True)  # type: ignore[arg-type]
        self.relation_in = Relation(stream, relation.columns if is_used else tuple(rest), bounds)

    def _joined(self, left: Relation, right: Relation, join: Expression, place: int, what: str = "") -> Relation:
        where = self.tree.args.get("where")
        return joined(
            left,
            right,
            join,
            place,
            resolved=self.resolved,
            where=None if where is None else where.this,
            what=what,
        )

    def resolved(self, tree: Expression, relation: Relation | None = None) -> Expression:
        """Return an expression in which columns have the names of the stream, so that equal ones are equal."""
        within = relation or self.relation_in

        def resolve(node: Expression) -> Expression:
            if isinstance(node, exp().Column) and not isinstance(node.this, exp().Star):
                return within.resolved(node)
            if isinstance(node, exp().Subquery | exp().Select | exp().Exists):
                raise unsupported(
                    "a subquery in an expression",
                    "join with it, or have IN or EXISTS as one of the conditions that AND connects after WHERE",
                )
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
            name = node.alias_or_name
            found.append((f"_col{i}" if name in ("", "*") else name, bare))
        names = [name for name, _ in found]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"sql: two result columns are called '{name}'; give one another name with AS")
        return found

    def _projected(self, outputs: list[tuple[str, Expression]]) -> Relation:
        bounds = self.relation_in.bounds
        self.relation_in.without_open_windows()
        stream, overs = with_overs(self.relation_in, outputs)
        return self.made(stream, outputs, Scalars(stream.schema, overs.get), bounds)

    def made(
        self,
        stream: Stream,
        outputs: list[tuple[str, Expression]],
        translate: Callable[[Expression], pl.Expr],
        bounds: Bounds | None,
    ) -> Relation:
        """Return the relation of the result columns."""
        for name, node in outputs:
            if isinstance(node, exp().Null):
                raise UsageError(f"sql: NULL needs a type to be column '{name}'; write CAST(NULL AS BIGINT) AS {name}")
        if stream._change_keys is not None and any(name == OP for name, _ in outputs):
            what = "column 'op' of a result that changes says what changes"
            raise UsageError(f"sql: {what}; give yours another name with AS")
        clocks = [name for name, node in outputs if is_proctime(node)]
        expressions = {name: translate(node) for name, node in outputs if name not in clocks}
        if not expressions:
            raise unsupported("SELECT of nothing but PROCTIME()", "select a column, too")
        result = relation_of(selected(stream, expressions), "")
        result = replace(result, columns=(*result.columns, *(Column("", name, PROCTIME) for name in clocks)))
        if bounds is None:
            return result
        names = {
            expression.meta.root_names()[0]: name
            for name, expression in reversed(expressions.items())
            if expression.meta.is_column()
        }
        if bounds.start in names or bounds.end in names:
            kept = Bounds(names.get(bounds.start, ""), names.get(bounds.end, ""), bounds.windows)
            return replace(result, bounds=kept)
        return result


def _has_aggregates(node: Expression) -> bool:
    return any(not is_of_over(found) for found in node.find_all(exp().AggFunc))


def _refuse_aggregates(node: Expression, clause: str, instead: str) -> None:
    if _has_aggregates(node):
        raise UsageError(f"sql: {clause} cannot have an aggregate; {instead}")
