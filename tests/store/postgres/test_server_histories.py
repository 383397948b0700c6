"""Writers, transactions, readers and a group in many processes, while PostgreSQL and the server of objects crash."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.logs.checks import anomalies
from tests.logs.faults import Clients, Strike, freezes, kills, lived_through, replaces, scales, sets_the_date
from tests.servers.objects import BUCKET, ObjectServer, object_server
from tests.servers.postgres import PostgresServer

from headgate.store import location
from headgate.store.store import Store


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.mark.crash
def test_no_client_sees_an_anomaly_while_both_servers_come_and_go(
    postgres: PostgresServer, objects: ObjectServer, tmp_path: Path
) -> None:
    def crashes_the_database(chance: random.Random, store: Store, clients: Clients) -> None:
        postgres.crash()
        time.sleep(0.2)  # the time of the fault: not a wait for anything
        postgres.start()

    def loses_the_objects(chance: random.Random, store: Store, clients: Clients) -> None:
        objects.fail()
        time.sleep(1)  # the time of the fault: not a wait for anything
        objects.heal()

    chance = random.Random(8)
    strikes: list[Strike] = [crashes_the_database] * 3 + [loses_the_objects] * 2
    strikes += [kills, kills, freezes, replaces, scales, scales, sets_the_date]
    chance.shuffle(strikes)
    url = postgres.url("histories")
    catalogue, storage, clock = location.open_shared(url, f"s3://{BUCKET}/histories")
    with Store(url, catalogue, storage, clock=clock) as store:
        found = lived_through(store, tmp_path / "logs", chance, strikes, environment=objects.environment)
        assert [str(anomaly) for anomaly in anomalies(found, is_real_time=False)] == []
        assert store.reader_group("members").unread_bytes() == 0
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []
