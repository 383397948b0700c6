"""Windows with a trigger of the user: each record says what becomes of its window after it (``window_trigger``).

They are kept as other windows that end by themselves (``triggered_windows``). A window that has a place in event time
has its bounds in the key.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.aggregates import stable
from headgate.operators.base import Operator
from headgate.operators.keys import check_keys
from headgate.operators.timestamps import EventTime
from headgate.operators.windows.aligned_windows import kept_columns
from headgate.operators.windows.assigned_windows import BOUNDS
from headgate.operators.windows.partial_sessions import merged
from headgate.operators.windows.triggered_windows import (
    Firing,
    TriggeredWindowOperator,
    TriggeredWindowSpec,
    joined,
    moments,
    table_at,
    values_of,
)
from headgate.operators.windows.window_assigner import AlignedWindows, tumbling
from headgate.operators.windows.window_plan import (
    Emission,
    WindowedAggregate,
    WindowShape,
    aggregated_schema,
    decompose,
)
from headgate.operators.windows.window_trigger import COMMAND, FIRE, FIRE_IF_NEW, IS_NO_RECORD, PURGE
from headgate.state.arrays import Mask
from headgate.state.key_index import Slots
from headgate.state.window_aggregates import AggTable, FrozenTable


@dataclass(frozen=True)
class CommandedWindowSpec(TriggeredWindowSpec):
    """Keep windows, and do with each what its records say.

    Attributes:
        windows: in which event time is divided, with the bounds at the end of the keys; None: global ones.
        lateness_ms: for so much longer than its end a window takes records.
    """

    windows: AlignedWindows | None = None
    lateness_ms: int = 0

    def build(self) -> Operator:
        """See ``OperatorSpec``."""
        return CommandedWindowOperator(self)

    @property
    def output_delay_ms(self) -> int:
        """By how much ``window_start`` may be earlier than the watermark."""
        return 0 if self.windows is None else self.windows.span_ms + self.lateness_ms

    @property
    def result_windows(self) -> AlignedWindows | None:
        """The windows of results, which have their start as event time."""
        return self.windows

    def _kind_text(self) -> str:
        return f"by commands, {'global' if self.windows is None else self.windows.text}"


class CommandedWindowOperator(TriggeredWindowOperator):
    """Has the windows' content."""

    _spec: CommandedWindowSpec

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``. Adds a batch to the windows, and does with each what its records say.

        What is between two commands to a window is a *part*, what is between two purges of it a *stretch*.
        """
        self._begin_call()
        self._backend.prepare()
        slots = self._backend.slots([batch.column(key) for key in self._shape.keys])
        known, of = np.unique(slots, return_inverse=True)
        order = np.argsort(of, kind="stable")
        of, commands = of[order], batch.column(COMMAND).to_numpy()[order]
        parts = _parts(of, (commands & (FIRE | PURGE | FIRE_IF_NEW)) != 0)
        stretches = _parts(of, (commands & PURGE) != 0)
        records = np.flatnonzero((commands & IS_NO_RECORD) == 0)
        taken = batch.take(pa.array(order[records]))
        _, values = self._read(taken)
        ones = np.ones(len(records), np.int64)
        added = merged(self._accumulators, len(parts.slots), parts.of[records], ones, values)
        stored = self._stored(known)
        first_stretch = np.flatnonzero(stretches.rank == 0)
        table, since = AggTable(self._accumulators), stored.since
        table.update(len(stretches.slots), first_stretch[stored.there], stored.rows, stored.values)
        stretch, command = stretches.of[parts.last], commands[parts.last]
        tables: list[FrozenTable] = []
        fired: list[Slots] = []
        for rank in range(int(parts.rank.max()) + 1):
            at = np.flatnonzero(parts.rank == rank)
            slots, some = parts.slots[at], table_at(added, at)
            table.update(len(stretches.slots), stretch[at], some.rows, values_of(some))
            since[slots] += some.rows
            is_new = ((command[at] & FIRE_IF_NEW) != 0) & (since[slots] > 0)
            held = table.take(stretch[at])
            fires = (((command[at] & FIRE) != 0) | is_new) & (held.rows > 0)
            tables.append(table_at(held, np.flatnonzero(fires)))
            fired.append(at[fires])
            since[slots[fires | ((command[at] & PURGE) != 0)]] = 0
        emitted, at = joined(tables), np.concatenate(fired)
        in_order = np.argsort(order[parts.last[at]])
        at = at[in_order]
        if self._lists is None:
            self._emit(known[parts.slots[at]], table_at(emitted, in_order), None)
        else:
            kept = _Kept(self._elements(taken), records, stretches, stretches.rank[stretch[at]] == 0)
            self._emit_kept(known, parts.slots[at], stretch[at], parts.last[at], kept)
        self._keep_stretches(known, stretches, commands, table, since, taken, records)

    def _emit_kept(self, known: Slots, slots: Slots, stretch: Slots, last: Slots, kept: _Kept) -> None:
        """Emit windows of which records are kept; ``last``: the row after which each fires."""
        if len(slots) == 0:
            return
        assert self._lists is not None
        begins = np.searchsorted(kept.records, kept.stretches.begins[stretch])
        counts = np.searchsorted(kept.records, last, side="right") - begins
        new = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        groups = [np.repeat(np.arange(len(slots)), counts)]
        elements = [kept.elements.take(pa.array(new))]
        before = np.flatnonzero(kept.is_first)
        if len(before):
            hit, place = np.unique(slots[before], return_inverse=True)
            rows, held = self._lists.explode(known[hit])
            lengths = np.bincount(rows, minlength=len(hit))
            firsts, counts = (np.cumsum(lengths) - lengths)[place], lengths[place]
            old = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
            groups.insert(0, np.repeat(before, counts))
            elements.insert(0, held.take(pa.array(old)))
        self._emit_records(known[slots], np.concatenate(groups), pa.concat_arrays(elements), None)

    def _keep_stretches(
        self,
        known: Slots,
        stretches: _Parts,
        commands: npt.NDArray[np.int8],
        table: AggTable,
        since: npt.NDArray[np.int64],
        taken: pa.RecordBatch,
        records: Slots,
    ) -> None:
        """Store the last stretch of each window, unless it ended with a purge."""
        last = np.append(np.flatnonzero(stretches.rank == 0)[1:], len(stretches.slots)) - 1
        is_purged = (commands[stretches.last[last]] & PURGE) != 0
        held = table.take(last)
        stays = np.flatnonzero(~is_purged & (held.rows > 0))
        self._values.clear(known[is_purged])
        self._put(known[stays], np.zeros(len(stays), np.int64), since[stays], table_at(held, stays))
        if self._lists is not None:
            self._lists.clear(known[is_purged | (stretches.rank[last] > 0)])
            is_kept = np.zeros(len(stretches.slots), np.bool_)
            is_kept[last[stays]] = True
            chosen = is_kept[stretches.of[records]]
            slots = known[stretches.slots[stretches.of[records]][chosen]]
            self._lists.append(slots, self._elements(taken).filter(pa.array(chosen)))

    def _key_columns(self, slots: Slots) -> list[pa.Array]:
        keys = super()._key_columns(slots)
        if self._spec.windows is not None:
            keys[-2:] = [moments(bound.to_numpy()) for bound in keys[-2:]]
        return keys


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a batch that is ordered by key.

    Attributes:
        of: the number of each row's part.
        slots: the key of each part.
        begins: its first row.
        last: its last row.
        rank: how many parts of its key come before it.
    """

    of: Slots
    slots: Slots
    begins: Slots
    last: Slots
    rank: Slots


def _parts(of: Slots, ends: Mask) -> _Parts:
    """Cut rows that are ordered by key, ``of``, after each one that ends a part."""
    begins = np.ones(len(of), np.bool_)
    begins[1:] = (of[1:] != of[:-1]) | ends[:-1]
    at = np.flatnonzero(begins)
    slots = of[at]
    is_first = np.ones(len(at), np.bool_)
    is_first[1:] = slots[1:] != slots[:-1]
    firsts = np.flatnonzero(is_first)
    rank = np.arange(len(at)) - np.repeat(firsts, np.diff(firsts, append=len(at)))
    return _Parts(np.cumsum(begins) - 1, slots, at, np.append(at[1:], len(of)) - 1, rank)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The records of a batch that is ordered by key.

    Attributes:
        elements: what is kept of each.
        records: their rows, ascending; the other rows are none.
        stretches: see ``CommandedWindowOperator.process``.
        is_first: of the windows that fire, whether no purge has come before in this batch.
    """

    elements: pa.Array
    records: Slots
    stretches: _Parts
    is_first: Mask


def commanded_window(
    node: str,
    keys: tuple[str, ...],
    aggregates: tuple[pl.Expr, ...],
    schema: pa.Schema,
    *,
    windows: AlignedWindows | None,
    lateness_ms: int,
    fires_at_end: bool,
) -> CommandedWindowSpec:
    """Return what computes ``aggregates`` over windows with a trigger of the user.

    Args:
        node: the name of the operator.
        keys: of the user's stream.
        aggregates: what is computed.
        schema: of the records, without their windows.
        windows: see ``CommandedWindowSpec``.
        lateness_ms: see ``CommandedWindowSpec``.
        fires_at_end: see ``Firing``.

    Raises:
        UsageError: unknown column, wrong type, or colliding names.
    """
    check_keys(node, schema, keys)
    output = aggregated_schema(node, schema, keys, aggregates, has_bounds=windows is not None)
    own = keys if windows is None else (*keys, *BOUNDS)
    records = schema if windows is None else pa.schema([*schema, *((name, pa.int64()) for name in BOUNDS)])
    types = tuple(records.field(key).type for key in own)
    shape = WindowShape(own, types, EventTime("", 1, 1), tumbling(1), output, Emission())
    aggregate = WindowedAggregate(own, "", tumbling(1), aggregates)
    plan, kept = decompose(aggregate, shape, schema), kept_columns(aggregate, shape, records)
    return CommandedWindowSpec(
        shape,
        Firing(discards=False, fires_at_end=fires_at_end),
        plan,
        is_combined=False,
        aggregates=tuple(map(stable, aggregates)),
        kept=kept,
        time=None,
        windows=windows,
        lateness_ms=lateness_ms,
    )
