"""Which keys a database has: read whole, for those few who must know all of them (the end of a round, ST9)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import KeyColumns, StateKind
from headgate.state.rocksdb.database import Rows
from headgate.state.rocksdb.layout import PREFIX_BYTES, decode_columns, runs
from headgate.state.rocksdb.packed import PackedTable
from headgate.state.rocksdb.tables import Table
from headgate.state.rocksdb.values import expiries_of


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
    """Return what of each row is its key, without what an element or entry has behind it."""
    _, ends = decode_columns(rows, keys.types)
    return [row[PREFIX_BYTES:end] for row, end in zip(rows, ends, strict=True)]
