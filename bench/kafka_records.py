"""Microbenchmark of Kafka's record batches in one thread, without a broker: records per second of processor time.

Prints how fast batches become Arrow columns and columns become batches, for values of 100 bytes, mixed sizes, JSON,
keys and headers, in each compression, and how much of reading is the chain of lengths, in compiled code and in Python.
Run: ``python bench/kafka_records.py``.
"""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections.abc import Callable

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import numpy as np
import pyarrow as pa

from headgate.codec.kafka import record_decoder
from headgate.codec.kafka.record_batch import HEADERS_TYPE, Compression
from headgate.codec.kafka.record_decoder import decode_records
from headgate.codec.kafka.record_encoder import encode_records

RECORDS = 100_000
CALLS = 10
MIXED_BYTES = (5, 20, 50, 80, 100, 150, 200, 300)


def rate(call: Callable[[], object]) -> float:
    """Return millions of records per second of processor time."""
    call()
    begun = time.process_time()
    for _ in range(CALLS):
        call()
    return round(CALLS * RECORDS / (time.process_time() - begun) / 1e6, 2)


def decoded(data: bytes, with_headers: bool = False) -> None:
    """Decode everything, as a source does: some at a time."""
    for _ in decode_records(data, 0, "bench", with_headers=with_headers):
        pass


def inputs() -> dict[str, tuple[pa.Array, pa.Array | None, pa.Array | None]]:
    """Return values, keys and headers by name."""
    draw = random.Random(1)
    rows = range(RECORDS)
    fixed = pa.array([draw.randbytes(100) for _ in rows], pa.large_binary())
    texts = [json.dumps({"id": n, "user": f"user-{draw.randint(1, 99_999)}", "amount": draw.random()}) for n in rows]
    keys = [None if draw.random() < 0.1 else draw.randbytes(draw.randint(0, 12)) for _ in rows]
    headers = [[{"key": "trace", "value": b"1"}, {"key": "n", "value": None}] if n % 2 else [] for n in rows]
    return {
        "100 bytes": (fixed, None, None),
        "mixed sizes": (
            pa.array([draw.randbytes(draw.choice(MIXED_BYTES)) for _ in rows], pa.large_binary()),
            None,
            None,
        ),
        "json": (pa.array([one.encode() for one in texts], pa.large_binary()), None, None),
        "keys, some null": (fixed, pa.array(keys, pa.large_binary()), None),
        "headers": (fixed, None, pa.array(headers, HEADERS_TYPE)),
    }


def main() -> None:
    """Measure; print one JSON object per line."""
    times = 1_764_000_000_000 + np.arange(RECORDS, dtype=np.int64) // 10
    for name, (value, key, headers) in inputs().items():
        figures: dict[str, float] = {}
        for codec in Compression:
            batches = encode_records(value, times, key, headers, compression=codec)
            data, offset = b"", 0
            for batch in batches:
                data += struct.pack(">q", offset) + b"".join(batch.parts)[8:]
                offset += batch.records_count
            has_headers = headers is not None
            figures[f"read {codec.name.lower()}"] = rate(
                lambda data=data, has=has_headers: decoded(data, has)  # type: ignore[misc]
            )
            if codec is Compression.NONE:
                figures["write none"] = rate(lambda v=value, k=key, h=headers: encode_records(v, times, k, h))  # type: ignore[misc]
                few, record_decoder.FEW_RECORDS = record_decoder.FEW_RECORDS, 1 << 30
                figures["read none, lengths in Python"] = rate(lambda data=data: decoded(data))  # type: ignore[misc]
                record_decoder.FEW_RECORDS = few
        print(json.dumps({"bench": "kafka_records", "records": name, "millions_per_s": figures}), flush=True)


if __name__ == "__main__":
    main()
