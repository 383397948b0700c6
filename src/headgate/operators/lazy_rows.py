"""Rows whose columns are made when they are asked for: what is filtered out, or never read, is not copied.

Joins emit them. An operator that takes them says so (``Operator.takes_lazy_rows``); others get a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.arrays import Mask
from headgate.state.key_index import Slots


class RowSource(Protocol):
    """Rows that have columns (``state.heap.HeapRows``)."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Slots | Mask) -> RowSource: ...

    def column(self, name: str) -> pa.Array: ...


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Some rows of whole columns."""

    columns: Mapping[str, pa.Array]
    rows: Slots

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Slots | Mask) -> ChosenRows:
        return ChosenRows(self.columns, self.rows[rows])

    def column(self, name: str) -> pa.Array:
        """Return one column."""
        return self.columns[name].take(pa.array(self.rows))


@dataclass(frozen=True, slots=True)
class Part:
    """Columns of lazy rows: by their names, what they are called in ``source``."""

    names: Mapping[str, str]
    source: RowSource


class LazyRows:
    """Rows that look like a record batch, as far as operators need it. ``parts`` have the same number of rows."""

    def __init__(self, schema: pa.Schema, parts: Sequence[Part]) -> None:
        self.schema = schema
        self._parts = parts
        self._made: dict[str, pa.Array] = {}

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return len(self._parts[0].source)

    def column(self, name: str) -> pa.Array:
        """Return one column."""
        if name not in self._made:
            part = next(part for part in self._parts if name in part.names)
            self._made[name] = part.source.column(part.names[name])
        return self._made[name]

    def select(self, names: Sequence[str]) -> pa.RecordBatch:
        """Return some columns as a batch."""
        schema = pa.schema([self.schema.field(name) for name in names])
        return pa.RecordBatch.from_arrays([self.column(name) for name in names], schema=schema)

    def batch(self) -> pa.RecordBatch:
        """Return all columns as a batch."""
        return self.select(self.schema.names)

    def take(self, rows: pa.Array) -> LazyRows:
        """Return some rows."""
        return self._chosen(rows.to_numpy())

    def filter(self, mask: pa.Array) -> LazyRows:
        """Return the rows where ``mask`` is true; null counts as false."""
        return self._chosen(np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False)))

    def slice(self, start: int, length: int) -> LazyRows:
        """Return up to ``length`` rows from ``start`` on."""
        return self._chosen(np.arange(start, min(start + length, self.num_rows)))

    def _chosen(self, rows: Slots) -> LazyRows:
        return LazyRows(self.schema, [Part(part.names, part.source[rows]) for part in self._parts])


def as_batch(rows: pa.RecordBatch | LazyRows) -> pa.RecordBatch:
    """Return ``rows`` as a record batch."""
    return rows.batch() if isinstance(rows, LazyRows) else rows
