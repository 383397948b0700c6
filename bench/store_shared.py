"""A store that machines share: events per second into and out of it, and how soon a reader sees a new one.

Catalogue on PostgreSQL, chunks on a server of objects, both on this machine, durable as far as the servers are
(PostgreSQL syncs; versitygw leaves that to the system, and moto keeps objects in memory). Events have 100 bytes.
Another process writes one event after the other for the delays; both compare the same clock, which only goes forward.
Settings: ``seconds`` of each measurement, ``rows`` of an append, ``rate`` (events per second at which
acknowledgements are timed); ``store`` and ``chunks``: URLs of servers that are there, instead of own ones.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.harness import CpuMeter, Options, Result, at_least, at_most
from headgate.store.store import Store
from headgate.store.writer import Appended

NAME = "store_shared"

SCHEMA = pa.schema([("sent_ns", pa.int64()), ("payload", pa.binary(92))])
STREAM = "bench/events"

WRITTEN_PER_S_MIN = 4_000_000 / 3
READ_PER_S_MIN = 20_000_000 / 3
ACKNOWLEDGED_MS_MAX = 30.0
SEEN_MS_MAX = 20.0
LOOK_S = 0.001
LAST_S = 0.5
"""When the writer has ended, so much silence means that all was seen."""

IN_FLIGHT_MAX = 64
"""Appends that wait for their acknowledgement: more would only fill the memory."""

PACED_ROWS = 500


def run(options: Options) -> Result:
    """Measure rates, acknowledgements and delays, one after the other."""
    seconds = options.number("seconds", 20, quick=3)
    with opened_store(options) as store:
        figures: dict[str, Any] = {}
        figures |= write_rate(store, seconds, int(options.number("rows", 50_000)))
        figures |= read_rate(store)
        figures |= acknowledgements(store, seconds, options.number("rate", 50_000))
        figures |= delays(store, seconds)
    targets = {
        "written_per_s": at_least(WRITTEN_PER_S_MIN),
        "read_per_s": at_least(READ_PER_S_MIN),
        "acknowledged_ms_p95": at_most(ACKNOWLEDGED_MS_MAX),
        "seen_ms_p95": at_most(SEEN_MS_MAX),
    }
    return Result(figures, targets)


@contextmanager
def opened_store(options: Options) -> Iterator[Store]:
    """Give a store with an empty stream, on servers of its own unless it is told of others."""
    with ExitStack() as opened:
        url, chunks = options.settings.get("store"), options.settings.get("chunks")
        if url is None or chunks is None:
            url, chunks = own_servers(opened)
        store = opened.enter_context(Store.open(url, chunks=chunks))
        store.create_stream(STREAM, SCHEMA, segments=1)
        yield store


def own_servers(opened: ExitStack) -> tuple[str, str]:
    """Start those that the tests use, and return where a store may be."""
    from tests.servers.objects import BUCKET, object_server
    from tests.servers.postgres import DURABLE, postgres_server

    directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="headgate-bench-")))
    opened.enter_context(object_server(directory))
    return opened.enter_context(postgres_server(settings=DURABLE)).url(), f"s3://{BUCKET}/bench"


def events(rows: int) -> pa.RecordBatch:
    """Return events of 100 bytes that cannot be compressed."""
    payload = np.random.default_rng(7).bytes(92 * rows)
    array = pa.FixedSizeBinaryArray.from_buffers(pa.binary(92), rows, [None, pa.py_buffer(payload)])
    return pa.record_batch([pa.array(np.full(rows, time.monotonic_ns())), array], schema=SCHEMA)


def write_rate(store: Store, seconds: float, rows: int) -> dict[str, Any]:
    """One writer that batches: what was acknowledged, by the time until all of it was."""
    batch, waiting, written = events(rows), deque[Future[Appended]](), 0
    with store.writer(STREAM) as writer:
        meter, began_s = CpuMeter(), time.monotonic()
        while not written or time.monotonic() - began_s < seconds:
            waiting.append(writer.append(batch))
            written += rows
            while len(waiting) > IN_FLIGHT_MAX:
                waiting.popleft().result(60)
        writer.flush()
        took_s = time.monotonic() - began_s
    return {"written_per_s": written / took_s, "writing_cpu_cores": meter.cpu_seconds() / took_s, "written": written}


def read_rate(store: Store) -> dict[str, Any]:
    """One reader from the first event to the last."""
    reader, read, began_s = store.reader(STREAM, 0), 0, time.monotonic()
    while (batch := reader.read()) is not None:
        read += batch.num_rows
    return {"read_per_s": read / (time.monotonic() - began_s), "read": read}


def acknowledgements(store: Store, seconds: float, rate: float) -> dict[str, Any]:
    """How long appends wait at a steady rate, the wait for their turn included."""
    batch, waits_ms = events(PACED_ROWS), list[float]()

    def note(due_s: float, done: Future[Appended]) -> None:
        done.result()
        waits_ms.append(1_000 * (time.monotonic() - due_s))

    began_s = time.monotonic()
    with store.writer(STREAM) as writer:
        for number in range(int(seconds * rate / PACED_ROWS)):
            due_s = began_s + number * PACED_ROWS / rate
            time.sleep(max(0.0, due_s - time.monotonic()))
            writer.append(batch).add_done_callback(lambda done, due_s=due_s: note(due_s, done))  # type: ignore[misc]
        writer.flush()
    return {f"acknowledged_ms_p{share}": float(np.percentile(waits_ms, share)) for share in (50, 95, 99)}


WRITER = """
import sys, time
from bench.store_shared import SCHEMA, STREAM
from headgate.store.store import Store
import pyarrow as pa
with Store.open(sys.argv[1]) as store, store.writer(STREAM, linger=None) as writer:
    until_s = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < until_s:
        time.sleep(0.02)
        done = writer.append(pa.record_batch([[time.monotonic_ns()], [bytes(92)]], schema=SCHEMA))
        writer.flush()
        done.result()
        print(time.monotonic_ns(), flush=True)
"""


def delays(store: Store, seconds: float) -> dict[str, Any]:
    """From an append of another process, and from its acknowledgement, to a reader that waits in this one."""
    reader = store.reader(STREAM, 0, store.describe(STREAM).ends[0])
    command = [sys.executable, "-c", WRITER, store.root, str(seconds)]
    sent_ns, seen_ns = list[int](), list[int]()
    with tempfile.TemporaryFile("w+") as told:
        with subprocess.Popen(command, stdout=told, cwd=Path(__file__).parents[1]) as process:
            latest_s = time.monotonic()
            while process.poll() is None or time.monotonic() - latest_s < LAST_S:
                batch = reader.read()
                if batch is None:
                    time.sleep(LOOK_S)
                else:
                    latest_s = time.monotonic()
                    sent_ns += batch.column(0).to_pylist()
                    seen_ns += [time.monotonic_ns()] * batch.num_rows
        told.seek(0)
        acknowledged_ns = [int(line) for line in told]
    if process.returncode != 0 or len(acknowledged_ns) != len(seen_ns):
        raise RuntimeError(f"{len(acknowledged_ns)} events were acknowledged, {len(seen_ns)} seen")
    figures: dict[str, Any] = {"delays_count": len(seen_ns)}
    for name, since_ns in (("seen_since_append", sent_ns), ("seen", acknowledged_ns)):
        waits_ms = (np.array(seen_ns) - np.array(since_ns)) / 1e6
        figures |= {f"{name}_ms_p{share}": float(np.percentile(waits_ms, share)) for share in (50, 95, 99, 100)}
    return figures
