"""Record batches judged by Kafka's own client, in Java: it frames snappy and LZ4 in ways of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.conftest import few
from tests.servers import kafka as servers
from tests.servers.kafka import KafkaBroker

from headgate.codec.kafka.messages import EARLIEST, LATEST
from headgate.codec.kafka.record_batch import HEADERS_TYPE, Compression
from headgate.connectors.kafka.client import KafkaClient
from headgate.connectors.kafka.fetcher import Fetcher
from headgate.connectors.kafka.producer import Producer
from headgate.environment import SYSTEM_ENVIRONMENT

PATIENCE_MS = 300_000
START_MS = 1_764_000_000_000
COUNT = 2_000
CODECS = [Compression.SNAPPY, Compression.NONE, Compression.GZIP, Compression.ZSTD, Compression.LZ4]
"""The first and the last one are framed in ways of its own; librdkafka judges all of them."""
PROGRAM = Path(servers.__file__).with_name("KafkaJudge.java")
Java = Callable[..., list[str]]

pytestmark = [
    pytest.mark.xdist_group("kafka"),
    pytest.mark.skipif(shutil.which("javac") is None, reason="there is no Java compiler (a JDK has one)"),
]


def run(*command: str) -> list[str]:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_MS / 1000)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Java:
    """Runs the program, which is compiled once."""
    classes = str(tmp_path_factory.mktemp("classes"))
    run("javac", "-d", classes, "-cp", f"{servers.LIBRARIES}/*", str(PROGRAM))
    path = f"{classes}:{servers.LIBRARIES}/*"
    return partial(run, servers.java(), "-XX:TieredStopAtLevel=1", "-cp", path, PROGRAM.stem)


def records() -> list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]]:
    """What the program writes: time, key, value and headers."""
    return [
        (
            START_MS + n,
            None if n % 3 == 0 else b"k%d" % n,
            None if n % 7 == 0 else b"value %d" % n * (n % 20),
            [("n", b"%d" % n)] if n % 5 == 0 else [],
        )
        for n in range(COUNT)
    ]


@pytest.mark.parametrize("codec", few(["snappy", "none", "gzip", "zstd", "lz4"], 2))
def test_what_java_writes_is_read(java: Java, kafka: KafkaBroker, topic: str, codec: str) -> None:
    java("write", kafka.address, topic, codec, str(COUNT))
    client = KafkaClient([kafka.address], patience_ms=PATIENCE_MS)
    found = client.topic(topic)
    assert client.list_offsets(found, {0: EARLIEST}) == {0: 0}
    assert client.list_offsets(found, {0: LATEST}) == {0: COUNT}
    fetcher = Fetcher(client, SYSTEM_ENVIRONMENT, {topic: found}, {(topic, 0): 0}, with_headers=True)
    rows = []
    while fetcher.positions[topic, 0] < COUNT:
        for one in fetcher.poll(PATIENCE_MS):
            for batch in (decoded.records for decoded in one.batches):
                times = batch.column("timestamp").cast(pa.int64()).to_pylist()
                for row, time in zip(batch.to_pylist(), times, strict=True):
                    headers = [(one["key"], one["value"]) for one in row["headers"]]
                    rows.append((time // 1000, row["key"], row["value"], headers))
    assert rows == records()
    fetcher.close()
    client.close()


@pytest.mark.parametrize("codec", few(CODECS, 2))
def test_java_reads_what_is_written(java: Java, kafka: KafkaBroker, topic: str, codec: Compression) -> None:
    client = KafkaClient([kafka.address], patience_ms=PATIENCE_MS)
    producer = Producer(
        client,
        SYSTEM_ENVIRONMENT,
        client.topics([topic]),
        client.new_producer(),
        compression=codec,
        batch_bytes_max=60_000,
    )
    times, keys, values, headers = zip(*records(), strict=True)
    producer.write(
        (topic, 0),
        pa.array(values, pa.binary()),
        np.array(times, np.int64),
        pa.array(keys, pa.binary()),
        pa.array([[{"key": name, "value": value} for name, value in one] for one in headers], HEADERS_TYPE),
    )
    producer.flush()

    def text(data: bytes | None) -> str:
        return "null" if data is None else f"x{data.hex()}"

    expected = [
        f"{n} {time} {text(key)} {text(value)} " + "".join(f"{name}={(data or b'').hex()};" for name, data in own)
        for n, (time, key, value, own) in enumerate(records())
    ]
    assert java("read", kafka.address, topic, str(COUNT)) == expected
    producer.close()
    client.close()
