"""Rows whose columns are made when they are asked for: what is filtered out, or never read, is not copied.

Joins, expressions and sources of encoded text emit them. An operator that takes them says so
(``Operator.takes_lazy_rows``); others get a batch. A text column may be *encoded*: a dictionary of its values, and for
each row the place of its value there. Operators that do not ask for that see ``large_string``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import polars as pl
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.operators.schemas import fitted
from headgate.state.arrays import Mask
from headgate.state.key_index import Slots


class RowSource(Protocol):
    """Rows that have columns (``state.heap.HeapRows``)."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Slots | Mask) -> RowSource: ...

    def column(self, name: str) -> pa.Array: ...


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Some rows of whole columns, of which there is at least one; ``rows`` None: all of them."""

    columns: Mapping[str, pa.Array]
    rows: Slots | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.rows is None else len(self.rows)

    def __getitem__(self, rows: Slots | Mask) -> ChosenRows:
        return ChosenRows(self.columns, _chosen(self.rows, rows))

    def column(self, name: str) -> pa.Array:
        """Return one column."""
        return decoded(self._taken(name))

    def encoded(self, name: str) -> pa.DictionaryArray | None:
        """Return one column as it is encoded; None: it is not."""
        return self._taken(name) if pa.types.is_dictionary(self.columns[name].type) else None

    def _taken(self, name: str) -> pa.Array:
        column = self.columns[name]
        return column if self.rows is None else column.take(pa.array(self.rows))


@dataclass(frozen=True, slots=True)
class SeriesRows:
    """Some rows of columns that Polars made; ``rows`` None: all of them."""

    frame: pl.DataFrame
    rows: Slots | None = None

    def __len__(self) -> int:
        return self.frame.height if self.rows is None else len(self.rows)

    def __getitem__(self, rows: Slots | Mask) -> SeriesRows:
        return SeriesRows(self.frame, _chosen(self.rows, rows))

    def series(self, name: str) -> pl.Series:
        """Return one column as Polars has it."""
        series = self.frame.get_column(name)
        return series if self.rows is None else series.gather(self.rows)

    def column(self, name: str) -> pa.Array:
        """Return one column."""
        return self.series(name).to_arrow(compat_level=pl.CompatLevel.oldest())


def _chosen(before: Slots | None, rows: Slots | Mask) -> Slots:
    """Return which rows are left of those in ``before``, None for all, of which ``rows`` are chosen."""
    places: Slots = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64, copy=False)
    return places if before is None else before[places]


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
            source, inner = self._place(name)
            self._made[name] = source.column(inner)
        return self._made[name]

    def encoded(self, name: str) -> pa.DictionaryArray | None:
        """Return one column as it is encoded; None: it is not."""
        source, inner = self._place(name)
        return source.encoded(inner) if isinstance(source, ChosenRows) else None

    def series(self, name: str) -> pl.Series | None:
        """Return one column that Polars made; None: it did not."""
        source, inner = self._place(name)
        return source.series(inner) if isinstance(source, SeriesRows) else None

    def _place(self, name: str) -> tuple[RowSource, str]:
        part = next(part for part in self._parts if name in part.names)
        return part.source, part.names[name]

    def parts(self, names: Mapping[str, str]) -> list[Part]:
        """Return parts with some columns of these rows: by their new names, what they are called here."""
        found: list[Part] = []
        for part in self._parts:
            own = {new: part.names[name] for new, name in names.items() if name in part.names}
            if own:
                found.append(Part(own, part.source))
        return found

    def without_series(self) -> LazyRows:
        """Return these rows with what Polars made in the types of the schema.

        Raises:
            MisfitError: a value does not fit.
        """
        parts: list[Part] = []
        for part in self._parts:
            if isinstance(part.source, SeriesRows):
                made = {
                    name: fitted(part.source.column(inner), self.schema.field(name).type, name)
                    for name, inner in part.names.items()
                }
                part = Part({name: name for name in made}, ChosenRows(made))
            parts.append(part)
        return LazyRows(self.schema, parts)

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


def decoded(column: pa.Array) -> pa.Array:
    """Return a column that may be encoded as it is without."""
    return column.dictionary.take(column.indices) if pa.types.is_dictionary(column.type) else column


def as_lazy(rows: pa.RecordBatch | LazyRows) -> LazyRows:
    """Return ``rows``, which have at least one column, as lazy rows."""
    if isinstance(rows, LazyRows):
        return rows
    schema = rows.schema
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema
    ]
    columns = dict(zip(schema.names, rows.columns, strict=True))
    return LazyRows(pa.schema(fields), [Part({name: name for name in columns}, ChosenRows(columns))])


def with_encoded_text(batch: pa.RecordBatch) -> pa.RecordBatch | LazyRows:
    """Return what a source has read; as lazy rows if any of its columns is encoded."""
    return as_lazy(batch) if any(pa.types.is_dictionary(dtype) for dtype in batch.schema.types) else batch
