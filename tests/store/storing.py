"""What the store's tests share."""

from __future__ import annotations

import pyarrow as pa

from headgate.store.store import Store

KEYED = pa.schema([pa.field("key", pa.large_string()), pa.field("value", pa.int64())])
STREAM = "app/events"


def keyed(*pairs: tuple[str | None, int | None]) -> pa.RecordBatch:
    return pa.record_batch([[k for k, _ in pairs], [v for _, v in pairs]], schema=KEYED)


def drain(store: Store, stream: str = STREAM, rows_max: int = 1_000) -> list[list[tuple[str, int]]]:
    """Everything visible, per segment."""
    found = []
    for segment in range(store.describe(stream).segments_count):
        reader = store.reader(stream, segment)
        rows: list[tuple[str, int]] = []
        while (batch := reader.read(rows_max)) is not None:
            rows += list(zip(*batch.to_pydict().values(), strict=True))
        found.append(rows)
    return found


def drained(store: Store, stream: str = STREAM) -> list[tuple[str, int]]:
    """Everything visible, sorted."""
    return sorted(row for segment in drain(store, stream) for row in segment)
