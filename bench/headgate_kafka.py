"""Headgate's half of ``bench/kafka``: a topic read to nothing, copied to another one exactly once, or timed.

Reading and copying are measured from what the workers report about themselves, each by its own clock, from the first
report with records to the last one in which they grew. Run by ``bench/kafka`` in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

import headgate as hg
from bench.machine import CpuMeter
from bench.running import Reports, clock_s, records_out, running

PARALLELISM = 2
SOURCE = "source"
JSON_COLUMNS = {"id": int, "user": str, "amount": float}
INTERVAL = "1s"
DELAY_INTERVAL = "250ms"
WARM_UP_S = 5.0
LOOK_S = 0.05
STALLED_S = 20.0
END_S = 120.0


def reading(brokers: str, topic: str, target: str | None, directory: str) -> hg.Pipeline:
    """Return a pipeline that reads a topic to its end: to nothing, or into ``target`` exactly once."""
    p = hg.Pipeline("kafka", parallelism=PARALLELISM, checkpointing=hg.Checkpointing(interval=INTERVAL, dir=directory))
    if target is not None or topic.startswith("raw"):
        source = hg.Kafka(brokers, topic, end="latest")
    else:
        source = hg.Kafka(brokers, topic, format="json", schema=JSON_COLUMNS, end="latest")
    sink = hg.Discard() if target is None else hg.KafkaSink(brokers, target, value="value")
    p.source(source, name=SOURCE).sink(sink)
    return p


def timed(brokers: str, target: str, rate: float, directory: str) -> hg.Pipeline:
    """Return a pipeline that writes when it made each record, exactly once."""
    checkpointing = hg.Checkpointing(interval=DELAY_INTERVAL, dir=directory)
    p = hg.Pipeline("kafka", parallelism=PARALLELISM, checkpointing=checkpointing)
    made = hg.Generator({"n": hg.Uniform(0, 1_000)}, rows_per_second=rate, time="processing")
    made_at = p.source(made, name=SOURCE).select(pl.col("ts").cast(pl.Int64).cast(pl.String).alias("value"))
    made_at.sink(hg.KafkaSink(brokers, target, value="value"))
    return p


def flow(definition: Any, records: int) -> dict[str, float]:
    """Run to the end, which the last commit is part of; return the rates until all records were read."""
    first: dict[int, tuple[float, int]] = {}
    last: dict[int, tuple[float, int]] = {}
    with running(definition) as handle:
        before = sum(count for _, count in looked(handle.driver.run_progress.reports()).values())
        meter, progress_s, cpu_s, idle_s, seconds = CpuMeter(), time.monotonic(), 0.0, 0.0, 0.0
        while sum(count for _, count in last.values()) < records and time.monotonic() < progress_s + STALLED_S:
            handle.wait(LOOK_S)
            for worker, (clock, count) in looked(handle.driver.run_progress.reports()).items():
                if count and (worker not in first):
                    first[worker] = (clock, count)
                if count > last.get(worker, (0.0, 0))[1]:
                    last[worker], progress_s = (clock, count), time.monotonic()
                    cpu_s, idle_s, seconds = meter.cpu_seconds(), meter.idle_seconds(), meter.seconds()
        handle.wait(END_S)
    rates = [(last[w][1] - first[w][1]) / (last[w][0] - first[w][0]) for w in last if last[w][0] > first[w][0]]
    total = sum(count for _, count in last.values())
    return {
        "records": total,
        "records_per_s": sum(rates),
        "records_per_cpu_s": (total - before) / cpu_s,
        "cpu_cores_used": cpu_s / seconds,
        "cores_idle": idle_s / seconds,
    }


def looked(reports: Reports) -> dict[int, tuple[float, int]]:
    """Return the clock and the count of records of each worker."""
    return {worker: (clock_s(report), records_out(report, SOURCE)) for worker, report in reports.items()}


def delays(definition: Any, brokers: str, topic: str, seconds: float) -> dict[str, float]:
    """Return after how long a reader of committed records sees a record, from its creation."""
    found: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    end = threading.Event()
    with running(definition) as handle:
        handle.wait(WARM_UP_S)
        reader = threading.Thread(target=watch, args=(brokers, topic, end, found))
        reader.start()
        handle.wait(seconds)
        end.set()
        reader.join()
    delays_ms = np.concatenate(found)
    p50, p99 = (float(np.quantile(delays_ms, share)) for share in (0.5, 0.99))
    return {"records": len(delays_ms), "visible_ms_p50": p50, "visible_ms_p99": p99}


def watch(brokers: str, topic: str, end: threading.Event, found: list[Any]) -> None:
    """Read what is committed from now on with librdkafka, and note how old each record is."""
    from confluent_kafka import OFFSET_END, Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": f"bench-{time.monotonic_ns()}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 5,
        }
    )
    partitions = consumer.list_topics(topic).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, OFFSET_END) for number in partitions])
    while not end.is_set():
        values = [message.value() for message in consumer.consume(5_000, timeout=0.02) if message.error() is None]
        now_ms = time.time_ns() / 1e6  # noqa: TID251 - records carry dates
        if values:
            found.append(now_ms - np.array(values, dtype=np.int64) / 1e3)
    consumer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", required=True)
    parser.add_argument("--topic", help="read this topic; without it, records are made")
    parser.add_argument("--target", help="write to this topic, instead of reading to nothing")
    parser.add_argument("--records", type=int, help="of the topic")
    parser.add_argument("--seconds", type=float, help="measure delays for so long")
    parser.add_argument("--rate", type=float, help="records to make each second")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        if options.topic is None:
            definition = timed(options.brokers, options.target, options.rate, directory).definition()
            result = delays(definition, options.brokers, options.target, options.seconds)
        else:
            definition = reading(options.brokers, options.topic, options.target, directory).definition()
            result = flow(definition, options.records)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
