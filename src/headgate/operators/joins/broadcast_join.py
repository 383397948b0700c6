"""Join of a stream with a broadcast table: every subtask keeps the table, and the stream is not shuffled.

The table has one row per key, the last one that came. A record of the stream sees the table as it is when the record
arrives, or waits in the state until the table has been read to its end (docs/spec/broadcast-join.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, UsageError
from headgate.model.graph import BROADCAST_INPUT, MAIN, MAIN_INPUT, InputName, OutputTag
from headgate.model.schema_evolution import Misfit
from headgate.model.state_schema import StateIdentity
from headgate.operators.base import Operator, OperatorContext, Output, RestoredState
from headgate.operators.changes import DELETE, OP, UPDATE_BEFORE
from headgate.operators.keys import whole_keys
from headgate.operators.process.broadcast_state import BroadcastMap, BroadcastSide
from headgate.operators.process.connected_process import BroadcastOrderOperator, BroadcastOrderSpec
from headgate.operators.schemas import frame_of, schema_text
from headgate.state.descriptors import (
    KeyColumns,
    StateDescriptor,
    StateKind,
    broadcast_text,
    evolved_values,
    section_schema,
)
from headgate.state.key_hash import KEY_TYPES, is_key_type
from headgate.state.snapshot import FrozenState, decode_stream, encode_batches

HOWS = ("inner", "left", "semi", "anti")

_WAITING = "waiting"
_COMPLETE = StateDescriptor("complete", StateKind.MAP, pa.bool_(), pa.int64())
_NO_KEY = KeyColumns((), ())


@dataclass(frozen=True)
class TableOrderSpec(BroadcastOrderSpec):
    """Bring the rows of a table in one order, without those that have no whole key; mark their end with a row of nulls.

    ``keys``: the join columns of the table; ``schema``: of its rows.
    """

    keys: tuple[str, ...] = ()
    schema: pa.Schema | None = None

    def build(self) -> Operator:
        return TableOrderOperator(self)


class TableOrderOperator(BroadcastOrderOperator):
    """Passes the rows with a key on, and a row of nulls at the end."""

    _spec: TableOrderSpec

    def process(self, batch: pa.RecordBatch) -> None:
        self.output.emit(_with_keys(batch, self._spec.keys))

    def finish(self) -> None:
        """See ``Operator``. All rows came to the first subtask, so the mark follows them on the same channels."""
        if self.context.subtask_index == 0:
            schema = cast(pa.Schema, self._spec.schema)
            self.output.emit(pa.RecordBatch.from_arrays([pa.nulls(1, one.type) for one in schema], schema=schema))


def _with_keys(batch: pa.RecordBatch, keys: Sequence[str]) -> pa.RecordBatch:
    """Return the rows of ``batch`` that have no null and no NaN among ``keys``."""
    whole = whole_keys(batch, keys)
    return batch if whole is None else batch.filter(pa.array(whole))


@dataclass(frozen=True)
class BroadcastJoinSpec:
    """Join records with the rows of a table.

    Attributes:
        left, right: schemas of the records and of the table's rows, canonical.
        left_keys, right_keys: the columns that must be equal.
        how: "inner", "left", "semi" or "anti".
        suffix: for columns of the table that the records have, too.
        waits: records wait until the table has been read to its end.
        has_changes: the column ``op`` of the table's rows says what each does.
    """

    left: pa.Schema
    right: pa.Schema
    left_keys: tuple[str, ...]
    right_keys: tuple[str, ...]
    how: str
    suffix: str
    waits: bool
    has_changes: bool

    def build(self) -> Operator:
        return BroadcastJoinOperator(self)

    @property
    def table_columns(self) -> list[str]:
        """The columns of the table that results get, by their names there."""
        if self.how in ("semi", "anti"):
            return []
        left_out = {*self.right_keys, *([OP] if self.has_changes else [])}
        return [name for name in self.right.names if name not in left_out]

    def output_schemas(self, inputs: Mapping[InputName, pa.Schema], node: str) -> Mapping[OutputTag, pa.Schema]:
        """Return the schema of the results.

        Raises:
            UsageError: keys that do not fit, or two columns of one name.
        """
        left, right = inputs[MAIN_INPUT], inputs[BROADCAST_INPUT]
        for name, other in zip(self.left_keys, self.right_keys, strict=True):
            for schema, column, side in ((left, name, "stream"), (right, other, "table")):
                if column not in schema.names:
                    raise UsageError(
                        f"operator '{node}': the {side} has no column '{column}'; it has {schema_text(schema)}"
                    )
                if not is_key_type(schema.field(column).type):
                    raise UsageError(
                        f"operator '{node}': column '{column}' of the {side} is {schema.field(column).type}, which "
                        f"cannot be a key; {KEY_TYPES}"
                    )
            types = left.field(name).type, right.field(other).type
            if not types[0].equals(types[1]):
                raise UsageError(
                    f"operator '{node}': join keys must have equal types, but '{name}' is {types[0]} and '{other}' of "
                    f"the table is {types[1]}; cast one of them with with_columns(...) before"
                )
        fields = list(left)
        for name in self.table_columns:
            result = name if name not in left.names else f"{name}{self.suffix}"
            if result in [field.name for field in fields]:
                raise UsageError(
                    f"operator '{node}': the result would have two columns '{result}'; give another suffix=, or rename "
                    "one with select(...) before"
                )
            fields.append(pa.field(result, right.field(name).type))
        return {MAIN: pa.schema(fields)}

    @property
    def stored(self) -> pa.Schema:
        """The columns of the table that are kept."""
        return pa.schema([field for field in self.right if not (self.has_changes and field.name == OP)])

    @property
    def descriptor(self) -> StateDescriptor:
        """The table as a broadcast map, from the number of a row to the row."""
        return StateDescriptor("table", StateKind.MAP, pa.struct(list(self.stored)), pa.int64())

    def state_text(self) -> str:
        """See ``specs.state_text``. Columns of records that wait are compared where there are some."""
        return StateIdentity.of_lists([broadcast_text(one) for one in (_COMPLETE, self.descriptor)]).text


class Table:
    """The rows of a table by key, as a part of a ``BroadcastSide``."""

    def __init__(self, spec: BroadcastJoinSpec) -> None:
        self.descriptor = spec.descriptor
        self._keys = spec.right_keys
        self._has_changes = spec.has_changes
        self._schema = spec.stored
        self._rows = _empty(self._schema)
        self._index: pl.DataFrame | None = None
        self._changes: list[pa.RecordBatch] = []

    def change(self, batch: pa.RecordBatch) -> None:
        """Take rows that were added, changed or, with ``op``, deleted."""
        self._changes.append(batch)

    def find(self, keys: Sequence[pa.Array]) -> pa.Array:
        """Return the number of the row of each key, null where there is none."""
        rows = self._current()
        if self._index is None:
            self._index = _frame([rows.column(key) for key in self._keys]).with_row_index("row")
        names = [name for name in self._index.columns if name != "row"]
        found = _frame(keys).join(self._index, on=names, how="left", maintain_order="left")["row"]
        return found.to_arrow()

    def take(self, rows: pa.Array, columns: Sequence[str]) -> list[pa.Array]:
        """Return these rows of some columns."""
        return [self._rows.column(name).take(rows) for name in columns]

    def _current(self) -> pa.RecordBatch:
        """Return the rows after all changes: of each key the last one, if that did not delete it."""
        if not self._changes:
            return self._rows
        changes, self._changes = self._changes, []
        batches, gone = [self._rows], [np.zeros(self._rows.num_rows, np.bool_)]
        for batch in changes:
            if self._has_changes:
                ops = frame_of(batch.select([OP])).to_series()
                batch = batch.filter(pa.array((ops != UPDATE_BEFORE).to_numpy()))  # the new row has the same key
                gone.append((ops.filter(ops != UPDATE_BEFORE) == DELETE).to_numpy())
                batch = batch.select(self._schema.names)
            else:
                gone.append(np.zeros(batch.num_rows, np.bool_))
            batches.append(batch)
        rows = pa.Table.from_batches(batches, self._schema).combine_chunks()
        last = (
            _frame([rows.column(key).combine_chunks() for key in self._keys])
            .with_row_index("row")
            .with_columns(gone=pl.Series(np.concatenate(gone)))
        )
        names = [name for name in last.columns if name not in ("row", "gone")]
        kept = last.unique(names, keep="last", maintain_order=True).filter(~pl.col("gone"))["row"].sort()
        # rows have other numbers now
        self._rows, self._index = _combined(rows.take(kept.to_arrow())), None
        return self._rows

    # -- as a part of a ``BroadcastSide`` ------------------------------------------------------------------------

    @property
    def has_entries(self) -> bool:
        """Whether there is any row."""
        return bool(self._current().num_rows)

    def frozen(self) -> FrozenTable:
        """Return the table as it is now."""
        return FrozenTable(self.descriptor, self._current())

    def fill(self, data: memoryview, path: str) -> None:
        """Take over what ``FrozenTable`` wrote.

        Raises:
            CorruptionError: it is something else.
        """
        found, batches = decode_stream(data, path)
        for batch in batches:
            values = evolved_values(batch.column(1), self.descriptor.type, self.descriptor.evolution)
            if isinstance(values, Misfit):
                raise CorruptionError(
                    path, 0, f"rows of {self.descriptor.type}", f"{found.field(1).type}: {values.why}"
                )
            rows = pa.RecordBatch.from_arrays(values.flatten(), schema=self._schema)
            self._rows = _combined(pa.Table.from_batches([self._rows, rows], self._schema))
        self._index = None


@dataclass(frozen=True, slots=True)
class FrozenTable:
    """A table at a barrier."""

    descriptor: StateDescriptor
    rows: pa.RecordBatch

    @property
    def size(self) -> int:
        """The number of its rows."""
        return cast(int, self.rows.num_rows)

    def batch(self) -> pa.RecordBatch:
        """Return it as two columns, the number of the row and the row."""
        numbers = pa.array(np.arange(self.size, dtype=np.int64))
        structs = pa.StructArray.from_arrays(self.rows.columns, fields=list(self.rows.schema))
        return pa.RecordBatch.from_arrays([numbers, structs], schema=section_schema(_NO_KEY, self.descriptor))


def _combined(table: pa.Table) -> pa.RecordBatch:
    found = table.combine_chunks().to_batches()
    return found[0] if found else _empty(table.schema)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], one.type) for one in schema], schema=schema)


def _frame(columns: Sequence[pa.Array]) -> pl.DataFrame:
    """Return key columns as a frame with names by position."""
    names = [f"key{number}" for number in range(len(columns))]
    return frame_of(pa.RecordBatch.from_arrays(list(columns), names=names))


class BroadcastJoinOperator(Operator):
    """Keeps the table and joins records with it. While records wait for the table, watermarks wait, too."""

    def __init__(self, spec: BroadcastJoinSpec) -> None:
        self._spec = spec
        self._table = Table(spec)
        self._complete = BroadcastMap(_COMPLETE)
        self._waiting: list[pa.RecordBatch] = []
        self._watermark_ms: int | None = None
        self._is_idle = False

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._side = BroadcastSide(context.node, [self._complete, self._table])
        inputs = {MAIN_INPUT: self._spec.left, BROADCAST_INPUT: self._spec.right}
        self._schema = self._spec.output_schemas(inputs, context.node)[MAIN]

    @property
    def _holds(self) -> bool:
        """Whether records wait for the rest of the table."""
        return self._spec.waits and not self._complete.has_entries

    def next_tick_ms(self) -> int | None:
        """See ``Operator``. At once, if a restored copy of the table is complete already and records waited for it."""
        return 0 if self._waiting and not self._holds else None

    def on_tick(self, now_ms: int) -> None:
        self._release()

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        # those that waited came before this batch
        if self._waiting and not self._holds:
            self._release()
        if name != BROADCAST_INPUT:
            self.process(batch)
            return
        rows = _with_keys(batch, self._spec.right_keys)
        if rows.num_rows:
            self._table.change(rows)
        if rows.num_rows < batch.num_rows:  # the mark of the end
            self._complete.put(None, {0: True})
            self._release()

    def process(self, batch: pa.RecordBatch) -> None:
        if self._holds:
            self._waiting.append(batch)
        else:
            self.output.emit(self._joined(batch))

    def _joined(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = self._table.find([batch.column(key) for key in self._spec.left_keys])
        if self._spec.how in ("inner", "semi"):
            batch, rows = batch.filter(rows.is_valid()), rows.drop_null()
        elif self._spec.how == "anti":
            batch = batch.filter(rows.is_null())
        columns = self._spec.table_columns
        found = self._table.take(rows, columns) if columns else []
        return pa.RecordBatch.from_arrays([*batch.columns, *found], schema=self._schema)

    def _release(self) -> None:
        """Join the records that waited, then pass event time on."""
        assert not self._holds, "records wait for the whole table"
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            self.output.emit(self._joined(batch))
        watermark_ms, self._watermark_ms = self._watermark_ms, None
        if watermark_ms is not None:
            self.output.emit_watermark(watermark_ms)
        if self._is_idle:
            self.output.emit_idle(True)

    def on_watermark(self, watermark_ms: int) -> None:
        if self._waiting and not self._holds:
            self._release()
        if self._holds:
            # the latest one is enough: it includes those before
            self._watermark_ms = watermark_ms
        else:
            self.output.emit_watermark(watermark_ms)

    def on_idle(self, is_idle: bool) -> None:
        self._is_idle = is_idle
        if not self._holds and not self._waiting:
            self.output.emit_idle(is_idle)

    def freeze_broadcast(self, *, is_own: bool) -> FrozenState | None:
        return self._side.freeze(self.context, is_own=is_own)

    def restore_broadcast(self, states: Sequence[RestoredState]) -> None:
        self._side.restore(states, self.context)

    def freeze(self) -> FrozenState | None:
        """See ``Operator``. The records that wait."""
        return FrozenWaiting(self._spec.left, list(self._waiting)) if self._waiting else None

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over the records that wait here now: those of some former subtasks, in their order.

        Raises:
            UsageError: they have other columns than the stream has now.
        """
        for state in sorted(states, key=lambda state: state.subtask_index):
            if state.subtask_index % self.context.parallelism != self.context.subtask_index:
                continue
            path = f"state of '{self.context.node}', subtask {state.subtask_index}"
            schema, batches = decode_stream(decode_sections(state.payload, path)[_WAITING], path)
            if not schema.equals(self._spec.left):
                raise UsageError(
                    f"the restored checkpoint holds records that wait in operator '{self.context.node}', with the "
                    f"columns {schema_text(schema)}, but its stream has {schema_text(self._spec.left)} now; run the "
                    "former program until its table has been read, or give the operator another name"
                )
            self._waiting += batches

    def finish(self) -> None:
        assert not self._waiting, "input ends with the mark of the table's end"


class FrozenWaiting(FrozenState):
    """Records that wait for the rest of the table at a barrier."""

    def __init__(self, schema: pa.Schema, batches: list[pa.RecordBatch]) -> None:
        super().__init__()
        self._schema = schema
        self._batches = batches

    def _rows(self) -> Mapping[str, int]:
        return {_WAITING: sum(batch.num_rows for batch in self._batches)}

    def _encode(self) -> Sequence[Buffer]:
        return encode_sections({_WAITING: encode_batches(self._schema, self._batches)})

    def _forget(self) -> None:
        self._batches = []
