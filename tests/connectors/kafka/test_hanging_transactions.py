"""Transactions that are decided and hang in a partition, because the broker left out their markers there.

A broker that does not compare what is written with its coordinator takes records of older clients, which had to make
partitions part of a transaction themselves. If they do not, the coordinator writes no marker to them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest
from tests.servers.kafka import KafkaBroker, kafka_broker

from headgate.codec.kafka.messages import LATEST, READ_UNCOMMITTED, Produce, TxnOffsetCommit
from headgate.codec.kafka.wire import ErrorCode
from headgate.connectors.kafka import client as requests
from headgate.connectors.kafka import producer as writing
from headgate.connectors.kafka.client import KafkaClient, ProducerIds
from headgate.connectors.kafka.sink import KafkaSink
from headgate.connectors.kafka.transactions import Prepared, prepared_in
from headgate.model.ids import CheckpointId
from headgate.testing import Target
from headgate.testing.sinks.fake_pipeline import Checkpoint, FakePipeline

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("kafka-hanging")]

Omitting = Callable[[], AbstractContextManager[None]]


class OlderProduce(Produce):
    VERSIONS: ClassVar[tuple[int, ...]] = (9,)


class OlderTxnOffsetCommit(TxnOffsetCommit):
    VERSIONS: ClassVar[tuple[int, ...]] = (3,)


@pytest.fixture(scope="module")
def lenient_broker() -> Iterator[KafkaBroker]:
    with kafka_broker("transaction.partition.verification.enable=false\n") as broker:
        yield broker


class Topic:
    """A topic with a sink, and the records that readers of committed ones find."""

    def __init__(self, broker: KafkaBroker) -> None:
        self.client = KafkaClient([broker.address])
        self.found = self.client.create_topic(f"t-{uuid.uuid4().hex}", 2)
        self.prefix = f"p-{uuid.uuid4().hex}"
        self.sink = KafkaSink(broker.address, self.found.name, key="text", prefix=self.prefix)
        self._broker = broker

    def pipeline(self, story: str) -> FakePipeline:
        return FakePipeline(Target(self.sink, self.read, list, holds_back=True), 6, story)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(one.value()) for one in self._broker.committed(self.found.name)]

    def hangs(self) -> bool:
        """Return whether readers of committed records do not come to the end of some partition."""
        parts = dict.fromkeys(self.found.leaders, LATEST)
        ends = self.client.list_offsets(self.found, parts, READ_UNCOMMITTED)
        return self.client.list_offsets(self.found, parts) != ends

    def ids(self) -> set[str]:
        names = {one.transactional_id for one in self.client.list_transactions(f"{self.prefix}:")}
        return {name for name in names if ":owners:" not in name}


@pytest.fixture
def topic(lenient_broker: KafkaBroker) -> Iterator[Topic]:
    made = Topic(lenient_broker)
    yield made
    made.client.close()


@pytest.fixture
def omitted(monkeypatch: pytest.MonkeyPatch) -> Omitting:
    """What is written meanwhile gets no markers."""

    @contextmanager
    def omitted() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(writing, "Produce", OlderProduce)
            yield

    return omitted


def decide(topic: Topic, checkpoint: Checkpoint) -> Prepared:
    """Commit the only transaction of a checkpoint, as a driver that dies after it."""
    (what,) = map(prepared_in, checkpoint.committables)
    ids = ProducerIds(what.producer_id, what.producer_epoch)
    assert topic.client.end_transaction(what.transactional_id, ids, commit=True).code is ErrorCode.NONE
    topic.client.wait_for_markers([what.transactional_id])
    assert topic.hangs()
    return what


def test_a_commit_ends_what_hangs_and_its_id_is_used_no_more(topic: Topic, omitted: Omitting) -> None:
    pipeline = topic.pipeline("markers of a commit were left out")
    run = pipeline.start(1)
    with omitted():
        pipeline.advance(run)
    assert not topic.hangs()
    pipeline.advance(run)
    assert len(topic.ids()) == 2
    run.close()
    pipeline.check_end(1)


def test_a_writer_uses_no_id_that_hangs(topic: Topic, omitted: Omitting) -> None:
    pipeline = topic.pipeline("the driver was slow after its commit")
    run = pipeline.start(1)
    with omitted():
        first = pipeline.prepare(run)
    decide(topic, first)
    second = pipeline.prepare(run)
    assert len(topic.ids()) == 2
    pipeline.complete(second)
    run.commit(second)
    run.close()
    pipeline.check_end(1)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_the_next_driver_ends_what_hangs(topic: Topic, omitted: Omitting, steps: int) -> None:
    """Also if the last one died while it did it: what is open for the id then is committed, not aborted."""
    pipeline = topic.pipeline(f"the driver died after {steps} steps")
    run = pipeline.start(1)
    with omitted():
        first = pipeline.prepare(run)
    what = decide(topic, first)
    following = ProducerIds(what.producer_id, what.producer_epoch + 1)
    if steps:
        topic.client.add_partitions(what.transactional_id, following, {topic.found.name: [0, 1]})
    if steps > 1:
        topic.client.end_transaction(what.transactional_id, following, commit=True)
    pipeline.complete(first)
    run.close()
    pipeline.check_end(1)
    assert not topic.hangs()


@pytest.mark.parametrize("is_same_driver", [True, False])
def test_output_whose_proof_hangs_too_is_not_taken_for_lost(
    topic: Topic, omitted: Omitting, monkeypatch: pytest.MonkeyPatch, is_same_driver: bool
) -> None:
    """The group of the proof was away when the transaction that ends the hanging one had begun."""
    pipeline = topic.pipeline("the marker of the proof was left out")
    run = pipeline.start(1)
    with omitted():
        monkeypatch.setattr(requests, "TxnOffsetCommit", OlderTxnOffsetCommit)
        first = pipeline.prepare(run)
        monkeypatch.undo()
    (what,) = map(prepared_in, first.committables)
    own, following = (ProducerIds(what.producer_id, what.producer_epoch + i) for i in (0, 1))
    topic.client.add_partitions(what.transactional_id, own, {topic.found.name: [0]})
    decide(topic, first)
    topic.client.add_partitions(what.transactional_id, following, {topic.found.name: [1]})
    pipeline.complete(first)
    if is_same_driver:
        run.commit(first)
        assert not topic.hangs()
    run.close()
    pipeline.check_end(1)
    assert not topic.hangs()


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_was_not_prepared_ends_as_aborted(topic: Topic, omitted: Omitting, is_closed: bool) -> None:
    pipeline = topic.pipeline("markers of an abort were left out")
    run = pipeline.start(1)
    pipeline.advance(run)
    with omitted():
        run.write(3)
        run.writers[0].seal(CheckpointId(99))
        if is_closed:
            run.close()
    assert topic.hangs()
    pipeline.check_end(1)
    assert not topic.hangs()


@pytest.mark.deep
def test_a_claim_that_hangs_is_made_again(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time for which a claim that is being made is waited for."""
    pipeline = topic.pipeline("the marker of a claim was left out")
    run = pipeline.start(1)
    pipeline.advance(run)
    run.close()
    (fence,) = topic.sink.all_claimed()
    name = f"{topic.prefix}:owners:{topic.found.name}:{fence.owner}"
    with monkeypatch.context() as patch:
        patch.setattr(requests, "TxnOffsetCommit", OlderTxnOffsetCommit)
        producer = topic.client.take_over(name, 10_000)
        topic.client.commit_in_transaction(name, producer, name, topic.found.name, {0: (99, "")})
        topic.client.end_transaction(name, producer, commit=True)
    pipeline.check_end(1)
    assert [one.generation for one in topic.sink.all_claimed()] == [2]
