"""Writing to partitions: each record once, in order, whatever happens to brokers, in transactions or without."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest
from tests.servers.kafka import KafkaBroker
from tests.servers.proxy import Wire

from headgate.codec.kafka.messages import LATEST, Produce, ProduceAnswer, ProducedPartition, ProducedTopic
from headgate.codec.kafka.record_batch import Compression
from headgate.codec.kafka.wire import ErrorCode
from headgate.connectors.kafka import producer as producing
from headgate.connectors.kafka.client import KafkaClient, ProducerIds, Topic
from headgate.connectors.kafka.fetcher import Fetcher, Partition
from headgate.connectors.kafka.outgoing_records import partitions_of_keys
from headgate.connectors.kafka.producer import Producer
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import FencedError, UsageError

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""

PATIENCE_MS = 300_000


def put(producer: Producer, partition: Partition, numbers: range) -> None:
    values = pa.array([b"%d" % number for number in numbers], pa.binary())
    # after a restart brokers know only producers whose last record is of today
    producer.write(partition, values, np.full(len(numbers), SYSTEM_ENVIRONMENT.wall_ms()))


def put_and_flush(producer: Producer, partition: Partition, numbers: range) -> None:
    """A refusal comes with the first answer, which either call may be the one to see."""
    put(producer, partition, numbers)
    producer.flush()


def written(client: KafkaClient, topic: str) -> dict[int, list[int]]:
    """Return what can be read of each partition."""
    found = client.topic(topic)
    ends = client.list_offsets(found, dict.fromkeys(found.leaders, LATEST))
    fetcher = Fetcher(client, SYSTEM_ENVIRONMENT, {topic: found}, {(topic, part): 0 for part in found.leaders})
    rows: dict[int, list[int]] = {part: [] for part in found.leaders}
    while any(fetcher.positions[topic, part] < end for part, end in ends.items()):
        for one in fetcher.poll(PATIENCE_MS):
            for batch in one.batches:
                rows[one.partition[1]] += [int(value) for value in batch.records.column("value").to_pylist()]
    fetcher.close()
    return rows


def test_records_of_many_partitions_are_written_in_order(client: KafkaClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producing, "BUFFERED_BYTES_MAX", 20_000)
    topic = client.create_topic(f"t-{uuid.uuid4().hex}", 3)
    producer = Producer(
        client,
        SYSTEM_ENVIRONMENT,
        {topic.name: topic},
        client.new_producer(),
        compression=Compression.ZSTD,
        batch_bytes_max=2_000,
    )
    for begin in range(0, 9_000, 300):
        put(producer, (topic.name, begin // 300 % 3), range(begin, begin + 300))
    producer.flush()
    producer.flush()
    expected = {part: [n for n in range(9_000) if n // 300 % 3 == part] for part in range(3)}
    assert written(client, topic.name) == expected
    producer.close()


class NewLeader:
    """A broker that does not lead its partition yet when the first request comes.

    As real ones do, it takes any batch of a producer that it does not know, and then only the batch that follows.
    """

    is_closed = False

    def __init__(self) -> None:
        self.is_leader = False
        self.taken: list[bytes] = []
        self._answers: deque[ProduceAnswer] = deque()

    def open(self, node: int) -> NewLeader:
        return self

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        return {name: Topic(name, uuid.UUID(int=1), {0: 1}) for name in names}

    def send(self, request: Produce) -> None:
        (of_topic,) = request.topic_data
        (part,) = of_topic.partition_data
        assert isinstance(part.records, list)
        batch = b"".join(bytes(one) for one in part.records)
        follows = not self.taken or sequence_of(batch) == sequence_of(self.taken[-1]) + 1
        code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        if not self.is_leader:
            code, self.is_leader = ErrorCode.NOT_LEADER_OR_FOLLOWER, True
        elif follows:
            code = ErrorCode.NONE
            self.taken.append(batch)
        produced = ProducedPartition(0, code, 0, -1, 0, (), None)
        self._answers.append(ProduceAnswer((ProducedTopic(of_topic.name, (produced,)),), 0))

    def receive(self, timeout_ms: int) -> ProduceAnswer | None:
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        pass


def sequence_of(batch: bytes) -> int:
    return int.from_bytes(batch[53:57], "big")


def test_the_first_batch_of_a_partition_is_written_before_the_others() -> None:
    broker = NewLeader()
    topics = broker.topics(["t"])
    producer = Producer(broker, SYSTEM_ENVIRONMENT, topics, ProducerIds(7, 0), batch_bytes_max=70)  # type: ignore[arg-type]
    put(producer, ("t", 0), range(5))
    producer.flush()
    assert [sequence_of(batch) for batch in broker.taken] == list(range(5))


def test_transactions_follow_each_other(client: KafkaClient, topic: str) -> None:
    name = uuid.uuid4().hex
    owner = client.take_over(name, PATIENCE_MS)
    producer = Producer(client, SYSTEM_ENVIRONMENT, client.topics([topic]), owner, name)
    for number, commit in enumerate([True, False, True]):
        put(producer, (topic, 0), range(10 * number, 10 * number + 10))
        producer.flush()
        ended = client.end_transaction(name, owner, commit=commit)
        assert ended.code is ErrorCode.NONE
        owner = ended.following
        producer.begin(owner)
    while len(found := written(client, topic)[0]) < 20:
        continue
    assert found == [*range(10), *range(20, 30)]
    producer.close()


def test_what_comes_late_is_no_part_of_the_next_transaction(client: KafkaClient, topic: str) -> None:
    """B19, KAFKA-17754: a batch of a transaction that is committed, or aborted, arrives during the next one."""
    name = uuid.uuid4().hex
    owner = client.take_over(name, PATIENCE_MS)
    for number, commit in enumerate([True, False]):
        late = Producer(client, SYSTEM_ENVIRONMENT, client.topics([topic]), owner, name)
        put_and_flush(late, (topic, 0), range(10 * number, 10 * number + 3))
        owner = client.end_transaction(name, owner, commit=commit).following
        following = Producer(client, SYSTEM_ENVIRONMENT, client.topics([topic]), owner, name)
        put_and_flush(following, (topic, 0), range(10 * number + 5, 10 * number + 8))
        with pytest.raises(FencedError, match="a newer producer took it over"):
            put_and_flush(late, (topic, 0), range(10 * number + 3, 10 * number + 5))
        owner = client.end_transaction(name, owner, commit=True).following
        late.close()
        following.close()
    while len(found := written(client, topic)[0]) < 9:
        continue
    assert found == [0, 1, 2, 5, 6, 7, 15, 16, 17]


def test_a_producer_that_was_replaced_ends(client: KafkaClient, topic: str) -> None:
    name = uuid.uuid4().hex
    producer = Producer(client, SYSTEM_ENVIRONMENT, client.topics([topic]), client.take_over(name, PATIENCE_MS), name)
    put(producer, (topic, 0), range(3))
    producer.flush()
    client.take_over(name, PATIENCE_MS)
    with pytest.raises(FencedError, match=r"write to partition 0 of topic .*: a newer producer took it over"):
        put_and_flush(producer, (topic, 0), range(3, 6))
    assert written(client, topic) == {0: []}
    producer.close()


def test_a_batch_that_the_topic_does_not_take_is_said(client: KafkaClient) -> None:
    topic = client.create_topic(f"t-{uuid.uuid4().hex}", 1, settings={"max.message.bytes": "1000"})
    producer = Producer(client, SYSTEM_ENVIRONMENT, {topic.name: topic}, client.new_producer())
    with pytest.raises(UsageError, match=r"it takes no batch of .* bytes; raise max.message.bytes of the topic"):
        put_and_flush(producer, (topic.name, 0), range(1_000))
    with pytest.raises(UsageError, match="has no partition 1"):
        put(producer, (topic.name, 1), range(1))
    producer.close()


def test_an_answer_that_is_lost_writes_nothing_twice(kafka: KafkaBroker, client: KafkaClient, topic: str) -> None:
    host, port = kafka.address.split(":")
    wire = Wire(int(port))
    through = KafkaClient([kafka.address], patience_ms=PATIENCE_MS)
    topics = through.topics([topic])
    through._cluster.nodes = dict.fromkeys(through._cluster.nodes, (host, wire.port))
    producer = Producer(through, SYSTEM_ENVIRONMENT, topics, client.new_producer(), batch_bytes_max=500)
    put(producer, (topic, 0), range(100))
    producer.flush()
    wire.lose_answer(b"\x00\x00\x00\x0c", is_given=True)  # version 12 of Produce
    put(producer, (topic, 0), range(100, 400))
    producer.flush()
    assert wire.lost_count == 1
    assert written(client, topic) == {0: list(range(400))}
    producer.close()
    through.close()
    wire.close()


def test_keys_meet_those_of_other_clients(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = client.create_topic(f"t-{uuid.uuid4().hex}", 7)
    keys = [uuid.uuid4().hex[: 1 + number % 30].encode() for number in range(200)]
    records = ({"value": b"%d" % number, "key": key} for number, key in enumerate(keys))
    kafka.put(topic.name, records, partitioner="murmur2")
    chosen = partitions_of_keys(pa.array(keys, pa.binary()), 7).tolist()
    assert written(client, topic.name) == {
        part: [number for number, one in enumerate(chosen) if one == part] for part in range(7)
    }


@pytest.mark.crash
def test_writing_survives_a_broker_that_is_killed(broker: KafkaBroker) -> None:
    client = KafkaClient([broker.address], patience_ms=PATIENCE_MS)
    topic = client.create_topic(f"t-{uuid.uuid4().hex}", 2)
    producer = Producer(client, SYSTEM_ENVIRONMENT, {topic.name: topic}, client.new_producer(), batch_bytes_max=3_000)
    killed = threading.Thread(target=kill_and_start, args=(broker,))
    number = 0
    while number < 200 or killed.is_alive():
        put(producer, (topic.name, number % 2), range(10 * number, 10 * number + 10))
        number += 1
        if number == 100:
            killed.start()
        if number > 200:
            time.sleep(0.01)  # writing goes on until the broker is there again: not a wait for anything
    producer.flush()
    written_numbers = written(client, topic.name)
    assert written_numbers == {part: [n for n in range(10 * number) if n // 10 % 2 == part] for part in (0, 1)}
    producer.close()
    client.close()


def kill_and_start(broker: KafkaBroker) -> None:
    broker.kill()
    broker.start()
