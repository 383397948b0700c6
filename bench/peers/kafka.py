"""Kafka with the confluent-kafka client: events of 100 bytes written and read, per second.

A broker of its own on the loopback, four partitions, everything acknowledged after a sync: the broker flushes its log
with each batch that it takes (``log.flush.interval.messages=1``), and the client waits for that (``acks=all``). Batches
are as large as the broker takes them, and are not compressed. Events are read twice; the second reading counts.

Runs in the environment that ``make bench-peers`` makes, so it imports nothing of Headgate.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOPIC = "events"
PARTITIONS = 4
EVENT_BYTES = 100
KEY_BYTES = 8
AT_A_TIME = 10_000
START_S = 120.0
BROKER = Path(sys.executable).parent.parent / "broker"
"""Where ``bench/peers/install.py`` puts the broker: beside the interpreter."""

PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
log.flush.interval.messages=1
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; print one JSON object as the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=2_000_000)
    events = parser.parse_args(arguments).events
    with tempfile.TemporaryDirectory(prefix="headgate-kafka-") as directory, broker(Path(directory)) as servers:
        make_topic(servers)
        written = write_rate(servers, events)
        read_rate(servers, events)
        print(json.dumps({"events": events, "written_per_s": written, "read_per_s": read_rate(servers, events)}))


@contextmanager
def broker(directory: Path) -> Iterator[str]:
    """Start a broker; give its address."""
    port, controller = free_port(), free_port()
    properties = directory / "server.properties"
    properties.write_text(PROPERTIES.format(port=port, controller=controller, data=directory / "data"))
    java = ["java", "-Xmx1g", "-cp", f"{BROKER}/*"]
    tool = [*java, "kafka.tools.StorageTool", "format", "-t", "AAAAAAAAQACAAAAAAAAAAQ", "-c", str(properties)]
    subprocess.run(tool, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen([*java, "kafka.Kafka", str(properties)], stdout=log, stderr=log, cwd=directory)
    try:
        wait_for(f"127.0.0.1:{port}", process)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def wait_for(servers: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the broker answers."""
    from confluent_kafka.admin import AdminClient

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if AdminClient({"bootstrap.servers": servers, "log_level": 0}).list_topics(timeout=1).brokers:
                return
        except Exception:
            time.sleep(0.2)
    raise RuntimeError("the broker does not start")


def make_topic(servers: str) -> None:
    """Create the topic."""
    from confluent_kafka.admin import AdminClient, NewTopic

    client = AdminClient({"bootstrap.servers": servers})
    for asked in client.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values():
        asked.result(START_S)


def write_rate(servers: str, events: int) -> float:
    """Produce so many events; return how many were acknowledged per second."""
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": servers,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "batch.num.messages": 100_000,
            "queue.buffering.max.messages": 1_000_000,
            "queue.buffering.max.kbytes": 256_000,
        }
    )
    value = os.urandom(EVENT_BYTES - KEY_BYTES)
    some: list[Any] = [{"key": number.to_bytes(KEY_BYTES, "big"), "value": value} for number in range(AT_A_TIME)]
    begun = time.perf_counter()
    for _ in range(events // AT_A_TIME):
        while len(producer) + AT_A_TIME > 1_000_000:
            producer.poll(0.01)
        producer.produce_batch(TOPIC, some)
    if producer.flush(START_S):
        raise RuntimeError("not everything was acknowledged")
    return events / (time.perf_counter() - begun)


def read_rate(servers: str, events: int) -> float:
    """Consume the topic from its beginning; return events per second."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"bench-{time.monotonic_ns()}",
            "enable.auto.commit": False,
            "fetch.message.max.bytes": 16_000_000,
            "queued.min.messages": 1_000_000,
            "queued.max.messages.kbytes": 256_000,
        }
    )
    consumer.assign([TopicPartition(TOPIC, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
    begun, read = time.perf_counter(), 0
    while read < events:
        found = consumer.consume(100_000, timeout=5)
        if not found:
            raise RuntimeError(f"only {read} of {events} events came back")
        read += sum(message.error() is None for message in found)
    took = time.perf_counter() - begun
    consumer.close()
    return read / took


def free_port() -> int:
    """Return a port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
