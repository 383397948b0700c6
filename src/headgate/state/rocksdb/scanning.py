"""Which keys a database has: read whole, for those few who must know all of them (the end of a round, ST9)."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headgate.state.descriptors import KeyColumns, StateKind
from headgate.state.rocksdb.database import Rows
from headgate.state.rocksdb.layout import PREFIX_BYTES, decode_columns, runs
from headgate.state.rocksdb.tables import Table


def distinct_keys(rows: Rows, tables: Sequence[Table], keys: KeyColumns) -> list[pa.Array]:
    """Return the columns of the keys that have a row in any of ``tables``, each once, those of a key group together."""
    wanted = {table.number + (0 if table.kind is StateKind.VALUE else 1) for table in tables}
    found: dict[bytes, None] = {}
    for scanned, _ in rows.scan(b"", None):
        for number, start, end in runs(scanned):
            if number in wanted:  # of a list or map, its head
                found.update(dict.fromkeys([row[PREFIX_BYTES:] for row in scanned[start:end]]))
    return decode_columns(list(found), keys.types, 0)[0]
