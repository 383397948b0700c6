"""SIGKILL of workers, of the driver and of the broker, between a topic and a topic of Kafka with keyed state."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers.kafka import KafkaBroker, kafka_broker

from crash.processes import STARTED_S, Life, kill, until
from crash.results import assert_clean
from headgate.connectors.kafka.client import KafkaClient

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800), pytest.mark.xdist_group("kafka")]

Spec = Callable[..., dict[str, Any]]
Launch = Callable[..., Life]

ROWS, KEYS = 12_000, 40
ANSWER_S = 60


class Topics:
    """A topic ``in`` that is filled step by step, and a topic ``out``."""

    def __init__(self, broker: KafkaBroker) -> None:
        self.broker, self._written = broker, 0
        for name in ("in", "out"):
            broker.create_topic(name, 2)

    def fill(self, count: int) -> None:
        """Write the next records, which wait for nobody."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.broker.address, "linger.ms": 20})
        for number in range(self._written, self._written + count):
            text = json.dumps({"id": number, "key": number % KEYS})
            producer.produce("in", text.encode(), partition=number % 2)
        assert producer.flush(ANSWER_S) == 0
        self._written += count

    def committed(self) -> list[dict[str, Any]]:
        """Return what a reader of committed records finds, by librdkafka."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self.broker.address,
                "group.id": uuid.uuid4().hex,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        consumer.assign([TopicPartition("out", part, 0) for part in range(2)])
        rows, ended = [], set()
        while len(ended) < 2:
            message = consumer.poll(ANSWER_S)
            assert message is not None, "the broker does not answer"
            if message.error() is None:
                rows.append(json.loads(message.value()))
            else:
                ended.add(message.partition())
        consumer.close()
        return rows

    def undecided(self) -> list[str]:
        client = KafkaClient([self.broker.address])
        found = client.list_transactions("headgate:")
        client.close()
        decided = ("Empty", "CompleteCommit", "CompleteAbort")
        return [one.transactional_id for one in found if one.transaction_state not in decided]

    def assert_exactly_once(self) -> None:
        """Every record was counted once for its key, in its order, and no transaction is open."""
        until(lambda: not self.undecided(), "the end of all transactions")
        rows = self.committed()
        by_key: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_key[row["key"]].append(row)
        assert sorted(row["id"] for row in rows) == list(range(ROWS))
        assert [row["n"] for key in sorted(by_key) for row in by_key[key]] == list(range(1, ROWS // KEYS + 1)) * KEYS


@pytest.fixture
def topics() -> Iterator[Topics]:
    with kafka_broker() as broker:
        yield Topics(broker)


def test_nothing_is_lost_or_doubled_when_workers_driver_and_broker_are_killed(
    spec: Spec, launch: Launch, tmp_path: Path, topics: Topics
) -> None:
    what = spec("kafka", rows=ROWS, brokers=topics.broker.address, gate=None)
    part = ROWS // 6
    topics.fill(part)
    life = launch(what)
    running = life.running()
    life.checkpoint(2)
    topics.fill(part)
    kill(next(iter(running["workers"].values())))
    life.restart()
    life.running(after=running["generation"])
    life.checkpoint(2)

    topics.fill(part)
    life.checkpoint()
    life.child.kill()
    life.child.assert_gone()
    life = launch(what)
    life.running()
    topics.fill(part)
    life.checkpoint(2)

    topics.fill(part)
    topics.broker.kill()
    topics.broker.start()
    topics.fill(ROWS - 5 * part)
    assert life.result(STARTED_S)["is_finished"]
    assert life.child.exit_code() == 0
    topics.assert_exactly_once()
    assert_clean(tmp_path)


POINTS = {"before-manifest": 2, "after-manifest": 2, "in-recover": 1, "in-commit": 1, "after-commit": 1}
"""Where each start is killed, and when it passes there for which time. There is one commit for certain."""


def test_nothing_is_lost_or_doubled_wherever_in_a_commit_the_driver_is_killed(
    spec: Spec, launch: Launch, tmp_path: Path, topics: Topics
) -> None:
    what = spec("kafka", rows=ROWS, brokers=topics.broker.address, gate=None)
    part = ROWS // (len(POINTS) + 1)
    for point, count in POINTS.items():
        topics.fill(part)
        life = launch(what, HEADGATE_KILL_AT=f"{point}:{count}:{tmp_path / point}")
        assert life.child.exit_code(3 * STARTED_S) == -9, life.child.tale("it was not killed")
        life.child.assert_gone()
    topics.fill(ROWS - len(POINTS) * part)
    life = launch(what)
    assert life.result(3 * STARTED_S)["is_finished"]
    assert life.child.exit_code() == 0
    topics.assert_exactly_once()
    assert_clean(tmp_path)
