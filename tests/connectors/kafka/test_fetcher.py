"""Reading partitions on: every record once, in order, whatever happens to brokers, and clear ends."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.servers.kafka import KafkaBroker

from headgate.codec.kafka.messages import LATEST, DivergingEpoch, FetchAnswer
from headgate.connectors.kafka import fetcher as fetching
from headgate.connectors.kafka.client import KafkaClient
from headgate.connectors.kafka.connection import Connection
from headgate.connectors.kafka.fetcher import Fetcher, Partition
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import UsageError

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""

PATIENCE_MS = 300_000


def produce(broker: KafkaBroker, topic: str, partition: int, numbers: range) -> None:
    records = ({"value": b"%d" % number, "partition": partition} for number in numbers)
    broker.put(topic, records, **{"compression.type": "lz4"})


def fetcher_of(client: KafkaClient, positions: Mapping[Partition, int], **options: Any) -> Fetcher:
    topics = client.topics({name for name, _ in positions})
    return Fetcher(client, SYSTEM_ENVIRONMENT, topics, positions, **options)


def read(fetcher: Fetcher, ends: Mapping[Partition, int]) -> dict[Partition, list[int]]:
    """Return the numbers read of each partition until all have come to their ends."""
    found: dict[Partition, list[int]] = {partition: [] for partition in ends}
    while any(fetcher.positions[partition] < end for partition, end in ends.items()):
        for one in fetcher.poll(PATIENCE_MS):
            for batch in one.batches:
                found[one.partition] += [int(value) for value in batch.records.column("value").to_pylist()]
            assert one.log_end >= one.next_offset
    return found


def test_partitions_of_several_topics_are_read_in_order(
    kafka: KafkaBroker, client: KafkaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "BYTES_MAX", 20_000)
    monkeypatch.setattr(fetching, "PARTITION_BYTES_MAX", 5_000)
    names = [client.create_topic(f"t-{uuid.uuid4().hex}", 3).name for _ in range(2)]
    partitions = [(name, number) for name in names for number in range(3)]
    for index, (name, number) in enumerate(partitions):
        produce(kafka, name, number, range(index * 1_000))
    fetcher = fetcher_of(client, dict.fromkeys(partitions, 0))
    found = read(fetcher, {partition: index * 1_000 for index, partition in enumerate(partitions)})
    assert found == {partition: list(range(index * 1_000)) for index, partition in enumerate(partitions)}
    fetcher.close()


def test_reading_goes_on_where_it_was(kafka: KafkaBroker, client: KafkaClient, topic: str) -> None:
    produce(kafka, topic, 0, range(2_000))
    numbers: list[int] = []
    position = 0
    while position < 2_000:
        fetcher = fetcher_of(client, {(topic, 0): position})
        (found,) = fetcher.poll(PATIENCE_MS)
        batch = pa.Table.from_batches([one.records for one in found.batches]).slice(0, 300)
        numbers += [int(value) for value in batch["value"].to_pylist()]
        position = batch["offset"][-1].as_py() + 1
        fetcher.close()
    assert numbers == list(range(2_000))


def test_a_poll_without_records_ends_in_time(client: KafkaClient, topic: str) -> None:
    fetcher = fetcher_of(client, {(topic, 0): 0})
    assert fetcher.poll(0) == []
    assert [list(one.batches) for one in fetcher.poll(PATIENCE_MS)] == [[]]
    fetcher.close()


def test_paused_partitions_are_not_asked_for(kafka: KafkaBroker, client: KafkaClient, topic: str) -> None:
    produce(kafka, topic, 0, range(10))
    fetcher = fetcher_of(client, {(topic, 0): 0})
    fetcher.pause((topic, 0))
    assert fetcher.poll(0) == []
    assert fetcher.poll(PATIENCE_MS) == []  # nothing is in flight, so that there is nothing to wait for
    fetcher.resume((topic, 0))
    assert read(fetcher, {(topic, 0): 10}) == {(topic, 0): list(range(10))}
    fetcher.close()


def test_a_position_that_is_not_in_the_log_is_an_error(client: KafkaClient, topic: str) -> None:
    fetcher = fetcher_of(client, {(topic, 0): 5})
    with pytest.raises(UsageError, match=r"offset 5 of partition 0 of topic .* is not in its log any more, or not yet"):
        fetcher.poll(PATIENCE_MS)
    fetcher.close()


@pytest.mark.parametrize("end", [4, 5])
def test_what_a_leader_says_about_epochs_is_obeyed(
    kafka: KafkaBroker, client: KafkaClient, topic: str, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    """KIP-320: records are lost if the epoch ends in front of the position; else compaction left none of it."""
    produce(kafka, topic, 0, range(10))
    receive = Connection.receive
    seen: list[FetchAnswer] = []

    def received(self: Connection, timeout_ms: int) -> Any:
        answer = receive(self, timeout_ms)
        if not isinstance(answer, FetchAnswer) or seen:
            return answer
        seen.append(answer)
        (of_topic,) = answer.responses
        (part,) = of_topic.partitions
        part = replace(part, records=b"", diverging_epoch=DivergingEpoch(0, end))
        return replace(answer, responses=(replace(of_topic, partitions=(part,)),))

    monkeypatch.setattr(Connection, "receive", received)
    fetcher = fetcher_of(client, {(topic, 0): 5}, epochs={(topic, 0): 0})
    if end < 5:
        with pytest.raises(UsageError, match="lost records that this pipeline has read: all from offset 4 on"):
            read(fetcher, {(topic, 0): 10})
    else:
        assert read(fetcher, {(topic, 0): 10}) == {(topic, 0): list(range(5, 10))}
    assert seen
    fetcher.close()


def test_a_topic_that_was_made_anew_is_noticed(kafka: KafkaBroker, client: KafkaClient, topic: str) -> None:
    produce(kafka, topic, 0, range(10))
    fetcher = fetcher_of(client, {(topic, 0): 0})
    read(fetcher, {(topic, 0): 10})
    kafka.delete_topic(topic)
    while client.topics([topic]):
        continue
    client.create_topic(topic, 1)
    with pytest.raises(UsageError, match="was deleted and created again since this pipeline began to read it"):
        poll_for_ever(fetcher)
    fetcher.close()


def test_a_topic_that_vanished_keeps_its_position(kafka: KafkaBroker, client: KafkaClient, topic: str) -> None:
    produce(kafka, topic, 0, range(10))
    fetcher = fetcher_of(client, {(topic, 0): 0})
    read(fetcher, {(topic, 0): 10})
    kafka.delete_topic(topic)
    while client.topics([topic]):
        continue
    for _ in range(5):
        assert [one for one in fetcher.poll(100) if list(one.batches)] == []
    assert fetcher.positions == {(topic, 0): 10}
    fetcher.close()


@pytest.mark.crash
def test_a_broker_that_does_not_answer_is_asked_again(broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "ANSWER_MS", 300)
    client = KafkaClient([broker.address], patience_ms=PATIENCE_MS)
    topic = client.create_topic(f"t-{uuid.uuid4().hex}", 1).name
    produce(broker, topic, 0, range(10))
    fetcher = fetcher_of(client, {(topic, 0): 0}, wait_ms=100)
    assert read(fetcher, {(topic, 0): 10}) == {(topic, 0): list(range(10))}
    fetcher.poll(0)
    first = fetcher._connections[1]
    broker.pause()
    try:
        while not first.is_closed:
            fetcher.poll(100)
    finally:
        broker.resume()
    produce(broker, topic, 0, range(10, 20))
    assert read(fetcher, {(topic, 0): 20}) == {(topic, 0): list(range(10, 20))}
    fetcher.close()
    client.close()


@pytest.mark.deep  # as test_broker_kills, where the kill comes at a request
@pytest.mark.crash
def test_reading_survives_brokers_that_are_killed(broker: KafkaBroker) -> None:
    client = KafkaClient([broker.address], patience_ms=PATIENCE_MS)
    topic = client.create_topic(f"t-{uuid.uuid4().hex}", 2)
    parts = [(topic.name, number) for number in range(2)]
    numbers = range(30_000)
    writer = threading.Thread(target=write_through_kills, args=(broker, topic.name, numbers))
    fetcher = fetcher_of(client, dict.fromkeys(parts, 0))
    writer.start()
    found: dict[Partition, list[int]] = {part: [] for part in parts}
    for kill_at in (5_000, 20_000):
        while sum(map(len, found.values())) < kill_at:
            take(fetcher, found)
        broker.kill()
        broker.start()
    writer.join()
    ends = client.list_offsets(topic, {0: LATEST, 1: LATEST})
    while any(fetcher.positions[topic.name, number] < end for number, end in ends.items()):
        take(fetcher, found)
    assert found == {part: list(numbers[part[1] :: 2]) for part in parts}
    fetcher.close()
    client.close()


def poll_for_ever(fetcher: Fetcher) -> None:
    while True:
        fetcher.poll(PATIENCE_MS)


def take(fetcher: Fetcher, found: dict[Partition, list[int]]) -> None:
    for one in fetcher.poll(PATIENCE_MS):
        for batch in one.batches:
            found[one.partition] += [int(value) for value in batch.records.column("value").to_pylist()]


def write_through_kills(broker: KafkaBroker, topic: str, numbers: range) -> None:
    from confluent_kafka import Producer

    config = {"bootstrap.servers": broker.address, "enable.idempotence": True, "log_level": 0, "linger.ms": 5}
    producer = Producer({**config, "message.timeout.ms": 600_000})
    for number in numbers:
        producer.produce(topic, b"%d" % number, partition=number % 2)
        producer.poll(0.001 if number % 100 == 0 else 0)
    assert producer.flush(600) == 0


def test_columns_are_as_large_as_their_records(kafka: KafkaBroker, client: KafkaClient, topic: str) -> None:
    produce(kafka, topic, 0, range(1_000))
    fetcher = fetcher_of(client, {(topic, 0): 0}, with_headers=True)
    batches: list[pa.RecordBatch] = []
    while fetcher.positions[topic, 0] < 1_000:
        batches += [batch.records for one in fetcher.poll(PATIENCE_MS) for batch in one.batches]
    whole = pa.Table.from_batches(batches)
    assert whole.num_rows == 1_000
    assert np.array_equal(whole["offset"].to_numpy(), np.arange(1_000))
    assert whole["headers"].to_pylist() == [[]] * 1_000
    fetcher.close()
