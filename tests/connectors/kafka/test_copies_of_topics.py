"""Copies between a topic and a stream: exact, and the same command again goes on. librdkafka writes and reads."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tests.servers.kafka import KafkaBroker

from headgate import testing
from headgate.api.stream_copy import TOPIC_COLUMNS, TopicCopy
from headgate.connectors.kafka.client import KafkaClient
from headgate.errors import HeadgateError, UsageError
from headgate.store.store import Store

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""

PATIENCE_S = 300
TIME_MS = 1_700_000_000_123


class Place:
    """A store, checkpoints and a broker."""

    def __init__(self, broker: KafkaBroker, directory: Path) -> None:
        self.broker, self.store, self._checkpoints = broker, str(directory / "store"), directory / "checkpoints"

    def copy(self, direction: Any, topic: str, stream: str, **options: Any) -> Any:
        kills = options.pop("kill", None)
        made = TopicCopy(direction, topic, stream, self.broker.address, self.store, **options)
        with testing.running(
            made.pipeline(), checkpoint_dir=self._checkpoints, kill_worker_after_checkpoint=kills
        ) as handle:
            made.stop_at(made.end(), handle, str(self._checkpoints))
            result = handle.wait(PATIENCE_S)
        assert result is not None
        made.release()
        return result

    def events(self, stream: str) -> list[dict[str, Any]]:
        with Store.open(self.store) as store:
            return [row for one in store.follow(stream, end="latest") for row in one.batch.to_pylist()]


@pytest.fixture
def place(kafka: KafkaBroker, tmp_path: Path) -> Place:
    return Place(kafka, tmp_path)


@pytest.fixture
def topic(kafka: KafkaBroker) -> str:
    return kafka.create_topic(f"t-{uuid.uuid4().hex}", 3)


def odd_records(first: int, last: int) -> list[dict[str, Any]]:
    """Return records with empty and missing keys, tombstones, empty values and headers of all kinds."""
    keys: list[str | None] = ["a", "b", "", None, "é"]
    values: list[bytes | None] = [b"\xff\0", b"", None, b"text"]
    return [
        {
            "key": keys[number % len(keys)],
            "value": values[number % len(values)],
            "timestamp": TIME_MS + number,
            "headers": [("n", str(number).encode()), ("n", b""), ("null", None)] if number % 3 else None,
        }
        for number in range(first, last)
    ]


def fact(record: dict[str, Any]) -> tuple[Any, ...]:
    return (record["timestamp"], record["key"], record["value"], tuple(record["headers"] or ()))


def fact_of_message(message: Any) -> tuple[Any, ...]:
    key = message.key()
    headers = tuple(message.headers() or ())
    return (message.timestamp()[1], None if key is None else key.decode(), message.value(), headers)


def test_a_topic_goes_to_a_stream_and_back_exactly(place: Place, topic: str) -> None:
    records = odd_records(0, 60)
    place.broker.put(topic, records)
    place.copy("to-stream", topic, "app/events", kill=1)
    with Store.open(place.store) as store:
        found = store.find("app/events")
        assert (found.segments_count, found.routing_key, found.schema) == (3, "key", TOPIC_COLUMNS)
    assert place.copy("to-stream", topic, "app/events").records_in == 60
    more = odd_records(60, 100)
    place.broker.put(topic, more)
    assert place.copy("to-stream", topic, "app/events").records_in == 100
    assert len(place.events("app/events")) == 100

    target = f"back-{uuid.uuid4().hex}"
    place.copy("from-stream", target, "app/events", partitions=2)
    assert place.copy("from-stream", target, "app/events").records_in == 100
    back = place.broker.committed(target)
    assert sorted(map(fact_of_message, back)) == sorted(map(fact, records + more))
    by_key: dict[Any, list[int]] = {}
    for message in back:
        by_key.setdefault(message.key(), []).append(message.timestamp()[1])
    del by_key[None], by_key[b""]  # librdkafka spreads them over the partitions
    assert len(by_key) == 3
    assert all(times == sorted(times) for times in by_key.values())


def keyed(stream: str, store: Store, first: int, last: int) -> None:
    with store.writer(stream, linger=None) as writer:
        rows = [{"key": number % 5, "n": number, "x": [0.5, None]} for number in range(first, last)]
        writer.append(pa.RecordBatch.from_pylist(rows, schema=store.find(stream).schema))


FIELDS = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("x", pa.large_list(pa.float64()))])


def test_a_stream_of_columns_goes_as_json_also_when_it_is_scaled(place: Place, kafka: KafkaBroker) -> None:
    topic = kafka.create_topic(f"t-{uuid.uuid4().hex}", 2)
    with Store.open(place.store) as store:
        store.create_stream("numbers", FIELDS, segments=2, routing_key="key")
        keyed("numbers", store, 0, 50)
    place.copy("from-stream", topic, "numbers", kill=1)
    with Store.open(place.store) as store:
        assert not store.holds("numbers")
        keyed("numbers", store, 50, 70)
        store.resize("numbers", 3)
        keyed("numbers", store, 70, 90)
        store.resize("numbers", 1)
        keyed("numbers", store, 90, 100)
    place.copy("from-stream", topic, "numbers")
    assert place.copy("from-stream", topic, "numbers").records_in == 100
    found = place.broker.committed(topic)
    assert sorted(json.loads(one.value())["n"] for one in found) == list(range(100))
    for key in range(5):
        mine = [json.loads(one.value()) for one in found if one.key() == str(key).encode()]
        assert [row["n"] for row in mine] == list(range(key, 100, 5))

    with Store.open(place.store) as store:
        store.create_stream("again", FIELDS, segments=4, routing_key="key")
    place.copy("to-stream", topic, "again")
    assert sorted(place.events("again"), key=lambda row: row["n"]) == [
        {"key": number % 5, "n": number, "x": [0.5, None]} for number in range(100)
    ]


def test_partitions_that_are_added_are_copied_too(place: Place, kafka: KafkaBroker, topic: str) -> None:
    from confluent_kafka.admin import NewPartitions

    place.broker.put(topic, odd_records(0, 10))
    place.copy("to-stream", topic, "events")
    admin = kafka.admin()
    admin.create_partitions([NewPartitions(topic, 5)])[topic].result(PATIENCE_S)
    place.broker.put(topic, [{"key": "new", "value": b"v", "partition": part} for part in range(5)])
    assert place.copy("to-stream", topic, "events").records_in == 15
    assert len(place.events("events")) == 15


def test_empty_ones_and_text(place: Place, topic: str, kafka: KafkaBroker) -> None:
    assert place.copy("to-stream", topic, "events").records_in == 0
    assert place.events("events") == []
    with Store.open(place.store) as store:
        store.create_stream("text", pa.schema([("value", pa.large_string())]))
    assert place.copy("from-stream", topic, "text").records_in == 0
    place.broker.put(topic, [{"value": "é"}, {"value": None}])
    place.copy("to-stream", topic, "text")
    assert {row["value"] for row in place.events("text")} == {None, "é"}


def refused(run: Callable[[], object]) -> str:
    with pytest.raises(HeadgateError) as found:
        run()
    return str(found.value)


def test_what_cannot_be_copied_is_said_in_one_sentence(place: Place, topic: str) -> None:
    none = f"none-{uuid.uuid4().hex}"
    assert none in refused(lambda: place.copy("to-stream", none, "events"))
    assert "no stream store" in refused(lambda: place.copy("from-stream", topic, "events"))
    with Store.open(place.store) as store:
        store.create_stream("times", pa.schema([("d", pa.duration("us"))]))
        store.create_stream("numbers", pa.schema([("x", pa.float64())]))
        with store.writer("numbers", linger=None) as writer:
            writer.append(pa.RecordBatch.from_pylist([{"x": math.inf}]))
        store.create_stream("sealed", TOPIC_COLUMNS)
        store.seal("sealed")
    assert "stream 'events' does not exist" in refused(lambda: place.copy("from-stream", topic, "events"))
    assert none in refused(lambda: place.copy("from-stream", none, "numbers"))
    assert "duration[us], which JSON cannot express" in refused(lambda: place.copy("from-stream", topic, "times"))
    assert "infinite, which JSON cannot hold" in refused(lambda: place.copy("from-stream", topic, "numbers"))
    assert "sealed" in refused(lambda: place.copy("to-stream", topic, "sealed"))
    with pytest.raises(UsageError, match="--partitions"):
        place.copy("to-stream", topic, "events", partitions=3)
    place.broker.put(topic, [{"key": b"\xff", "value": b"v"}])
    assert "a key that is not UTF-8" in refused(lambda: place.copy("to-stream", topic, "events"))
    with Store.open(place.store) as store:
        columns = pa.schema([("key", pa.large_binary()), ("value", pa.large_binary()), ("partition", pa.int32())])
        store.create_stream("bytes", columns, routing_key="partition")
    place.copy("to-stream", topic, "bytes")
    assert [row["key"] for row in place.events("bytes")] == [b"\xff"]


def test_a_topic_that_was_created_again_gets_everything(place: Place, kafka: KafkaBroker, topic: str) -> None:
    target = kafka.create_topic(f"t-{uuid.uuid4().hex}")
    place.broker.put(topic, odd_records(0, 10))
    place.copy("to-stream", topic, "events")
    place.copy("from-stream", target, "events")
    kafka.delete_topic(target)
    client = KafkaClient([kafka.address])
    client.create_topic(target, 1)  # returns when it can be used
    client.close()
    for _ in range(2):
        assert place.copy("from-stream", target, "events").records_in == 10
    assert len(place.broker.committed(target)) == 10


def test_a_checkpoint_that_is_removed_while_it_is_read_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def is_past(copy: TopicCopy, end: Any, checkpoints: str, checkpoint: int) -> bool:
        looked.append(checkpoint)
        if checkpoint == 1:
            raise UsageError("there is no checkpoint 1")
        return True

    class Handle:
        is_stopped = False

        def wait(self, timeout_s: float) -> object:
            return object() if self.is_stopped or len(looked) > 2 else None

        @property
        def progress(self) -> Any:
            return SimpleNamespace(last_checkpoint=SimpleNamespace(checkpoint=len(looked) + 1))

        def stop(self) -> None:
            self.is_stopped = True

    monkeypatch.setattr(TopicCopy, "is_past", is_past)
    handle: Any = Handle()
    assert TopicCopy("to-stream", "t", "s", "h:1", "store").stop_at({0: 1}, handle, "checkpoints")
    assert looked == [1, 2]
    assert handle.is_stopped
