"""What benchmarks of the stream store share: events of 100 bytes, and how fast they are written and read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from headgate.store.store import Store

EVENT_BYTES = 100
PAYLOAD_BYTES = EVENT_BYTES - 8
SCHEMA = pa.schema({"key": pa.int64(), "payload": pa.large_binary()})
KEYS = 100_000
BATCH_ROWS = 65_536
STREAM = "bench/events"


def events(rows: int = BATCH_ROWS, seed: int = 7) -> pa.RecordBatch:
    """Return events of 100 bytes: a key, and what cannot be compressed."""
    random = np.random.default_rng(seed)
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int64) * PAYLOAD_BYTES)
    payload = pa.Array.from_buffers(
        pa.large_binary(), rows, [None, offsets, pa.py_buffer(random.bytes(rows * PAYLOAD_BYTES))]
    )
    return pa.record_batch([pa.array(random.integers(0, KEYS, rows)), payload], schema=SCHEMA)


@contextmanager
def local_store(segments: int = 4) -> Iterator[Store]:
    """Give a store on files and SQLite with one stream; it is gone at the end."""
    with TemporaryDirectory(prefix="headgate-bench-") as directory, Store.open(Path(directory) / "store") as store:
        make_stream(store, segments)
        yield store


def make_stream(store: Store, segments: int = 4, name: str = STREAM) -> None:
    """Create the stream."""
    store.create_stream(name, SCHEMA, segments=segments, routing_key="key")


def write_rate(store: Store, rows: int, name: str = STREAM) -> float:
    """Append so many events from one writer; return how many became durable per second."""
    batch = events()
    begun = time.perf_counter()
    written = 0
    with store.writer(name, linger=None) as writer:
        while written < rows:
            writer.append(batch)
            written += batch.num_rows
    return written / (time.perf_counter() - begun)


def read_rate(store: Store, name: str = STREAM) -> float:
    """Read all that is there with one reader; return events per second."""
    begun = time.perf_counter()
    read: int = sum(found.batch.num_rows for found in store.follow(name, end="latest"))
    return read / (time.perf_counter() - begun)
