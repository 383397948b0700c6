"""The top rows of each key: as they change, or once for each window that has ended (docs/spec/changes.md).

Where input changes, any row may come up when others go, so ``ChangingTopOperator`` keeps all rows of a key: the first
ones in order, and the others in a list to which changes are appended. The list is only read when too few of the first
ones are left, or when most of it says nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.base import WATERMARK_MAX_MS, LazyRows, Operator, OperatorContext, Output, key_columns
from headgate.operators.changes import (
    DELETE,
    INSERT,
    OP,
    OP_FIELD,
    OPS,
    UPDATE_AFTER,
    UPDATE_BEFORE,
    ChangeOperator,
    Codes,
    DistinctSlots,
    Signs,
    change_rows,
    counted,
    signs,
)
from headgate.operators.deduplication import check_order_column, refuse_op
from headgate.operators.keys import check_keys
from headgate.operators.lateness import InTimeOperator
from headgate.operators.row_order import LEFT_OUT, Order, first_rows, group_ranks
from headgate.operators.schemas import describe, require_columns
from headgate.operators.windows.window_assigner import AlignedWindows
from headgate.operators.windows.window_plan import END_COLUMN
from headgate.state.backend import ColumnBackend, ListColumns, TimeKind, ValueColumns
from headgate.state.descriptors import StateDescriptor, StateKind, state_identity
from headgate.state.heap import HeapRows
from headgate.state.key_index import Slots
from headgate.state.ttl import TTL
from headgate.state.values import Mask

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


_MOVED = 2
"""The step of a row that was one of the first and is not any more; -1: a row goes, 1: one comes."""


@dataclass(frozen=True)
class ChangingTopSpec(TopSpec):
    """Keep the rows of each key, and emit how the first ``count`` of them change. ``schema`` has no ``op``.

    Attributes:
        identity: the columns by which a row of a key is found again.
        is_upsert: a change says what the row is now, and not what it was.
    """

    identity: tuple[str, ...]
    is_upsert: bool

    def build(self) -> Operator:
        return ChangingTopOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the columns of the records, the rank, and ``op``.

        Raises:
            UsageError: a wrong key, an unknown column, one that is in the way.
        """
        require_columns(node, schema, [OP])
        return super().output_schema(pa.schema([field for field in schema if field.name != OP]), node)

    @property
    def descriptor(self) -> StateDescriptor:
        """The first rows of each key, more than ``count``; what kept no others is never taken for it."""
        kept = super().descriptor
        return replace(kept, name=f"changing {kept.name}")

    @property
    def rest(self) -> StateDescriptor:
        """Changes of the rows that are not among the first."""
        change = pa.struct([pa.field("row", self.descriptor.type.value_type), pa.field("step", pa.int8())])
        return StateDescriptor("rest", StateKind.LIST, change)

    @property
    def rest_size(self) -> StateDescriptor:
        """How many rows are left of them, about."""
        return StateDescriptor("rest size", StateKind.VALUE, pa.int64())

    @property
    def descriptors(self) -> list[StateDescriptor]:
        """All states. With a TTL, by which a key is forgotten as a whole, all rows are among the first."""
        return [self.descriptor, *([self.rest, self.rest_size] if self.ttl is None else [])]

    def state_text(self) -> str:
        return state_identity(key_columns(self.schema, self.keys), self.descriptors)


class ChangingTopOperator(TopOperator):
    """Applies the changes of each batch to the rows of its keys."""

    takes_lazy_rows = False

    _spec: ChangingTopSpec

    def __init__(self, spec: ChangingTopSpec) -> None:
        super().__init__(spec)
        self._first_max = 4 * spec.count + 64
        self._first = self._first_max // 2
        self._rest: ListColumns | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super(TopOperator, self).open(context, output)
        spec = self._spec
        self._backend = context.states.by_column(key_columns(spec.schema, spec.keys), spec.descriptors)
        self._state = self._backend.values(spec.descriptor)
        if spec.ttl is None:
            self._rest = self._backend.lists(spec.rest)
            self._rest_size: ValueColumns = self._backend.values(spec.rest_size)
        self._output_schema = spec.output_schema(spec.schema.append(pa.field(OP, pa.large_string())), context.node)

    def process(self, batch: pa.RecordBatch) -> None:
        self._begin_call()
        self._backend.prepare()
        spec = self._spec
        slots, places = self._distinct.of(self._backend.slots([batch.column(key) for key in spec.keys]))
        arrived = batch.select([field.name for field in self._row]).to_struct_array().cast(self._row)
        steps = signs(batch.column(OP))
        if spec.is_upsert:
            places, arrived, steps = self._with_old_rows(places, arrived, steps)
        had = self._state.contains(slots)
        lists = self._state.get(slots[had])
        lengths = np.zeros(len(slots), np.int64)
        lengths[had] = lists.value_lengths().to_numpy(zero_copy_only=False)
        old_count = int(lengths.sum())
        old_places = np.repeat(np.arange(len(slots)), lengths)
        rows = pa.concat_arrays([lists.flatten().cast(self._row), arrived])
        groups = np.concatenate([old_places, places])
        is_known, stays = self._counted(groups, rows, np.concatenate([np.ones(old_count, np.int64), steps]))
        kept = np.flatnonzero(stays)
        kept = kept[self._order(groups[kept], rows.take(pa.array(kept)))]
        if self._rest is not None:
            unknown = np.flatnonzero(~is_known)
            rows, groups, kept = self._with_rest(self._rest, slots, rows, groups, kept, unknown, old_count)
        self._store_first(slots, rows, groups, kept, lengths)
        tops = [(old_places, np.arange(old_count)), (groups[kept], kept)]
        self._emit_tops(slots, rows, *(found for pair in tops for found in self._top(*pair)))

    def _order(self, groups: Slots, rows: pa.StructArray) -> Slots:
        return self._spec.order.rows(groups, self._columns(rows, self._spec.order.columns))

    def _counted(self, owners: Slots, rows: pa.StructArray, steps: Signs) -> tuple[Mask, Mask]:
        return counted(owners, self._columns(rows, self._spec.identity), steps, keep="last")

    def _columns(self, rows: pa.StructArray, names: Sequence[str]) -> list[pa.Array]:
        columns = dict(zip([field.name for field in self._row], rows.flatten(), strict=True))
        return [columns[name] for name in names]

    def _taken(self, rows: pa.StructArray, taken: Slots) -> Columns:
        names = [field.name for field in self._row]
        return dict(zip(names, rows.take(pa.array(taken)).flatten(), strict=True))

    def _with_old_rows(
        self, places: Slots, arrived: pa.StructArray, steps: Signs
    ) -> tuple[Slots, pa.StructArray, Signs]:
        """Return upserts as changes: each row goes, if it is there, and its last one comes."""
        _, is_last = counted(
            places, self._columns(arrived, self._spec.identity), np.ones(len(places), np.int64), keep="one"
        )
        last = np.flatnonzero(is_last)
        chosen = np.concatenate([last, last[steps[last] > 0]])
        found = np.ones(len(chosen), np.int64)
        found[: len(last)] = -1
        return places[chosen], arrived.take(pa.array(chosen)), found

    def _with_rest(
        self,
        rest: ListColumns,
        slots: Slots,
        rows: pa.StructArray,
        groups: Slots,
        kept: Slots,
        unknown: Slots,
        old_count: int,
    ) -> tuple[pa.StructArray, Slots, Slots]:
        """Move rows between the first ones, which are ``kept`` in their order, and the rest of their keys.

        ``unknown`` are rows that go, and are not among those. Return rows, their groups, and the first ones.
        """
        lengths = rest.counts(slots)
        has_rest = lengths > 0
        ranks = group_ranks(groups[kept])
        last_old = np.full(len(slots), -1, np.int64)
        is_old = kept < old_count
        np.maximum.at(last_old, groups[kept[is_old]], ranks[is_old])
        is_first = ~has_rest[groups[kept]] | (ranks <= last_old[groups[kept]])
        beyond, kept = kept[~is_first], kept[is_first]
        counts = np.bincount(groups[kept], minlength=len(slots))
        is_moved = (counts > self._first_max)[groups[kept]] & (group_ranks(groups[kept]) >= self._first)
        moved, kept = kept[is_moved][::-1], kept[~is_moved]
        gone = unknown[has_rest[groups[unknown]]]
        changed = np.concatenate([gone, moved, np.sort(beyond)])
        steps = np.repeat(np.array([-1, _MOVED, 1], np.int8), [len(gone), len(moved), len(beyond)])
        if len(changed):
            self._append(rest, slots[groups[changed]], rows.take(pa.array(changed)), steps)
            owners, places = np.unique(groups[changed], return_inverse=True)
            sizes = np.bincount(places, weights=np.sign(steps)).astype(np.int64)
            self._rest_size.add(slots[owners], pa.array(sizes))
        np.add.at(lengths, groups[changed], 1)
        counts = np.bincount(groups[kept], minlength=len(slots))
        sizes = self._rest_size.get(slots).fill_null(0).to_numpy(zero_copy_only=False)
        is_due = (counts < self._spec.count) | (lengths > 2 * np.maximum(sizes, 0) + self._first_max)
        due = np.flatnonzero(is_due & (lengths > 0))
        return (rows, groups, kept) if len(due) == 0 else self._refilled(rest, slots, due, rows, groups, kept)

    def _refilled(
        self, rest: ListColumns, slots: Slots, due: Slots, rows: pa.StructArray, groups: Slots, kept: Slots
    ) -> tuple[pa.StructArray, Slots, Slots]:
        """Read the rest of the groups ``due``, and divide their rows again."""
        owners, changes = rest.explode(slots[due])
        values, steps = changes.flatten()
        steps = steps.to_numpy()
        _, stays = self._counted(owners, values, np.sign(steps).astype(np.int64))
        moved, others = np.flatnonzero(stays & (steps == _MOVED))[::-1], np.flatnonzero(stays & (steps != _MOVED))
        found = np.concatenate([moved, others])  # of equal rows those that were among the first come first
        is_due = np.zeros(len(slots), np.bool_)
        is_due[due] = True
        known = kept[is_due[groups[kept]]]
        values = values.take(pa.array(found)).cast(self._row)
        rows, groups = pa.concat_arrays([rows, values]), np.concatenate([groups, due[owners[found]]])
        candidates = np.concatenate([known, np.arange(len(rows) - len(found), len(rows))])
        candidates = candidates[self._order(groups[candidates], rows.take(pa.array(candidates)))]
        is_first = group_ranks(groups[candidates]) < self._first
        beyond = candidates[~is_first]
        rest.clear(slots[due])
        self._append(rest, slots[groups[beyond]], rows.take(pa.array(beyond)), np.ones(len(beyond), np.int8))
        sizes = np.bincount(groups[beyond], minlength=len(slots))[due]
        self._rest_size.put(slots[due[sizes > 0]], pa.array(sizes[sizes > 0]))
        self._rest_size.clear(slots[due[sizes == 0]])
        kept = np.concatenate([kept[~is_due[groups[kept]]], candidates[is_first]])
        return rows, groups, kept[np.argsort(groups[kept], kind="stable")]

    def _append(self, rest: ListColumns, slots: Slots, rows: pa.StructArray, steps: npt.NDArray[np.int8]) -> None:
        fields = list(self._spec.rest.type)
        rest.append(slots, pa.StructArray.from_arrays([rows, pa.array(steps, pa.int8())], fields=fields))

    def _store_first(self, slots: Slots, rows: pa.StructArray, groups: Slots, kept: Slots, before: Slots) -> None:
        """Set the first rows of the keys that have others now; with a TTL those of all, which live on."""
        lengths = np.bincount(groups[kept], minlength=len(slots))
        is_changed = (lengths != before) if self._spec.ttl is None else np.ones(len(slots), np.bool_)
        is_changed[groups[kept[kept >= before.sum()]]] = True
        stored = is_changed & (lengths > 0)
        if stored.any():
            ends = np.concatenate([[0], np.cumsum(lengths[stored])]).astype(np.int64)
            values = rows.take(pa.array(kept[stored[groups[kept]]]))
            dtype = self._spec.descriptor.type
            self._state.put(slots[stored], pa.LargeListArray.from_arrays(pa.array(ends), values, type=dtype))
        self._state.clear(slots[is_changed & (lengths == 0)])

    def _top(self, groups: Slots, kept: Slots) -> Sequence[Slots]:
        """Return the groups, ranks and rows of the first ``count`` rows of each group."""
        ranks = group_ranks(groups)
        chosen = ranks < self._spec.count
        return groups[chosen], ranks[chosen], kept[chosen]

    def _emit_tops(
        self,
        slots: Slots,
        rows: pa.StructArray,
        old_groups: Slots,
        old_ranks: Slots,
        old: Slots,
        groups: Slots,
        ranks: Slots,
        new: Slots,
    ) -> None:
        spec = self._spec
        if spec.rank is None and spec.count > 1:
            left, came = ~np.isin(old, new), ~np.isin(new, old)
            taken, places = np.concatenate([old[left], new[came]]), np.concatenate([old_groups[left], groups[came]])
            codes = np.full(len(taken), OPS.index(INSERT), np.int8)
            codes[: left.sum()] = OPS.index(DELETE)
            order = np.argsort(places, kind="stable")
            self._send(slots, self._taken(rows, taken[order]), places[order], codes[order], None)
            return
        old_codes, new_codes = old_groups * spec.count + old_ranks, groups * spec.count + ranks
        of_all = np.union1d(old_codes, new_codes)
        had, has = np.isin(of_all, old_codes), np.isin(of_all, new_codes)
        before, after = np.zeros((2, len(of_all)), np.int64)
        before[had], after[has] = old, new
        chosen, codes = change_rows(had, has, before != after, retractions=spec.retractions)
        places = chosen % len(of_all) if len(of_all) else chosen
        taken = np.concatenate([before, after])[chosen]
        shown = None if spec.rank is None else of_all[places] % spec.count
        self._send(slots, self._taken(rows, taken), of_all[places] // spec.count, codes, shown)
