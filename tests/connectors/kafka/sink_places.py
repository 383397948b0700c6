"""Topics with a sink in front, readers that look at them, and sinks and clients whose calls fail."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from tests.servers.kafka import KafkaBroker

from headgate.connectors.base import Committer
from headgate.connectors.kafka.client import KafkaClient
from headgate.connectors.kafka.sink import KafkaSink
from headgate.model.ids import Generation
from headgate.testing import Target
from headgate.testing.sinks.failures import Failure
from headgate.testing.sinks.fake_pipeline import FakePipeline

PATIENCE_S = 300


class Reader:
    """Reads a topic by librdkafka, as far as its last stable offset is when it is asked."""

    def __init__(self, broker: KafkaBroker, topic: str, client: KafkaClient, prefix: str) -> None:
        from confluent_kafka import Consumer, TopicPartition

        self._client, self._prefix = client, prefix
        self._consumer = Consumer(
            {
                "bootstrap.servers": broker.address,
                "group.id": uuid.uuid4().hex,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 5,
                "log_level": 0,
            }
        )
        self._next = {part: TopicPartition(topic, part, 0) for part in client.topic(topic).leaders}
        self.rows: list[Any] = []

    def read(self) -> list[Any]:
        """Return all records so far: those of decided transactions, without waiting for any."""
        self._consumer.assign(list(self._next.values()))  # from which it tells the ends again
        ended: set[int] = set()
        while len(ended) < len(self._next):
            message = self._consumer.poll(PATIENCE_S)
            assert message is not None, "the broker does not answer"
            if message.error() is None:
                ended.discard(message.partition())
                self._next[message.partition()].offset = message.offset() + 1
                self.rows.append(message)
            else:
                ended.add(message.partition())
        self._consumer.unassign()  # or it asks the broker on and on, two hundred times a second
        return self.rows

    def transactions(self) -> Sequence[Any]:
        return self._client.list_transactions(f"{self._prefix}:")

    def close(self) -> None:
        self._consumer.close()


class PatientSink(KafkaSink):
    """A sink that waits for a broker, however long it takes to start again."""

    def client(self) -> KafkaClient:
        return KafkaClient([self.brokers], patience_ms=1_000 * PATIENCE_S)


class Place:
    """A topic of its own with a sink, and what a reader of committed records sees of it."""

    def __init__(
        self,
        broker: KafkaBroker,
        client: KafkaClient,
        topic: str = "",
        kind: type[KafkaSink] = KafkaSink,
        **options: Any,
    ) -> None:
        self.broker, self.client = broker, client
        self.topic = topic or client.create_topic(f"t-{uuid.uuid4().hex}", 2).name
        self.prefix = f"p-{uuid.uuid4().hex}"
        self.reader = Reader(broker, self.topic, client, self.prefix)
        self.sink = kind(broker.address, self.topic, key="text", prefix=self.prefix, **options)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(one.value()) for one in self.reader.read()]

    def open_transactions(self) -> list[str]:
        return self._transactions("Ongoing")

    def aborted_transactions(self) -> list[str]:
        return self._transactions("CompleteAbort")

    def _transactions(self, state: str) -> list[str]:
        return [one.transactional_id for one in self.reader.transactions() if one.transaction_state == state]

    def lose(self) -> None:
        for name in self.open_transactions():
            self.client.take_over(name, 10_000)

    def take(self) -> None:
        from confluent_kafka import TopicPartition

        self.reader.read()
        everything = [TopicPartition(self.topic, part, -1) for part in range(2)]
        admin = self.broker.admin()
        for asked in admin.delete_records(everything).values():
            asked.result(PATIENCE_S)
        self.reader.rows.clear()

    @property
    def target(self) -> Target:
        return Target(self.sink, self.read, self.open_transactions, self.lose, self.take, holds_back=True)

    def pipeline(self, story: str, rows: int = 6) -> FakePipeline:
        return FakePipeline(self.target, rows, story)


RETRIED = (
    "committed_offsets",
    "commit_in_transaction",
    "describe_transaction",
    "end_transaction",
    "list_transactions",
    "take_over",
    "wait_for_markers",
)
"""What committers ask of brokers. Of what writers ask, only the proof is asked for again."""


class FailingClient(KafkaClient):
    """A client in which one of some calls fails once."""

    failure = Failure()
    names: Sequence[str] = ()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in RETRIED or name not in self.names:
            return found
        return lambda *given, **options: self.failure.during(lambda: found(*given, **options))


class FailingSink(KafkaSink):
    """A sink in which calls to brokers fail where the runtime repeats them."""

    names: Sequence[str] = ("commit_in_transaction",)

    def client(self) -> KafkaClient:
        client = FailingClient([self.brokers])
        client.names = self.names
        return client

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        object.__setattr__(self, "names", RETRIED)
        try:
            return super().open_committer(pipeline, node, generation)
        finally:
            object.__setattr__(self, "names", ("commit_in_transaction",))
