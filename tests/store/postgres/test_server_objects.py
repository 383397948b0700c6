"""Chunks on a server of objects or in HDFS, the catalogue on PostgreSQL: any server comes and goes meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.logs.checks import anomalies
from tests.logs.faults import Clients, Strike, freezes, kills, lived_through, replaces, scales, sets_the_date
from tests.servers.hdfs import HdfsCluster
from tests.servers.objects import BUCKET, ObjectServer, careless_server, object_server
from tests.servers.postgres import PostgresServer
from tests.store.faults.test_store_crash import SINK, WRITER, kill, lines_of, start
from tests.store.storing import KEYED, STREAM, drain, drained, keyed

from headgate.errors import UsageError
from headgate.store import location
from headgate.store.store import Store


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture
def store(postgres: PostgresServer, objects: ObjectServer, request: pytest.FixtureRequest) -> Iterator[Store]:
    name = f"objects_{abs(hash(request.node.nodeid)) % 10**12}"
    catalogue, storage, _ = location.open_shared(postgres.url(name), f"s3://{BUCKET}/{name}")
    with Store(postgres.url(name), catalogue, storage) as opened:
        opened.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        yield opened


def test_what_is_written_is_read_truncated_and_checked(store: Store) -> None:
    with store.writer(STREAM) as writer:
        for number in range(10):
            writer.append(keyed(("a", number), ("b", number))).result(60)
    transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name="t")
    transaction.write(keyed(("c", 1)))
    transaction.prepare()
    store.commit_transactions([(STREAM, "t")], owner="p", epoch=1)
    assert drained(store) == sorted([("a", n) for n in range(10)] + [("b", n) for n in range(10)] + [("c", 1)])
    assert store.fsck() == []
    store.truncate(store.tail(STREAM))
    assert store._core.storage.list("") == []
    assert store.fsck() == []


def test_clients_of_both_servers_that_are_killed_lose_and_repeat_nothing(store: Store) -> None:
    patient, victim = start(WRITER, store.root, "w", 15), start(WRITER, store.root, "victim", 100_000)
    sink = start(SINK, store.root, 1)
    acknowledged = [int(line) for line in lines_of(victim, 5)]
    acknowledged += [int(line) for line in kill(victim)]
    committed = {line.split()[1] for line in lines_of(sink, 7) + kill(sink) if line.startswith("committed")}
    assert patient.communicate()[0].split() == [str(n) for n in range(15)]
    store.transactions.recover(STREAM, owner="p/sink", epoch=2)
    found = drain(store)
    assert [v for s in found for k, v in s if k == "w"] == list(range(15))
    there = [v for s in found for k, v in s if k == "victim"]
    assert there == list(range(len(there)))
    assert len(acknowledged) <= len(there) <= len(acknowledged) + 1
    rounds = [v for _, v in drained(store) if _.startswith("k")]
    assert {str(v) for v in rounds} >= committed
    assert all(rounds.count(v) == 6 for v in set(rounds))
    assert [problem for problem in store.fsck() if not problem.is_harmless] == []


def test_writers_wait_for_a_server_of_objects_that_is_away(store: Store, objects: ObjectServer) -> None:
    with store.writer(STREAM) as writer:
        writer.append(keyed(("a", 0))).result(60)
        objects.fail()
        threading.Timer(2, objects.heal).start()
        writer.append(keyed(("a", 1))).result(200)
    assert drained(store) == [("a", 0), ("a", 1)]


def test_a_place_that_does_not_let_us_in_is_named(
    postgres: PostgresServer, objects: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"chunks of the store at .* cannot be reached: .*no-such-bucket"):
        location.open_shared(postgres.url("no_bucket"), "s3://no-such-bucket/x")
    if objects.keeps:  # moto lets everybody in
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-wrong")
        with pytest.raises(UsageError, match="cannot be reached") as caught:
            location.open_shared(postgres.url("wrong_key"), f"s3://{BUCKET}/wrong")
        assert "very-wrong" not in str(caught.value)


def test_a_place_that_ignores_conditions_is_refused(postgres: PostgresServer) -> None:
    with careless_server() as objects, pytest.raises(UsageError, match="replaces an object"):
        location.open_shared(postgres.url("careless"), f"s3://{BUCKET}/careless")
    assert objects == {}


@pytest.fixture
def hdfs_store(postgres: PostgresServer, hdfs: HdfsCluster, request: pytest.FixtureRequest) -> Iterator[Store]:
    name = f"hdfs_{abs(hash(request.node.nodeid)) % 10**12}"
    catalogue, storage, _ = location.open_shared(postgres.url(name), f"{hdfs.url}/{name}")
    with Store(postgres.url(name), catalogue, storage) as opened:
        opened.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        yield opened


@pytest.mark.xdist_group("hdfs")
@pytest.mark.long
@pytest.mark.deep
def test_what_is_written_is_read_truncated_and_checked_in_hdfs(hdfs_store: Store) -> None:
    with hdfs_store.writer(STREAM) as writer:
        for number in range(5):
            writer.append(keyed(("a", number), ("b", number))).result(60)
    transaction = hdfs_store.transactions.begin(STREAM, owner="p", epoch=1, name="t")
    transaction.write(keyed(("c", 1)))
    transaction.prepare()
    hdfs_store.commit_transactions([(STREAM, "t")], owner="p", epoch=1)
    assert drained(hdfs_store) == sorted([("a", n) for n in range(5)] + [("b", n) for n in range(5)] + [("c", 1)])
    assert hdfs_store.fsck() == []
    hdfs_store.truncate(hdfs_store.tail(STREAM))
    assert hdfs_store._core.storage.list("") == []
    assert hdfs_store.fsck() == []


@pytest.mark.xdist_group("hdfs")
@pytest.mark.long
@pytest.mark.deep
@pytest.mark.crash
def test_clients_that_are_killed_lose_and_repeat_nothing_in_hdfs(hdfs_store: Store) -> None:
    victim, sink = start(WRITER, hdfs_store.root, "victim", 100_000), start(SINK, hdfs_store.root, 1)
    acknowledged = [int(line) for line in lines_of(victim, 5)]
    acknowledged += [int(line) for line in kill(victim)]
    committed = {line.split()[1] for line in lines_of(sink, 7) + kill(sink) if line.startswith("committed")}
    hdfs_store.transactions.recover(STREAM, owner="p/sink", epoch=2)
    there = [value for segment in drain(hdfs_store) for key, value in segment if key == "victim"]
    assert there == list(range(len(there)))
    assert len(acknowledged) <= len(there) <= len(acknowledged) + 1
    rounds = [value for key, value in drained(hdfs_store) if key.startswith("k")]
    assert {str(value) for value in rounds} >= committed
    assert all(rounds.count(value) == 6 for value in set(rounds))
    assert [problem for problem in hdfs_store.fsck() if not problem.is_harmless] == []


@pytest.mark.xdist_group("hdfs")
@pytest.mark.long
@pytest.mark.deep
@pytest.mark.parametrize("server", ["name_node", "data_node"])
def test_writers_wait_for_a_server_of_hdfs_that_was_killed(hdfs_store: Store, hdfs: HdfsCluster, server: str) -> None:
    with hdfs_store.writer(STREAM) as writer:
        writer.append(keyed(("a", 0))).result(60)
        hdfs.kill(server)
        healing = threading.Timer(2, hdfs.start, [server])
        healing.start()
        writer.append(keyed(("a", 1))).result(400)
        healing.join()
    assert drained(hdfs_store) == [("a", 0), ("a", 1)]
    assert [problem for problem in hdfs_store.fsck() if not problem.is_harmless] == []


@pytest.mark.xdist_group("hdfs")
@pytest.mark.long
@pytest.mark.deep
def test_a_directory_of_hdfs_that_does_not_let_us_in_is_named(
    postgres: PostgresServer, hdfs: HdfsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "guest")
    with pytest.raises(UsageError, match=r"chunks of the store at .* cannot be reached: .*Permission denied") as caught:
        location.open_shared(postgres.url("no_rights"), f"{hdfs.url}/not-yours")
    assert "\n" not in str(caught.value)


@pytest.mark.crash
@pytest.mark.long
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
