"""Stores whose catalogue is on PostgreSQL and whose chunks are in HDFS, the servers of which are killed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.servers.hdfs import HdfsCluster
from tests.servers.postgres import PostgresServer
from tests.store.storing import KEYED, STREAM, drain, drained, keyed
from tests.store.test_store_crash import SINK, WRITER, kill, lines_of, start

from headgate.errors import UsageError
from headgate.store import location
from headgate.store.store import Store

pytestmark = [pytest.mark.xdist_group("hdfs"), pytest.mark.long, pytest.mark.deep]


@pytest.fixture
def store(postgres: PostgresServer, hdfs: HdfsCluster, request: pytest.FixtureRequest) -> Iterator[Store]:
    name = f"hdfs_{abs(hash(request.node.nodeid)) % 10**12}"
    catalogue, storage, _ = location.open_shared(postgres.url(name), f"{hdfs.url}/{name}")
    with Store(postgres.url(name), catalogue, storage) as opened:
        opened.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        yield opened


def test_what_is_written_is_read_truncated_and_checked_in_hdfs(store: Store) -> None:
    with store.writer(STREAM) as writer:
        for number in range(5):
            writer.append(keyed(("a", number), ("b", number))).result(60)
    transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name="t")
    transaction.write(keyed(("c", 1)))
    transaction.prepare()
    store.commit_transactions([(STREAM, "t")], owner="p", epoch=1)
    assert drained(store) == sorted([("a", n) for n in range(5)] + [("b", n) for n in range(5)] + [("c", 1)])
    assert store.fsck() == []
    store.truncate(store.tail(STREAM))
    assert store._core.storage.list("") == []
    assert store.fsck() == []


@pytest.mark.crash
def test_clients_that_are_killed_lose_and_repeat_nothing_in_hdfs(store: Store) -> None:
    victim, sink = start(WRITER, store.root, "victim", 100_000), start(SINK, store.root, 1)
    acknowledged = [int(line) for line in lines_of(victim, 5)]
    acknowledged += [int(line) for line in kill(victim)]
    committed = {line.split()[1] for line in lines_of(sink, 7) + kill(sink) if line.startswith("committed")}
    store.transactions.recover(STREAM, owner="p/sink", epoch=2)
    there = [value for segment in drain(store) for key, value in segment if key == "victim"]
    assert there == list(range(len(there)))
    assert len(acknowledged) <= len(there) <= len(acknowledged) + 1
    rounds = [value for key, value in drained(store) if key.startswith("k")]
    assert {str(value) for value in rounds} >= committed
    assert all(rounds.count(value) == 6 for value in set(rounds))
    assert [problem for problem in store.fsck() if not problem.is_harmless] == []


@pytest.mark.parametrize("server", ["name_node", "data_node"])
def test_writers_wait_for_a_server_of_hdfs_that_was_killed(store: Store, hdfs: HdfsCluster, server: str) -> None:
    with store.writer(STREAM) as writer:
        writer.append(keyed(("a", 0))).result(60)
        hdfs.kill(server)
        healing = threading.Timer(2, hdfs.start, [server])
        healing.start()
        writer.append(keyed(("a", 1))).result(400)
        healing.join()
    assert drained(store) == [("a", 0), ("a", 1)]
    assert [problem for problem in store.fsck() if not problem.is_harmless] == []


def test_a_directory_of_hdfs_that_does_not_let_us_in_is_named(
    postgres: PostgresServer, hdfs: HdfsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "guest")
    with pytest.raises(UsageError, match=r"chunks of the store at .* cannot be reached: .*Permission denied") as caught:
        location.open_shared(postgres.url("no_rights"), f"{hdfs.url}/not-yours")
    assert "\n" not in str(caught.value)
