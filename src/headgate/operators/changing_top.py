"""The top rows of each key of a table that changes (docs/spec/changes.md).

Counterpart: ``top_rows``. Any row may come up when others go, so all rows of a key are kept: the first ones in order,
and the others in a list to which changes are appended. The list is only read when too few of the first ones are left,
or when most of it says nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.base import Operator, OperatorContext, Output, key_columns
from headgate.operators.changes import DELETE, INSERT, OP, OPS, Signs, signs
from headgate.operators.keyed_rows import change_rows, counted
from headgate.operators.row_order import group_ranks
from headgate.operators.schemas import require_columns
from headgate.operators.top_rows import Columns, TopOperator, TopSpec
from headgate.state.arrays import Mask
from headgate.state.backend import ListColumns, ValueColumns
from headgate.state.descriptors import StateDescriptor, StateKind, state_identity
from headgate.state.key_index import Slots

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
