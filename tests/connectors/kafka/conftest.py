"""A broker for the tests of this room, which all tests of one process of pytest share."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers.kafka import RIGHTS, TWO_PHASE_COMMIT, KafkaBroker, kafka_broker
from tests.servers.schema_registry import Registry, schema_registry

from headgate.connectors.kafka.client import KafkaClient
from headgate.connectors.kafka.connection import Connection, KafkaSecurity
from headgate.environment import SYSTEM_ENVIRONMENT

PATIENCE_MS = 300_000


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and "kafka" in getattr(item, "fixturenames", ()):
            item.add_marker("long")


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaBroker]:
    with kafka_broker(RIGHTS) as broker:
        yield broker


@pytest.fixture(scope="session")
def broker() -> Iterator[KafkaBroker]:
    """One that tests kill and start again, and that takes part in two-phase commit."""
    with kafka_broker(TWO_PHASE_COMMIT) as started:
        yield started


@pytest.fixture
def client(kafka: KafkaBroker) -> Iterator[KafkaClient]:
    client = KafkaClient([kafka.address], patience_ms=PATIENCE_MS)
    yield client
    client.close()


@pytest.fixture
def registry() -> Iterator[Registry]:
    with schema_registry() as found:
        yield found


@pytest.fixture
def topic(kafka: KafkaBroker) -> str:
    """A new topic with one partition."""
    return kafka.create_topic(f"t-{uuid.uuid4().hex}")


@pytest.fixture
def connect(kafka: KafkaBroker) -> Iterator[Callable[..., Connection]]:
    """Opens connections that end with the test."""
    opened = []

    def connect(security: KafkaSecurity | None = None, address: str = "") -> Connection:
        default = kafka.sasl_address if security is not None and security.mechanism else kafka.address
        host, port = (address or default).split(":")
        connection = Connection(
            host,
            int(port),
            security or KafkaSecurity(),
            client_id="tests",
            environment=SYSTEM_ENVIRONMENT,
            timeout_ms=PATIENCE_MS,
        )
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def connection(connect: Callable[..., Connection]) -> Connection:
    return connect()
