"""Record batches judged by librdkafka and a real broker: what one writes the other reads, record by record."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.conftest import IS_DEEP
from tests.servers.kafka import KafkaBroker

from headgate.codec.kafka.messages import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    EndTxn,
    Fetch,
    FetchedPartition,
    FetchPartition,
    FetchTopic,
    FindCoordinator,
    InitProducerId,
    InitProducerIdAnswer,
    Metadata,
    MetadataTopic,
    Produce,
    ProducePartition,
    ProduceTopic,
)
from headgate.codec.kafka.record_batch import HEADERS_TYPE, Compression
from headgate.codec.kafka.record_decoder import decode_records, end_of
from headgate.codec.kafka.record_encoder import NO_PRODUCER, ProducerState, encode_records
from headgate.connectors.kafka.connection import Connection

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""

TIMEOUT_MS = 300_000
START_MS = 1_764_000_000_000
FETCH_BYTES = 50 << 20


@dataclass(frozen=True)
class Record:
    value: bytes | None
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)
    timestamp_ms: int = START_MS


def drawn(seed: int, count: int) -> list[Record]:
    """Records of many shapes: nulls, empty ones, sizes around those at which lengths take another byte, headers."""
    draw = random.Random(seed)
    sizes = [None, 0, 1, 5, 30, 63, 64, 100, 127, 128, 300, 8_191, 8_192]
    weights = [2, 2, 3, 5, 10, 2, 2, 20, 2, 2, 3, 1, 1]

    def text(most: int) -> bytes | None:
        size = draw.choices(sizes, weights)[0]
        return None if size is None else draw.randbytes(min(size, most))

    def headers() -> list[tuple[str, bytes | None]]:
        return [(draw.choice(["", "a", "trace", "ü" * 40]), text(200)) for _ in range(draw.choice([0, 0, 0, 1, 2, 7]))]

    return [
        Record(text(10_000), text(100), headers(), START_MS + draw.choice([0, -5_000, i, 10**9])) for i in range(count)
    ]


# -- librdkafka --------------------------------------------------------------------------------------------------------


def write_by_librdkafka(broker: KafkaBroker, topic: str, records: Sequence[Record], **config: Any) -> None:
    from confluent_kafka import Producer

    settings = {"bootstrap.servers": broker.address, "max.in.flight": 1, "linger.ms": 50}
    producer = Producer(settings | config)
    for one in records:
        producer.produce(topic, one.value, one.key, 0, timestamp=one.timestamp_ms, headers=list(one.headers))
        producer.poll(0)
    assert producer.flush(60) == 0


def read_by_librdkafka(broker: KafkaBroker, topic: str, count: int) -> list[Record]:
    from confluent_kafka import Consumer, TopicPartition

    config = {
        "bootstrap.servers": broker.address,
        "group.id": uuid.uuid4().hex,
        "check.crcs": True,
        "isolation.level": "read_committed",
        "enable.partition.eof": False,
    }
    consumer = Consumer(config)
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[Record] = []
    while len(found) < count:
        for message in consumer.consume(10_000, 0.5):  # it waits for as many
            assert message.error() is None
            headers = [(name, value) for name, value in message.headers() or []]
            found.append(Record(message.value(), message.key(), headers, message.timestamp()[1]))
    consumer.close()
    return found


# -- ours --------------------------------------------------------------------------------------------------------------


def topic_id(connection: Connection, topic: str) -> Any:
    answer = connection.ask(Metadata((MetadataTopic(name=topic),)), TIMEOUT_MS)
    assert answer.topics[0].error_code == 0
    return answer.topics[0].topic_id


def fetch(
    connection: Connection, topic: str, begin: int, isolation: int = READ_COMMITTED, bytes_max: int = FETCH_BYTES
) -> FetchedPartition:
    partition = FetchPartition(0, -1, begin, -1, -1, bytes_max)
    topics = (FetchTopic(topic_id(connection, topic), (partition,)),)
    answer = connection.ask(Fetch(-1, 1_000, 1, FETCH_BYTES, isolation, 0, -1, topics), TIMEOUT_MS)
    assert answer.error_code == 0
    found = answer.responses[0].partitions[0]
    assert found.error_code == 0
    return found


def read(
    connection: Connection, topic: str, begin: int = 0, isolation: int = READ_COMMITTED, bytes_max: int = FETCH_BYTES
) -> tuple[list[Record], list[int]]:
    """Return the records up to the end of what may be read, and their offsets."""
    records: list[Record] = []
    offsets: list[int] = []
    while True:
        found = fetch(connection, topic, begin, isolation, bytes_max)
        end = found.last_stable_offset if isolation == READ_COMMITTED else found.high_watermark
        if begin >= end:
            return records, offsets
        aborted = None if isolation == READ_UNCOMMITTED else found.aborted_transactions or ()
        data, former = found.records or b"", begin
        begin, _ = end_of(data, former)
        assert begin > former
        for decoded in decode_records(data, former, topic, aborted, with_headers=True):
            batch = decoded.records
            batch.validate(full=True)
            offsets += batch.column("offset").to_pylist()
            times = batch.column("timestamp").cast(pa.int64()).to_pylist()
            for row, time in zip(batch.to_pylist(), times, strict=True):
                headers = [(one["key"], one["value"]) for one in row["headers"]]
                records.append(Record(row["value"], row["key"], headers, time // 1000))


def write(
    connection: Connection,
    topic: str,
    records: Sequence[Record],
    compression: Compression = Compression.NONE,
    producer: ProducerState = NO_PRODUCER,
    transactional_id: str | None = None,
    batch_bytes_max: int = 200_000,
) -> None:
    headers = [[{"key": name, "value": value} for name, value in one.headers] for one in records]
    batches = encode_records(
        pa.array([one.value for one in records], pa.large_binary()),
        np.array([one.timestamp_ms for one in records], np.int64),
        pa.array([one.key for one in records], pa.large_binary()),
        pa.array(headers, HEADERS_TYPE) if any(headers) else None,
        producer=producer,
        compression=compression,
        batch_bytes_max=batch_bytes_max,
    )
    assert sum(batch.records_count for batch in batches) == len(records)
    for batch in batches:  # brokers take one batch for a partition in one request
        data = (ProduceTopic(topic, (ProducePartition(0, batch.parts),)),)
        answer = connection.ask(Produce(transactional_id, -1, TIMEOUT_MS, data), TIMEOUT_MS)
        (result,) = answer.responses[0].partition_responses
        assert result.error_code == 0, result


def begin_transactions(connection: Connection, transactional_id: str) -> InitProducerIdAnswer:
    while True:
        (found,) = connection.ask(FindCoordinator(1, (transactional_id,)), TIMEOUT_MS).coordinators
        if found.error_code == 0:
            answer = connection.ask(InitProducerId(transactional_id, 60_000), TIMEOUT_MS)
            if answer.error_code == 0:
                return answer


def end_transaction(connection: Connection, transactional_id: str, of: Any, *, commit: bool) -> Any:
    answer = connection.ask(EndTxn(transactional_id, of.producer_id, of.producer_epoch, commit), TIMEOUT_MS)
    assert answer.error_code == 0
    return answer


# -- the judgement -----------------------------------------------------------------------------------------------------

RDKAFKA_CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


@pytest.mark.parametrize("codec", RDKAFKA_CODECS)
def test_what_librdkafka_writes_is_read(kafka: KafkaBroker, topic: str, connection: Connection, codec: str) -> None:
    records = drawn(1, 4_000)
    write_by_librdkafka(kafka, topic, records, **{"compression.type": codec})
    found, offsets = read(connection, topic)
    assert found == records
    assert offsets == list(range(len(records)))


@pytest.mark.parametrize("codec", list(Compression))
def test_librdkafka_reads_what_is_written(
    kafka: KafkaBroker, topic: str, connection: Connection, codec: Compression
) -> None:
    records = drawn(2, 4_000)
    write(connection, topic, records, codec)
    assert read_by_librdkafka(kafka, topic, len(records)) == records
    assert read(connection, topic)[0] == records


def test_small_answers_that_cut_batches_off_are_read_whole(
    kafka: KafkaBroker, topic: str, connection: Connection
) -> None:
    records = drawn(3, 3_000)
    write_by_librdkafka(kafka, topic, records, **{"batch.size": 20_000})
    assert read(connection, topic, bytes_max=30_000)[0] == records


def test_reading_begins_in_the_middle_of_a_batch(kafka: KafkaBroker, topic: str, connection: Connection) -> None:
    records = drawn(4, 1_000)
    write(connection, topic, records)
    for begin in (1, 499, 999):
        found, offsets = read(connection, topic, begin)
        assert found == records[begin:]
        assert offsets[0] == begin
    assert read(connection, topic, 1_000) == ([], [])


def test_large_records_are_read_and_written(kafka: KafkaBroker, connection: Connection) -> None:
    limit = 8_000_000
    topic = kafka.create_topic(f"t-{uuid.uuid4().hex}", config={"max.message.bytes": str(limit)})
    draw = random.Random(5)
    records = [Record(draw.randbytes(size)) for size in (10, 3_000_000, 20, 7_000_000)]
    write_by_librdkafka(kafka, topic, records, **{"message.max.bytes": limit})
    assert read(connection, topic)[0] == records
    write(connection, topic, records, batch_bytes_max=limit)
    assert read(connection, topic)[0] == records * 2


def test_gaps_that_compaction_leaves_are_read_over(kafka: KafkaBroker, connection: Connection) -> None:
    config = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "segment.ms": "100",
        "min.compaction.lag.ms": "0",
        "max.compaction.lag.ms": "1",
    }
    topic = kafka.create_topic(f"t-{uuid.uuid4().hex}", config=config)
    old = [Record(b"%d" % i, b"k%d" % (i % 10)) for i in range(1_000)]
    write(connection, topic, old, batch_bytes_max=5_000)
    offsets = list(range(1_000))
    time_ms = START_MS
    while len(offsets) > 500:  # until the broker has compacted: all but the segment of the latest time
        time_ms += 1_000
        write(connection, topic, [Record(b"new", b"new", timestamp_ms=time_ms)])
        found, offsets = read(connection, topic)
    assert offsets == sorted(set(offsets))
    assert {one.key: one.value for one in found if one.key != b"new"} == {one.key: one.value for one in old[-10:]}


# -- transactions ------------------------------------------------------------------------------------------------------


def test_aborted_transactions_of_librdkafka_are_left_out(
    kafka: KafkaBroker, topic: str, connection: Connection
) -> None:
    from confluent_kafka import Producer

    draw = random.Random(6)
    producers = [
        Producer({"bootstrap.servers": kafka.address, "transactional.id": uuid.uuid4().hex, "linger.ms": 0})
        for _ in range(3)
    ]
    for producer in producers:
        producer.init_transactions(60)
    committed: list[bytes] = []
    aborted: list[bytes] = []
    for number in range(30 if IS_DEEP else 10):  # transactions of several producers lie between each other in the log
        chosen = draw.sample(producers, draw.randint(1, 3))
        for producer in chosen:
            producer.begin_transaction()
        outcomes = [draw.random() < 0.5 for _ in chosen]
        for part in range(draw.randint(1, 4)):
            for index, (producer, is_committed) in enumerate(zip(chosen, outcomes, strict=True)):
                value = b"%d/%d/%d" % (number, part, index)
                producer.produce(topic, value, partition=0)
                producer.flush(60)
                (committed if is_committed else aborted).append(value)
        for producer, is_committed in zip(chosen, outcomes, strict=True):
            (producer.commit_transaction if is_committed else producer.abort_transaction)(60)
    assert aborted
    assert [one.value for one in read(connection, topic)[0]] == committed
    values = [one.value for one in read(connection, topic, isolation=READ_UNCOMMITTED)[0]]
    assert sorted(values, key=str) == sorted(committed + aborted, key=str)
    for begin in range(0, len(values), 7):  # the first marker may belong to a transaction that began before
        assert {one.value for one in read(connection, topic, begin)[0]} <= set(committed)


def test_open_transactions_end_what_is_read(kafka: KafkaBroker, topic: str, connection: Connection) -> None:
    name = uuid.uuid4().hex
    owner = begin_transactions(connection, name)
    write(connection, topic, [Record(b"before")])
    state = ProducerState(owner.producer_id, owner.producer_epoch, 0, True)
    write(connection, topic, [Record(b"open")], producer=state, transactional_id=name)
    write(connection, topic, [Record(b"after")])
    assert [one.value for one in read(connection, topic)[0]] == [b"before"]
    end_transaction(connection, name, owner, commit=True)
    while len(found := read(connection, topic)[0]) < 3:
        continue
    assert [one.value for one in found] == [b"before", b"open", b"after"]


def test_librdkafka_reads_only_transactions_that_are_committed(
    kafka: KafkaBroker, topic: str, connection: Connection
) -> None:
    name = uuid.uuid4().hex
    owner: Any = begin_transactions(connection, name)
    expected: list[Record] = []
    for number, commit in enumerate([True, False, True, True, False, True]):
        records = drawn(100 + number, 500)
        codec = list(Compression)[number % 5]
        sequence = 0
        for part in (records[:200], records[200:]):
            state = ProducerState(owner.producer_id, owner.producer_epoch, sequence, True)
            write(connection, topic, part, codec, state, name, batch_bytes_max=10_000_000)
            sequence += len(part)
        owner = end_transaction(connection, name, owner, commit=commit)
        expected += records if commit else []
    assert read_by_librdkafka(kafka, topic, len(expected)) == expected
    assert read(connection, topic)[0] == expected


def test_times_of_the_broker_are_read(kafka: KafkaBroker, connection: Connection) -> None:
    topic = kafka.create_topic(f"t-{uuid.uuid4().hex}", config={"message.timestamp.type": "LogAppendTime"})
    write_by_librdkafka(kafka, topic, [Record(b"a"), Record(b"b")])
    found = read(connection, topic)[0]
    assert [one.timestamp_ms for one in found] == [one.timestamp_ms for one in read_by_librdkafka(kafka, topic, 2)]
    assert found[0].timestamp_ms > START_MS
