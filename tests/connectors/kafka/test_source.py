"""Topics as a source: restarts anywhere, partitions that come, go and are made anew, begins and ends."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from tests.conftest import IS_DEEP, few
from tests.docs.documentation import PREAMBLE, examples
from tests.servers.kafka import KafkaBroker
from tests.servers.schema_registry import Registry
from tests.support.killing import run_killing

import headgate as hg
from headgate.api.foreground import RunRequested, loading_only
from headgate.codec.arrow import MOMENT
from headgate.codec.kafka.messages import LATEST
from headgate.codec.kafka.record_batch import HEADER, LENGTH_BEGIN, BatchHeader
from headgate.connectors.base import SourceBatch, SourceContext, SplitPosition
from headgate.connectors.kafka.client import KafkaClient, Topic
from headgate.connectors.kafka.fetcher import Fetched, Fetcher
from headgate.connectors.kafka.producer import Producer
from headgate.connectors.kafka.source import Delivery, Kafka, KafkaReader, Position
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import CorruptionError, UsageError
from headgate.operators.checkpoint_listeners import SnapshotContext
from headgate.testing.source_kit import Growing, check_late_splits, check_source

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""

PARALLELISMS = (1, 2) if IS_DEEP else (2,)

PATIENCE_MS = 300_000
START = datetime(2026, 1, 1, tzinfo=UTC)


def new_topic(client: KafkaClient, partitions: int, prefix: str = "t") -> str:
    return client.create_topic(f"{prefix}-{uuid.uuid4().hex}", partitions).name


def put(
    client: KafkaClient,
    topic: str,
    values: Mapping[int, Sequence[bytes | None]],
    *,
    transaction: str = "",
    commit: bool | None = True,
) -> None:
    """Write to partitions; the n-th value has a time of n seconds after ``START``. ``commit``: None: leave it open."""
    ids = client.take_over(transaction, PATIENCE_MS) if transaction else client.new_producer()
    producer = Producer(client, SYSTEM_ENVIRONMENT, client.topics([topic]), ids, transaction or None)
    for part, some in values.items():
        times = int(START.timestamp() * 1000) + 1000 * np.arange(len(some), dtype=np.int64)
        producer.write((topic, part), pa.array(some, pa.binary()), times)
    producer.flush()
    producer.close()
    if transaction and commit is not None:
        client.end_transaction(transaction, ids, commit=commit)


def context(positions: dict[str, bytes] | None = None, index: int = 0, parallelism: int = 1) -> SourceContext:
    return SourceContext("p", "s", index, parallelism, positions)


def take(reader: KafkaReader, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        found = reader.poll()
        if found is not None:
            rows += found.batch.to_pylist()
    return rows


def read_all(source: Kafka, positions: dict[str, bytes] | None = None) -> list[bytes]:
    """Return the values up to the end of a bounded source."""
    reader = source.open(context(positions))
    rows = []
    while not reader.is_finished():
        found = reader.poll()
        rows += [] if found is None else found.batch.to_pylist()
    reader.close()
    return [row["value"] for row in rows]


def cut_back(broker: KafkaBroker, topic: str, begin: int) -> None:
    """Have a stopped broker forget the records of partition 0 from an offset on, which must begin a batch."""
    (log,) = (broker.data / f"{topic}-0").glob("*.log")
    data, position = log.read_bytes(), 0
    while (header := BatchHeader._make(HEADER.unpack_from(data, position))).base_offset < begin:
        position += LENGTH_BEGIN + header.batch_length
    log.write_bytes(data[:position])


@pytest.mark.crash
def test_records_that_a_topic_lost_after_they_were_read_are_an_error(broker: KafkaBroker) -> None:
    """KIP-320: without the epoch of the leader, reading would go on in the middle of other records."""
    client = KafkaClient([broker.address], patience_ms=PATIENCE_MS)
    topic = new_topic(client, 1)
    for _ in range(2):
        put(client, topic, {0: [b"old"] * 10})
    source = Kafka(broker.address, topic)
    reader = source.open(context())
    take(reader, 20)
    positions = reader.positions()
    reader.close()
    broker.kill()
    cut_back(broker, topic, 10)
    broker.start()
    put(client, topic, {0: [b"new"] * 30})
    again = source.open(context(positions))
    with pytest.raises(UsageError, match=r"partition 0 of topic .* lost records .* has read: all from offset 10 on"):
        take(again, 1)
    again.close()
    # what was read before the records that are gone is as it was
    position = Position(client.topic(topic).id.hex, 10, epoch=0)
    sound = source.open(context({f"{topic}/0": position.encode()}))
    assert [row["value"] for row in take(sound, 30)] == [b"new"] * 30
    assert Position.decode("t/0", sound.positions()[f"{topic}/0"]).epoch > 0
    sound.close()
    client.close()


class PatientReader(KafkaReader):
    """A reader whose polls wait for something, so that the kit counts few of them."""

    def poll(self) -> SourceBatch | None:
        while (found := super().poll()) is None and not self.is_finished():
            time.sleep(0.001)
        return found


class PatientSource(Kafka):
    def open(self, context: SourceContext) -> KafkaReader:
        return PatientReader(self, context)


@pytest.mark.early
def test_a_restart_anywhere_delivers_what_followed(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = new_topic(client, 2)
    for number in range(3):
        name = uuid.uuid4().hex
        values = {part: [b"%d/%d/%d" % (number, part, i) for i in range(5)] for part in range(2)}
        put(client, topic, values, transaction=name, commit=number != 1)
    while client.list_offsets(client.topic(topic), {0: LATEST, 1: LATEST}) != {0: 18, 1: 18}:  # markers come later
        continue
    found = check_source(lambda: PatientSource(kafka.address, topic, end="latest"), parallelisms=PARALLELISMS)
    expected = [b"%d/%d/%d" % (number, part, i) for number in (0, 2) for part in range(2) for i in range(5)]
    assert sorted(row["value"] for row in found) == sorted(expected)


@pytest.mark.early
@pytest.mark.parametrize("form", few(["avro", "text", "json", "csv"], 1))
def test_a_restart_anywhere_delivers_what_followed_in_each_format(
    kafka: KafkaBroker, client: KafkaClient, form: str
) -> None:
    topic = new_topic(client, 2)
    encode: Callable[[int], bytes] = {
        "text": lambda n: b"%d" % n,
        "json": lambda n: b'{"value": "%d"}' % n,
        "csv": lambda n: b"%d" % n,
        "avro": lambda n: b"\x04%02d" % n,
    }[form]
    values = [encode(n) if n % 5 else [None, b"\xff"][n % 2] for n in range(10, 40)]
    for begin in range(0, 30, 6):
        put(client, topic, {part: values[begin + 3 * part : begin + 3 * part + 3] for part in range(2)})
    schema = {"text": None, "avro": AVRO}.get(form, {"value": str})
    options: dict[str, Any] = {"schema": schema, "format": form, "metadata": ["offset", "partition"], "end": "latest"}
    found = check_source(lambda: PatientSource(kafka.address, topic, **options), parallelisms=PARALLELISMS)
    assert sorted(row["value"] for row in found) == [str(n) for n in range(10, 40) if n % 5]
    assert len({(row["offset"], row["partition"]) for row in found}) == len(found)


AVRO = '{"type": "record", "name": "r", "fields": [{"name": "value", "type": "string"}]}'


def test_what_is_odd_in_a_topic_is_read(kafka: KafkaBroker, client: KafkaClient) -> None:
    from confluent_kafka import Producer as OtherProducer

    topic = client.create_topic(f"t.{uuid.uuid4().hex}", 1, settings={"max.message.bytes": "20000000"}).name
    expected = []
    for number, compression in enumerate(["none", "gzip", "snappy", "lz4", "zstd"]):
        settings = {
            "bootstrap.servers": kafka.address,
            "compression.type": compression,
            "message.max.bytes": 20_000_000,
        }
        producer = OtherProducer(settings)
        text = f"{number:02d}" * (5_000_000 if compression == "none" else 1000)
        producer.produce(topic, json.dumps({"value": text}).encode())
        producer.produce(topic, None, key=b"only")
        producer.flush()
        expected.append(text)
    source = Kafka(kafka.address, pattern=re.escape(topic), format="json", schema={"value": str}, end="latest")
    reader = source.open(context())
    rows = []
    while not reader.is_finished():
        found = reader.poll()
        rows += [] if found is None else found.batch.to_pylist()
    reader.close()
    assert [row["value"] for row in rows] == expected
    empty = new_topic(client, 3)
    assert read_all(Kafka(kafka.address, empty, end="latest")) == []


@pytest.mark.early
def test_topics_that_come_later_are_read_once(kafka: KafkaBroker, client: KafkaClient) -> None:
    def fresh() -> Growing:
        prefix = uuid.uuid4().hex
        source = Kafka(kafka.address, pattern=f"{prefix}-.*", discovery_interval="20ms")

        def add() -> list[dict[str, Any]]:
            topic = new_topic(client, 1, prefix)
            put(client, topic, {0: [b"a", b"b", b"c"]})
            moment = pa.array([START + timedelta(seconds=n) for n in range(3)], MOMENT).to_pylist()
            return [
                {"topic": topic, "partition": 0, "value": value, "key": None, "offset": n, "timestamp": moment[n]}
                for n, value in enumerate((b"a", b"b", b"c"))
            ]

        return Growing(source, add(), add)

    check_late_splits(fresh, parallelisms=PARALLELISMS)


def test_records_have_where_they_came_from(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = new_topic(client, 2)
    put(client, topic, {1: [b"a"]})
    assert Kafka(kafka.address, topic).schema().names == ["value", "key", "timestamp", "topic", "partition", "offset"]
    source = Kafka(kafka.address, topic, metadata=["topic", "partition", "key", "offset", "timestamp", "headers"])
    assert source.schema().names == ["value", "topic", "partition", "key", "offset", "timestamp", "headers"]
    reader = source.open(context())
    (row,) = take(reader, 1)
    reader.close()
    assert row == {
        "topic": topic,
        "partition": 1,
        "value": b"a",
        "key": None,
        "offset": 0,
        "timestamp": START,
        "headers": [],
    }


def test_reading_begins_and_ends_where_it_is_told_to(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = new_topic(client, 1)
    put(client, topic, {0: [b"%d" % n for n in range(10)]})

    def values(**options: Any) -> list[int]:
        return [int(value) for value in read_all(Kafka(kafka.address, topic, **options))]

    assert values(end="latest") == list(range(10))
    assert values(start={(topic, 0): 4}, end={(topic, 0): 7}) == [4, 5, 6]
    assert values(start=START + timedelta(seconds=8), end="latest") == [8, 9]
    assert values(end=START + timedelta(seconds=2)) == [0, 1]
    assert values(start="latest", end="latest") == []
    assert values(start=START + timedelta(days=1), end="latest") == []
    assert values(start=START + timedelta(seconds=8, microseconds=1), end="latest") == [9]
    assert values(end=START + timedelta(seconds=2, microseconds=1)) == [0, 1, 2]
    for before_ms in (1, 2, 3, 1_000):  # as numbers these mean the end, the beginning and other places to brokers
        long_ago = datetime(1970, 1, 1, tzinfo=UTC) - timedelta(milliseconds=before_ms)
        assert values(start=long_ago, end="latest") == list(range(10))
        assert values(end=long_ago) == []
    client.commit_offsets("g", topic, {0: 9})
    assert values(start="committed", group="g", end="latest") == [9]
    assert values(start="committed", group="none", end="latest") == list(range(10))


def test_a_bounded_reading_that_begins_after_the_log_is_refused(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = new_topic(client, 1)
    put(client, topic, {0: [b"a", b"b"]})
    put(client, topic, {0: [b"c"]}, transaction=topic, commit=False)  # it has a marker, too
    with pytest.raises(UsageError, match=rf"offset 5 of partition 0 of topic '{topic}' is not in its log, which ends"):
        read_all(Kafka(kafka.address, topic, start={(topic, 0): 5}, end="latest"))
    source = Kafka(kafka.address, topic, end="latest")
    beyond = {f"{topic}/0": Position(client.topic(topic).id.hex, 9).encode()}
    with pytest.raises(UsageError, match="the offset is wrong, or the topic lost data; start over"):
        read_all(source, beyond)
    assert read_all(Kafka(kafka.address, topic, start={(topic, 0): 2}, end={(topic, 0): 1})) == []


def test_the_end_is_that_of_the_first_start(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = new_topic(client, 1)
    put(client, topic, {0: [b"a", b"b"]})
    source = Kafka(kafka.address, topic, end="latest")
    reader = source.open(context())
    positions = reader.positions()
    reader.close()
    put(client, topic, {0: [b"late"]})
    assert read_all(source, positions) == [b"a", b"b"]


def test_offsets_are_committed_after_a_completed_checkpoint_only(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic, group = new_topic(client, 1), uuid.uuid4().hex
    put(client, topic, {0: [b"a", b"b"]})
    reader = Kafka(kafka.address, topic, group=group).open(context())
    take(reader, 2)
    reader.snapshot(SnapshotContext(1))
    reader.poll()
    assert client.committed_offsets(group, topic, [0]) == {}
    reader.snapshot(SnapshotContext(2))
    reader.notify_checkpoint_complete(1)
    while not (found := client.committed_offsets(group, topic, [0])):
        reader.poll()
    assert found == {0: (2, "")}
    reader.close()


def made_again(kafka: KafkaBroker, client: KafkaClient, topic: str, partitions: int) -> None:
    kafka.delete_topic(topic)
    while client.topics([topic]):
        continue
    client.create_topic(topic, partitions)


def test_a_topic_that_was_made_anew_since_the_checkpoint_is_refused(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = new_topic(client, 1)
    source = Kafka(kafka.address, topic)
    reader = source.open(context())
    positions = reader.positions()
    reader.close()
    made_again(kafka, client, topic, 1)
    with pytest.raises(UsageError, match="was deleted and created again since the checkpoint"):
        source.open(context(positions))


def test_a_topic_that_is_made_anew_with_more_partitions_is_refused_while_it_is_read(
    kafka: KafkaBroker, client: KafkaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New partitions are looked for before what was read is asked for again."""
    topic = new_topic(client, 1)
    put(client, topic, {0: [b"old"] * 3})
    may_go_on, stands_still = threading.Event(), threading.Event()
    may_go_on.set()
    poll = Fetcher.poll

    def held(self: Fetcher, timeout_ms: int) -> list[Fetched]:
        found = poll(self, timeout_ms)
        if not may_go_on.is_set():
            stands_still.set()
        may_go_on.wait()
        return found

    monkeypatch.setattr(Fetcher, "poll", held)
    reader = Kafka(kafka.address, topic, discovery_interval="1ms").open(context())
    take(reader, 3)
    may_go_on.clear()
    assert stands_still.wait(PATIENCE_MS / 1000)
    made_again(kafka, client, topic, 2)
    put(client, topic, {0: [b"new"] * 5, 1: [b"new"] * 5})
    may_go_on.set()
    with pytest.raises(UsageError, match=f"topic '{topic}' was deleted and created again since this pipeline began"):
        take(reader, 7)
    reader.close()


def test_partitions_of_one_topic_are_found_while_another_one_is_gone(kafka: KafkaBroker, client: KafkaClient) -> None:
    grown, gone = new_topic(client, 1), new_topic(client, 1)
    reader = Kafka(kafka.address, [grown, gone], discovery_interval="1ms").open(context())
    kafka.delete_topic(gone)
    while client.topics([gone]):
        continue
    kafka.add_partitions(grown, 2)
    put(client, grown, {1: [b"found"]})
    assert [row["value"] for row in take(reader, 1)] == [b"found"]
    assert f"{gone}/0" in reader.positions()
    reader.close()


def test_a_partition_that_vanished_keeps_its_position(kafka: KafkaBroker, client: KafkaClient) -> None:
    prefix = uuid.uuid4().hex
    gone, there = new_topic(client, 1, prefix), new_topic(client, 1, prefix)
    put(client, gone, {0: [b"a"]})
    source = Kafka(kafka.address, pattern=f"{prefix}.*")
    reader = source.open(context())
    take(reader, 1)
    positions = reader.positions()
    reader.close()
    kafka.delete_topic(gone)
    while client.topics([gone]):
        continue
    put(client, there, {0: [b"b"]})
    reader = source.open(context(positions))
    assert [row["value"] for row in take(reader, 1)] == [b"b"]
    assert Position.decode("", reader.positions()[f"{gone}/0"]).offset == 1
    reader.close()


def test_topics_that_come_and_go_keep_their_positions(
    kafka: KafkaBroker, client: KafkaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLINK-39837, FLINK-7195: brokers list a topic or a partition, then not, then again, also while starts look."""
    prefix = uuid.uuid4().hex
    topic = new_topic(client, 2, prefix)
    values = {part: [b"%d-%d" % (part, number) for number in range(4)] for part in range(2)}
    put(client, topic, {part: some[:2] for part, some in values.items()})
    source = Kafka(kafka.address, pattern=f"{prefix}.*", discovery_interval="1ms")
    reader = source.open(context())
    take(reader, 4)
    positions = reader.positions()
    reader.close()
    lists = KafkaClient.topics
    hidden: list[int] = []
    looks = threading.Semaphore(0)

    def topics(self: KafkaClient, names: Any) -> dict[str, Topic]:
        looks.release()
        found = dict(lists(self, names))
        if topic in found and hidden:
            leaders = {part: leader for part, leader in found[topic].leaders.items() if part not in hidden}
            found |= {topic: Topic(topic, found[topic].id, leaders)}
        return {name: one for name, one in found.items() if one.leaders}

    monkeypatch.setattr(KafkaClient, "topics", topics)
    for now in ([0, 1], [1], [0]):
        hidden[:] = now
        reader = source.open(context(positions))
        for then in ([0, 1], [1], [], [0], []):
            hidden[:] = then
            while looks.acquire(blocking=False):
                continue
            for _ in range(2):  # the second look began after the change
                while not looks.acquire(blocking=False):
                    assert reader.poll() is None
        assert {split: Position.decode("", data).offset for split, data in reader.positions().items()} == {
            f"{topic}/{part}": 2 for part in range(2)
        }
        reader.close()
    put(client, topic, {part: some[2:] for part, some in values.items()})
    reader = source.open(context(positions))
    assert sorted(row["value"] for row in take(reader, 4)) == sorted(values[0][2:] + values[1][2:])
    reader.close()


def test_a_topic_that_the_program_no_longer_names_is_no_longer_read(kafka: KafkaBroker, client: KafkaClient) -> None:
    prefix = uuid.uuid4().hex
    kept, dropped = new_topic(client, 1, f"kept-{prefix}"), new_topic(client, 1, f"dropped-{prefix}")
    reader = Kafka(kafka.address, [kept, dropped]).open(context())
    positions = reader.positions()
    reader.close()
    put(client, dropped, {0: [b"no"]})
    put(client, kept, {0: [b"yes"]})
    for source in (
        Kafka(kafka.address, kept, end="latest"),
        Kafka(kafka.address, pattern=f"kept-{prefix}.*", end="latest"),
    ):
        reader = source.open(context(positions))
        assert reader.splits() == [f"{kept}/0"]
        reader.close()
        assert read_all(source, positions) == [b"yes"]


def test_positions_of_other_topics_are_refused(kafka: KafkaBroker, client: KafkaClient) -> None:
    """Also if the program says that one topic is another one now."""
    former, now = new_topic(client, 1), new_topic(client, 1)
    reader = Kafka(kafka.address, former).open(context())
    positions = reader.positions()
    reader.close()
    with pytest.raises(UsageError, match=f"reads none of the topics of its checkpoint, which are {former}: positions"):
        Kafka(kafka.address, now).open(context(positions))


def test_an_end_may_be_given_and_taken_away_between_starts(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = new_topic(client, 1)
    put(client, topic, {0: [b"%d" % n for n in range(4)]})
    reader = Kafka(kafka.address, topic).open(context())
    endless = reader.positions()
    reader.close()
    assert read_all(Kafka(kafka.address, topic, end="latest"), endless) == [b"0", b"1", b"2", b"3"]
    assert read_all(Kafka(kafka.address, topic, end={(topic, 0): 2}), endless) == [b"0", b"1"]

    reader = Kafka(kafka.address, topic, end={(topic, 0): 2}).open(context())
    bounded = reader.positions()
    reader.close()
    assert read_all(Kafka(kafka.address, topic, end={(topic, 0): 3}), bounded) == [b"0", b"1", b"2"]
    reader = Kafka(kafka.address, topic).open(context(bounded))
    assert [row["value"] for row in take(reader, 4)] == [b"0", b"1", b"2", b"3"]
    reader.close()

    reader = Kafka(kafka.address, topic, end="latest").open(context())
    bounded = reader.positions()
    reader.close()
    put(client, topic, {0: [b"later"]})
    assert read_all(Kafka(kafka.address, topic, end="latest"), bounded) == [b"0", b"1", b"2", b"3"]


def upsert(client: KafkaClient, topic: str, at: datetime, rows: Sequence[tuple[str, int | None]]) -> None:
    """Write newest values of keys; None deletes one."""
    producer = Producer(
        client, SYSTEM_ENVIRONMENT, client.topics([topic]), client.new_producer(), batch_bytes_max=1_000
    )
    values = [None if n is None else json.dumps({"key": key, "n": n}).encode() for key, n in rows]
    keys = pa.array([key.encode() for key, _ in rows], pa.binary())
    times = np.full(len(rows), int(at.timestamp() * 1000), np.int64)
    producer.write((topic, 0), pa.array(values, pa.binary()), times, keys)
    producer.flush()
    producer.close()


def with_changes(table: dict[str, int], rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    for row in rows:
        if row["op"] == "delete":
            table.pop(row["key"], None)
        else:
            table[row["key"]] = row["n"]
    return table


def test_a_topic_of_upserts_that_was_compacted_meanwhile_is_read_on(kafka: KafkaBroker, client: KafkaClient) -> None:
    settings = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "segment.ms": "100"}
    topic = client.create_topic(f"t-{uuid.uuid4().hex}", 1, settings={**settings, "max.compaction.lag.ms": "1"}).name
    upsert(client, topic, START, [(f"k{n % 10}", n) for n in range(200)])
    source = Kafka(kafka.address, topic, format="json", schema={"key": str, "n": int}, upsert="key")
    reader = source.open(context())
    table = with_changes({}, take(reader, 200))
    positions = reader.positions()
    reader.close()
    upsert(client, topic, START, [(f"k{n % 10}", n) for n in range(200, 400)])
    upsert(client, topic, START, [("k3", None)])
    moment, left = START, 401
    while left > 150:  # until the broker has compacted: all but the segment of the latest time
        moment += timedelta(seconds=1)
        upsert(client, topic, moment, [("last", 1)])
        left = len(read_all(Kafka(kafka.address, topic, end="latest")))
    upsert(client, topic, moment, [("last", 2)])
    reader = source.open(context(positions))
    while table.get("last") != 2:
        table = with_changes(table, take(reader, 1))
    reader.close()
    assert table == {f"k{n % 10}": n for n in range(390, 400) if n % 10 != 3} | {"last": 2}


def test_what_is_added_to_a_bounded_reading_is_read(kafka: KafkaBroker, client: KafkaClient) -> None:
    """Topics that are named now, and partitions that have an end now; not those that only came meanwhile."""
    first, second = new_topic(client, 1), new_topic(client, 1)
    put(client, first, {0: [b"a", b"b"]})
    put(client, second, {0: [b"c"]})
    reader = Kafka(kafka.address, first, end={(first, 0): 1}).open(context())
    positions = reader.positions()
    reader.close()
    kafka.add_partitions(first, 2)
    put(client, first, {1: [b"d"]})
    assert read_all(Kafka(kafka.address, first, end={(first, 0): 1}), positions) == [b"a"]
    assert read_all(Kafka(kafka.address, first, end="latest"), positions) == [b"a"]
    more = {(first, 0): 1, (first, 1): 1}
    assert sorted(read_all(Kafka(kafka.address, first, end=more), positions)) == [b"a", b"d"]
    assert sorted(read_all(Kafka(kafka.address, [first, second], end="latest"), positions)) == [b"a", b"c"]
    more = {(first, 0): 1, (second, 0): 1}
    assert sorted(read_all(Kafka(kafka.address, [first, second], end=more), positions)) == [b"a", b"c"]


def test_subtasks_share_partitions_without_agreement(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = new_topic(client, 5)
    source = Kafka(kafka.address, topic)
    readers = [source.open(context(None, index, 3)) for index in range(3)]
    owned = [split for reader in readers for split in reader.splits()]
    assert sorted(owned) == [f"{topic}/{part}" for part in range(5)]
    assert all(len(reader.splits()) in (1, 2) for reader in readers)
    for reader in readers:
        reader.close()


def test_another_cluster_has_another_identity(kafka: KafkaBroker, topic: str) -> None:
    assert Kafka(kafka.address, topic).identity() == "topics of Kafka cluster AAAAAAAAQACAAAAAAAAAAQ"


def test_what_is_wrong_is_said_before_anything_starts(kafka: KafkaBroker) -> None:
    with pytest.raises(UsageError, match="has no topic 'nothing-there'; create it, or name another one"):
        Kafka(kafka.address, "nothing-there").schema()
    with pytest.raises(UsageError, match="cannot have a topic 'no name of a topic': that is no name of a topic"):
        Kafka(kafka.address, "no name of a topic").schema()


# -- without a broker --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "needs topics=... or pattern=..., one of them"),
        ({"topics": "a", "pattern": "b"}, "needs topics=... or pattern=..., one of them"),
        ({"pattern": "("}, "is no regular expression"),
        ({"topics": "a", "start": "begin"}, "start='begin' of a Kafka source is none of 'earliest', 'latest'"),
        ({"topics": "a", "start": datetime(2026, 1, 1)}, "a datetime with a time zone"),
        ({"topics": "a", "start": {("a", 0): -1}}, "offsets such as"),
        ({"topics": "a", "start": {("a", 0): 1, "a": 2}}, "offsets such as"),
        ({"topics": "a", "end": "earliest"}, "end='earliest' of a Kafka source is none of 'latest'"),
        ({"topics": "a", "start": "committed"}, "needs group="),
        ({"topics": "a", "brokers": ("kafka:9092",)}, r"brokers=\('kafka:9092',\) must be one text with commas"),
    ],
)
def test_a_source_that_cannot_work_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Kafka(**{"brokers": "kafka:9092", **options})


def test_a_source_says_where_it_reads_and_how_it_ends() -> None:
    source = Kafka("kafka:9092", ["a", "b"])
    assert [one.name for one in source.locations()] == ["kafka:a", "kafka:b"]
    assert source.how_to_end() == "give end='latest'"
    assert Kafka("kafka:9092", "a", end="latest").how_to_end() is None


@pytest.mark.parametrize("data", [b"", b"{}", b'{"topic":"x","offset":1}', b"\xff", b'{"topic":"' + b"0" * 32 + b'"}'])
def test_damaged_positions_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="position of split 'a/0'"):
        Position.decode("a/0", data)


def test_positions_of_another_version_are_refused() -> None:
    with pytest.raises(CorruptionError, match="expected version 1, found version 2"):
        Position.decode("a/0", Position("0" * 32, 1, version=2).encode())


# -- in a pipeline -----------------------------------------------------------------------------------------------------


@pytest.mark.run
def test_a_pipeline_reads_each_record_once_although_a_worker_is_killed(
    kafka: KafkaBroker, client: KafkaClient, tmp_path: Path
) -> None:
    topic = new_topic(client, 4)
    put(client, topic, {part: [b"%d" % (4 * n + part) for n in range(2_000)] for part in range(4)})
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="20ms", dir=tmp_path / "checkpoints"))
    records = pipeline.source(SlowSource(kafka.address, topic, end="latest"), name="kafka")
    number = pl.col("value").cast(pl.String).cast(pl.Int64)
    records.select(number.alias("number"), "partition").sink(hg.FileSink(tmp_path / "out"), name="out")
    run_killing(pipeline, (1, 3), parallelism=3)
    files = [path for path in (tmp_path / "out").iterdir() if path.suffix == ".jsonl"]
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert sorted(row["number"] for row in rows) == list(range(8_000))
    assert all(row["number"] % 4 == row["partition"] for row in rows)


class SlowReader(KafkaReader):
    """Gives records out a few at a time, so that checkpoints lie between them."""

    def _take(self, found: Any) -> None:
        super()._take(found)
        whole, self._ready = self._ready, deque()
        for one in whole:
            if one.batch is None or one.batch.is_split_finished:
                self._ready.append(one)
                continue
            for row in range(0, one.batch.batch.num_rows, 20):
                part = one.batch.batch.slice(row, 20)
                offset = part.column("offset")[-1].as_py() + 1
                self._ready.append(Delivery(one.partition, SourceBatch(one.batch.split, part), offset, one.epoch))

    def poll(self) -> SourceBatch | None:
        time.sleep(0.001)  # slow work: not a wait for anything
        return super().poll()


class SlowSource(Kafka):
    def open(self, context: SourceContext) -> KafkaReader:
        return SlowReader(self, context)


def test_each_example_of_the_guide_builds_its_pipeline(
    kafka: KafkaBroker, client: KafkaClient, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("orders", "payments", "shop.public.orders"):
        client.create_topic(name, 1)
    codes = examples("docs/how-to/kafka.md")
    assert len(codes) >= 4
    after = {"type": "record", "name": "Value", "fields": [{"name": "id", "type": "long"}]}
    fields = [{"name": "after", "type": ["null", after]}, {"name": "op", "type": "string"}]
    registry.register("shop.public.orders-value", {"type": "record", "name": "Envelope", "fields": fields})
    for code in codes:
        code = code.replace("localhost:9092", kafka.address).replace("security=security", "security=hg.KafkaSecurity()")
        code = code.replace("http://localhost:8081", registry.url)
        names: dict[str, Any] = {"__name__": "example"}
        exec(PREAMBLE, names)
        try:
            with loading_only():
                exec(code, names)
        except RunRequested as requested:
            names["p"] = requested.pipeline
        assert len(names["p"].definition().plan.vertices) >= 1


def progress_when(reader: KafkaReader, wanted: Mapping[str, SplitPosition]) -> None:
    """Wait until the thread that fetches has seen where the partitions end."""
    deadline_s = time.monotonic() + PATIENCE_MS / 1000
    while reader.progress() != wanted:
        assert time.monotonic() < deadline_s, reader.progress()
        time.sleep(0.005)


def test_progress_has_the_offset_and_the_end_of_each_partition(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = new_topic(client, 2)
    put(client, topic, {0: [b"a", b"b", b"c"]})
    reader = Kafka(kafka.address, topic).open(context())
    progress_when(reader, {f"{topic}/0": SplitPosition(0, 3), f"{topic}/1": SplitPosition(0, 0)})
    take(reader, 3)
    assert reader.progress()[f"{topic}/0"] == SplitPosition(3, 3)
    put(client, topic, {1: [b"d"]}, transaction=uuid.uuid4().hex, commit=False)
    progress_reached = {f"{topic}/0": SplitPosition(3, 3), f"{topic}/1": SplitPosition(2, 2)}
    deadline_s = time.monotonic() + PATIENCE_MS / 1000
    while reader.progress() != progress_reached:  # an aborted record and its marker are passed over
        assert reader.poll() is None
        assert time.monotonic() < deadline_s, reader.progress()
    again = Kafka(kafka.address, topic).open(context(reader.positions()))
    progress_when(again, progress_reached)
    reader.close()
    again.close()


def test_progress_tells_what_waits_behind_an_open_transaction(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic, name = new_topic(client, 1), uuid.uuid4().hex
    put(client, topic, {0: [b"a"]})
    put(client, topic, {0: [b"b", b"c"]}, transaction=name, commit=None)
    put(client, topic, {0: [b"d"]})
    reader = Kafka(kafka.address, topic).open(context())
    progress_when(reader, {f"{topic}/0": SplitPosition(0, 1, undecided=3)})
    client.take_over(name, PATIENCE_MS)
    assert [row["value"] for row in take(reader, 2)] == [b"a", b"d"]
    progress_when(reader, {f"{topic}/0": SplitPosition(4, 5)})
    reader.close()


def test_progress_of_a_bounded_reading_goes_to_its_end(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = new_topic(client, 1)
    put(client, topic, {0: [b"a", b"b", b"c"]})
    reader = Kafka(kafka.address, topic, end={(topic, 0): 2}).open(context())
    assert reader.progress() == {f"{topic}/0": SplitPosition(0, 2)}
    while not reader.is_finished():
        reader.poll()
    assert reader.progress() == {f"{topic}/0": SplitPosition(2, 2)}
    reader.close()
