"""Topics of Kafka read, and copied exactly once, beside Structured Streaming and Flink SQL, in turns.

One broker on loopback, topics of four partitions, records of 100 bytes. Three topics are read to nothing: ``raw``
(values as they are), ``json`` (three columns decoded from JSON), ``zstd`` (the same JSON, compressed). ``raw`` is
also copied to another topic, with a checkpoint each second: exactly once by Headgate and Flink, at least once by
Structured Streaming, which has nothing stronger. Each system runs in a process of its own, one after another, on the
cores that it shares with the broker. ``records_per_s`` is by the clock, ``records_per_cpu_s`` by the processor time of
all processes of the system, without the broker; both leave the start out. Each turn also prints ``cores_idle``: how
many cores of the machine had nothing to do. What is left after that and ``cpu_cores_used`` is mostly the broker's;
where almost nothing is idle, nothing waits, and the machine limits the rate by the clock. Before the first turn
some records are copied, so that the first system does not meet a broker that still compiles. Last, the time from the
creation of a record until a reader of committed records has it, at checkpoints each 250 ms. Settings: ``records``,
``peer_records``, ``turns``, ``seconds`` and ``rate`` (of the delays).
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tests.servers.kafka import KafkaBroker, missing

from bench.harness import Options, Result, Target, at_least, at_most, median, skipped
from bench.peers.measure import NotInstalled, measure_kafka_flink, measure_kafka_streaming, run_peer
from headgate.codec.kafka.record_batch import Compression
from headgate.connectors.kafka.client import KafkaClient
from headgate.connectors.kafka.producer import Producer
from headgate.environment import SYSTEM_ENVIRONMENT

NAME = "kafka"

PARTITIONS = 4
ROWS = 50_000
TOPICS, COPY = ("raw", "json", "zstd"), "copy"
READ_RATIO_MIN, COPY_RATIO_MIN = 4.0, 3.0
PER_CPU_S_MIN = {"raw": 2_000_000, "json": 700_000}
VISIBLE_MS_P99_MAX = 600.0


def run(options: Options) -> Result:
    """Measure all systems in turns on one broker."""
    records = int(options.number("records", 20_000_000, quick=4_000_000))
    peer_records = int(options.number("peer_records", 4_000_000, quick=1_000_000))
    turns = int(options.number("turns", 3, quick=1))
    if (problem := missing()) is not None:
        return Result({}, {f"ratio_{name}": skipped(at_least(READ_RATIO_MIN), problem) for name in TOPICS})
    seconds, rate = options.number("seconds", 30, quick=10), options.number("rate", 20_000)
    with started_broker() as broker:
        found = measured(broker, records, peer_records, turns)
        target = broker.create_topic("delays", PARTITIONS)
        delays = mine(broker.address, "--target", target, "--seconds", str(seconds), "--rate", str(rate))
    return judged(found, delays)


Measured = dict[str, list[dict[str, Any]]]
"""``topic/system`` → what each turn measured."""

PEERS: dict[str, Callable[[str, str, str | None, int], dict[str, Any] | NotInstalled]] = {
    "streaming": measure_kafka_streaming,
    "flink": measure_kafka_flink,
}


def measured(broker: KafkaBroker, records: int, peer_records: int, turns: int) -> Measured:
    """Fill each topic and have every system read it in turns, then copy one."""
    found: Measured = {}
    for name in TOPICS:
        fill(broker.address, f"{name}-long", name, records)
        fill(broker.address, name, name, peer_records)
    warm = broker.create_topic("warm", PARTITIONS)
    mine(broker.address, "--topic", TOPICS[0], "--records", str(peer_records), "--target", warm)
    broker.delete_topic(warm)
    for turn in range(turns):
        for name in (*TOPICS, COPY):
            topic = TOPICS[0] if name == COPY else name
            for system in ("headgate", *PEERS):
                target = broker.create_topic(f"{name}-{system}-{turn}", PARTITIONS) if name == COPY else None
                if system == "headgate":
                    arguments = ["--topic", f"{topic}-long", "--records", str(records)]
                    arguments += [] if target is None else ["--target", target]
                    result: dict[str, Any] | NotInstalled = mine(broker.address, *arguments)
                else:
                    result = PEERS[system](broker.address, topic, target, peer_records)
                if target is not None:
                    broker.delete_topic(target)
                if not isinstance(result, NotInstalled):
                    print(f"{name}/{system}: {json.dumps(result)}", flush=True)
                    found.setdefault(f"{name}/{system}", []).append(result)
    return found


def mine(address: str, *arguments: str) -> dict[str, Any]:
    """Measure Headgate in a process of its own."""
    return run_peer(Path(sys.executable), "bench.headgate_kafka", ["--brokers", address, *arguments])


def judged(found: Measured, delays: dict[str, Any]) -> Result:
    """Return the medians, the ratios to the better peer of each turn, and their targets."""
    figures: dict[str, Any] = {"visible_ms_p99": delays["visible_ms_p99"], "visible_ms_p50": delays["visible_ms_p50"]}
    targets: dict[str, Target] = {"visible_ms_p99": at_most(VISIBLE_MS_P99_MAX)}
    for key, turns in found.items():
        for name in ("records_per_s", "records_per_cpu_s"):
            figures[f"{key}/{name}"] = round(median([one[name] for one in turns]))
    for topic in dict.fromkeys(key.partition("/")[0] for key in found):
        bound = at_least(COPY_RATIO_MIN if topic == COPY else READ_RATIO_MIN)
        peers = [found[f"{topic}/{peer}"] for peer in PEERS if f"{topic}/{peer}" in found]
        for figure, unit in ((f"ratio_{topic}", "records_per_s"), (f"ratio_{topic}_per_cpu_s", "records_per_cpu_s")):
            if not peers:
                targets[figure] = skipped(bound, "no peer is installed: run `make bench-peers`")
                continue
            best = [max(one[unit] for one in turn) for turn in zip(*peers, strict=True)]
            own = [one[unit] for one in found[f"{topic}/headgate"]]
            figures[figure] = round(median([mine / peer for mine, peer in zip(own, best, strict=True)]), 2)
            targets[figure] = bound
        if topic in PER_CPU_S_MIN:
            targets[f"{topic}/headgate/records_per_cpu_s"] = at_least(PER_CPU_S_MIN[topic])
    return Result(figures, targets)


@contextmanager
def started_broker() -> Iterator[KafkaBroker]:
    """Start a broker that compiles for speed."""
    directory = Path(tempfile.mkdtemp(prefix="headgate-kafka-"))
    try:
        started = KafkaBroker(directory, is_measured=True)
        try:
            yield started
        finally:
            started.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def fill(address: str, topic: str, kind: str, records: int) -> None:
    """Create a topic and write so many records of 100 bytes, in batches as large as librdkafka makes them."""
    column = values(kind)
    with closing(KafkaClient([address])) as client:
        created = client.create_topic(topic, PARTITIONS)
        compression = Compression.ZSTD if kind == "zstd" else Compression.NONE
        producer = Producer(
            client, SYSTEM_ENVIRONMENT, {topic: created}, client.new_producer(), compression=compression
        )
        times = np.full(ROWS, SYSTEM_ENVIRONMENT.wall_ms())
        for number in range(records // ROWS):
            producer.write((topic, number % PARTITIONS), column, times)
        producer.flush()
        producer.close()


def values(kind: str) -> pa.Array:
    """Return values of 100 bytes: random ones, or JSON with ``id``, ``user`` and ``amount``."""
    draw = random.Random(1)
    if kind == "raw":
        return pa.array([draw.randbytes(100) for _ in range(ROWS)], pa.large_binary())
    fields = [(number, f"user-{draw.randint(1, 99_999)}", round(draw.random() * 1e4, 2)) for number in range(ROWS)]
    text = pa.array(f'{{"id": {one}, "user": "{two}", "amount": {three}, "note": "' for one, two, three in fields)
    filling = pc.binary_repeat("n", pc.subtract(98, pc.binary_length(text)))
    return pc.binary_join_element_wise(text, filling, pa.scalar('"}'), "").cast(pa.large_binary())
