"""SIGKILL of workers, of drivers and of the broker, in a pipeline between topics of Kafka, in two in a row, and
in copies between a topic and a stream."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.servers.kafka import KafkaBroker, kafka_broker

from crash.support.chains import KAFKA_PROGRAM, Chain
from crash.support.processes import STARTED_S, Child, Life, kill, until
from crash.support.results import assert_clean, assert_equal
from crash.support.standing import MINUTES, SPARK_IN_DEEP, WITH_SPARK
from headgate.connectors.files.file_committer import read_committed
from headgate.connectors.kafka.client import KafkaClient
from headgate.store.store import Store

pytestmark = [
    pytest.mark.crash,
    pytest.mark.timeout(1_800 + 120 * MINUTES),
    pytest.mark.xdist_group("kafka"),
]

Spec = Callable[..., dict[str, Any]]
Launch = Callable[..., Life]

ROWS, KEYS = 12_000, 40
ANSWER_S = 60
DELIVERED_MS = 20_000
"""A record that was not written after this time is given up; the windows of the chain wait longer."""
RATE_PAUSE_S = KEYS / 1_000
"""A record for each key after each pause."""


class Topics:
    """A topic ``in`` that is filled step by step or all the time, and those that pipelines write to."""

    def __init__(self, broker: KafkaBroker) -> None:
        self.broker, self.written = broker, 0
        for name in ("in", "middle", "out"):
            broker.create_topic(name, 2)

    def fill(self, count: int) -> None:
        """Write the next records, which wait for nobody."""
        numbers = range(self.written, self.written + count)
        texts = ((number % 2, json.dumps({"id": number, "key": number % KEYS})) for number in numbers)
        self.broker.put("in", ({"value": text.encode(), "partition": part} for part, text in texts))
        self.written += count

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Write records all the time; around a kill of the broker some may come twice, out of order, or not at all."""
        from confluent_kafka import Producer

        is_over = threading.Event()
        options = {"bootstrap.servers": self.broker.address, "message.timeout.ms": DELIVERED_MS, "log_level": 0}
        producer = Producer({**options, "reconnect.backoff.max.ms": 500})

        def write() -> None:
            while not is_over.wait(RATE_PAUSE_S):
                for number in range(self.written, self.written + KEYS):
                    text = json.dumps({"id": number, "key": number % KEYS})
                    producer.produce("in", text.encode(), partition=number % 2)
                self.written += KEYS
                producer.poll(0)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield
        finally:
            is_over.set()
            writer.join()
        assert producer.flush(STARTED_S) == 0

    def committed(self, topic: str = "out") -> list[dict[str, Any]]:
        """Return what a reader of committed records finds, by librdkafka."""
        return [json.loads(one.value()) for one in self.broker.committed(topic)]

    def transactions(self) -> dict[str, str]:
        """Return the state of each transaction by its id."""
        client = KafkaClient([self.broker.address])
        found = client.list_transactions("headgate:")
        client.close()
        return {one.transactional_id: one.transaction_state for one in found}

    def undecided(self) -> list[str]:
        decided = ("Empty", "CompleteCommit", "CompleteAbort")
        return [name for name, state in self.transactions().items() if state not in decided]

    def counted(self) -> list[dict[str, Any]]:
        """Return what is in ``in``, with the number of each record among those of its key."""
        counts: Counter[int] = Counter()
        rows = self.committed("in")
        for row in rows:
            counts[row["key"]] += 1
            row["n"] = counts[row["key"]]
        return rows

    def assert_exactly_once(self, topic: str = "out") -> None:
        """Every record was counted once for its key, in its order, and no transaction is open."""
        until(lambda: not self.undecided(), "the end of all transactions")
        found = in_order(self.committed(topic))
        said = f"{topic} has records up to {self.ends(topic)}; transactions: {self.transactions()}"
        assert found == in_order(self.counted()), said

    def ends(self, topic: str) -> dict[str, list[int]]:
        """Return where a topic ends, for all and for readers of committed records, which an open transaction stops."""
        from confluent_kafka import Consumer, TopicPartition

        found = {}
        for level in ("read_uncommitted", "read_committed"):
            settings = {"bootstrap.servers": self.broker.address, "group.id": "ends", "isolation.level": level}
            consumer = Consumer(settings)
            ends = [consumer.get_watermark_offsets(TopicPartition(topic, part), ANSWER_S) for part in range(2)]
            found[level] = [end for _, end in ends]
            consumer.close()
        return found

    def windows(self) -> pl.DataFrame:
        """Return what the second pipeline of the chain shall have written, from what is in ``in``."""
        counted = pl.DataFrame(self.counted()).with_columns(window_start=pl.from_epoch("id", time_unit="ms"))
        grouped = counted.group_by("key", pl.col("window_start").dt.truncate("1s"))
        found = grouped.agg(records=pl.len().cast(pl.Int64), ids=pl.col("id").sum(), counts=pl.col("n").sum())
        return found.with_columns(pl.col("window_start").cast(pl.Datetime("us")))


def in_order(rows: list[dict[str, Any]]) -> dict[int, list[tuple[int, int]]]:
    """Return number and count of each record by key, in the order of the topic."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        found[row["key"]].append((row["id"], row["n"]))
    return found


@pytest.fixture
def topics() -> Iterator[Topics]:
    with kafka_broker() as broker:
        yield Topics(broker)


@pytest.mark.spark
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


@pytest.mark.deep  # as the kit for sinks kills it, and tests/crash/test_driver_kills.py drivers
@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_nothing_is_lost_or_doubled_wherever_in_a_commit_the_driver_is_killed(
    spec: Spec, launch: Launch, tmp_path: Path, topics: Topics, with_spark: bool
) -> None:
    what = spec("kafka", rows=ROWS, brokers=topics.broker.address, gate=None)
    part = ROWS // (len(POINTS) + 1)
    for point, count in POINTS.items():
        topics.fill(part)
        life = launch(what, with_spark=with_spark, HEADGATE_KILL_AT=f"{point}:{count}:{tmp_path / point}")
        assert life.child.exit_code(3 * STARTED_S) == -9, life.child.tale("it was not killed")
        life.child.assert_gone()
    topics.fill(ROWS - len(POINTS) * part)
    life = launch(what, with_spark=with_spark)
    assert life.result(3 * STARTED_S)["is_finished"]
    assert life.child.exit_code() == 0
    topics.assert_exactly_once()
    assert_clean(tmp_path)


BROKER_POINTS = {
    "before-trigger": 2,
    "before-snapshot": 2,
    "after-prepare": 2,
    "after-snapshot-before-ack": 2,
    "before-ack": 2,
    "before-manifest": 2,
    "after-manifest": 2,
    "in-commit": 1,
    "after-commit": 1,
    "after-claim": 1,
    "in-recover": 1,
    "in-restore": 1,
}
"""Where the broker is killed in each start, and when a process passes there for which time."""


@pytest.mark.deep
@pytest.mark.parametrize("dies_too", [False, True], ids=["alone", "with-the-process"])
def test_nothing_is_lost_or_doubled_wherever_the_broker_is_killed(
    spec: Spec, launch: Launch, tmp_path: Path, topics: Topics, dies_too: bool
) -> None:
    """By the process that passes a point, a worker or the driver, which is killed with it or goes on."""
    what = spec("kafka", rows=ROWS, brokers=topics.broker.address, gate=None)
    part = ROWS // (len(BROKER_POINTS) + 1)
    for point, count in BROKER_POINTS.items():
        topics.fill(part)
        marker = tmp_path / point
        kills = [f"{point}={topics.broker.pid}:{count}:{marker}"]
        kills += [f"{point}:{count}:{marker}-too"] if dies_too else []
        life = launch(what, with_spark=False, HEADGATE_KILL_AT=";".join(kills))
        until(marker.exists, f"a process at {point}", 3 * STARTED_S)
        topics.broker.kill()
        topics.broker.start()
        if dies_too and point not in OF_WORKERS:
            assert life.child.exit_code(3 * STARTED_S) == -9, life.child.tale("it was not killed")
            life.child.assert_gone()
            continue
        life.running()
        life.checkpoint(2)
        life.child.signal(signal.SIGTERM)
        assert life.child.exit_code(3 * STARTED_S) == 0, life.child.tale("it did not stop")
        life.child.assert_gone()
    topics.fill(ROWS - len(BROKER_POINTS) * part)
    topics.broker.kill()
    topics.broker.start()
    life = launch(what, with_spark=False)
    assert life.result(3 * STARTED_S)["is_finished"]
    assert life.child.exit_code() == 0
    topics.assert_exactly_once()
    assert_clean(tmp_path)


OF_WORKERS = ("in-restore", "before-snapshot", "after-prepare", "after-snapshot-before-ack")
"""Points that workers pass, and not the driver."""


@pytest.fixture
def chain(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Chain]:
    with closing(Chain(tmp_path, KAFKA_PROGRAM, with_spark=request.param)) as made:
        yield made


@pytest.mark.deep
@pytest.mark.skipif("HEADGATE_TEST_MINUTES" not in os.environ, reason="make kill-chain runs it")
@pytest.mark.parametrize("chain", WITH_SPARK, indirect=True)
def test_a_chain_over_topics_is_exactly_once_from_end_to_end_whoever_is_killed(
    chain: Chain, topics: Topics, dice: random.Random, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    broker = topics.broker
    for name in ("first", "second"):
        chain.start(name, broker.address, str(tmp_path / "windows"), "")

    def restart_broker(how: signal.Signals) -> None:
        broker.stop(how)
        broker.start()

    def kill_with_broker() -> None:
        link = dice.choice(chain.links)
        broker.kill()
        kill(link.driver().pid)
        broker.start()

    chain.other_strikes = [
        ("the broker", lambda: restart_broker(signal.SIGKILL)),
        ("the broker, by SIGTERM,", lambda: restart_broker(signal.SIGTERM)),
        ("the broker and a driver", kill_with_broker),
        *chain.stops(dice),
    ]
    with topics.flowing():
        chain.checkpoint(STARTED_S)
        told = chain.strike_until_time_is_up(dice)
    for link in list(chain.links):
        chain.stop(link)
    for name, link in zip(("first", "second"), list(chain.links), strict=True):
        again = chain.start_again(link, name, broker.address, str(tmp_path / "windows"), "latest")
        assert again.exit_code(STARTED_S) == 0, chain.tale()
        again.assert_gone()
    topics.assert_exactly_once("middle")
    assert len(topics.counted()) > topics.written // 2
    found = read_committed(str(tmp_path / "windows")).with_columns(
        pl.col("window_start").str.to_datetime(time_unit="us", time_zone="UTC").dt.replace_time_zone(None)
    )
    assert_equal(found, topics.windows(), "windows")
    assert_clean(tmp_path)
    kills = ", ".join(f"{count} x {what}" for what, count in told.most_common())
    record_property("kills", kills)
    print(f"{topics.written:,} records; {told.total()} kills and stops: {kills}")


class CopyCommand:
    """``headgate streams copy``, below a directory."""

    def __init__(self, directory: Path, broker: KafkaBroker) -> None:
        self._directory = directory
        self._options = ["--brokers", broker.address, "--dir", str(directory / "checkpoints"), "--master", "local[2]"]
        self._env = {"HEADGATE_STORE": str(directory / "store")}

    def _start(self, source: str, target: str, kill_at: str) -> Child:
        command = [sys.executable, "-P", "-m", "headgate.cli.__main__", "streams", "copy", source, target, "--json"]
        env = {"HEADGATE_KILL_AT": kill_at} if kill_at else {}
        return Child([*command, *self._options], self._directory / "driver", {**self._env, **env})

    def run(self, source: str, target: str) -> dict[str, Any]:
        """Return what the command says at its end."""
        child = self._start(source, target, "")
        try:
            assert child.exit_code(STARTED_S) == 0, child.stderr()
            return child.events[0]
        finally:
            child.close()

    def kill(self, source: str, target: str) -> None:
        """Kill a worker in its first checkpoint, and the driver in the commit of one that comes after it."""
        markers = {
            name: self._directory / f"{name}-{target.replace(':', '-')}" for name in ("before-snapshot", "in-commit")
        }
        child = self._start(source, target, ";".join(f"{name}:1:{path}" for name, path in markers.items()))
        try:
            assert child.exit_code(STARTED_S) == -9, child.stderr()
            child.assert_gone()
        finally:
            child.close()
        assert all(path.exists() for path in markers.values())


@pytest.mark.spark
@pytest.mark.deep
def test_a_copy_that_is_killed_and_run_again_is_exact(tmp_path: Path, topics: Topics) -> None:
    command = CopyCommand(tmp_path, topics.broker)
    topics.fill(ROWS // 2)
    command.kill("kafka:in", "copied")
    topics.fill(ROWS - ROWS // 2)
    assert command.run("kafka:in", "copied")["records"] == ROWS
    with Store.open(tmp_path / "store") as store:
        found = [row for one in store.follow("copied", end="latest") for row in one.batch.to_pylist()]
    assert sorted(json.loads(row["value"])["id"] for row in found) == list(range(ROWS))

    command.kill("copied", "kafka:out")
    assert command.run("copied", "kafka:out")["records"] == ROWS
    until(lambda: not topics.undecided(), "the end of all transactions")
    assert sorted(row["id"] for row in topics.committed()) == list(range(ROWS))
    assert_clean(tmp_path)
