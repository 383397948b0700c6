"""Events of 100 bytes copied from one stream into another, exactly once: records per second.

Two streams of four segments in one store on files and SQLite; two workers on Spark, a checkpoint each second.
``records_per_s`` is what the workers count, each by its own clock, from the first report with records to the last;
``records_per_cpu_s`` is by the processor time of all processes. Starts are left out. Afterwards the copy has as many
events as the stream. Settings: ``events`` (20,000,000), ``turns`` (3), ``in_process``: with so many subtasks in threads
of this process, without Spark, for profiles and for pairs of two versions.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import headgate as hg
from bench.harness import CpuMeter, Options, Result, at_least, median
from bench.headgate_kafka import PARALLELISM, SOURCE, flow
from bench.stream_events import STREAM, local_store, make_stream, write_rate
from headgate.store.store import Store

NAME = "store_copy"

PER_S_MIN = 3_000_000
INTERVAL = "1s"


def run(options: Options) -> Result:
    """Copy in turns, each time into a stream of its own."""
    events, turns = int(options.number("events", 20_000_000, quick=1_000_000)), int(options.number("turns", 3, quick=1))
    in_process = int(options.number("in_process", 0))
    found = []
    with local_store() as store:
        write_rate(store, events)
        expected = count(store, STREAM)
        for turn in range(turns):
            target = f"bench/copy-{turn}"
            make_stream(store, name=target)
            found.append(copied(str(store.root), target, expected, in_process))
            if (there := count(store, target)) != expected:
                raise RuntimeError(f"the copy has {there} events, and not {expected}")
    figures: dict[str, Any] = {"events": expected, "load": round(os.getloadavg()[0], 1)}
    figures |= {name: median([one[name] for one in found]) for name in ("records_per_s", "records_per_cpu_s")}
    return Result({**figures, "turns": found}, {"records_per_s": at_least(PER_S_MIN)})


def copied(store: str, target: str, events: int, in_process: int) -> dict[str, float]:
    """Copy the stream, which has so many events; return the rates."""
    with TemporaryDirectory(prefix="headgate-bench-") as directory:
        checkpointing = hg.Checkpointing(interval=INTERVAL, dir=str(Path(directory) / "c"))
        name = f"store-{target.rpartition('/')[2]}"  # each copy is another pipeline's output
        p = hg.Pipeline(name, parallelism=in_process or PARALLELISM, checkpointing=checkpointing)
        p.source(hg.StreamSource(STREAM, store, follow=False), name=SOURCE).sink(hg.StreamSink(target, store))
        if not in_process:
            return flow(p.definition(), events)
        from headgate.testing import run as run_here

        meter = CpuMeter()
        run_here(p, timeout_s=900)
        return {"records_per_s": events / meter.seconds(), "records_per_cpu_s": events / meter.cpu_seconds()}


def count(store: Store, name: str) -> int:
    """Return how many committed events a stream has."""
    return sum(found.batch.num_rows for found in store.follow(name, end="latest"))
