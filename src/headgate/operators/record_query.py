"""What expressions make of records, one result for each record: a query of Polars over the columns that it needs.

Columns that are only handed on, or get another name, do not go through Polars. What an expression makes of encoded
text is computed once for each of its values, if there are far fewer of them than rows. The structure of an expression
is what Polars writes down. A part is taken out of it only where everything in it is known to give a row's result from
that row alone, and only from places in which any column may stand.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.base import ChosenRows, LazyRows, Part, SeriesRows
from headgate.operators.schemas import columns_of, empty_frame, frame_of, schema_of_frame

ROWS_PER_VALUE_MIN = 2
"""An encoded column with fewer rows for each of its values is decoded."""


class Verb(Enum):
    """What a step does with its expressions."""

    FILTER = "filter"
    SELECT = "select"
    WITH_COLUMNS = "with_columns"


@dataclass(frozen=True)
class Step:
    """One verb as the user wrote it."""

    verb: Verb
    expressions: tuple[pl.Expr, ...]

    def apply(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        """Return ``frame`` after this step."""
        if self.verb is Verb.FILTER:
            return frame.filter(*self.expressions)
        if self.verb is Verb.SELECT:
            return frame.select(*self.expressions)
        return frame.with_columns(*self.expressions)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a query makes of records with a certain schema.

    Attributes:
        handed_on: columns of the result that are columns of the records, with their names there.
        made: the other columns of the result.
        needed: the columns of the records that they need.
        expressions: what makes each of them of the records; None: only the steps say it.
    """

    schema: pa.Schema
    handed_on: dict[str, str]
    made: list[str]
    needed: list[str]
    expressions: dict[str, pl.Expr] | None

    @staticmethod
    def of(steps: Sequence[Step], schema: pa.Schema) -> _Layout:
        """Return it."""
        empty = empty_frame(schema)
        result = schema_of_frame(_collected(_applied(empty, steps)).clear())
        sources: dict[str, str | None] | None = _sources(steps, schema.names)
        if sources is None or list(sources) != result.names:
            return _Layout(result, {}, result.names, schema.names, None)
        as_polars_has_it = schema_of_frame(empty)
        handed_on = {
            name: source
            for name, source in sources.items()
            if source is not None and as_polars_has_it.field(source).type == schema.field(source).type
        }
        made = [name for name in result.names if name not in handed_on]
        expressions = None
        if len(steps) == 1:
            named = {expression.meta.output_name(): expression for expression in steps[0].expressions}
            expressions = {name: named[name] if name in named else pl.col(name) for name in made}
        used = columns_of(expressions.values() if expressions is not None else _all_expressions(steps))
        assert used is not None, "a selector has no source"
        needed = [name for name in schema.names if name in used]
        return _Layout(result, handed_on, made, needed or schema.names[:1], expressions)


def _all_expressions(steps: Sequence[Step]) -> list[pl.Expr]:
    return [expression for step in steps for expression in step.expressions]


def _sources(steps: Sequence[Step], names: Sequence[str]) -> dict[str, str | None] | None:
    """Return for each column of the result which column it is; None: it is made, or for all: that is not known."""
    sources: dict[str, str | None] = {name: name for name in names}
    for step in steps:
        if columns_of(step.expressions) is None:
            return None
        found: dict[str, str | None] = {}
        for expression in step.expressions:
            name = expression.meta.output_name(raise_if_undetermined=False)
            if name is None:
                return None
            plain = expression.meta.undo_aliases()
            found[name] = sources.get(plain.meta.root_names()[0]) if plain.meta.is_column() else None
        sources = found if step.verb is Verb.SELECT else sources | found
    return sources


class Query:
    """Steps without filters. It is for records of one schema."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._layout: _Layout | None = None
        self._divided: dict[frozenset[str], ByValue | None] = {}
        self._computed: dict[str, tuple[Sequence[pl.Expr], pa.Array, pl.DataFrame]] = {}
        self._one_by_one = [Query([step]) for step in steps] if len(steps) > 1 else []

    def run(self, rows: LazyRows) -> LazyRows:
        """Return the results for ``rows``.

        Raises:
            polars.exceptions.PolarsError: an expression fails.
        """
        if self._layout is None:
            self._layout = _Layout.of(self._steps, rows.schema)
        layout = self._layout
        if not layout.made:
            return LazyRows(layout.schema, rows.parts(layout.handed_on))
        encoded = _worth_it(rows, layout.needed)
        if encoded and self._one_by_one:
            for query in self._one_by_one:
                rows = query.run(rows)
            return rows
        found = self._by_value(rows, encoded, layout) if encoded else None
        if found is None:
            found = [Part(_same(layout.made), SeriesRows(self._made(rows, layout)))]
        return LazyRows(layout.schema, [*rows.parts(layout.handed_on), *found])

    def _made(self, rows: LazyRows, layout: _Layout) -> pl.DataFrame:
        frame = _frame(rows, layout.needed)
        if layout.expressions is None:
            query = _applied(frame, self._steps).select(layout.made)
        else:
            query = frame.lazy().select(e.alias(name) for name, e in layout.expressions.items())
        return _of_height(_collected(query), rows.num_rows)

    def _by_value(
        self, rows: LazyRows, encoded: Mapping[str, pa.DictionaryArray], layout: _Layout
    ) -> list[Part] | None:
        """Return what is made of rows with encoded columns; None: nothing of it can be computed for each value.

        Nor can what fails for a value, which may be one that no row has.
        """
        chosen = frozenset(encoded)
        if chosen not in self._divided:
            names = [*layout.needed, *layout.schema.names]
            self._divided[chosen] = divide(layout.expressions or {}, chosen, names)
        divided = self._divided[chosen]
        if divided is None:
            return None
        values: dict[str, tuple[pa.Array, pl.DataFrame]] = {}
        for column, expressions in divided.of_values.items():
            codes, dictionary = _with_null(encoded[column])
            try:
                values[column] = codes, self._of_values(column, dictionary, expressions)
            except pl.exceptions.PolarsError:
                return None
        texts: dict[str, pa.Array] = {}
        series: list[pl.Series] = []
        for name, (column, key) in divided.whole.items():
            codes, frame = values[column]
            found = frame.get_column(key)
            if found.dtype == pl.String:
                texts[name] = pa.DictionaryArray.from_arrays(codes, found.to_arrow(compat_level=_OLDEST), safe=False)
            else:
                series.append(found.gather(_indices(codes)).alias(name))
        if divided.rest:
            used = columns_of(divided.rest) or frozenset()
            of_values = [
                frame.get_column(key).gather(_indices(codes))
                for codes, frame in values.values()
                for key in frame.columns
                if key in used
            ]
            needed = [name for name in layout.needed if name in used]
            if not needed and not of_values:
                needed = layout.needed[:1]
            frame = _frame(rows, needed, of_values)
            rest = _collected(frame.lazy().select(divided.rest))
            series += _of_height(rest, rows.num_rows).get_columns()
        parts: list[Part] = []
        if texts:
            parts.append(Part(_same(texts), ChosenRows(texts)))
        if series:
            parts.append(Part(_same(one.name for one in series), SeriesRows(pl.DataFrame(series))))
        return parts

    def _of_values(self, column: str, values: pa.Array, expressions: Sequence[pl.Expr]) -> pl.DataFrame:
        """Return what expressions make of the values of a column; those of the batch before are often the same."""
        before = self._computed.get(column)
        if before is not None and before[0] is expressions and before[1].equals(values):
            return before[2]
        frame = pl.DataFrame([pl.Series(column, values)])
        found = _of_height(_collected(frame.lazy().select(expressions)), len(values))
        self._computed[column] = expressions, values, found  # with other columns encoded, expressions are other ones
        return found


_OLDEST = pl.CompatLevel.oldest()


def mask_of(predicates: Sequence[pl.Expr]) -> Query:
    """Return the query for whether all of ``predicates`` hold, in its only column."""
    return Query([Step(Verb.SELECT, (pl.all_horizontal(*predicates).alias("is_kept"),))])


def _worth_it(rows: LazyRows, names: Sequence[str]) -> dict[str, pa.DictionaryArray]:
    """Return those of the columns that are encoded, with few values."""
    found: dict[str, pa.DictionaryArray] = {}
    for name in names:
        column = rows.encoded(name)
        if column is not None and len(column.dictionary) * ROWS_PER_VALUE_MIN <= len(column):
            found[name] = column
    return found


def _with_null(column: pa.DictionaryArray) -> tuple[pa.Array, pa.Array]:
    """Return the places of the values of a column, and the values: with null at its end if there is any in a row."""
    codes, values = column.indices, column.dictionary
    if not codes.null_count:
        return codes, values
    return codes.fill_null(len(values)), pa.concat_arrays([values, pa.nulls(1, values.type)])


def _indices(codes: pa.Array) -> pl.Series:
    return pl.Series(codes)


def _frame(rows: LazyRows, names: Sequence[str], others: Sequence[pl.Series] = ()) -> pl.DataFrame:
    """Return some columns of ``rows`` and others beside them."""
    given = {name: rows.series(name) for name in names}
    series = [one.alias(name) for name, one in given.items() if one is not None]
    plain = [name for name, one in given.items() if one is None]
    if not series and not others:
        return frame_of(rows.select(plain))
    columns = frame_of(rows.select(plain)).get_columns() if plain else []
    return pl.DataFrame([*columns, *series, *others])


def _applied(frame: pl.DataFrame, steps: Sequence[Step]) -> pl.LazyFrame:
    query = frame.lazy()
    for step in steps:
        query = step.apply(query)
    return query


def _collected(query: pl.LazyFrame) -> pl.DataFrame:
    return query.collect(engine="in-memory")  # the default one, for long input, costs more per batch


def _of_height(frame: pl.DataFrame, height: int) -> pl.DataFrame:
    """Return ``frame``; literals alone are one row to Polars, and one for each record here."""
    return frame if frame.height == height else frame[np.zeros(height, np.int64)]


def _same(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


_PARTS: Mapping[str, tuple[str, ...]] = {
    "BinaryExpr": ("left", "right"),
    "Ternary": ("predicate", "truthy", "falsy"),
    "Cast": ("expr",),
}
"""What is made of other expressions, but for functions and aliases, and where these are."""


@dataclass(slots=True)
class ByValue:
    """Expressions of records, divided.

    Attributes:
        of_values: for each encoded column, the expressions that are computed for each of its values.
        whole: results that are one of these as a whole: the column and the name of the expression in ``of_values``.
        rest: the expressions of all other results, with the names of those in ``of_values`` as columns.
    """

    of_values: dict[str, list[pl.Expr]] = field(default_factory=dict)
    whole: dict[str, tuple[str, str]] = field(default_factory=dict)
    rest: list[pl.Expr] = field(default_factory=list)


def divide(expressions: Mapping[str, pl.Expr], encoded: Collection[str], taken: Collection[str]) -> ByValue | None:
    """Return the expressions of results by their names, divided; None: nothing can be computed for each value.

    Args:
        expressions: elementwise ones.
        encoded: the columns whose parts are taken out.
        taken: names that parts must not get.
    """
    found = ByValue()
    prefix = "value"
    while any(name.startswith(prefix) for name in (*taken, *expressions)):
        prefix += "_"
    names: dict[str, str] = {}

    def take_out(column: str, tree: Any) -> Any:
        key = json.dumps(tree)
        if key not in names:
            names[key] = f"{prefix}{len(names)}"
            found.of_values.setdefault(column, []).append(_expression(tree).alias(names[key]))
        return {"Column": names[key]}

    for name, expression in expressions.items():
        tree = _tree(expression)
        if tree is None:
            found.rest.append(expression.alias(name))
            continue
        while "Alias" in tree:
            tree = tree["Alias"][0]
        column = _only_column(tree, encoded)
        if column is not None:
            found.whole[name] = column, take_out(column, tree)["Column"]
        else:
            divided = _divided(tree, encoded, take_out)
            found.rest.append((expression if divided == tree else _expression(divided)).alias(name))
    return found if found.of_values else None


def _divided(tree: Any, encoded: Collection[str], take_out: Callable[[str, Any], Any]) -> Any:
    """Return an expression with columns in the place of its largest parts that need one encoded column."""
    column = _only_column(tree, encoded)
    if column is not None:
        return take_out(column, tree)
    (name, inner), *others = tree.items()
    if others:
        return tree
    if name == "Alias":
        return {name: [_divided(inner[0], encoded, take_out), *inner[1:]]}
    if name == "Function":
        return {name: inner | {"input": [_named(one, _divided(one, encoded, take_out)) for one in inner["input"]]}}
    if name in _PARTS:
        return {name: inner | {part: _divided(inner[part], encoded, take_out) for part in _PARTS[name]}}
    return tree


def _named(tree: Any, divided: Any) -> Any:
    """Return a divided expression with the name that it had: ``struct`` calls its fields by the names of its inputs."""
    if divided == tree:
        return tree
    name = _expression(tree).meta.output_name()
    return divided if _expression(divided).meta.output_name() == name else {"Alias": [divided, name]}


def _only_column(tree: Any, encoded: Collection[str]) -> str | None:
    """Return the column that an expression needs, if that is one encoded column, and it is not that column itself."""
    columns = _columns(tree)
    if columns is None or len(columns) != 1 or "Column" in tree:
        return None
    (column,) = columns
    return column if column in encoded else None


def _columns(tree: Any) -> frozenset[str] | None:
    """Return the columns that an expression needs; None: something in it is not known."""
    if not isinstance(tree, Mapping) or len(tree) != 1:
        return None
    name, inner = next(iter(tree.items()))
    match name:
        case "Column":
            return frozenset([inner])
        case "Literal":
            return frozenset()
        case "Alias":
            parts: Sequence[Any] = inner[:1]
        case "Function":
            parts = inner["input"]
        case _ if name in _PARTS:
            parts = [inner[part] for part in _PARTS[name]]
        case _:
            return None
    found = [_columns(part) for part in parts]
    known = [columns for columns in found if columns is not None]
    return frozenset().union(*known) if len(known) == len(found) else None


def _tree(expression: pl.Expr) -> Any:
    """Return the structure of an expression; None: the expression is not what its structure says, as with NaN in it."""
    try:
        with io.StringIO() as file:
            expression.meta.serialize(file, format="json")
            tree = json.loads(file.getvalue())
        is_same = _expression(tree).meta.serialize() == expression.meta.serialize()
    except pl.exceptions.ComputeError:
        return None
    return tree if is_same else None


def _expression(tree: Any) -> pl.Expr:
    return pl.Expr.deserialize(io.StringIO(json.dumps(tree)), format="json")
