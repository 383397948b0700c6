"""Records as rows of a table: what no column can hold becomes JSON, and of changes of one key the last one counts.

Counterparts: ``sql.sink`` and ``postgres.sink``. Never touches a single row in Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.connectors.base import SealedTransaction, SinkWriter
from headgate.connectors.encode import check_json
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId
from headgate.operators.changes import DELETE, OP, UPDATE_BEFORE

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)

_NUL_IN_JSON = re.compile(r"(^|[^\\])(\\\\)*\\u0000").pattern


def is_json(dtype: pa.DataType, *, has_arrays: bool) -> bool:
    """Whether values of a canonical type become JSON: structs, and lists, unless the database has arrays of it."""
    if pa.types.is_large_list(dtype):
        return not has_arrays or pa.types.is_nested(dtype.value_type)
    return bool(pa.types.is_struct(dtype))


def row_type(dtype: pa.DataType, *, has_arrays: bool) -> pa.DataType:
    """Return the type that values of a canonical type have in rows."""
    return pa.large_string() if is_json(dtype, has_arrays=has_arrays) else dtype


def row_schema(schema: pa.Schema, *, has_arrays: bool) -> pa.Schema:
    """Return the schema of rows made of records of ``schema``."""
    return pa.schema([pa.field(field.name, row_type(field.type, has_arrays=has_arrays)) for field in schema])


def check_rows(schema: pa.Schema, *, has_arrays: bool) -> None:
    """Check that rows can be made of records of ``schema``.

    Raises:
        UsageError: nested values have what JSON does not.
    """
    if not len(schema):
        raise UsageError("records without columns cannot be written to a table; select at least one column")
    check_json(pa.schema([field for field in schema if is_json(field.type, has_arrays=has_arrays)]))


def rows_of(
    batch: pa.RecordBatch, schema: pa.Schema, keys: Sequence[str], *, has_nul: bool, has_nan: bool
) -> pa.RecordBatch:
    """Return records as rows of ``schema``.

    Args:
        batch: the records.
        schema: what ``row_schema`` returned.
        keys: of the table; no row may have a null there.
        has_nul: whether texts of the database may have the character 0.
        has_nan: whether numbers of the database may be NaN or infinite, or become null then.

    Raises:
        UsageError: a value cannot be stored.
    """
    columns = []
    for field, column in zip(schema, batch.columns, strict=True):
        made = column if column.type == field.type else _json(column)
        if not has_nul and not pa.types.is_nested(column.type) and pa.types.is_large_string(field.type):
            _refuse_nul(field.name, pc.match_substring(made, "\0"))
        elif not has_nul and made is not column:
            _refuse_nul(field.name, pc.match_substring_regex(made, _NUL_IN_JSON))
        elif not has_nul and pa.types.is_large_list(column.type) and pa.types.is_large_string(column.type.value_type):
            _refuse_nul(field.name, pc.match_substring(pc.list_flatten(column), "\0"))
        if not has_nan and pa.types.is_floating(field.type) and not pc.all(pc.is_finite(made)).as_py():
            raise UsageError(
                f"a number in '{field.name}' is NaN or infinite, which the database cannot store; make it null before "
                f"the sink with with_columns(pl.when(pl.col('{field.name}').is_finite()).then(pl.col('{field.name}')))"
            )
        columns.append(made)
    refuse_null_keys(batch, keys)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def refuse_null_keys(batch: pa.RecordBatch, keys: Sequence[str]) -> None:
    """Refuse records with a null in a key.

    Raises:
        UsageError
    """
    for key in keys:
        if batch.column(key).null_count:
            raise UsageError(
                f"a record has a null in '{key}', which is a key of the table; leave such records out with "
                f"filter(pl.col('{key}').is_not_null())"
            )


def upsert_columns(sink: str, upsert: str | Sequence[str]) -> tuple[str, ...]:
    """Return the columns of an option ``upsert=``.

    Raises:
        UsageError: one is named twice.
    """
    keys = (upsert,) if isinstance(upsert, str) else tuple(upsert)
    if len(set(keys)) != len(keys):
        raise UsageError(f"{sink}(upsert={list(keys)}) names a column twice")
    return keys


def check_change_keys(sink: str, upsert: Sequence[str], keys: Sequence[str]) -> None:
    """Check that a sink with ``upsert`` keeps the table that changes with ``keys`` describe.

    Raises:
        UsageError: the keys differ.
    """
    if set(keys) != set(upsert):
        known = f"the key of the changes is {', '.join(keys)}" if keys else "the key of the changes is not known"
        raise UsageError(
            f"{sink}(upsert={list(upsert)}) needs changes with this key, and {known}; give the same key, or "
            "keep the columns of the key in select, or aggregate by it before"
        )


def check_upsert_columns(sink: str, upsert: Sequence[str], schema: pa.Schema) -> None:
    """Check that the records have the columns of the key, of types that can be one.

    Raises:
        UsageError
    """
    for key in upsert:
        if key not in schema.names:
            raise UsageError(
                f"{sink}(upsert={list(upsert)}): there is no column '{key}'; the columns are {', '.join(schema.names)}"
            )
        dtype = schema.field(key).type
        if pa.types.is_nested(dtype) or pa.types.is_floating(dtype):
            raise UsageError(f"{sink}(upsert=): '{key}' has type {dtype}, which cannot be a key; cast it")


def _refuse_nul(name: str, found: pa.Array) -> None:
    if pc.any(found).as_py():
        raise UsageError(
            f"a text in '{name}' has the character U+0000, which the database cannot store; remove it before the sink "
            f"with with_columns(pl.col('{name}').str.replace_all('\\0', '', literal=True))"
        )


def _json(column: pa.Array) -> pa.Array:
    """Return values as JSON, null where they are null."""
    values = pl.Series("v", column)
    texts = pl.select(pl.struct(values)).to_series().struct.json_encode()
    made = texts.str.strip_prefix('{"v":').str.head(-1)
    array = made.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.large_string())
    return pc.if_else(column.is_valid(), array, pa.scalar(None, pa.large_string()))


def last_changes(batch: pa.RecordBatch, keys: Sequence[str], *, has_op: bool) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the rows to upsert, and the keys to delete: of each key the last change counts.

    ``batch`` has the changes in order, with a column ``op`` or (not ``has_op``) as rows to upsert.
    """
    kept = newest_changes(batch, keys, has_op=has_op)
    if not has_op:
        return kept, kept.slice(0, 0).select(list(keys))
    is_delete = pc.equal(kept.column(OP), DELETE)
    others = [name for name in batch.schema.names if name != OP]
    return kept.filter(pc.invert(is_delete)).select(others), kept.filter(is_delete).select(list(keys))


def newest_changes(batch: Rows, keys: Sequence[str], *, has_op: bool) -> Rows:
    """Return the last change of each key, without ``update_before``. See ``last_changes``."""
    rows = np.arange(batch.num_rows)
    if has_op:
        rows = rows[np.asarray(pc.not_equal(batch.column(OP), UPDATE_BEFORE))]
    found = pl.DataFrame([pl.Series(str(at), batch.column(key)) for at, key in enumerate(keys)])[rows]
    last = found.with_columns(pl.Series("row", rows)).unique(found.columns, keep="last", maintain_order=True)
    return batch.take(pa.array(np.sort(last["row"].to_numpy())))


class RowWriter(SinkWriter):
    """Makes rows of the records, for another writer."""

    def __init__(
        self, inner: SinkWriter, schema: pa.Schema, keys: Sequence[str], *, has_nul: bool, has_nan: bool = True
    ) -> None:
        """``schema``: what ``row_schema`` returned."""
        self._inner, self._schema, self._keys = inner, schema, keys
        self._has_nul, self._has_nan = has_nul, has_nan

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``SinkWriter``.

        Raises:
            UsageError: a value cannot be stored.
        """
        self._inner.write(rows_of(batch, self._schema, self._keys, has_nul=self._has_nul, has_nan=self._has_nan))

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        return self._inner.seal(checkpoint)

    def close(self) -> None:
        self._inner.close()
