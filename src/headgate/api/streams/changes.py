"""Streams with changes: what is known of them, and which verbs without state keep them so.

A stream with changes describes a table that changes: its column ``op`` (``operators.changes``) says what each record
does to it. Operators that do not know changes refuse them, because ``Records._edges`` does (docs/spec/changes.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.changes import DELETE, INSERT, OP, UPDATE_AFTER, UPDATE_BEFORE
from headgate.operators.expressions import ExpressionsSpec, filter_spec, with_columns_spec
from headgate.operators.schemas import empty_frame

AS_RECORDS = "call .changes_as_records() before it to have the changes as ordinary records with a column 'op'"


@dataclass(frozen=True, slots=True)
class Changes:
    """What is known of a stream with changes.

    Attributes:
        keys: the columns that identify a row of the table (upsert keys); none: they are not known any more, and only
            the retractions say which row goes.
        retractions: each update is two records, ``update_before`` with the old row and ``update_after`` with the new
            one, and ``delete`` has the whole row. Without, there is no ``update_before``; ``insert`` and
            ``update_after`` both say what the row of their keys is now, and ``delete`` says that there is none, even
            if there was none before.
    """

    keys: tuple[str, ...]
    retractions: bool


def refused(upstream: object) -> UsageError:
    """Return the error about an operation that takes no changes."""
    return UsageError(
        f"the stream of '{upstream}' has changes (its column 'op' says which), which this operation cannot take; "
        f"{AS_RECORDS}"
    )


def filter_of_changes(changes: Changes, predicates: tuple[pl.Expr, ...]) -> list[ExpressionsSpec]:
    """Return the operators that filter the table: a row that no longer fulfils the predicates is deleted from it.

    Raises:
        UsageError: a predicate looks at ``op``.
    """
    columns = {name for predicate in predicates for name in predicate.meta.root_names()}
    if OP in columns:
        raise UsageError(f"filter: to choose changes by their 'op', {AS_RECORDS}")
    if columns and columns <= set(changes.keys):
        return [filter_spec(*predicates)]
    if changes.retractions:  # one record of an update may stay alone
        alone = pl.col(OP).replace([UPDATE_BEFORE, UPDATE_AFTER], [DELETE, INSERT])
        return [filter_spec(*predicates), with_columns_spec(alone.alias(OP))]
    fulfils = pl.all_horizontal(*predicates).fill_null(False)
    gone = pl.when(fulfils).then(pl.col(OP)).otherwise(pl.lit(DELETE))
    return [with_columns_spec(gone.alias(OP))]


def changes_after(
    verb: str, changes: Changes, expressions: Sequence[pl.Expr], schema: pa.Schema, *, keeps_others: bool
) -> Changes:
    """Return what is known of changes after ``select`` or (``keeps_others``) ``with_columns``.

    Raises:
        UsageError: ``op`` is lost or replaced, or the keys are, without retractions.
    """
    names = renamed(expressions, schema)
    if keeps_others:
        written = {name for expression in expressions for name in _outputs(expression, schema)}
        names |= {name: name for name in schema.names if name not in written}
    if names.get(OP) != OP:
        raise UsageError(
            f"{verb} of a stream with changes must keep its column 'op' as it is: name it too, or {AS_RECORDS}"
        )
    sources = {source: name for name, source in names.items()}
    if all(key in sources for key in changes.keys):
        return Changes(tuple(sources[key] for key in changes.keys), changes.retractions)
    if changes.retractions:
        return Changes((), True)
    lost = next(key for key in changes.keys if key not in sources)
    raise UsageError(
        f"{verb} of a stream with changes must keep its key '{lost}', because each change is about the row with that "
        f"key; keep it, or give the operator that makes the changes retractions=True, or {AS_RECORDS}"
    )


def _outputs(expression: pl.Expr, schema: pa.Schema) -> list[str]:
    try:
        return empty_frame(schema).lazy().select(expression).collect_schema().names()
    except pl.exceptions.PolarsError:
        return []  # the operator says what is wrong


def renamed(expressions: Sequence[pl.Expr], schema: pa.Schema) -> dict[str, str]:
    """Return, for each output that is a column as it was, that column."""
    found: dict[str, str] = {}
    for expression in expressions:
        inner = expression.meta.undo_aliases()
        if inner.meta.is_column_selection():
            found |= dict(zip(_outputs(expression, schema), _outputs(inner, schema), strict=False))
    return found


def check_keys_of_changes(changes: Changes, keys: Sequence[str]) -> None:
    """Check that all changes of a row meet where records are sent by ``keys``.

    Raises:
        UsageError: they may not.
    """
    if OP in keys:
        raise UsageError(f"key_by: column 'op' says what changes, and cannot be a key; {AS_RECORDS}")
    if not changes.retractions and not set(keys) <= set(changes.keys):
        raise UsageError(
            f"key_by({', '.join(keys)}): the changes are upserts of rows by {', '.join(changes.keys)}, so an update "
            "would reach the new key and not the old one; give the operator that makes the changes retractions=True"
        )
