"""What the rows of a database mean: each state has a table, and its rows are those of its section.

A table of values has a row per key. One of lists or maps has a row per element or entry, and a *head* in the table
after it with their number: most keys that are looked up have nothing, and a head can be looked up without a search.
Values of a fixed width that do not expire share one packed row per key if there are at least two such states: one
look-up instead of one for each. Its first bytes say, a bit each, which of the states have a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.descriptors import KeyColumns, Section, StateDescriptor, StateKind, section_of
from headgate.state.key_index import Slots, make_key_index
from headgate.state.rocksdb.database import Changes, Database, Rows
from headgate.state.rocksdb.row_encoding import (
    PREFIX_BYTES,
    EncodedKeys,
    ValueCodec,
    decode_columns,
    disk_order,
    encode_columns,
    encoded_keys,
    expiries_of,
    places_of,
    runs,
    timed,
    timed_codec,
    value_codec,
)
from headgate.state.ttl import TTL
from headgate.state.values import Mask, is_fixed, storage_type, to_arrow, to_numpy

_HEAD = value_codec(pa.int64())

TABLES_MAX = 0xFFFE
"""Tables of states and of their heads have smaller numbers; this one and the next are for timers."""


@dataclass(frozen=True)
class Table:
    """The table of one section.

    Attributes:
        number: of the table; that of its heads is one more.
        section: what its rows are in a snapshot.
        outer: types of the columns in front of the value, which are in the row's own bytes.
        dtype: of the value: all columns of the section, if it is a record.
        ttl: of the state. If it has one, values are in columns with their expiries (``row_encoding.timed``).
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
        """Return rows of the database as rows of the section, without what has expired."""
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
    assert 2 * len(descriptors) < TABLES_MAX, "the numbers of the tables of timers come after those of all states"
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


MemberValues: TypeAlias = tuple[Mask, pa.Array]
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

    def encode(self, members: Sequence[MemberValues]) -> tuple[Mask, list[bytes]]:
        """Return which keys have a row, and these rows. ``members``: what the keys have of each."""
        rows = np.zeros(len(members[0][0]), _packed_dtype(self._types))
        has = np.column_stack([has for has, _ in members])
        rows[_HAS] = np.packbits(has, axis=1, bitorder="little")
        for place, (of_member, values) in enumerate(members):
            rows[str(place)][of_member] = to_numpy(values)
        is_there = np.asarray(has.any(axis=1))
        found: list[bytes] = rows[is_there].view(f"V{rows.dtype.itemsize}").tolist()
        return is_there, found

    def decode(self, values: Sequence[bytes]) -> list[MemberValues]:
        """Return what ``values`` of rows hold of each member."""
        rows = np.frombuffer(b"".join(values), _packed_dtype(self._types))
        return [
            (has, to_arrow(rows[str(place)][has], member.dtype))
            for place, (member, has) in enumerate(zip(self.members, self._has(rows), strict=True))
        ]

    def counts(self, values: Sequence[bytes]) -> list[int]:
        """Return how many of ``values`` of rows hold a value of each member."""
        rows = np.frombuffer(b"".join(values), _packed_dtype(self._types))
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


def packed_states(tables: Mapping[StateDescriptor, Table]) -> tuple[StateDescriptor, ...]:
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
def _packed_dtype(types: tuple[pa.DataType, ...]) -> np.dtype[Any]:
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
    # a part restored before may have had these keys, with values of other states
    there = np.flatnonzero([value is not None for value in stored])
    members: list[MemberValues] = []
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


def restore_rows(
    table: Table, database: Database, keys: KeyColumns, max_parallelism: int, batch: pa.RecordBatch
) -> None:
    """Add rows of the table's section. Elements of a list go after those that are there."""
    changes = Changes()
    if table.kind is StateKind.VALUE:
        names = table.section.key_names
        batch = batch.take(pa.array(disk_order([batch.column(name) for name in names], keys, max_parallelism)))
        columns = [batch.column(name) for name in names]
        has = np.ones(batch.num_rows, np.bool_)
        store_values(table, changes, encoded_keys(columns, keys, max_parallelism), has, table.stored(batch))
        database.write(changes)
        return
    width = len(keys.names)
    index = make_key_index(keys.types)
    numbers = index.slots(batch.columns[:width])
    encoded = encoded_keys(index.columns(np.arange(len(index))), keys, max_parallelism)
    # a part restored before may have had these keys: elements go after theirs, and heads count both
    counts = load_counts(table, database, encoded)
    if table.kind is StateKind.LIST:
        suffixes = places_of(_place_in_key(numbers) + counts[numbers])
    else:
        suffixes = encode_columns([batch.column(width)])
    rows = entry_rows(table, encoded, numbers.tolist(), suffixes)
    changes.put(rows, table.codec.encode(table.stored(batch)))
    store_heads(table, changes, encoded, counts + np.bincount(numbers, minlength=len(counts)))
    database.write(changes)


def _place_in_key(numbers: np.ndarray) -> np.ndarray:
    """Return, for each row, how many rows of its key come before it."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    starts = np.repeat(firsts, np.diff(firsts, append=len(ordered)))
    found = np.empty(len(numbers), np.int64)
    found[order] = np.arange(len(numbers)) - starts
    return found


def distinct_keys(rows: Rows, tables: Sequence[Table | PackedTable], keys: KeyColumns, now_ms: int) -> list[pa.Array]:
    """Return the columns of the keys that have a row in any of ``tables``, each once, those of a key group together.

    A row that has expired is none.
    """
    lasting = {t.number + (0 if t.kind is StateKind.VALUE else 1) for t in tables if t.ttl is None}
    expiring = {table.number for table in tables if table.ttl is not None}
    found: dict[bytes, None] = {}
    for scanned, values in rows.scan(b"", None):
        for number, start, end in runs(scanned):
            if number in lasting:  # of a list or map, its head
                found.update(dict.fromkeys([row[PREFIX_BYTES:] for row in scanned[start:end]]))
            elif number in expiring:
                living = np.flatnonzero(expiries_of(values[start:end]) > now_ms) + start
                found.update(dict.fromkeys(_keys([scanned[at] for at in living.tolist()], keys)))
    return decode_columns(list(found), keys.types, 0)[0]


def _keys(rows: Sequence[bytes], keys: KeyColumns) -> list[bytes]:
    """Return what of each row is its key, without the suffix of an element or entry."""
    _, ends = decode_columns(rows, keys.types)
    return [row[PREFIX_BYTES:end] for row, end in zip(rows, ends, strict=True)]
