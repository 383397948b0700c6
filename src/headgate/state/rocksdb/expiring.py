"""What has expired in a database: found by going round through its rows; what a restore does to it (RB10, TL7, TL8).

Nothing here removes a row: keys of which something has expired come into the cache in front, which drops it as state in
memory does, and writes that back. So there is one place that knows what a key has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from headgate.state.descriptors import KeyColumns
from headgate.state.rocksdb.database import Changes, Database, Rows
from headgate.state.rocksdb.described import AnyTable, sections_of
from headgate.state.rocksdb.layout import decode_columns, runs
from headgate.state.rocksdb.tables import Table
from headgate.state.rocksdb.values import expiries_of, expiring_at
from headgate.state.ttl import TTL, StateTime

SWEEP_ROWS = 512
"""So many rows are looked at in a turn, two more for each that was written since: a round ends before they doubled."""


class ExpiringTables:
    """The tables of one database whose rows expire."""

    def __init__(self, database: Database, keys: KeyColumns, tables: Sequence[Table], time: StateTime) -> None:
        self._database = database
        self._keys = keys
        self._ttls: dict[int, tuple[Table, TTL]] = {t.number: (t, t.ttl) for t in tables if t.ttl is not None}
        self._time = time
        self._at = b""
        self._written = 0
        self._latest_ms = dict.fromkeys(self._ttls, self._time.now_ms)
        """When the last of what was restored expires."""

    def sweep(self) -> Iterator[tuple[Table, list[pa.Array]]]:
        """Look at some rows; yield the keys, by table, of those that have expired, perhaps more than once."""
        if not self._ttls:
            return
        written, self._written = self._written, self._database.rows_written
        count = SWEEP_ROWS + 2 * (self._written - written)
        rows, values = self._database.some(self._at, count)
        self._at = rows[-1] + b"\0" if len(rows) == count else b""
        for number, start, end in runs(rows) if rows else ():
            if number in self._ttls:
                expired = np.flatnonzero(expiries_of(values[start:end]) <= self._time.now_ms) + start
                if len(expired):
                    found = [rows[at] for at in expired.tolist()]
                    yield self._ttls[number][0], decode_columns(found, self._keys.types)[0]

    def restored(self, table: Table, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return what is to be kept of rows that are restored, and take note of them."""
        if table.ttl is not None:
            batch = table.living(batch, self._time.now_ms)
            latest_ms = batch.columns[-1].to_numpy().max(initial=self._latest_ms[table.number])
            self._latest_ms[table.number] = int(latest_ms)
        return batch

    def go_on_with(self, latest_ms: Mapping[int, int]) -> None:
        """The database has rows now, of which the last ones of each table expire at ``latest_ms`` at the latest."""
        for number, found_ms in latest_ms.items():
            self._latest_ms[number] = max(self._latest_ms[number], found_ms)

    def end_restore(self) -> None:
        """Nothing lives longer than its TTL from now on (TL7). Reads the database only if something would."""
        limits = {number: self._time.now_ms + ttl.duration_ms for number, (_, ttl) in self._ttls.items()}
        limits = {number: limit_ms for number, limit_ms in limits.items() if self._latest_ms[number] > limit_ms}
        if not limits:
            return
        for rows, values in self._database.scan(b"", None):
            changes = Changes()
            for number, start, end in runs(rows):
                if number in limits:
                    longer = np.flatnonzero(expiries_of(values[start:end]) > limits[number]) + start
                    kept = [values[at] for at in longer.tolist()]
                    changes.put([rows[at] for at in longer.tolist()], expiring_at(kept, limits[number]))
            self._database.write(changes)


def expired_counts(rows: Rows, tables: Sequence[AnyTable], now_ms: int) -> dict[str, int]:
    """Return how many rows of each section of ``tables`` that expire have done so."""
    found = {table.number: 0 for table in tables if table.ttl is not None}
    if found:
        for scanned, values in rows.scan(b"", None):
            for number, start, end in runs(scanned):
                if number in found:
                    found[number] += int(np.count_nonzero(expiries_of(values[start:end]) <= now_ms))
    expiring = [table for table in tables if table.number in found]
    return {section.name: found[table.number] for table in expiring for section in sections_of(table)}
