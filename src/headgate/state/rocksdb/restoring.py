"""Rows of a former snapshot, whoever wrote it, go straight to the database (ST4)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import KeyColumns, StateKind
from headgate.state.key_index import make_key_index
from headgate.state.rocksdb.database import Changes, Database
from headgate.state.rocksdb.layout import disk_order, encode_columns, encoded_keys, places_of
from headgate.state.rocksdb.tables import Table, entry_rows, load_counts, store_heads, store_values


def restore_rows(
    table: Table, database: Database, keys: KeyColumns, max_parallelism: int, batch: pa.RecordBatch
) -> None:
    """Add rows of the table's section. Elements of a list go behind those that are there."""
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
