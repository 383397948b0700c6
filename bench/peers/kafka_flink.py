"""Flink SQL's half of ``bench/kafka``: reads a topic into nothing, or copies it to another one exactly once.

Its rate is read from its own counter of records leaving the source, over the last two thirds of the topic: the first
third is its warm-up, also for processor time. Runs in the environment of ``bench/peers/install.py``; its last printed
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence

from bench.machine import CpuMeter
from bench.peers.flink_sql import JobMonitor, environment, free_port, rate_of, settings
from bench.peers.install import flink_connector

PARALLELISM = 2
INTERVAL_MS = 1_000
LOOK_S = 0.15
STALLED_S = 30.0
WARM_UP_SHARE = 1 / 3


def source_sql(brokers: str, topic: str) -> str:
    """Return the table of a topic: JSON with three columns, or bytes if the topic is raw."""
    shape = _kafka(brokers, topic, "raw" if topic.startswith("raw") else "json")
    begin = "'scan.startup.mode' = 'earliest-offset'"
    return f"CREATE TEMPORARY TABLE source_topic ({_columns(topic)}) WITH ({shape}, {begin})"


def sink_sql(brokers: str, topic: str, target: str | None) -> str:
    """Return the table that is written."""
    if target is None:
        return f"CREATE TEMPORARY TABLE target ({_columns(topic)}) WITH ('connector' = 'blackhole')"
    exactly_once = (
        "'sink.delivery-guarantee' = 'exactly-once', 'sink.transactional-id-prefix' = 'bench', "
        "'properties.transaction.timeout.ms' = '600000', "
        "'properties.batch.size' = '1000000', 'properties.linger.ms' = '5'"
    )
    shape = _kafka(brokers, target, "raw")
    return f"CREATE TEMPORARY TABLE target ({_columns(topic)}) WITH ({shape}, {exactly_once})"


def measure(brokers: str, topic: str, target: str | None, records: int) -> dict[str, float]:
    """Run until all records have left the source; return the rates."""
    directory, port = tempfile.mkdtemp(prefix="headgate-peer-"), free_port()
    chosen = settings(parallelism=PARALLELISM, directory=directory, port=port, checkpoint_interval_ms=INTERVAL_MS)
    chosen["pipeline.jars"] = ";".join(f"file://{jar}" for jar in flink_connector())
    tables = environment(chosen)
    tables.execute_sql(source_sql(brokers, topic))
    tables.execute_sql(sink_sql(brokers, topic, target))
    job = tables.execute_sql("INSERT INTO target SELECT * FROM source_topic").get_job_client()
    try:
        monitor = JobMonitor(port)
        monitor.wait_for_source()
        looks: list[tuple[float, int]] = []
        cpu_s: list[float] = []
        idle_s: list[float] = []
        meter, progress_s = CpuMeter(), time.monotonic()
        while (not looks or looks[-1][1] < records) and time.monotonic() < progress_s + STALLED_S:
            count = monitor.events_generated()
            if count >= records * WARM_UP_SHARE and (not looks or count > looks[-1][1]):
                looks.append((time.monotonic(), count))
                cpu_s.append(meter.cpu_seconds())
                idle_s.append(meter.idle_seconds())
                progress_s = looks[-1][0]
            time.sleep(LOOK_S)
        return {
            "records": looks[-1][1],
            "records_per_s": rate_of(looks),
            "records_per_cpu_s": (looks[-1][1] - looks[0][1]) / (cpu_s[-1] - cpu_s[0]),
            "cpu_cores_used": (cpu_s[-1] - cpu_s[0]) / (looks[-1][0] - looks[0][0]),
            "cores_idle": (idle_s[-1] - idle_s[0]) / (looks[-1][0] - looks[0][0]),
            "checkpoints": float(monitor.checkpoints()["checkpoints"] or 0),
        }
    finally:
        job.cancel().result()
        shutil.rmtree(directory, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure once; print the result as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--target", help="copy to this topic, instead of reading to nothing")
    parser.add_argument("--records", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        import pyflink  # noqa: F401
    except ImportError:
        sys.exit("apache-flink is not installed in this environment: run `make bench-peers`")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    print(json.dumps(measure(options.brokers, options.topic, options.target, options.records)), flush=True)


def _columns(topic: str) -> str:
    return "`value` BYTES" if topic.startswith("raw") else "`id` BIGINT, `user` STRING, `amount` DOUBLE"


def _kafka(brokers: str, topic: str, form: str) -> str:
    return (
        f"'connector' = 'kafka', 'properties.bootstrap.servers' = '{brokers}', 'topic' = '{topic}', 'format' = '{form}'"
    )


if __name__ == "__main__":
    main()
