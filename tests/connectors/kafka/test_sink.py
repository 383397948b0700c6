"""The sink: each record once for readers of committed records, whatever happens to its processes."""

from __future__ import annotations

import dataclasses
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.conftest import IS_DEEP
from tests.connectors.kafka.sink_places import PATIENCE_S, FailingClient, FailingSink, Place, Reader
from tests.servers.kafka import KafkaBroker
from tests.support.killing import run_killing

import headgate as hg
from headgate import testing
from headgate.api.launch import outage_notes
from headgate.codec.kafka.record_batch import HEADERS_TYPE
from headgate.codec.kafka.wire import ErrorCode
from headgate.connectors.base import SinkContext
from headgate.connectors.kafka import committer as committing
from headgate.connectors.kafka.client import KafkaClient, ProducerIds
from headgate.connectors.kafka.sink import KafkaSink
from headgate.connectors.kafka.transactions import UNCERTAIN, prepared_in
from headgate.errors import FencedError, StorageError, UsageError
from headgate.model.config import duration_ms
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import Owner, PipelineIdentity
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.testing import check_sink
from headgate.testing.sinks.failures import check_interruption
from headgate.testing.sinks.fake_pipeline import NUMBERS_MAX, SCHEMA, Checkpoint, FakePipeline, Name, SinkGeneration

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""


@pytest.fixture
def place(kafka: KafkaBroker, client: KafkaClient) -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(**options: Any) -> Place:
        places.append(Place(kafka, client, **options))
        return places[-1]

    yield make
    for one in places:
        one.reader.close()


@pytest.mark.timeout(1_200)
def test_the_sink_passes_the_kit(place: Callable[..., Place]) -> None:
    left_out = check_sink(
        lambda: place().target,
        rescales=((2, 2), (5, 2)) if IS_DEEP else ((3, 2),),
        overlaps=(2,),
        rows=(0, 7) if IS_DEEP else (7,),
    )
    assert [one.partition(":")[0] for one in left_out] == [
        "the order of the output",
        "remove output",
        "interruptions",
        "outages",
    ]


@pytest.mark.timeout(1_200)
def test_every_call_that_fails_is_made_good(place: Callable[..., Place]) -> None:
    """Call after call, before or after its effect, and with the driver killed or not, in turn."""
    for number in itertools.count(1, 1 if IS_DEEP else 5):
        here = place()
        sink = FailingSink(**{field.name: getattr(here.sink, field.name) for field in dataclasses.fields(here.sink)})
        target = dataclasses.replace(here.target, sink=sink, failing=FailingClient.failure.armed)
        if not check_interruption(target, number, is_after=number % 2 == 1, is_killed=number % 4 >= 2):
            break
    assert number > 20


@pytest.mark.run
def test_a_pipeline_writes_each_record_once_although_workers_are_killed(
    place: Callable[..., Place], tmp_path: Path
) -> None:
    here = place(create=2)
    pipeline = hg.Pipeline(f"p-{uuid.uuid4().hex}", checkpointing=hg.Checkpointing(interval="50ms", dir=tmp_path))
    columns = {"number": hg.RowNumber()}
    rows = pipeline.source(hg.Generator(columns=columns, rows=4_000, rows_per_second=2_000, splits=2), name="in")
    texts = rows.select("number", text=pl.col("number").cast(pl.String))
    texts.sink(here.sink, name="out")
    assert outage_notes(pipeline.definition()) == [
        "sink 'out' survives an outage of 72 h 00 min; after a longer one, in which its target dropped output, the "
        "pipeline stops"
    ]
    result = run_killing(pipeline, (2, 5), timeout_s=4 * PATIENCE_S, parallelism=2)
    assert result.restarts >= 1
    assert sorted(row["number"] for row in here.read()) == list(range(4_000))
    assert here.open_transactions() == []
    again = testing.run(pipeline, timeout_s=4 * PATIENCE_S, checkpoint_dir=tmp_path)  # it has ended: nothing follows
    assert again.is_finished
    assert len(here.read()) == 4_000


def committed(run: SinkGeneration, pipeline: FakePipeline) -> Checkpoint:
    """Write a checkpoint, prepare and commit it."""
    pipeline.advance(run)
    return pipeline.completed


def ids_of(place: Place) -> set[str]:
    found = {one.transactional_id for one in place.reader.transactions()}
    return {name for name in found if ":owners:" not in name}


def test_an_id_is_used_again_once_its_transaction_is_committed(place: Callable[..., Place]) -> None:
    here = place()
    pipeline = here.pipeline("it went on for a while")
    run = pipeline.start(1)
    for _ in range(5):
        committed(run, pipeline)
    assert len(ids_of(here)) == 1
    for _ in range(3):  # given up
        pipeline.prepare(run)
    assert len(ids_of(here)) == 3
    run.close()
    pipeline.check_end(1)


def test_an_id_that_rested_for_long_is_not_used_again(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers forget ids that nothing was written with: a topic for alarms may get nothing for weeks."""
    here = place()
    pipeline = here.pipeline("nothing was written for long")
    run = pipeline.start(1)
    monkeypatch.setattr("headgate.connectors.kafka.sink_writer.IDLE_MS_MAX", 0)
    for _ in range(3):
        committed(run, pipeline)
    assert len(ids_of(here)) == 3
    pipeline.check_end(1)


def test_ids_with_forgotten_proofs_are_released(place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers forget offsets, too (``offsets.retention.minutes``): such an id would never count as committed."""
    open_clients: set[KafkaClient] = set()

    class CountedClient(KafkaClient):
        def close(self) -> None:
            open_clients.discard(self)
            super().close()

    class CountedSink(KafkaSink):
        def client(self) -> KafkaClient:
            client = CountedClient([self.brokers], patience_ms=1_000 * PATIENCE_S)
            open_clients.add(client)
            return client

    here = place(kind=CountedSink)
    pipeline = here.pipeline("nothing was written for so long that the proof was forgotten")
    run = pipeline.start(1)
    committed(run, pipeline)
    count = len(open_clients)
    admin = here.broker.admin()
    for deleted in admin.delete_consumer_groups(sorted(ids_of(here))).values():
        deleted.result(PATIENCE_S)
    monkeypatch.setattr("headgate.connectors.kafka.sink_writer.IDLE_MS_MAX", 0)
    for _ in range(3):
        done = pipeline.prepare(run)
        pipeline.complete(done)
        run.commit(done)
    assert len(open_clients) == count
    pipeline.check_end(1)


def test_a_reused_id_proves_its_former_commits(place: Callable[..., Place]) -> None:
    """FLINK-8132: a commit of an old checkpoint neither fails nor commits what is in the id now."""
    here = place()
    pipeline = here.pipeline("the id was used again")
    run = pipeline.start(1)
    first = committed(run, pipeline)
    second = committed(run, pipeline)
    pipeline.prepare(run)
    seen = len(here.read())
    for old in (first, second):
        run.committer.commit(CommitPermit(old.checkpoint, run.generation), old.committables)
        assert [run.committer.denial(one) for one in old.committables] == [""]
    assert len(here.read()) == seen
    assert len(here.open_transactions()) == 1


def test_going_back_behind_a_reused_id_aborts_what_is_in_it_now(place: Callable[..., Place]) -> None:
    """FLINK-40703: checkpoint 1 completed, 2 and 3 did not, the id was used again, and 1 is restored."""
    here = place()
    pipeline = here.pipeline("restored checkpoint 1")
    run = pipeline.start(1)
    first = committed(run, pipeline)
    pipeline.prepare(run)  # in the same id
    pipeline.prepare(run)
    assert len(ids_of(here)) == 2
    assert len(here.open_transactions()) == 2
    pipeline.go_back_to(first)
    run = pipeline.start(1)
    assert here.open_transactions() == []
    pipeline.check_visible(first.position, "after checkpoint 1 was restored")
    pipeline.advance(run)
    pipeline.check_end(1)


def test_epochs_that_are_used_up_lose_nothing(place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool leaves an id whose next epoch brokers would not give. The broker's side: see ``test_client``."""
    here = place()
    pipeline = here.pipeline("the epochs of an id were used up")
    run = pipeline.start(1)
    committed(run, pipeline)
    monkeypatch.setattr("headgate.connectors.kafka.sink_writer.EPOCH_LAST", 2)
    for _ in range(6):
        committed(run, pipeline)
    assert len(ids_of(here)) == 3
    pipeline.check_end(1)


def test_an_outage_that_was_too_long_stops_the_pipeline(place: Callable[..., Place]) -> None:
    here = place(transaction_timeout="10s")  # a slow machine may need its time to prepare
    pipeline = here.pipeline("it was away for too long", rows=8)
    run = pipeline.start(2)
    done = pipeline.prepare(run)
    pipeline.complete(done)
    while here.open_transactions():  # the broker aborts them
        time.sleep(0.05)
    lost = r"output of checkpoint 1 cannot be committed: 8 records for topic '.*' are lost: Kafka aborted transaction"
    for attempt in (lambda: run.commit(done), lambda: pipeline.start(1), lambda: pipeline.start(2)):
        with pytest.raises(UsageError, match=lost) as found:
            attempt()
        assert found.value.is_output_gone
    assert "are lost" in run.committer.denial(done.committables[0])
    assert here.read() == []


@pytest.mark.crash
def test_two_phase_commit_has_no_timeout(broker: KafkaBroker) -> None:
    """KIP-939: what is prepared waits for its decision, also while the broker is killed; what is not is aborted."""
    client = KafkaClient([broker.address], patience_ms=1_000 * PATIENCE_S)
    here = Place(broker, client, two_phase=True)
    here.sink.check(SCHEMA)
    assert here.sink.transaction_timeout is None
    pipeline = here.pipeline("it was away for longer than any timeout", rows=8)
    run = pipeline.start(2)
    promised = pipeline.prepare(run)
    pipeline.prepare(run)  # in a checkpoint that was not completed
    pipeline.complete(promised)
    names = here.open_transactions()
    assert len(names) == 4
    described = [client.describe_transaction(name) for name in names]
    # longer than the longest that brokers allow otherwise
    assert {one.transaction_timeout_ms for one in described if one is not None} == {(1 << 31) - 1}
    run.close()
    broker.kill()
    broker.start()
    other = Place(broker, client, transaction_timeout="1s")
    away = other.pipeline("it has a timeout").start(1)
    away.write(3)
    while not other.aborted_transactions():  # the broker aborts what was open for too long, and not the rest
        time.sleep(0.05)
    assert here.open_transactions() == names
    run = pipeline.start(1)
    assert here.open_transactions() == []
    pipeline.check_visible(promised.shown, "after the next start")
    pipeline.advance(run)
    pipeline.check_end(1)
    away.close()
    for one in (here, other):
        one.reader.close()
    client.close()


def test_a_transaction_that_was_open_for_too_long_is_no_newer_generation(
    kafka: KafkaBroker, place: Callable[..., Place]
) -> None:
    """KAFKA-6119: nothing was promised, so the pipeline goes back to its last checkpoint."""
    here = place(transaction_timeout="1s")
    pipeline = here.pipeline("a transaction was open for too long")
    run = pipeline.start(1)
    run.write(3)
    while not here.aborted_transactions():
        time.sleep(0.05)
    with pytest.raises(StorageError, match="which was open longer than 1000 ms"):
        run.prepare(pipeline.next_id())
    run.close()
    patient = KafkaSink(kafka.address, here.topic, key="text", prefix=here.prefix)  # a slow machine may need its time
    pipeline.target = dataclasses.replace(pipeline.target, sink=patient)
    pipeline.advance(pipeline.start(1))
    pipeline.check_end(1)


def test_a_writer_that_was_replaced_begins_with_no_new_id(place: Callable[..., Place]) -> None:
    here = place()
    pipeline = here.pipeline("replaced before it wrote anything")
    old = pipeline.start(2)
    new = pipeline.start(2)
    with pytest.raises(FencedError, match="generation 1 was replaced by generation 2"):
        old.write(4)
    pipeline.advance(new)
    pipeline.check_end(1)


def test_records_of_a_key_stay_in_order_over_checkpoints(kafka: KafkaBroker, client: KafkaClient) -> None:
    """The next transaction is written while a slow upload still has to prepare the former one."""
    topic = client.create_topic(f"t-{uuid.uuid4().hex}", 1, settings={"max.message.bytes": "1000"}).name
    here = Place(kafka, client, topic=topic)
    run = here.pipeline("uploads were slow").start(1)
    sealed = []
    for number in range(1, 4):
        run.write(500)
        sealed.append(run.writers[0].seal(CheckpointId(number)))
    payloads = [one.prepare() for one in reversed(sealed)]
    found = [
        prepared_in(Committable("sink", CheckpointId(3), 0, Generation(1), payload or b"")) for payload in payloads
    ]
    for what in found:
        ids = ProducerIds(what.producer_id, what.producer_epoch)
        assert client.end_transaction(what.transactional_id, ids, commit=True).code is ErrorCode.NONE
    assert [row["number"] for row in here.read()] == list(range(1_500))
    run.close()
    here.reader.close()


def test_a_writer_that_ends_leaves_nothing_open(place: Callable[..., Place]) -> None:
    here = place()
    pipeline = here.pipeline("a writer was closed")
    run = pipeline.start(1)
    run.write(5)
    run.close()
    assert here.open_transactions() == []


def test_proofs_of_retained_checkpoints_are_kept(place: Callable[..., Place]) -> None:
    here = place()
    pipeline = here.pipeline("an old checkpoint is retained")
    run = pipeline.start(1)
    first = committed(run, pipeline)
    run = pipeline.start(1)
    (one,) = first.committables
    name = prepared_in(one).transactional_id
    before = here.client.committed_offsets(name, here.topic, [0])
    run.forget([first])
    assert here.client.committed_offsets(name, here.topic, [0])[0][0] == before[0][0] == 1
    run.committer.commit(CommitPermit(first.checkpoint, run.generation), first.committables)
    pipeline.check_end(1)


def test_what_was_promised_is_committed_also_by_a_sink_that_is_at_least_once_now(place: Callable[..., Place]) -> None:
    here = place()
    pipeline = here.pipeline("the guarantee was changed after a crash")
    run = pipeline.start(1)
    promised = pipeline.prepare(run)
    pipeline.prepare(run)  # in a checkpoint that was not completed
    run.close()
    pipeline.complete(promised)
    now = dataclasses.replace(here.sink, guarantee="at-least-once", transaction_timeout=None)
    committer = now.open_committer("kit", "sink", Generation(int(run.generation) + 1))
    committer.recover(promised.committables)
    committer.commit(CommitPermit(promised.checkpoint, Generation(int(run.generation) + 1)), promised.committables)
    committer.close()
    assert here.open_transactions() == []
    pipeline.check_visible(promised.shown, "after its commit")


def test_the_owner_of_a_topic_is_not_forgotten_while_its_pipeline_runs(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers forget offsets of a group after a week."""
    here = place()
    run = here.pipeline("it ran for long").start(1)
    (before,) = here.sink.all_claimed()
    other = f"{here.prefix}-other"
    producer = here.client.take_over(other, 10_000)
    group = f"{here.prefix}:owners:{here.topic}:{before.owner}"
    here.client.commit_in_transaction(other, producer, group, here.topic, {0: (0, before.life)})
    assert here.client.end_transaction(other, producer, commit=True).code is ErrorCode.NONE
    run.committer.forget(CheckpointId(1), list)
    assert list(here.sink.all_claimed()) == [dataclasses.replace(before, generation=0)], "it is not renewed each time"
    monkeypatch.setattr(committing, "RENEWAL_MS", 0)
    run.committer.forget(CheckpointId(1), list)
    assert list(here.sink.all_claimed()) == [before]
    run.close()


# -- bugs of other sinks -----------------------------------------------------------------------------------------------


def test_a_pipeline_that_is_deployed_again_commits_nothing_twice(place: Callable[..., Place]) -> None:
    """B2, B6: the answer to the commit is lost, and another process goes on, twice, by other names of the brokers."""
    here = place()
    pipeline = here.pipeline("it was deployed again")
    run = pipeline.start(2)
    done = pipeline.prepare(run)
    run.commit(done)
    pipeline.complete(done)
    for brokers in (here.broker.address, f"{here.broker.address},127.0.0.1:1"):
        pipeline.target = dataclasses.replace(here.target, sink=dataclasses.replace(here.sink, brokers=brokers))
        run = pipeline.start(2)
        pipeline.check_visible(done.position, "after the checkpoint was committed again")
    pipeline.check_end(1)


def test_sinks_with_one_prefix_leave_each_other_alone(place: Callable[..., Place]) -> None:
    """B3, names that begin alike or share their parts, in one topic."""
    here = place()
    names = [
        Name("a", "b"),
        Name("a", "bc", NUMBERS_MAX),
        Name("a:b", "c", 2 * NUMBERS_MAX),
        Name("b", "a", 3 * NUMBERS_MAX),
    ]
    pipelines = [FakePipeline(here.target, 4, f"{name}", name=name) for name in names]
    runs = [pipeline.start(1) for pipeline in pipelines]
    promised = [pipeline.prepare(run) for pipeline, run in zip(pipelines, runs, strict=True)]
    for pipeline, done in zip(pipelines, promised, strict=True):
        pipeline.complete(done)
    for pipeline in pipelines:  # the first starts abort nothing of the others
        pipeline.is_held_back = True
        pipeline.start(1)
    for pipeline, done in zip(pipelines, promised, strict=True):
        pipeline.is_held_back = False
        pipeline.check_visible(done.position, "after all have started again")
    assert here.open_transactions() == []


def test_what_is_left_of_a_commit_is_committed(place: Callable[..., Place]) -> None:
    """B4, B9: the driver dies between two transactions of a checkpoint; older ones were not committed, either."""
    here = place()
    pipeline = here.pipeline("killed between two commits")
    run = pipeline.start(3)
    pipeline.prepare(run)
    done = pipeline.prepare(run)
    assert len(done.committables) == 6
    run.committer.commit(CommitPermit(done.checkpoint, run.generation), done.committables[:4])
    pipeline.complete(done)
    pipeline.check_end(2)


def test_a_commit_that_arrives_late_changes_nothing(place: Callable[..., Place]) -> None:
    """B5, B18: the request of a driver that was replaced is on its way until the next one has gone on."""
    here = place()
    pipeline = here.pipeline("a commit came late")
    old = pipeline.start(1)
    done = pipeline.prepare(old)
    given_up = pipeline.prepare(old)
    pipeline.complete(done)
    new = pipeline.start(1)
    pipeline.prepare(new)
    for what in map(prepared_in, given_up.committables):
        late = here.client.end_transaction(
            what.transactional_id, ProducerIds(what.producer_id, what.producer_epoch), commit=True
        )
        assert late.code in UNCERTAIN
    with pytest.raises(FencedError, match="was replaced"):
        old.commit(given_up)
    pipeline.check_visible(done.position, "after the late commit")
    assert len(here.open_transactions()) == 1
    pipeline.check_end(1)


@pytest.mark.run
def test_a_bounded_input_is_committed_to_its_end(place: Callable[..., Place], tmp_path: Path) -> None:
    """B8, B10: no checkpoint is due while it runs."""
    here = place()
    checkpointing = hg.Checkpointing(interval="1h", dir=tmp_path)
    pipeline = hg.Pipeline(f"p-{uuid.uuid4().hex}", checkpointing=checkpointing)
    rows = [{"number": number, "text": str(number)} for number in range(100)]
    pipeline.source(hg.FromRows(rows), name="in").sink(here.sink, name="out")
    assert testing.run(pipeline, timeout_s=4 * PATIENCE_S, parallelism=2).is_finished
    assert sorted(row["number"] for row in here.read()) == list(range(100))
    assert here.open_transactions() == []


@pytest.mark.parametrize(("before", "after"), [(5, 1), (1, 3)])
def test_nothing_is_left_of_subtasks_that_are_gone(place: Callable[..., Place], before: int, after: int) -> None:
    """B14, FLINK-23854, FLINK-40626: killed before the first checkpoint and after it; then scaled."""
    here = place()
    pipeline = here.pipeline("scaled after a crash", rows=10)
    for _ in range(2):
        run = pipeline.start(before)
        run.write(10)
        pipeline.prepare(run)
        run.write(10)
        run = pipeline.start(after)  # the former processes are gone: they close nothing
        assert here.open_transactions() == []
        pipeline.advance(run)
    pipeline.check_end(after)


# -- options and refusals ---------------------------------------------------------------------------------------------


def test_at_least_once_writes_at_once_and_waits_at_a_barrier(place: Callable[..., Place]) -> None:
    here = place(guarantee="at-least-once", compression="zstd")
    assert not here.sink.is_transactional
    here.sink.check(SCHEMA)
    context = SinkContext("p", "out", 0, 1, Generation(1), SCHEMA)
    writer = here.sink.open(context)
    writer.write(pa.record_batch([[1, 2], ["1", "2"]], schema=SCHEMA))
    assert writer.seal(CheckpointId(1)).prepare() is None
    assert sorted(row["number"] for row in here.read()) == [1, 2]
    assert here.reader.transactions() == []
    writer.close()


def test_records_arrive_as_they_were_asked_for(kafka: KafkaBroker, client: KafkaClient) -> None:
    """Key, value, tombstone, headers, time, partition and topic, in a topic that the sink creates."""
    topic, other = f"t-{uuid.uuid4().hex}", client.create_topic(f"t-{uuid.uuid4().hex}").name
    sink = KafkaSink(
        kafka.address,
        topic,
        key="k",
        value="v",
        headers="h",
        timestamp="at",
        partition="part",
        topic_column="to",
        compression="lz4",
        create=3,
        settings={"cleanup.policy": "compact"},
        guarantee="at-least-once",
    )
    batch = pa.RecordBatch.from_pydict(
        {
            "k": pa.array([b"a", b"a", None], pa.large_binary()),
            "v": pa.array(["1", None, "3"], pa.large_string()),
            "h": pa.array([[{"key": "x", "value": b"y"}], [], None], HEADERS_TYPE),
            "at": pa.array([1_700_000_000_000_000] * 3, pa.timestamp("us", "UTC")),
            "part": pa.array([2, 2, 0]),
            "to": pa.array([None, None, other], pa.large_string()),
        }
    )
    sink.check(batch.schema)
    sink.make_target(batch.schema)
    sink.make_target(batch.schema)
    assert client.setting("cleanup.policy", topic) == "compact"
    writer = sink.open(SinkContext("p", "out", 0, 1, Generation(1), batch.schema))
    writer.write(batch)
    writer.seal(CheckpointId(1))
    writer.close()
    reader, beside = Reader(kafka, topic, client, "none"), Reader(kafka, other, client, "none")
    found = [(one.partition(), one.key(), one.value(), one.headers(), one.timestamp()[1]) for one in reader.read()]
    assert found == [(2, b"a", b"1", [("x", b"y")], 1_700_000_000_000), (2, b"a", None, None, 1_700_000_000_000)]
    assert [one.value() for one in beside.read()] == [b"3"]
    reader.close()
    beside.close()


def test_a_topic_belongs_to_a_pipeline_until_it_is_deleted(kafka: KafkaBroker, client: KafkaClient) -> None:
    topic = f"t-{uuid.uuid4().hex}"
    sink = KafkaSink(kafka.address, topic, create=1)
    mine, other = PipelineIdentity("mine", "/mine", "here", 1), PipelineIdentity("other", "/other", "here", 1)
    assert sink.owner("p", "out") == Owner()
    assert sink.holding("p", "out", lambda owner: True).what == ""
    assert sink.own("p", "out", mine).life == mine
    assert sink.own("p", "out", other).life == mine
    holding = sink.holding("p", "out", lambda owner: True)
    assert holding.what
    assert "keeps what was written to it; delete the topic" in holding.problem
    kafka.delete_topic(topic)
    while client.topics([topic]):
        continue
    assert sink.own("p", "out", other).life == other


def test_any_number_of_sinks_write_to_a_topic(kafka: KafkaBroker, client: KafkaClient, topic: str) -> None:
    """The text of one offset has at most 4096 bytes (``offset.metadata.max.bytes``)."""
    sink = KafkaSink(kafka.address, topic)
    lives = {f"s{number}": PipelineIdentity(f"life {number}", "/home/" + "x" * 200, "here", 1) for number in range(30)}
    for node, life in lives.items():
        assert sink.own("p", node, life).life == life
    beside = KafkaSink(kafka.address, kafka.create_topic(f"{topic}.beside"))
    assert beside.own("p", "s0", lives["s1"]).others == ()
    for node, life in lives.items():
        known = sink.owner("p", node)
        assert known.life == life
        assert {one.sink: one.owner.life for one in known.others} == {k: v for k, v in lives.items() if k != node}


def test_what_cannot_work_is_one_sentence(kafka: KafkaBroker, client: KafkaClient, topic: str) -> None:
    with pytest.raises(UsageError, match="has no topic 'missing'; create it, or name another one"):
        KafkaSink(kafka.address, "missing").check(SCHEMA)
    with pytest.raises(UsageError, match="allows, which is 604800000 ms: raise transaction"):
        KafkaSink(kafka.address, topic, transaction_timeout="8d").check(SCHEMA)
    with pytest.raises(UsageError, match=r"does not take part in two-phase commit: set transaction.two.phase.commit"):
        KafkaSink(kafka.address, topic, two_phase=True).check(SCHEMA)
    with pytest.raises(UsageError, match=r"KafkaSink\(key='none'\) names a column"):
        KafkaSink(kafka.address, topic, key="none").check(SCHEMA)
    sink = KafkaSink(kafka.address, topic)
    sink.check(SCHEMA)
    assert duration_ms(sink.transaction_timeout, "") == 3 * 24 * 3_600_000
    elsewhere = KafkaSink(kafka.address, topic, topic_column="text", guarantee="at-least-once")
    writer = elsewhere.open(SinkContext("p", "out", 0, 1, Generation(1), SCHEMA))
    with pytest.raises(UsageError, match="has no topic 'nowhere'"):
        writer.write(pa.record_batch([[1], ["nowhere"]], schema=SCHEMA))
    writer.close()
    compacted = kafka.create_topic(f"{topic}-compacted", config={"cleanup.policy": "compact"})
    writer = KafkaSink(kafka.address, compacted, guarantee="at-least-once").open(
        SinkContext("p", "out", 0, 1, Generation(1), SCHEMA)
    )
    writer.write(pa.record_batch([[1], ["without a key"]], schema=SCHEMA))
    with pytest.raises(UsageError, match=r"does not take a record \(INVALID_RECORD: .* each record needs a key"):
        writer.seal(CheckpointId(1))
    writer.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"guarantee": "twice"}, "must be 'exactly-once' or 'at-least-once'"),
        ({"compression": "rar"}, "must be one of none, gzip, snappy, lz4, zstd"),
        ({"create": -1}, "must be a number of partitions"),
        ({"transaction_timeout": "soon"}, "transaction_timeout"),
        ({"guarantee": "at-least-once", "transaction_timeout": "5m"}, "has no transactions"),
        ({"guarantee": "at-least-once", "two_phase": True}, "has no transactions: leave two_phase out"),
        ({"two_phase": True, "transaction_timeout": "5m"}, "transactions without a timeout: leave transaction_timeout"),
        ({"topic": ""}, "names no topic"),
        ({"brokers": "kafka"}, "is no address of a Kafka broker"),
        ({"brokers": ["kafka:9092"]}, r"brokers=\['kafka:9092'\] must be one text with commas"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        KafkaSink(**{"brokers": "localhost:9092", "topic": "t", **options})


def test_a_level_of_the_cluster_without_repeatable_commits_is_refused(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaClient, "feature_level", lambda self, name: 1)
    with pytest.raises(
        UsageError, match=r"runs at level 1 of transaction.version, and commits of KafkaSink need level 2"
    ):
        KafkaSink(kafka.address, topic).check(SCHEMA)
    KafkaSink(kafka.address, topic, guarantee="at-least-once").check(SCHEMA)
