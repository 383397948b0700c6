"""The top rows of each key: as they change, or once for each window that has ended (docs/spec/changes.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.base import WATERMARK_MAX_MS, Operator, OperatorContext, Output, key_columns
from headgate.operators.changes import DELETE, INSERT, OP, OP_FIELD, OPS, UPDATE_AFTER, UPDATE_BEFORE, Codes
from headgate.operators.deduplication import check_order_column, refuse_op
from headgate.operators.keyed_rows import ChangeOperator, DistinctSlots
from headgate.operators.keys import check_keys
from headgate.operators.late_rows import InTimeOperator
from headgate.operators.lazy_rows import LazyRows
from headgate.operators.row_order import Order, first_rows, group_ranks
from headgate.operators.schemas import describe, require_columns
from headgate.operators.window_candidates import LEFT_OUT
from headgate.operators.windows.window_assigner import AlignedWindows
from headgate.operators.windows.window_plan import END_COLUMN
from headgate.state.backend import ColumnBackend, TimeKind
from headgate.state.descriptors import StateDescriptor, StateKind, state_identity
from headgate.state.heap import HeapRows
from headgate.state.key_index import Slots
from headgate.state.ttl import TTL

Columns: TypeAlias = Mapping[str, pa.Array]

_WINDOWS_PER_CALL = 1_024


def _check(node: str, schema: pa.Schema, keys: tuple[str, ...], order: Order, rank: str | None) -> None:
    check_keys(node, schema, keys)
    require_columns(node, schema, order.columns)
    for name in order.columns:
        check_order_column(node, schema, name)
        if name in keys:
            raise UsageError(f"operator '{node}': all rows of a key have the same '{name}'; order by another column")
    if rank is not None and rank in schema.names:
        raise UsageError(
            f"operator '{node}': there is a column '{rank}' already; name that of the ranks with rank=; the columns "
            f"are {describe(schema)}"
        )


@dataclass(frozen=True)
class TopSpec:
    """Keep the first ``count`` rows of each key, and emit how they change.

    Attributes:
        rank: the column with the number of a row, from 1 on; None: there is none.
        ttl: how long a key is remembered after its last record.
    """

    keys: tuple[str, ...]
    schema: pa.Schema
    count: int
    order: Order
    rank: str | None
    retractions: bool
    ttl: TTL | None

    def build(self) -> Operator:
        return TopOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the columns of the records, the rank, and ``op``.

        Raises:
            UsageError: a wrong key, an unknown column, one that is in the way.
        """
        _check(node, schema, self.keys, self.order, self.rank)
        refuse_op(node, schema)
        if self.rank == OP:
            raise UsageError(f"operator '{node}': column 'op' says what changes; give another rank=")
        ranks = [] if self.rank is None else [pa.field(self.rank, pa.int64())]
        return pa.schema([*schema, *ranks, OP_FIELD])

    def keys_after(self, keys: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return self.keys

    @property
    def change_keys(self) -> tuple[str, ...]:
        """The columns that identify a row of the result; none if nothing does."""
        if self.rank is not None:
            return (*self.keys, self.rank)
        return self.keys if self.count == 1 else ()

    @property
    def descriptor(self) -> StateDescriptor:
        """The rows of each key in their order, without the columns of the key. Its name says which rows these are."""
        row = pa.struct([field for field in self.schema if field.name not in self.keys])
        name = f"{'' if self.rank is None else 'ranked '}top {self.count} by {self.order.text}"
        return StateDescriptor(name, StateKind.VALUE, pa.large_list(row), ttl=self.ttl)

    def state_text(self) -> str:
        return state_identity(key_columns(self.schema, self.keys), [self.descriptor])


class TopOperator(ChangeOperator):
    """Merges each batch into the top rows of its keys."""

    takes_lazy_rows = True
    _backend: ColumnBackend

    def __init__(self, spec: TopSpec) -> None:
        self._spec = spec
        self._distinct = DistinctSlots()
        self._row: pa.DataType = spec.descriptor.type.value_type

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        spec = self._spec
        self._backend = context.states.by_column(key_columns(spec.schema, spec.keys), [spec.descriptor])
        self._state = self._backend.values(spec.descriptor)
        self._output_schema = spec.output_schema(spec.schema, context.node)

    def process(self, batch: pa.RecordBatch | LazyRows) -> None:
        self._begin_call()
        self._backend.prepare()
        spec = self._spec
        slots, places = self._distinct.of(self._backend.slots([batch.column(key) for key in spec.keys]))
        arrived = np.arange(len(places))
        if len(places) > spec.count * len(slots):  # many rows cannot be among the first of the batch alone
            by = [batch.column(name) for name in spec.order.columns]
            arrived, _ = first_rows(spec.order, places, by, spec.count, ties=False)
            places = places[arrived]
        had = self._state.contains(slots)
        owners, old = self._state.rows(slots[had])
        old_places = np.flatnonzero(had)[owners]
        lengths = np.bincount(old_places, minlength=len(slots))
        groups = np.concatenate([old_places, places])
        order = spec.order.rows(groups, [self._both(name, old, batch, arrived) for name in spec.order.columns])
        ranks = group_ranks(groups[order])
        kept = order[ranks < spec.count]
        is_new = kept >= len(old)
        chosen = batch.take(pa.array(arrived[kept[is_new] - len(old)]))
        record = chosen.select([field.name for field in self._row])
        rows = old + self._state.added(record.to_struct_array().cast(self._row))
        new_groups = groups[kept[is_new]]
        kept[is_new] = len(old) + np.arange(len(new_groups))  # of the others that arrived nothing is left
        groups = np.concatenate([old_places, new_groups])
        self._store(slots, rows, kept, groups, len(old))
        if spec.rank is None:
            self._emit_sets(slots, rows, groups, kept, len(old))
        else:
            before = np.concatenate([group_ranks(old_places), np.full(len(new_groups), -1)])
            self._emit_ranks(slots, rows, groups, kept, before, lengths)

    def _both(self, name: str, old: HeapRows, batch: pa.RecordBatch | LazyRows, arrived: Slots) -> pa.Array:
        """Return one column of the old rows and of those that arrived."""
        new = batch.column(name).take(pa.array(arrived))
        return pa.concat_arrays([old.column(name), new]) if len(old) else new

    def _store(self, slots: Slots, rows: HeapRows, kept: Slots, groups: Slots, old_count: int) -> None:
        """Set the rows of the keys that have another top now; with a TTL those of all, which live on."""
        changed = np.zeros(len(slots), np.bool_)
        changed[groups[kept[kept >= old_count]]] = True
        if self._spec.ttl is not None:
            changed[:] = True
        if changed.any():
            chosen = kept[changed[groups[kept]]]
            lengths = np.bincount(groups[chosen], minlength=len(slots))[changed]
            self._state.put_rows(slots[changed], lengths, rows[chosen])

    def _emit_ranks(
        self, slots: Slots, rows: HeapRows, groups: Slots, kept: Slots, before: Slots, lengths: Slots
    ) -> None:
        """Emit, of each place of each key that another row has now, what changed."""
        ranks = group_ranks(groups[kept])
        moved = before[kept] != ranks
        taken, places, ranks = kept[moved], groups[kept][moved], ranks[moved]
        is_update = ranks < lengths[places]
        codes = np.where(is_update, OPS.index(UPDATE_AFTER), OPS.index(INSERT)).astype(np.int8)
        if self._spec.retractions and is_update.any():
            starts = np.cumsum(lengths) - lengths  # of the rows of each key among the old ones
            old = starts[places[is_update]] + ranks[is_update]
            order = np.argsort(np.concatenate([2 * np.arange(len(taken)) + 1, 2 * np.flatnonzero(is_update)]))
            taken = np.concatenate([taken, old])[order]
            places = np.concatenate([places, places[is_update]])[order]
            ranks = np.concatenate([ranks, ranks[is_update]])[order]
            codes = np.concatenate([codes, np.full(len(old), OPS.index(UPDATE_BEFORE), np.int8)])[order]
        self._send(slots, self._columns_of(rows[taken]), places, codes, ranks)

    def _emit_sets(self, slots: Slots, rows: HeapRows, groups: Slots, kept: Slots, old_count: int) -> None:
        """Emit, key by key, which rows left the top, and which came."""
        stays = np.zeros(len(rows), np.bool_)
        stays[kept] = True
        left, came = np.flatnonzero(~stays[:old_count]), kept[kept >= old_count]
        if self._spec.count == 1 and not self._spec.retractions:
            is_update = np.isin(groups[came], groups[left])
            codes = np.where(is_update, OPS.index(UPDATE_AFTER), OPS.index(INSERT)).astype(np.int8)
            self._send(slots, self._columns_of(rows[came]), groups[came], codes, None)
            return
        gone, new = (UPDATE_BEFORE, UPDATE_AFTER) if self._spec.count == 1 else (DELETE, INSERT)
        is_update = np.isin(groups[came], groups[left])
        codes = np.concatenate(
            [
                np.full(len(left), OPS.index(gone), np.int8),
                np.where(is_update, OPS.index(new), OPS.index(INSERT)).astype(np.int8),
            ]
        )
        taken = np.concatenate([left, came])
        order = np.argsort(groups[taken], kind="stable")
        self._send(slots, self._columns_of(rows[taken[order]]), groups[taken][order], codes[order], None)

    def _columns_of(self, rows: HeapRows) -> Columns:
        return rows.columns([field.name for field in self._row])

    def _send(self, slots: Slots, record: Columns, places: Slots, codes: Codes, ranks: Slots | None) -> None:
        """Send changes of the keys ``slots[places]``, of which ``record`` has the other columns."""
        if len(places) == 0:
            return
        keys = dict(zip(self._spec.keys, self._backend.key_columns(slots[places]), strict=True))
        columns = [keys[name] if name in keys else record[name] for name in self._spec.schema.names]
        if ranks is not None:
            columns.append(pa.array(ranks + 1))
        self._emit(self._output_schema, columns, codes)


@dataclass(frozen=True)
class WindowTopSpec:
    """Emit the first rows of each window, and of each key in it, when the window has ended.

    Attributes:
        keys: the columns of the key, with those of the window.
        ties: all rows that are equal to the last one in what orders them are among them, and equal rows have one rank.
        windows: those of the records, which are no results of windows, and come from ``WindowCandidatesSpec``; None:
            they are.
        holds_back: records are results of other windows than these, which may come when one of these has ended: the
            watermark is held back by that.
    """

    keys: tuple[str, ...]
    schema: pa.Schema
    count: int
    order: Order
    rank: str | None
    ties: bool
    windows: AlignedWindows | None = None
    holds_back: bool = False

    @property
    def output_delay_ms(self) -> int:
        """By how much ``window_start`` may be earlier than the watermark, beside that of the records."""
        return 0 if self.windows is None else self.windows.span_ms

    @property
    def result_windows(self) -> AlignedWindows | None:
        """The windows of results, which have their start as event time; None: those of the records."""
        return self.windows

    def build(self) -> Operator:
        return WindowTopOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the columns of the records, and the rank.

        Raises:
            UsageError: a wrong key, an unknown column, one that is in the way.
        """
        _check(node, self.schema, self.keys, self.order, self.rank)
        return self.schema if self.rank is None else self.schema.append(pa.field(self.rank, pa.int64()))

    @property
    def descriptor(self) -> StateDescriptor:
        """The rows of each key, without its columns."""
        row = pa.struct([field for field in self.schema if field.name not in self.keys])
        return StateDescriptor("rows", StateKind.LIST, row)

    def state_text(self) -> str:
        return state_identity(key_columns(self.schema, self.keys), [self.descriptor], has_timers=True)


class WindowTopOperator(InTimeOperator):
    """Keeps the rows of each window until event time has passed its end."""

    _backend: ColumnBackend

    def __init__(self, spec: WindowTopSpec) -> None:
        self._spec = spec
        self._row: pa.DataType = spec.descriptor.type
        self._end = spec.keys.index(END_COLUMN)

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        spec = self._spec
        keys = key_columns(spec.schema, spec.keys)
        self._backend = context.states.by_column(keys, [spec.descriptor], has_timers=True)
        self._state = self._backend.lists(spec.descriptor)
        self._output_schema = spec.output_schema(spec.schema, context.node)

    def process(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        self._backend.prepare()
        ends_ms = batch.column(END_COLUMN).cast(pa.int64()).to_numpy() // 1_000 - 1
        records = None if self._spec.windows is None else batch.column(LEFT_OUT).to_numpy() + 1
        late = self._late(batch, self._spec.keys, ends_ms, records)
        if late is not None:
            batch, ends_ms = batch.filter(pa.array(~late)), ends_ms[~late]
        if batch.num_rows == 0:
            return
        slots = self._backend.slots([batch.column(key) for key in self._spec.keys])
        self._state.append(slots, batch.select([field.name for field in self._row]).to_struct_array().cast(self._row))
        assert self._backend.timers is not None
        self._backend.timers.event_time.register(slots, ends_ms)

    def on_watermark(self, watermark_ms: int) -> None:
        watermark_ms = self.context.held_back(watermark_ms)
        if watermark_ms < WATERMARK_MAX_MS:
            self._advance(watermark_ms)
        super().on_watermark(watermark_ms)

    def _fire_some(self, kind: TimeKind, until_ms: int) -> int:
        assert self._backend.timers is not None
        self._begin_call()
        self._backend.prepare()
        slots, _ = self._backend.timers.of(kind).take(until_ms, _WINDOWS_PER_CALL)
        if len(slots) == 0:
            return 0
        spec = self._spec
        groups, rows = self._state.explode(slots)
        columns = [rows.field(name) for name in spec.order.columns]
        kept, ranks = first_rows(spec.order, groups, columns, spec.count, ties=spec.ties)
        keys = dict(zip(spec.keys, self._backend.key_columns(slots[groups[kept]]), strict=True))
        record = rows.take(pa.array(kept))
        found = [keys[name] if name in keys else record.field(name) for name in spec.schema.names]
        if spec.rank is not None:
            found.append(pa.array(ranks + 1))
        self._state.clear(slots)
        self.output.emit(pa.RecordBatch.from_arrays(found, schema=self._output_schema))
        return len(slots)

    def _end_firing(self) -> None:
        pass
