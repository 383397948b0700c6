"""A stream that one pipeline writes and another reads, with event time, while it is scaled and workers are killed."""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.servers.pravega import PravegaServer, read_all
from tests.servers.processes import START_S

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import read_committed
from headgate.connectors.pravega.controller import SegmentRange, StreamName
from headgate.model.progress import SilentObserver

pytestmark = pytest.mark.xdist_group("pravega")

ROWS, STEP_MS, KEYS = 6_000, 25, 40
SCALINGS = (
    [(0.0, 0.25), (0.25, 0.5), (0.5, 1.0)],
    [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)],
    [(0.0, 0.25), (0.25, 0.75), (0.75, 1.0)],
    [(0.0, 0.75), (0.75, 1.0)],
    [(0.0, 0.3), (0.3, 0.6), (0.6, 1.0)],
)
"""Parts of the keys, one after the other: up, up, down, down, up. A stream has no fewer than it was created with."""


class Before(hg.ProcessFunction):
    """Returns each record with the one of its key that came before it."""

    schema = {"key": pa.string(), "n": pa.int64(), "before": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.last = state.value("last", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"key": context.key, "n": row["n"], "before": self.last.get(-1)}
        self.last.put(row["n"])


class Counting(SilentObserver):
    """Counts checkpoints."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def on_checkpoint(self, checkpoint: Any, duration_ms: int, size_bytes: int) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def see(self, more: int) -> None:
        """Wait for more checkpoints."""
        with self._changed:
            wanted = self._count + more
            assert self._changed.wait_for(lambda: self._count >= wanted, START_S)


def writer(server: PravegaServer, stream: str, directory: Path) -> hg.Pipeline:
    pipeline = hg.Pipeline(
        f"w-{uuid.uuid4().hex}", checkpointing=hg.Checkpointing(interval="300ms", dir=directory / "writer")
    )
    numbers = pipeline.source(hg.Generator({"n": hg.RowNumber()}, rows=ROWS, rows_per_second=300))
    rows = numbers.select(
        ts=pl.col("n") * STEP_MS, n=pl.col("n"), key=pl.format("k{}", pl.col("n") % KEYS)
    ).with_timestamps("ts")
    rows.sink(hg.PravegaSink(server.address, stream, key="key"))
    return pipeline


def reader(server: PravegaServer, stream: str, directory: Path) -> hg.Pipeline:
    pipeline = hg.Pipeline(
        f"r-{uuid.uuid4().hex}", checkpointing=hg.Checkpointing(interval="300ms", dir=directory / "reader")
    )
    schema = {"ts": int, "n": int, "key": str}
    source = hg.Pravega(server.address, stream, format="json", schema=schema, noted_time=True)
    rows = pipeline.source(source, name="in").with_timestamps("ts")
    keyed = rows.key_by("key")
    keyed.process(Before(), name="before").sink(hg.FileSink(directory / "rows", "parquet"), name="rows")
    counts = keyed.window(hg.Tumbling("2s")).agg(count=pl.len())
    counts.sink(hg.FileSink(directory / "counts", "parquet"), name="counts")
    return pipeline


def scale_to(server: PravegaServer, stream: str, ranges: list[tuple[float, float]]) -> bool:
    """Replace the segments that have other parts of the keys; return whether the stream has these parts now.

    Until then it may be refused: a transaction that was begun before the stream was scaled replaces all segments by
    new ones when it is committed, so that those which were to be scaled are not the last any more.
    """
    now = server.client.current(StreamName.parse(stream))
    kept = {(one.low, one.high) for one in now} & set(ranges)

    def part(one: SegmentRange) -> tuple[float, float]:
        return one.low, one.high

    sealed = [one.segment for one in now if part(one) not in kept]
    added = [one for one in ranges if one not in kept]
    if sealed:
        try:
            server.scale(stream, sealed, added)
        except AssertionError:
            return False
    return True


@pytest.mark.timeout(1_200)
def test_nothing_is_late_lost_or_out_of_order_while_the_stream_is_scaled(
    pravega: PravegaServer, tmp_path: Path
) -> None:  # PV2, PV4, PV12, PV13
    stream = pravega.create_stream(2)
    watching = Counting()
    reading = testing.running(
        reader(pravega, stream, tmp_path), parallelism=3, observer=watching, kill_worker_after_checkpoint=(4, 12)
    )
    writing = testing.running(writer(pravega, stream, tmp_path), parallelism=2, kill_worker_after_checkpoint=(6,))
    with reading as read, writing as write:
        for ranges in SCALINGS:
            watching.see(3)
            deadline = time.monotonic() + START_S
            while not scale_to(pravega, stream, ranges):
                assert time.monotonic() < deadline
                watching.see(1)
        assert write.wait(0) is None, "it was scaled while it was written"
        written = write.wait(START_S)
        assert written is not None
        pravega.seal(stream)
        result = read.wait(START_S)
    assert result is not None
    assert written.restarts
    assert result.restarts
    assert result.late_records == 0
    assert len(read_all(hg.Pravega(pravega.address, stream, format="text"))) == ROWS
    assert int(read_committed(str(tmp_path / "counts"))["count"].sum()) == ROWS
    by_key: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in read_committed(str(tmp_path / "rows")).to_dicts():
        by_key[row["key"]].append((row["n"], row["before"]))
    assert len(by_key) == KEYS
    for key, found in by_key.items():
        expected = range(int(key[1:]), ROWS, KEYS)
        assert sorted(found) == list(zip(expected, [-1, *expected], strict=False)), key
