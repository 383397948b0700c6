"""Values of several states of one key in one row: one look-up instead of one for each state (RB27).

Packed are values of a fixed width that do not expire, if there are at least two of them. A row says in its first bytes,
a bit each, which of the states have a value, and holds a place for the value of each. A key that has none of them has
no row. Counterparts: ``tables``, whose other tables have a row for each state of a key, and ``cached_pack``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.state.columns import is_fixed, storage_type, to_arrow, to_numpy
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.key_index import make_key_index
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.layout import encoded_keys
from headgate.state.rocksdb.tables import Table, put_or_delete
from headgate.state.slot_array import Mask

Values: TypeAlias = tuple[Mask, pa.Array]
"""Which of some keys have a value of one state, and the values of those."""

_HAS = "has"
_MEMBERS_MIN = 2


@dataclass(frozen=True)
class PackedTable:
    """The table of several states, ``members``, in the order of their places in a row."""

    members: tuple[Table, ...]
    ttl: None = None

    @property
    def number(self) -> int:
        """Of the table: that which its first member would have."""
        return self.members[0].number

    @property
    def kind(self) -> StateKind:
        """A row per key, as a table of values has."""
        return StateKind.VALUE

    def encode(self, members: Sequence[Values]) -> tuple[Mask, list[bytes]]:
        """Return which keys have a row, and these rows. ``members``: what the keys have of each."""
        rows = np.zeros(len(members[0][0]), _layout(self._types))
        has = np.column_stack([has for has, _ in members])
        rows[_HAS] = np.packbits(has, axis=1, bitorder="little")
        for place, (of_member, values) in enumerate(members):
            rows[str(place)][of_member] = to_numpy(values)
        is_there = np.asarray(has.any(axis=1))
        found: list[bytes] = rows[is_there].view(f"V{rows.dtype.itemsize}").tolist()
        return is_there, found

    def decode(self, values: Sequence[bytes]) -> list[Values]:
        """Return what ``values`` of rows hold of each member."""
        rows = np.frombuffer(b"".join(values), _layout(self._types))
        return [
            (has, to_arrow(rows[str(place)][has], member.dtype))
            for place, (member, has) in enumerate(zip(self.members, self._has(rows), strict=True))
        ]

    def counts(self, values: Sequence[bytes]) -> list[int]:
        """Return how many of ``values`` of rows hold a value of each member."""
        rows = np.frombuffer(b"".join(values), _layout(self._types))
        return [int(has.sum()) for has in self._has(rows)]

    def batches(self, rows: Sequence[bytes], values: Sequence[bytes], now_ms: int) -> Iterator[pa.RecordBatch]:
        """Yield rows of the database as rows of the section of each member."""
        for member, (has, column) in zip(self.members, self.decode(values), strict=True):
            there = [row for row, is_there in zip(rows, has.tolist(), strict=True) if is_there]
            yield member.batch_of(there, column, now_ms)

    @property
    def _types(self) -> tuple[pa.DataType, ...]:
        return tuple(member.dtype for member in self.members)

    def _has(self, rows: np.ndarray[Any, Any]) -> list[Mask]:
        has = np.unpackbits(rows[_HAS], axis=1, count=len(self.members), bitorder="little").astype(np.bool_)
        return list(has.T)


def packed(tables: Mapping[StateDescriptor, Table]) -> tuple[StateDescriptor, ...]:
    """Return the states among ``tables`` that share a row, in the order of their places: at least two, or none."""
    found = sorted(
        (
            one
            for one, table in tables.items()
            if one.kind is StateKind.VALUE and one.ttl is None and is_fixed(one.type)
        ),
        key=lambda one: tables[one].number,
    )
    return tuple(found) if len(found) >= _MEMBERS_MIN else ()


@lru_cache
def _layout(types: tuple[pa.DataType, ...]) -> np.dtype[Any]:
    """Return the bytes of a row: a bit for each member, then a place for each, with nothing between them."""
    places = [(str(place), storage_type(dtype).newbyteorder("<")) for place, dtype in enumerate(types)]
    return np.dtype([(_HAS, np.uint8, (-(-len(types) // 8),)), *places])


def restore_packed(
    table: PackedTable,
    database: Database,
    keys: KeyColumns,
    max_parallelism: int,
    found: Sequence[Sequence[pa.RecordBatch]],
) -> None:
    """Add rows of the section of each member. A key that has a row keeps what it has of the others."""
    index = make_key_index(keys.types)
    width = len(keys.types)
    numbered = [[index.slots(batch.columns[:width]) for batch in batches] for batches in found]
    if not len(index):
        return
    encoded = encoded_keys(index.columns(np.arange(len(index))), keys, max_parallelism)
    rows = encoded.in_table(table.number)
    stored = database.get(rows)
    there = np.flatnonzero([value is not None for value in stored])
    members: list[Values] = []
    before = table.decode([value for value in stored if value is not None])
    for member, (had, values), slots, batches in zip(table.members, before, numbered, found, strict=True):
        has = np.zeros(len(index), np.bool_)
        numbers = np.zeros(len(index), storage_type(member.dtype))
        for some, column in [(there[had], values), *zip(slots, [batch.columns[-1] for batch in batches], strict=True)]:
            has[some], numbers[some] = True, to_numpy(column)
        members.append((has, to_arrow(numbers[has], member.dtype)))
    changes = Changes()
    put_or_delete(changes, rows, *table.encode(members))
    database.write(changes)
