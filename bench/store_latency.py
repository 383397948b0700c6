"""From a writer to a reader in another process: how old an event is when it is read.

One event at a time, every millisecond, by a writer with its default linger; it carries the monotonic clock's time just
before ``append``, which all processes of a machine share. The reader follows the stream. Settings: ``seconds``.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from bench.harness import Options, Result, at_most, percentile
from bench.stream_events import local_store
from headgate.store.store import Store

NAME = "store_latency"

P99_MS_MAX = 30.0
WARM_S = 1.0
PAUSE_S = 0.001
SCHEMA = pa.schema({"made_ns": pa.int64(), "payload": pa.large_binary()})
STREAM = "bench/latency"
START_S = 120.0


def run(options: Options) -> Result:
    """Measure on files and SQLite."""
    with local_store() as store:
        found = ages(store, options.number("seconds", 60, quick=5))
    return Result(found, {"p99_ms": at_most(P99_MS_MAX)})


def ages(store: Store, seconds: float) -> dict[str, Any]:
    """Write for so long, and return how old events were when another process had them."""
    store.create_stream(STREAM, SCHEMA, segments=1)
    mine, others = multiprocessing.Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=read, args=(store.root, others), daemon=True)
    reader.start()
    try:
        if not mine.poll(START_S):
            raise RuntimeError("the reader does not start")
        mine.recv()
        write(store, seconds)
        found: list[float] = mine.recv()
    finally:
        reader.kill()
        reader.join()
    shares = {f"p{share:g}_ms": percentile(found, share / 100) for share in (50, 95, 99)}
    return {**shares, "max_ms": max(found), "events": len(found)}


def write(store: Store, seconds: float) -> None:
    """Write an event every millisecond, then seal the stream."""
    payload = pa.array([bytes(92)], pa.large_binary())
    with store.writer(STREAM) as writer:
        end_s = time.perf_counter() + seconds + WARM_S
        while time.perf_counter() < end_s:
            writer.append(pa.record_batch([pa.array([time.monotonic_ns()]), payload], schema=SCHEMA))
            time.sleep(PAUSE_S)
    store.seal(STREAM)


def read(root: str, told: Connection) -> None:
    """Follow the stream to its end, and tell how old events were, in milliseconds."""
    found: list[float] = []
    with Store.open(root) as store:
        follower = store.follow(STREAM)
        told.send("ready")
        warm_ns = time.monotonic_ns() + int(WARM_S * 1e9)
        for one in follower:
            now_ns = time.monotonic_ns()
            made = one.batch.column("made_ns").to_pylist()
            found += [(now_ns - made_ns) / 1e6 for made_ns in made if made_ns > warm_ns]
    told.send(found)
