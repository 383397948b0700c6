"""SIGKILL of the broker at each kill point of the kits, and at each request: before it, and after it without an answer.

The broker is started again with what it has. With the processes of the pipeline, see tests/crash/test_kafka_kills.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.conftest import IS_DEEP, few
from tests.connectors.kafka.sink_places import PATIENCE_S, PatientSink, Place
from tests.servers.kafka import KafkaBroker

from headgate.codec.kafka.wire import Request
from headgate.connectors.base import SourceContext
from headgate.connectors.kafka.client import KafkaClient
from headgate.connectors.kafka.connection import Connection
from headgate.connectors.kafka.producer import Producer
from headgate.connectors.kafka.source import Kafka, KafkaReader
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import StorageError
from headgate.operators.checkpoint_listeners import SnapshotContext
from headgate.testing import Target
from headgate.testing.sinks.failures import check_interruption
from headgate.testing.sinks.scenarios import KillPoint, check_first_epoch, check_kill

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800), pytest.mark.xdist_group("kafka")]
"""They share a broker."""

OF_TESTS = "tests"
"""The name of clients that are no part of what is tested."""


@pytest.fixture
def client(broker: KafkaBroker) -> Iterator[KafkaClient]:
    client = KafkaClient([broker.address], client_id=OF_TESTS, patience_ms=1_000 * PATIENCE_S)
    yield client
    client.close()


@pytest.fixture
def place(broker: KafkaBroker, client: KafkaClient) -> Iterator[Place]:
    made = Place(broker, client, kind=PatientSink)
    yield made
    made.reader.close()


def crashing(place: Place) -> Target:
    """Return a target of which the broker is killed with the processes of the pipeline."""

    def crash() -> None:
        place.broker.kill()
        place.broker.start()

    return dataclasses.replace(place.target, crash=crash)


POINTS = [KillPoint.COMPLETED, *(point for point in KillPoint if point is not KillPoint.COMPLETED)]


@pytest.mark.parametrize("point", few(POINTS, 1), ids=lambda point: point.name)
def test_the_sink_is_exact_when_the_broker_dies_with_the_pipeline(place: Place, point: KillPoint) -> None:
    check_kill(crashing(place), point, 3, 2, 2, 7, f"broker and pipeline killed {point.value}")


@pytest.mark.deep
@pytest.mark.parametrize("point", KillPoint, ids=lambda point: point.name)
def test_nothing_stays_open_when_the_broker_dies_in_the_first_epoch(place: Place, point: KillPoint) -> None:
    check_first_epoch(crashing(place), point)


class Killer:
    """Kills the broker at a request, and starts it again, before anything else goes on.

    Attributes:
        has_killed: whether it came to that.
        spared: connections at whose requests it is not killed.
    """

    def __init__(self, broker: KafkaBroker) -> None:
        self._broker, self._kind, self._number, self._is_after, self._seen = broker, "", 0, False, 0
        self._asked: dict[Connection, list[bool]] = {}
        self.spared: set[Connection] = set()
        self.has_killed = False

    @contextlib.contextmanager
    def armed(self, kind: str, number: int, *, is_after: bool) -> Iterator[Callable[[], bool]]:
        """Kill it at request number n of a kind, before it is sent or once it is carried out; yield ``has_killed``."""
        self._kind, self._number, self._is_after, self._seen = kind, number, is_after, 0
        self.has_killed = False
        try:
            yield lambda: self.has_killed
        finally:
            self._kind = ""

    def before(self, connection: Connection, request: Request[Any]) -> None:
        """A request is about to be sent."""
        is_of_kind = type(request).__name__ == self._kind and connection not in self.spared
        self._seen += is_of_kind
        is_it = is_of_kind and self._seen == self._number and not self.has_killed
        if is_it and not self._is_after:
            self._kill()
        self._asked.setdefault(connection, []).append(is_it and self._is_after)

    def after(self, connection: Connection) -> None:
        """The answer to the oldest request of a connection has come; it is lost if the broker was killed after it."""
        if self._asked[connection].pop(0):
            self._kill()
            connection.close()
            raise StorageError("talk to", f"Kafka at {connection.address}", "the broker was killed")

    def _kill(self) -> None:
        self.has_killed = True
        self._broker.kill()
        self._broker.start()


@pytest.fixture
def killer(broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> Killer:
    killer = Killer(broker)
    make, send, receive = Connection.__init__, Connection.send, Connection.receive

    def making(self: Connection, *given: Any, client_id: str, **options: Any) -> None:
        if client_id == OF_TESTS:
            killer.spared.add(self)
        make(self, *given, client_id=client_id, **options)

    def sending(self: Connection, request: Request[Any]) -> None:
        killer.before(self, request)
        send(self, request)

    def receiving(self: Connection, timeout_ms: int) -> Any:
        if (found := receive(self, timeout_ms)) is not None:
            killer.after(self)
        return found

    monkeypatch.setattr(Connection, "__init__", making)
    monkeypatch.setattr(Connection, "send", sending)
    monkeypatch.setattr(Connection, "receive", receiving)
    return killer


AFTER = [pytest.param(True, id="after"), pytest.param(False, id="before", marks=pytest.mark.deep)]

OF_THE_SINK = (
    "EndTxn",
    "ApiVersions",
    "DescribeConfigs",
    "DescribeProducers",
    "DescribeTransactions",
    "FindCoordinator",
    "InitProducerId",
    "ListOffsets",
    "ListTransactions",
    "Metadata",
    "OffsetFetch",
    "Produce",
    "TxnOffsetCommit",
)
"""All kinds of requests that a sink makes, in its workers and in the driver, but for those of rare renewals."""

REPEATS = (1, 2, 4, 8, 16)
"""Which of the requests of a kind; there may be less of them."""


@pytest.mark.parametrize("is_after", AFTER)
@pytest.mark.parametrize("kind", few(OF_THE_SINK, 1))
def test_the_sink_is_exact_at_whichever_request_the_broker_is_killed(
    broker: KafkaBroker, client: KafkaClient, killer: Killer, kind: str, is_after: bool
) -> None:
    count = 0
    for number in REPEATS if IS_DEEP else REPEATS[:1]:
        place = Place(broker, client, kind=PatientSink)
        target = dataclasses.replace(
            place.target,
            failing=lambda at, after: killer.armed(kind, at, is_after=after),
        )
        is_reached = check_interruption(target, number, is_after=is_after, is_killed=True)
        place.reader.close()
        if not is_reached:
            break
        count += 1
    assert count > 0, f"a sink makes no request {kind}"


class PatientSource(Kafka):
    """A source that waits for a broker, however long it takes to start again."""

    def client(self, patience_ms: int = 1_000 * PATIENCE_S) -> KafkaClient:
        return super().client(patience_ms)


OF_THE_SOURCE = ("Fetch", "ApiVersions", "FindCoordinator", "ListOffsets", "Metadata", "OffsetCommit", "OffsetFetch")
"""All kinds of requests that a source makes, when it begins, reads, looks for partitions and commits to its group."""


def put(client: KafkaClient, topic: str, partition: int, numbers: range, *, commit: bool = True) -> None:
    """Write numbers in a transaction of their own, which is over when it returns: it would hang, see KAFKA-20734."""
    name = uuid.uuid4().hex
    ids = client.take_over(name, 600_000)
    producer = Producer(client, SYSTEM_ENVIRONMENT, client.topics([topic]), ids, name)
    values = pa.array([b"%d" % number for number in numbers], pa.binary())
    producer.write((topic, partition), values, np.zeros(len(numbers), np.int64))
    producer.flush()
    producer.close()
    client.end_transaction(name, ids, commit=commit)
    while client.describe_transaction(name).transaction_state.startswith("Prepare"):  # type: ignore[union-attr]
        continue


def take(reader: KafkaReader, count: int) -> list[int]:
    rows: list[int] = []
    while len(rows) < count:
        found = reader.poll()
        rows += [] if found is None else [int(value) for value in found.batch.column("value").to_pylist()]
    return rows


@pytest.mark.parametrize("is_after", AFTER)
@pytest.mark.parametrize("kind", few(OF_THE_SOURCE, 1))
def test_the_source_is_exact_at_whichever_request_the_broker_is_killed(
    broker: KafkaBroker, client: KafkaClient, killer: Killer, kind: str, is_after: bool
) -> None:
    """It begins at a group, finds a partition while it reads, commits to the group, and goes on from a checkpoint."""
    count = 0
    for number in REPEATS if IS_DEEP else REPEATS[:1]:
        topic = client.create_topic(f"t-{uuid.uuid4().hex}", 2).name
        client.commit_offsets(topic, topic, {0: 1})
        for part in range(2):
            put(client, topic, part, range(100 * part, 100 * part + 10))
        with killer.armed(kind, number, is_after=is_after) as has_killed:
            found, committed = read_through(broker, client, topic)
            is_reached = has_killed()
        assert sorted(found) == [*range(1, 30), *range(100, 130), *range(200, 210)]
        assert committed == {0: (39, ""), 1: (39, ""), 2: (11, "")}
        if not is_reached:
            break
        count += 1
    assert count > 0, f"a source makes no request {kind}"


def read_through(broker: KafkaBroker, client: KafkaClient, topic: str) -> tuple[list[int], dict[int, tuple[int, str]]]:
    """Read what there is, and what comes; return it, and what the group has at the end."""
    source = PatientSource(broker.address, topic, start="committed", group=topic, discovery_interval="20ms")
    reader = source.open(SourceContext("p", "s", 0, 1, None))
    found = take(reader, 19)
    for part in range(2):
        put(client, topic, part, range(500, 505), commit=False)
        put(client, topic, part, range(100 * part + 10, 100 * part + 20))
    found += take(reader, 20)
    positions = reader.positions()
    reader.snapshot(SnapshotContext(1))
    reader.close()  # it is killed
    broker.add_partitions(topic, 3)
    reader = source.open(SourceContext("p", "s", 0, 1, positions))
    for part in range(3):
        first = 200 if part == 2 else 100 * part + 20
        put(client, topic, part, range(first, first + 10))
    found += take(reader, 30)
    while sorted(one.position for one in reader.progress().values()) != [11, 39, 39]:
        assert reader.poll() is None  # the markers come last
    reader.snapshot(SnapshotContext(2))
    reader.notify_checkpoint_complete(2)
    while (committed := client.committed_offsets(topic, topic, range(3))).get(2) is None:
        assert reader.poll() is None
    reader.close()
    return found, committed
