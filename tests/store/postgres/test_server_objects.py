"""Stores whose catalogue is on PostgreSQL and whose chunks are on a server of objects: no machine has any of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.servers.objects import BUCKET, ObjectServer, careless_server, object_server
from tests.servers.postgres import PostgresServer
from tests.store.storing import KEYED, STREAM, drain, drained, keyed
from tests.store.test_store_crash import SINK, WRITER, kill, lines_of, start

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
