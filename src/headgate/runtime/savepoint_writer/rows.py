"""Given rows as the state of subtasks: checked, in stored columns, distributed by the hash of their keys.

The inverse of ``state_reader.reader``: it takes the columns that reading shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.exact_values import MisfitError
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.schemas import canonical_type, fitted, schema_text, to_canonical
from headgate.runtime.state_reader.schema import (
    EXPIRES,
    KEY_GROUP,
    MAP_KEY,
    OF_TIMERS,
    SUBTASK,
    TIME,
    WINDOW,
    WINDOW_END,
    WINDOW_START,
    Kind,
    Shape,
)
from headgate.state.backend import TIME_COLUMN
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.snapshot import FrozenState, KeyedState, Rows, SnapshotTarget
from headgate.state.ttl import EXPIRES_COLUMN, NEVER_MS

WRITABLE = (
    Kind.VALUE,
    Kind.LIST,
    Kind.MAP,
    Kind.EVENT_TIME_TIMERS,
    Kind.PROCESSING_TIME_TIMERS,
    Kind.WINDOW_RESULTS,
    Kind.WINDOW_RECORDS,
    Kind.OPERATOR_LIST,
    Kind.OPERATOR_UNION,
    Kind.BROADCAST,
    Kind.POSITIONS,
)
"""What rows can be given of."""

_REPEATED = {
    Kind.VALUE: (),
    Kind.MAP: (MAP_KEY,),
    Kind.BROADCAST: (MAP_KEY,),
    Kind.WINDOW_RESULTS: (WINDOW,),
    Kind.EVENT_TIME_TIMERS: (TIME_COLUMN,),
    Kind.PROCESSING_TIME_TIMERS: (TIME_COLUMN,),
}
"""Of these a key has one row, with each value of the further columns."""

_DERIVED = (SUBTASK, KEY_GROUP)
"""Reading shows them of any state; given rows need not have them."""


def stored_columns(given: pa.Table, shape: Shape, what: str) -> pa.RecordBatch:
    """Return ``given`` as the state is stored.

    Args:
        given: has the columns that reading shows, in any order.
        shape: of the state.
        what: it is, for messages.

    Raises:
        UsageError: a column is missing or unknown, or a value cannot be stored.
    """
    _refuse_names(given, shape, what)
    given = _canonical(given, what)
    arrays = [_stored(given, shape, i, what) for i in range(len(shape.schema))]
    rows = pa.RecordBatch.from_arrays(arrays, schema=shape.schema)
    _refuse_nulls(rows, shape, what)
    _refuse_repeated(rows, shape, what)
    return _in_order_of_expiry(rows, shape, what) if shape.expires else rows


def subtask_of(given: pa.Table, parallelism: int, kind: Kind) -> np.ndarray:
    """Return which subtask gets each row of a state without a key: as it says, else the first one.

    Of a broadcast map it is always the first one: its copy stands for those of all.
    """
    if SUBTASK not in given.column_names or kind is Kind.BROADCAST:
        return np.zeros(given.num_rows, np.int64)
    found = given.column(SUBTASK).fill_null(0).to_numpy().astype(np.int64)
    return np.where((found >= 0) & (found < parallelism), found, 0)


def _canonical(given: pa.Table, what: str) -> pa.Table:
    fields = [f if pa.types.is_null(f.type) else f.with_type(_canonical_type(f, what)) for f in given.schema]
    schema = pa.schema([field.with_nullable(True) for field in fields])
    try:
        return pa.Table.from_batches([to_canonical(batch, schema) for batch in given.to_batches()], schema)
    except MisfitError as error:
        raise UsageError(f"{what}: column {error}") from None


def _canonical_type(field: pa.Field, what: str) -> pa.DataType:
    try:
        return canonical_type(field.type)
    except UsageError:
        raise UsageError(f"{what}: column '{field.name}' cannot have the type {field.type}") from None


def _refuse_names(given: pa.Table, shape: Shape, what: str) -> None:
    names = given.column_names
    optional = {*_DERIVED, *shape.all.names, *(["text"] if shape.kind is Kind.POSITIONS else [])}
    needed = [name for name in shape.shown.names if name not in (SUBTASK, WINDOW_END, TIME, "text")]
    if shape.kind in OF_TIMERS.values() and TIME in names and TIME_COLUMN not in names:
        needed.remove(TIME_COLUMN)
    missing = [name for name in needed if name not in names]
    unknown = [name for name in names if name not in optional]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    for problem, found in (("lack", missing), ("have an unknown column", unknown), ("have twice", twice)):
        if found:
            listed = ", ".join(found)
            raise UsageError(f"{what} has the columns ({schema_text(shape.shown)}), but the rows {problem} {listed}")


def _stored(given: pa.Table, shape: Shape, place: int, what: str) -> pa.Array:
    """Return one stored column."""
    field, name = shape.schema.field(place), shape.names[place] if place < len(shape.names) else ""
    if shape.expires and field.name == EXPIRES_COLUMN:
        return _expiries(given, what)
    if shape.window_ms and field.name == WINDOW:
        return _windows(_column(given, WINDOW_START, pa.timestamp("us"), what), shape.window_ms, what)
    if field.name == TIME_COLUMN and name not in given.column_names:
        times_us = _microseconds(_column(given, TIME, pa.timestamp("us"), what))
        return pa.array(-(-times_us // 1_000), pa.int64())  # never early
    return _column(given, name, field.type, what)


def _column(given: pa.Table, name: str, dtype: pa.DataType, what: str) -> pa.Array:
    column = given.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    try:
        return fitted(column, dtype, name)
    except MisfitError as error:
        raise UsageError(f"{what}: column {error}") from None


def _expiries(given: pa.Table, what: str) -> pa.Array:
    """Return until when rows live; without saying so until the TTL of the restore."""
    if EXPIRES not in given.column_names:
        return pa.repeat(pa.scalar(NEVER_MS), given.num_rows)
    moments = _column(given, EXPIRES, pa.timestamp("us"), what)
    expiries = np.where(moments.is_null().to_numpy(zero_copy_only=False), NEVER_MS, _microseconds(moments) // 1_000)
    return pa.array(expiries, pa.int64())


def _windows(starts: pa.Array, window_ms: int, what: str) -> pa.Array:
    """Return the numbers of windows that begin at ``starts``."""
    if starts.null_count:
        raise UsageError(f"{what}: column '{WINDOW_START}' has a null")
    numbers, rest = np.divmod(_microseconds(starts), window_ms * 1_000)
    if rest.any():
        wrong = starts[int(np.flatnonzero(rest)[0])].as_py()
        raise UsageError(f"{what}: no window of {window_ms} ms begins at {wrong}")
    return pa.array(numbers, pa.int64())


def _microseconds(moments: pa.Array) -> np.ndarray:
    found: np.ndarray = moments.view(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _refuse_nulls(rows: pa.RecordBatch, shape: Shape, what: str) -> None:
    """Nothing stored is null, and no key is NaN; what records have beside their key may be."""
    if shape.kind in (Kind.WINDOW_RECORDS, Kind.WINDOW_RESULTS):
        checked: Sequence[str] = shape.keys
    else:
        checked = [name for name in rows.schema.names if name != "text"]
    for name in checked:
        column, shown = rows.column(name), shape.names[rows.schema.get_field_index(name)]
        if column.null_count:
            raise UsageError(f"{what}: column '{shown}' has a null, which is never stored")
        if name in shape.keys and pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
            raise UsageError(f"{what}: column '{shown}' has a NaN, which is no key")


def _refuse_repeated(rows: pa.RecordBatch, shape: Shape, what: str) -> None:
    """A key has one value, and one entry for each key of its map."""
    if shape.kind not in _REPEATED:
        return
    names = [*shape.keys, *(name for name in _REPEATED[shape.kind] if name in rows.schema.names)]
    twice = _frame(rows, names).is_duplicated()
    if twice.any():
        first = rows.slice(int(twice.arg_true()[0]), 1).select(names).to_pylist()[0]
        shown = {shape.names[rows.schema.get_field_index(name)]: value for name, value in first.items()}
        raise UsageError(f"{what}: the rows have {shown} more than once")


def _in_order_of_expiry(rows: pa.RecordBatch, shape: Shape, what: str) -> pa.RecordBatch:
    """Return rows as a snapshot has them: nothing of a key expires before what is in front of it."""
    last = pl.col(EXPIRES_COLUMN)
    frame = _frame(rows, [*shape.keys, EXPIRES_COLUMN])
    by_key = frame.select((last < last.shift(1)).over(list(shape.keys)).any()).item()
    if not by_key or shape.kind is Kind.VALUE:
        return rows
    if shape.kind is Kind.LIST:
        raise UsageError(f"{what}: an element of a list cannot expire before those in front of it; sort by {EXPIRES}")
    # sorted where the order of rows means nothing; in a list it does, so there it was refused
    order = np.argsort(rows.column(EXPIRES_COLUMN).to_numpy(), kind="stable")
    return rows.take(pa.array(order))


def _frame(rows: pa.RecordBatch, names: Iterable[str]) -> pl.DataFrame:
    return pl.DataFrame({name: pl.from_arrow(rows.column(name)) for name in names})


_BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Rows of one state, by the subtask that owns them; each keeps its rows in their order."""

    rows: pa.RecordBatch
    starts: Sequence[int]

    def of(self, subtask_index: int) -> list[pa.RecordBatch]:
        """Return the rows of one subtask, in batches."""
        first, end = self.starts[subtask_index], self.starts[subtask_index + 1]
        return [self.rows.slice(at, min(_BATCH_ROWS, end - at)) for at in range(first, end, _BATCH_ROWS)]


def owners_of(rows: pa.RecordBatch, shape: Shape, max_parallelism: int, parallelism: int) -> np.ndarray:
    """Return which subtask owns the key of each row (KG8)."""
    groups = key_groups(hash_columns(rows, shape.keys), max_parallelism)
    return groups * parallelism // max_parallelism


def distribute(rows: pa.RecordBatch, owners: np.ndarray, parallelism: int) -> OwnedRows:
    """Return ``rows`` by their owners."""
    assert len(owners) == rows.num_rows, "each row has one owner"
    order = np.argsort(owners, kind="stable")
    starts = np.searchsorted(owners[order], np.arange(parallelism + 1))
    return OwnedRows(rows.take(pa.array(order)), starts.tolist())


@dataclass(frozen=True, slots=True)
class SubtaskState:
    """What one subtask has of one operator: rows of sections, and sections that belong to no key."""

    sections: Rows
    meta: Mapping[str, bytes] = field(default_factory=dict)

    def frozen(self, *, has_keys: bool) -> FrozenState:
        """Return it as state at a barrier; rows without a key are never cut by key group."""
        return WrittenRows(self, has_keys=has_keys)


class WrittenRows(KeyedState):
    """The rows of one operator in one subtask, as if they had been frozen at a barrier."""

    def __init__(self, state: SubtaskState, *, has_keys: bool) -> None:
        super().__init__()
        self._state = state
        self._has_keys = has_keys

    def _rows(self) -> Mapping[str, int]:
        return {section.name: sum(b.num_rows for b in batches) for section, batches in self._state.sections}

    def _sections(self) -> Rows:
        return self._state.sections

    def _meta(self) -> Mapping[str, bytes]:
        return self._state.meta

    def _write(self, target: SnapshotTarget) -> None:
        if self._has_keys:
            super()._write(target)
        else:
            FrozenState._write(self, target)

    def _forget(self) -> None:
        self._state = SubtaskState([])
