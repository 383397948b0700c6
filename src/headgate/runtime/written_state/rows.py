"""Rows as the state of subtasks: dealt out by the hash of their keys, frozen, and written as snapshots are (WS6).

Counterparts: ``columns``, which checks rows; ``runtime.checkpoints.targets``, which has frozen state write itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from headgate.runtime.stored_state.shapes import Shape
from headgate.state.frozen import FrozenState, SnapshotTarget
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.keyed import KeyedState, Rows

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
    """Return which subtask owns the key of each row (KG7, KG8)."""
    groups = key_groups(hash_columns(rows, shape.keys), max_parallelism)
    return groups * parallelism // max_parallelism


def dealt_out(rows: pa.RecordBatch, owners: np.ndarray, parallelism: int) -> OwnedRows:
    """Return ``rows`` by their owners."""
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
