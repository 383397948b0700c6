"""Deduplication: the first or the last record of each key (docs/spec/changes.md)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.state_schema import name_text
from headgate.operators.base import Operator, OperatorContext, Output, key_columns
from headgate.operators.changes import (
    INSERT,
    OP,
    OP_FIELD,
    OPS,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    ChangeOperator,
    DistinctSlots,
)
from headgate.operators.keys import check_keys
from headgate.operators.row_order import Order, are_whole_numbers, first_rows
from headgate.operators.schemas import require_columns
from headgate.state.backend import ColumnBackend
from headgate.state.descriptors import StateDescriptor, StateKind, state_identity
from headgate.state.key_index import Slots
from headgate.state.ttl import TTL


@dataclass(frozen=True)
class DeduplicateSpec:
    """Keep the first or last record of each key.

    Attributes:
        keys: the key columns.
        schema: of the input.
        is_last: the last one, otherwise the first one.
        by: the column that orders the records; None: they are ordered as they come.
        retractions: the output has ``update_before``.
        ttl: how long a key is remembered after its record was emitted.
    """

    keys: tuple[str, ...]
    schema: pa.Schema
    is_last: bool
    by: str | None
    retractions: bool
    ttl: TTL | None

    @property
    def is_append_only(self) -> bool:
        """Whether a record that was emitted is never replaced: the output has no ``op``."""
        return not self.is_last and self.by is None

    def build(self) -> Operator:
        return DeduplicateOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the columns of the records, and ``op`` unless it is append-only.

        Raises:
            UsageError: a wrong key, no column ``by``, or a column ``op`` in the way.
        """
        check_keys(node, schema, self.keys)
        if self.by is not None:
            require_columns(node, schema, [self.by])
            check_order_column(node, schema, self.by)
        if self.is_append_only:
            return schema
        refuse_op(node, schema)
        return schema.append(OP_FIELD)

    @property
    def kept(self) -> list[pa.Field]:
        """The columns that are kept of the record of each key."""
        if self.retractions and not self.is_append_only:
            return [field for field in self.schema if field.name not in self.keys]
        return [] if self.by is None else [self.schema.field(self.by)]

    @property
    def descriptor(self) -> StateDescriptor:
        """What is known of the record of each key. Its name says which record that is."""
        fields = self.kept or [pa.field("there", pa.bool_())]
        name = f"{'last' if self.is_last else 'first'} record"
        name += "" if self.by is None else f" by {name_text(self.by)}"
        return StateDescriptor(name, StateKind.VALUE, pa.struct(fields), ttl=self.ttl)

    def state_text(self) -> str:
        return state_identity(key_columns(self.schema, self.keys), [self.descriptor])


def check_order_column(node: str, schema: pa.Schema, name: str) -> None:
    """Check that records can be ordered by a column.

    Raises:
        UsageError: its type has no order.
    """
    dtype = schema.field(name).type
    if pa.types.is_nested(dtype):
        raise UsageError(
            f"operator '{node}': column '{name}' of type {dtype} has no order; name a number, time or text"
        )


def refuse_op(node: str, schema: pa.Schema) -> None:
    """Refuse records with a column ``op``, which is that of changes.

    Raises:
        UsageError
    """
    if OP in schema.names:
        raise UsageError(
            f"operator '{node}': the records have a column 'op' already, which is to say what changes; rename it"
        )


class DeduplicateOperator(ChangeOperator):
    """Finds the best record of each key in a batch, and compares it with the one that was emitted."""

    _backend: ColumnBackend

    def __init__(self, spec: DeduplicateSpec) -> None:
        self._spec = spec
        self._distinct = DistinctSlots()
        self._order = Order(() if spec.by is None else (spec.by,), (spec.is_last,))

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        spec = self._spec
        self._backend = context.states.by_column(key_columns(spec.schema, spec.keys), [spec.descriptor])
        self._state = self._backend.values(spec.descriptor)
        self._output_schema = spec.output_schema(spec.schema, context.node)

    def process(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        self._backend.prepare()
        spec = self._spec
        slots = self._backend.slots([batch.column(key) for key in spec.keys])
        rows = self._best(batch, slots)
        slots = slots[rows]
        had = self._state.contains(slots)
        if spec.is_append_only:
            wins = ~had
        elif spec.by is None:
            wins = np.ones(len(rows), np.bool_)
        else:
            wins = ~had
            old = pl.Series(self._state.get(slots[had]).field(spec.by))
            new = pl.Series(batch.column(spec.by).take(pa.array(rows[had])))
            wins[had] = _replaces(old, new, is_last=spec.is_last)
        rows, slots, had = rows[wins], slots[wins], had[wins]
        if len(rows) == 0:
            return
        found = batch.take(pa.array(rows))
        if spec.is_append_only:
            self._state.put(slots, self._stored(found))
            self.output.emit(found)
            return
        codes = np.where(had, OPS.index(UPDATE_AFTER), OPS.index(INSERT)).astype(np.int8)
        columns = found.columns
        if spec.retractions and had.any():
            before = self._records(slots[had])
            order = np.argsort(np.concatenate([2 * np.arange(len(rows)) + 1, 2 * np.flatnonzero(had)]))
            columns = [
                pa.concat_arrays([new, old]).take(pa.array(order)) for new, old in zip(columns, before, strict=True)
            ]
            befores = np.full(int(had.sum()), OPS.index(UPDATE_BEFORE), np.int8)
            codes = np.concatenate([codes, befores])[order]
        self._state.put(slots, self._stored(found))
        self._emit(self._output_schema, columns, codes)

    def _best(self, batch: pa.RecordBatch, slots: Slots) -> Slots:
        """Return the first or last row of each key in the batch, ascending."""
        if self._spec.by is None:
            if self._spec.is_last:
                return self._distinct.last_rows(slots)
            return len(slots) - 1 - self._distinct.last_rows(slots[::-1])[::-1]
        is_last, column = self._spec.is_last, batch.column(self._spec.by)
        if are_whole_numbers(column):
            _, groups = self._distinct.of(slots)
            if not is_last:
                return np.sort(first_rows(self._order, groups, [column], 1, ties=False)[0])
            backwards = column.take(pa.array(np.arange(len(slots))[::-1]))
            found, _ = first_rows(self._order, groups[::-1], [backwards], 1, ties=False)
            return np.sort(len(slots) - 1 - found)
        frame = pl.DataFrame({"row": np.arange(len(slots)), "slot": slots}).with_columns(pl.Series("by", column))
        ordered = frame.sort("by", nulls_last=not is_last, maintain_order=True)
        best: Slots = ordered.unique("slot", keep="last" if is_last else "first")["row"].sort().to_numpy()
        return best

    def _stored(self, found: pa.RecordBatch) -> pa.StructArray:
        fields = list(self._spec.descriptor.type)
        if not self._spec.kept:
            return pa.StructArray.from_arrays([pa.array(np.ones(found.num_rows, np.bool_))], fields=fields)
        return pa.StructArray.from_arrays([found.column(field.name) for field in fields], fields=fields)

    def _records(self, slots: Slots) -> list[pa.Array]:
        """Return the records that were emitted of these keys."""
        keys = dict(zip(self._spec.keys, self._backend.key_columns(slots), strict=True))
        record = self._state.get(slots)
        return [keys[name] if name in keys else record.field(name) for name in self._spec.schema.names]


def _replaces(old: pl.Series, new: pl.Series, *, is_last: bool) -> npt.NDArray[np.bool_]:
    """Return where a record replaces one: of equal ones the later one is the last, and the earlier one the first.

    A null is before everything for the last, and after everything for the first: it is replaced.
    """
    is_better = new >= old if is_last else new < old
    known = is_better.fill_null(False) | (old.is_null() & (new.is_not_null() | is_last))
    found: npt.NDArray[np.bool_] = known.to_numpy()
    return found
