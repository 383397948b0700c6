"""The windowed count in Flink SQL: the second peer of ``bench/windowed_count``.

Counterpart of ``bench/headgate_windowed.py``: events (key, value, timestamp) from Flink's own generator, 5 s tumbling
count and sum per key, parallelism 2, exactly-once checkpoints every second on disk, output discarded. Flink brings
Python packages of other versions than ours, so this file runs in the environment that ``bench/peers/install.py``
makes: ``.venv-peers/bin/python -m bench.peers.flink_sql --keys 1000``; its last printed line is one JSON object.
The rate is read from Flink's own counter of records leaving the generator, never from inside the pipeline.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from bench.machine import CpuMeter

START_SECONDS_MAX = 60
"""A local Flink job that does not generate records by then will not start at all."""

POLL_SECONDS = 0.25
"""Pause between two looks at the counter; longer than Flink's own refresh of 0.1 s."""

RATE_UNLIMITED = 1_000_000_000
"""Rows per second asked of the generator: more than any machine delivers."""


def settings(*, parallelism: int, directory: str, port: int, checkpoint_interval_ms: int) -> dict[str, str]:
    """Return the Flink configuration of the peer; also what docs/benchmarks.md quotes."""
    chosen = {
        "parallelism.default": str(parallelism),
        "taskmanager.numberOfTaskSlots": str(parallelism),
        # Window buffers live in managed memory; the default of 128 MB would be the bottleneck with many keys.
        "taskmanager.memory.managed.size": "1g",
        "state.backend.type": "hashmap",
        "pipeline.object-reuse": "true",
        "table.optimizer.agg-phase-strategy": "TWO_PHASE",
        # Windows buffer records anyway; mini-batches on top were no faster at 100,000 keys, slower at 1,000.
        "table.exec.mini-batch.enabled": "false",
        "rest.bind-port": str(port),
        "rest.port": str(port),
        "rest.address": "127.0.0.1",
        "rest.bind-address": "127.0.0.1",
        "metrics.fetcher.update-interval": "100",
    }
    if checkpoint_interval_ms > 0:
        chosen |= {
            "execution.checkpointing.interval": f"{checkpoint_interval_ms} ms",
            "execution.checkpointing.mode": "EXACTLY_ONCE",
            "execution.checkpointing.storage": "filesystem",
            "execution.checkpointing.dir": f"file://{directory}",
        }
    return chosen


def source_sql(*, keys: int, rows: int | None = None) -> str:
    """Return the generator's table; ``rows`` bounds it (None: endless).

    One random number per event, from which key and value are derived: drawing each column would be slower.
    """
    bound = "" if rows is None else f", 'number-of-rows' = '{rows}'"
    return (
        "CREATE TEMPORARY TABLE events ("
        " seed BIGINT,"
        f" k AS MOD(seed, {keys}),"
        " v AS MOD(seed, 1000),"
        " ts AS CAST(CURRENT_TIMESTAMP AS TIMESTAMP_LTZ(3)),"
        " WATERMARK FOR ts AS ts"
        ") WITH ("
        f" 'connector' = 'datagen', 'rows-per-second' = '{RATE_UNLIMITED}',"
        f" 'fields.seed.min' = '0', 'fields.seed.max' = '999999999'{bound})"
    )


def query_sql() -> str:
    """Return the windowed count: columns ``window_start``, ``k``, ``events``, ``total``."""
    return (
        "SELECT window_start, k, COUNT(*) AS events, SUM(v) AS total"
        " FROM TABLE(TUMBLE(TABLE events, DESCRIPTOR(ts), INTERVAL '5' SECOND))"
        " GROUP BY window_start, window_end, k"
    )


SINK_SQL = (
    "CREATE TEMPORARY TABLE nowhere (window_start TIMESTAMP(3), k BIGINT, events BIGINT, total BIGINT)"
    " WITH ('connector' = 'blackhole')"
)


def environment(chosen: Mapping[str, str]) -> Any:
    """Return a streaming TableEnvironment with ``chosen`` as its configuration."""
    from pyflink.common import Configuration
    from pyflink.table import EnvironmentSettings, TableEnvironment

    configuration = Configuration()
    for name, value in chosen.items():
        configuration.set_string(name, value)
    return TableEnvironment.create(
        EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
    )


class JobMonitor:
    """Reads counters of the one running job from Flink's REST interface."""

    def __init__(self, port: int) -> None:
        self._root = f"http://127.0.0.1:{port}"
        self._job = ""
        self._vertex = ""
        self._metrics: list[str] = []

    def wait_for_source(self) -> None:
        """Wait until every subtask of the generator reports records."""
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline:
            try:
                if self._find() and self.events_generated() > 0:
                    return
            except (OSError, ValueError, KeyError, IndexError):
                pass  # the REST interface and the metrics appear a little after the job
            time.sleep(0.2)
        raise RuntimeError(f"no records from the generator within {START_SECONDS_MAX} s")

    def events_generated(self) -> int:
        """Return the records that have left the generator, all subtasks together."""
        wanted = ",".join(self._metrics)
        answer = self._get(f"/jobs/{self._job}/vertices/{self._vertex}/metrics?get={wanted}")
        return sum(int(metric["value"]) for metric in answer)

    def checkpoints(self) -> dict[str, float | None]:
        """Return how many checkpoints completed and their median duration and size."""
        answer = self._get(f"/jobs/{self._job}/checkpoints")
        completed = [item for item in answer["history"] if item["status"] == "COMPLETED"]
        durations = [float(item["end_to_end_duration"]) for item in completed]
        return {
            "checkpoints": answer["counts"]["completed"],
            "checkpoints_failed": answer["counts"]["failed"],
            "checkpoint_ms_median": statistics.median(durations) if durations else None,
            "checkpoint_bytes_median": (
                statistics.median(float(item["state_size"]) for item in completed) if completed else None
            ),
        }

    def vertices(self) -> list[str]:
        """Return the names of the job's vertices, to show which plan was measured."""
        return [str(vertex["name"]) for vertex in self._get(f"/jobs/{self._job}")["vertices"]]

    def _find(self) -> bool:
        self._job = self._get("/jobs/overview")["jobs"][0]["jid"]
        self._vertex = self._get(f"/jobs/{self._job}")["vertices"][0]["id"]
        names = [item["id"] for item in self._get(f"/jobs/{self._job}/vertices/{self._vertex}/metrics")]
        self._metrics = sorted(name for name in names if ".Source__" in name and name.endswith("numRecordsOut"))
        return bool(self._metrics)

    def _get(self, path: str) -> Any:
        # A proxy configured for the machine must not see requests to this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self._root + path, timeout=5) as answer:
            return json.load(answer)


def poll(monitor: JobMonitor, seconds: float) -> list[tuple[float, int]]:
    """Read the counter again and again for ``seconds``; return (monotonic seconds, events) of every look.

    Flink answers with what it had fetched at the look before and only then fetches anew. A single look after a long
    pause would therefore tell the count from before the pause; looking all the time keeps the lag constant.
    """
    readings: list[tuple[float, int]] = []
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        readings.append((time.monotonic(), monitor.events_generated()))
        time.sleep(POLL_SECONDS)
    return readings


def rate_of(readings: Sequence[tuple[float, int]]) -> float:
    """Return events per second between the first and the last look.

    Raises:
        ValueError: fewer than two looks.
    """
    if len(readings) < 2:
        raise ValueError(f"a rate needs two looks at the counter, found {len(readings)}")
    (started, before), (ended, after) = readings[0], readings[-1]
    return (after - before) / (ended - started)


def measure(
    *, keys: int, parallelism: int, seconds: float, warmup_seconds: float, checkpoint_interval_ms: int
) -> dict[str, Any]:
    """Run the endless query, wait for its warm-up and count the events of the next ``seconds``."""
    directory = tempfile.mkdtemp(prefix="headgate-peer-")
    port = free_port()
    chosen = settings(
        parallelism=parallelism, directory=directory, port=port, checkpoint_interval_ms=checkpoint_interval_ms
    )
    tables = environment(chosen)
    tables.execute_sql(source_sql(keys=keys))
    tables.execute_sql(SINK_SQL)
    job = tables.execute_sql(f"INSERT INTO nowhere {query_sql()}").get_job_client()
    try:
        monitor = JobMonitor(port)
        monitor.wait_for_source()
        poll(monitor, warmup_seconds)
        meter = CpuMeter()
        readings = poll(monitor, seconds)
        cores = meter.cpu_seconds() / meter.seconds()
        rate = rate_of(readings)
        # Below the cores of the machine, something else was running and the rate is too low.
        figures = {
            "events_per_s": round(rate),
            "cpu_cores_used": round(cores, 2),
            "events_per_cpu_s": round(rate / cores),
        }
        return figures | monitor.checkpoints() | {"vertices": monitor.vertices()}
    finally:
        job.cancel().result()
        shutil.rmtree(directory, ignore_errors=True)


def check(*, keys: int, parallelism: int, rows: int) -> dict[str, int]:
    """Run the same query over ``rows`` events to its end and return what it counted: events, keys and windows."""
    directory = tempfile.mkdtemp(prefix="headgate-peer-")
    chosen = settings(parallelism=parallelism, directory=directory, port=free_port(), checkpoint_interval_ms=1_000)
    tables = environment(chosen)
    tables.execute_sql(source_sql(keys=keys, rows=rows))
    with tables.execute_sql(query_sql()).collect() as results:
        counted = [(row[0], row[1], row[2]) for row in results]
    shutil.rmtree(directory, ignore_errors=True)
    return {
        "events": sum(events for _, _, events in counted),
        "keys": len({key for _, key, _ in counted}),
        "windows": len({start for start, _, _ in counted}),
        "groups": len(counted),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure once and print the result as the last line."""
    parser = argparse.ArgumentParser(description="windowed count in Flink SQL")
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--warmup-seconds", type=float, default=12.0)
    parser.add_argument("--checkpoint-interval-ms", type=int, default=1_000, help="0: no checkpoints")
    parser.add_argument("--check-rows", type=int, help="count so many events to the end instead of measuring")
    options = parser.parse_args(arguments)
    try:
        import pyflink.version
    except ImportError:
        sys.exit("apache-flink is not installed in this environment: run `make bench-peers`")
    # Beam, on which PyFlink depends, must not print into the last line.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    if options.check_rows is not None:
        counted = check(keys=options.keys, parallelism=options.parallelism, rows=options.check_rows)
        print(json.dumps(counted), flush=True)
        return
    figures = measure(
        keys=options.keys,
        parallelism=options.parallelism,
        seconds=options.seconds,
        warmup_seconds=options.warmup_seconds,
        checkpoint_interval_ms=options.checkpoint_interval_ms,
    )
    head = {"peer": "flink_sql", "version": pyflink.version.__version__, "keys": options.keys}
    print(json.dumps(head | figures), flush=True)


def free_port() -> int:
    """Return a free port below those that systems give to connections, so that none takes it meanwhile."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port between 20000 and 29999 is free")


if __name__ == "__main__":
    main()
