"""What makes rows in FROM: UNNEST of arrays and maps, and VALUES. Nothing runs here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

from headgate.api.sql.expressions import Scalars, exp, refuse_others
from headgate.api.sql.relations import Column, Relation, relation_of
from headgate.api.sql.values import unsupported
from headgate.connectors.memory import FromRows
from headgate.errors import UsageError

if TYPE_CHECKING:
    from sqlglot.expressions import Expression

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
