"""What the rows of a database mean: each state has a table, and its rows are those of its section (RB1, ST3).

A table of values has a row per key. One of lists or maps has a row per element or entry, and a *head* in the table
behind it with their number: most keys that are looked up have nothing, and a head can be looked up without a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import KeyColumns, Section, StateDescriptor, StateKind, section_of
from headgate.state.key_index import Slots
from headgate.state.rocksdb.database import Changes, Rows
from headgate.state.rocksdb.layout import EncodedKeys, decode_columns
from headgate.state.rocksdb.values import ValueCodec, timed, timed_codec, value_codec
from headgate.state.slot_array import Mask
from headgate.state.ttl import TTL

_HEAD = value_codec(pa.int64())


@dataclass(frozen=True)
class Table:
    """The table of one section.

    Attributes:
        number: of the table; that of its heads is one more.
        section: what its rows are in a snapshot.
        outer: types of the columns in front of the value, which are in the row's own bytes.
        dtype: of the value: all columns of the section, if it is a record.
        ttl: of the state. If it has one, values are in columns with their expiries (``values.timed``).
    """

    number: int
    section: Section
    kind: StateKind
    outer: tuple[pa.DataType, ...]
    dtype: pa.DataType
    is_record: bool = False
    ttl: TTL | None = None

    @property
    def codec(self) -> ValueCodec:
        """How values are stored."""
        return value_codec(self.dtype) if self.ttl is None else timed_codec(self.dtype)

    def batch(self, rows: Sequence[bytes], values: Sequence[bytes], now_ms: int) -> pa.RecordBatch:
        """Return rows of the database as rows of the section, without what has expired (TL6)."""
        return self.batch_of(rows, self.codec.decode(values), now_ms)

    def batch_of(self, rows: Sequence[bytes], stored: pa.Array, now_ms: int) -> pa.RecordBatch:
        """Return the same, of values that are decoded."""
        if self.is_record:
            return pa.RecordBatch.from_arrays(stored.flatten(), schema=self.section.schema)
        columns, _ = decode_columns(rows, self.outer)
        if self.ttl is None:
            return pa.RecordBatch.from_arrays([*columns, stored], schema=self.section.schema)
        return self.living(
            pa.RecordBatch.from_arrays([*columns, *stored.flatten()], schema=self.section.schema), now_ms
        )

    def living(self, batch: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        """Return the rows of the section that have not expired."""
        if self.ttl is None:
            return batch
        is_live = batch.columns[-1].to_numpy() > now_ms
        return batch if is_live.all() else batch.filter(pa.array(is_live))

    def stored(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the values of rows of the section, as ``codec`` takes them."""
        if self.is_record:
            return pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
        return batch.columns[-1] if self.ttl is None else timed(*batch.columns[-2:])


def tables_of(keys: KeyColumns, descriptors: Sequence[StateDescriptor]) -> dict[StateDescriptor, Table]:
    """Return the table of each declared state. Their numbers do not depend on the order of declaration."""
    return {
        descriptor: Table(
            2 * place,
            section_of(keys, descriptor),
            descriptor.kind,
            (*keys.types, *([descriptor.key_type] if descriptor.kind is StateKind.MAP else [])),
            descriptor.type,
            ttl=descriptor.ttl,
        )
        for place, descriptor in enumerate(sorted(descriptors, key=lambda descriptor: descriptor.name))
    }


def record_table(section: Section) -> Table:
    """Return the table of one record per key."""
    types = tuple(section.schema.field(name).type for name in section.key_names)
    return Table(0, section, StateKind.VALUE, types, pa.struct(list(section.schema)), is_record=True)


def load_values(table: Table, rows: Rows, keys: EncodedKeys) -> tuple[Mask, pa.Array]:
    """Return which keys have a value, and the values."""
    found = rows.get(keys.in_table(table.number))
    has = np.array([value is not None for value in found], np.bool_)
    return has, table.codec.decode([value for value in found if value is not None])


def store_values(table: Table, changes: Changes, keys: EncodedKeys, has: Mask, values: pa.Array) -> None:
    """Set the values of the keys that ``has`` says, and remove those of the others."""
    put_or_delete(changes, keys.in_table(table.number), has, table.codec.encode(values))


def put_or_delete(changes: Changes, rows: Sequence[bytes], has: Mask, values: Sequence[bytes]) -> None:
    """Set those of ``rows`` that ``has`` says to ``values``, of which there are as many, and remove the others."""
    if has.all():
        changes.put(rows, values)
        return
    wanted = has.tolist()
    changes.put([row for row, is_there in zip(rows, wanted, strict=True) if is_there], values)
    changes.delete([row for row, is_there in zip(rows, wanted, strict=True) if not is_there])


@dataclass(frozen=True, slots=True)
class Entries:
    """Elements or entries of some keys, those of one key after those of another.

    Attributes:
        counts: how many of each key.
        suffixes: of the row of each.
        values: of each.
    """

    counts: Slots
    suffixes: list[bytes]
    values: pa.Array


def load_counts(table: Table, rows: Rows, keys: EncodedKeys) -> Slots:
    """Return how many elements or entries each key has."""
    heads = rows.get(keys.in_table(table.number + 1))
    counts = np.zeros(len(heads), np.int64)
    has = [at for at, head in enumerate(heads) if head is not None]
    counts[has] = _HEAD.decode([head for head in heads if head is not None]).to_numpy()
    return counts


def load_entries(table: Table, rows: Rows, keys: EncodedKeys) -> Entries:
    """Return everything that ``keys`` have."""
    counts = load_counts(table, rows, keys)
    found = counts.tolist()
    prefixes = [(row, count) for row, count in zip(keys.in_table(table.number), found, strict=True) if count]
    lengths = [len(row) for row, count in prefixes for _ in range(count)]
    pairs = list(rows.of_keys([row for row, _ in prefixes], [count for _, count in prefixes]))
    suffixes = [row[length:] for (row, _), length in zip(pairs, lengths, strict=True)]
    return Entries(counts, suffixes, table.codec.decode([value for _, value in pairs]))


def store_heads(table: Table, changes: Changes, keys: EncodedKeys, counts: Slots) -> None:
    """Say how many elements or entries each key has now."""
    has = counts > 0
    put_or_delete(changes, keys.in_table(table.number + 1), has, _HEAD.encode(pa.array(counts[has])))


def entry_rows(table: Table, keys: EncodedKeys, key_numbers: Sequence[int], suffixes: Sequence[bytes]) -> list[bytes]:
    """Return the rows of entries: of which key each is, and its suffix."""
    prefixes = keys.in_table(table.number)
    return [prefixes[number] + suffix for number, suffix in zip(key_numbers, suffixes, strict=True)]
