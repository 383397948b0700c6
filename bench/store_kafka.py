"""The stream store beside a broker of Kafka and the confluent-kafka client, on this machine, in turns.

Events of 100 bytes, each batch acknowledged after a sync, on both sides. Here a batch is a chunk of up to 32 MiB; with
chunks of 1 MB, which is what Kafka's client sends at once, ``written_1mb_per_s`` says what remains. Settings:
``events``, ``peer_events``, ``turns``.
"""

from __future__ import annotations

import time
from typing import Any

from bench.harness import Options, Result, at_least, median, skipped
from bench.peers.measure import NotInstalled, measure_kafka
from bench.stream_events import STREAM, events, local_store, read_rate, write_rate
from headgate.store.store import Store

NAME = "store_kafka"

RATIO_MIN = 4.0
SMALL_ROWS = 10_000


def run(options: Options) -> Result:
    """Measure both in turns."""
    rows = int(options.number("events", 20_000_000, quick=1_000_000))
    peer_rows = int(options.number("peer_events", 5_000_000, quick=500_000))
    turns = int(options.number("turns", 5, quick=2))
    mine: list[dict[str, float]] = []
    others: list[dict[str, Any]] = []
    for _ in range(turns):
        mine.append(measured(rows))
        other = measure_kafka(peer_rows)
        if isinstance(other, NotInstalled):
            wanted = {f"ratio_{what}": skipped(at_least(RATIO_MIN), other.reason) for what in ("written", "read")}
            return Result(mine[0], wanted)
        others.append(other)
    figures: dict[str, Any] = {name: median([one[name] for one in mine]) for name in mine[0]}
    for what in ("written", "read"):
        figures[f"kafka_{what}_per_s"] = median([one[f"{what}_per_s"] for one in others])
        figures[f"ratio_{what}"] = median(
            [own[f"{what}_per_s"] / other[f"{what}_per_s"] for own, other in zip(mine, others, strict=True)]
        )
    figures["ratio_written_1mb"] = figures["written_1mb_per_s"] / figures["kafka_written_per_s"]
    return Result(figures, {f"ratio_{what}": at_least(RATIO_MIN) for what in ("written", "read")})


def measured(rows: int) -> dict[str, float]:
    """Return the rates of a new store."""
    with local_store() as store:
        written = write_rate(store, rows)
        read_rate(store)
        read = read_rate(store)
    with local_store() as store:
        return {"written_per_s": written, "read_per_s": read, "written_1mb_per_s": small_rate(store, max(1, rows // 4))}


def small_rate(store: Store, rows: int) -> float:
    """Return how fast events are written with a sync for each MB."""
    batch = events(SMALL_ROWS)
    begun, written = time.perf_counter(), 0
    with store.writer(STREAM, linger=None) as writer:
        while written < rows:
            writer.append(batch)
            writer.flush()
            written += batch.num_rows
    return written / (time.perf_counter() - begun)
