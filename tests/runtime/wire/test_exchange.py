"""Two or three exchanges in one process over loopback: order, credit, loss and refusal."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest

from headgate.codec.frames import (
    HEADER_BYTES,
    Barrier,
    BatchElement,
    Buffer,
    Cancel,
    Element,
    EndOfData,
    FrameKind,
    Watermark,
    batch_element,
    encode_header,
    schema_fingerprint,
)
from headgate.codec.handshake import Purpose
from headgate.codec.messages import DataHello, DataRefused, DataWelcome, decode_greeting, encode_message
from headgate.errors import FencedError, HeadgateError
from headgate.model.graph import Edge, Graph, Node, Partitioner, Role
from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId, VertexId, WorkerIndex
from headgate.model.plan import Plan, make_plan
from headgate.runtime.wire import exchange as peer_module
from headgate.runtime.wire.channels import ChannelKey, InputChannel, OutputChannel
from headgate.runtime.wire.connection import Connection, ConnectionLost, connect
from headgate.runtime.wire.exchange import Exchange, ExchangeCallbacks

SECRET = b"s" * 32
SCHEMA = pa.schema([("value", pa.int64())])
WAIT = 120
GENERATION = Generation(5)


def plan_of(parallelism: int, partitioner: Partitioner = Partitioner.HASH) -> Plan:
    """source ─► window ─► sink, both edges with ``partitioner``."""
    names = [NodeName("source"), NodeName("window"), NodeName("sink")]
    nodes = (
        Node(names[0], Role.SOURCE, (), None),
        Node(names[1], Role.OPERATOR, (Edge(names[0], partitioner, ("value",)),), None),
        Node(names[2], Role.SINK, (Edge(names[1], partitioner, ("value",)),), None),
    )
    return make_plan(Graph(nodes), parallelism, 128)


def loop_plan(parallelism: int) -> Plan:
    """source ─► loop ─► sink, with the loop fed back from itself by hash: edge 2."""
    source, loop, sink = NodeName("source"), NodeName("loop"), NodeName("sink")
    by_value = (Partitioner.HASH, ("value",))
    nodes = (
        Node(source, Role.SOURCE, (), None),
        Node(loop, Role.LOOP_HEAD, (Edge(source, *by_value),), None, feedback=(Edge(loop, *by_value),), loops=(loop,)),
        Node(sink, Role.SINK, (Edge(loop, *by_value),), None),
    )
    return make_plan(Graph(nodes), parallelism, 128)


def batch_of(*values: int) -> BatchElement:
    return batch_element(pa.record_batch([list(values)], schema=SCHEMA))


class Worker:
    """One exchange and what it reported."""

    def __init__(self, index: int, plan: Plan, schema: pa.Schema = SCHEMA, secret: bytes = SECRET) -> None:
        self.plan = plan
        self.index = WorkerIndex(index)
        self.changed = threading.Condition()
        self.lost: queue.Queue[tuple[WorkerIndex, str]] = queue.Queue()
        self.errors: queue.Queue[HeadgateError] = queue.Queue()
        lost, error = (lambda worker, why: self.lost.put((worker, why))), self.errors.put
        callbacks = ExchangeCallbacks(self._wake, self._wake, lost, error)
        self.exchange = Exchange(self.index, plan, [schema] * len(plan.edges), secret, callbacks)

    def _wake(self, channel: InputChannel | OutputChannel) -> None:
        with self.changed:
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT)

    def output(self, edge: int, receiver: int) -> OutputChannel:
        return self.exchange.outputs(self.plan.edges[edge])[receiver]

    def input(self, edge: int, sender: int) -> InputChannel:
        target = self.plan.edges[edge].target
        return self.exchange.inputs(SubtaskId(target, self.index))[sender]

    def send(self, edge: int, receiver: int, element: Element) -> None:
        output = self.output(edge, receiver)
        if isinstance(element, BatchElement):
            self.wait(lambda: output.can_send)
        output.send(element)

    def take(self, edge: int, sender: int) -> Element:
        channel = self.input(edge, sender)
        self.wait(lambda: len(channel) > 0)
        element = channel.poll()
        assert element is not None
        return element


class Cluster:
    def __init__(self, plan: Plan, credit_bytes: int = 1 << 20) -> None:
        self.workers = [Worker(index, plan) for index in range(plan.parallelism)]
        self.addresses = [worker.exchange.address for worker in self.workers]
        threads = [
            threading.Thread(target=worker.exchange.start, args=(GENERATION, self.addresses, credit_bytes))
            for worker in self.workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        for worker in self.workers:
            worker.exchange.close()


MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster() -> Iterator[MakeCluster]:
    made: list[Cluster] = []

    def make(parallelism: int = 2, credit_bytes: int = 1 << 20) -> Cluster:
        made.append(Cluster(plan_of(parallelism), credit_bytes))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


def as_peer(worker: Worker, index: int, generation: int) -> tuple[Connection, DataWelcome | DataRefused]:
    """Connect to ``worker`` by hand as worker ``index``."""
    address = worker.exchange.address
    connection = connect(address.host, address.port, SECRET, Purpose.DATA)
    connection.send_message(encode_message(DataHello(index, generation)))
    answer = decode_greeting(connection.receive_message())
    assert not isinstance(answer, DataHello)
    return connection, answer


def start_with_hand_made_peer(worker: Worker, credit_bytes: int = 1 << 20) -> Connection:
    """Start worker 0 of two, with a worker 1 whose frames the test makes itself."""
    addresses = [worker.exchange.address] * 2
    start = threading.Thread(target=worker.exchange.start, args=(GENERATION, addresses, credit_bytes))
    start.start()
    connection, answer = as_peer(worker, 1, GENERATION)
    start.join()
    assert answer == DataWelcome()
    return connection


def frame(kind: FrameKind, sequence: int, value: int, *, generation: int = GENERATION, edge: int = 0) -> list[Buffer]:
    return [encode_header(kind, edge, generation, sequence, value)]


OPENING = schema_fingerprint(SCHEMA)


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_every_channel_keeps_its_order(make_cluster: MakeCluster, parallelism: int) -> None:
    cluster = make_cluster(parallelism)
    for worker in cluster.workers:
        for edge in range(2):
            for receiver in range(parallelism):
                worker.send(edge, receiver, batch_of(worker.index, edge, receiver))
                worker.send(edge, receiver, Watermark(-3))
                worker.send(edge, receiver, Barrier(CheckpointId(1)))
                worker.send(edge, receiver, EndOfData())
    for worker in cluster.workers:
        for edge in range(2):
            for sender in range(parallelism):
                batch = worker.take(edge, sender)
                assert isinstance(batch, BatchElement)
                assert batch.batch.column(0).to_pylist() == [sender, edge, worker.index]
                rest = [worker.take(edge, sender) for _ in range(3)]
                assert rest == [Watermark(-3), Barrier(CheckpointId(1)), EndOfData()]


@pytest.mark.long
def test_ten_thousand_small_batches_arrive_in_order(make_cluster: MakeCluster) -> None:
    sender, receiver = make_cluster(credit_bytes=4_096).workers

    def send_all() -> None:
        for value in range(10_000):
            sender.send(0, 1, batch_of(value))

    thread = threading.Thread(target=send_all)
    thread.start()
    seen = []
    for _ in range(10_000):
        element = receiver.take(0, 0)
        assert isinstance(element, BatchElement)
        seen.append(element.batch.column(0)[0].as_py())
    thread.join()
    assert seen == list(range(10_000))
    assert receiver.exchange.metrics.frames_in == sender.exchange.metrics.frames_out == 10_002
    assert receiver.exchange.metrics.bytes_in == sender.exchange.metrics.bytes_out


def test_a_batch_far_larger_than_the_credit_arrives(make_cluster: MakeCluster) -> None:
    sender, receiver = make_cluster(credit_bytes=1_000).workers
    big = pa.record_batch([np.arange(4_000_000)], schema=SCHEMA)
    sender.send(0, 1, batch_element(big))
    element = receiver.take(0, 0)
    assert isinstance(element, BatchElement)
    assert element.batch.equals(big)
    sender.send(0, 1, batch_of(1))


def test_a_channel_that_is_not_read_stops_its_sender_and_nobody_else(make_cluster: MakeCluster) -> None:
    sender, receiver = make_cluster(credit_bytes=2_000).workers
    receiver.input(0, 0).block()
    stopped = sender.output(0, 1)
    while stopped.can_send:
        sender.send(0, 1, batch_of(1))
    sent = 2_000 - stopped.credit_bytes
    for value in range(1_000):
        sender.send(1, 1, batch_of(value))
        receiver.take(1, 0)
    assert not stopped.can_send
    receiver.wait(lambda: receiver.input(0, 0).size_bytes == sent)
    receiver.input(0, 0).unblock()
    while receiver.input(0, 0).poll() is not None:
        pass
    sender.wait(lambda: stopped.can_send)


def test_a_barrier_passes_a_channel_without_credit_behind_its_batches(make_cluster: MakeCluster) -> None:
    sender, receiver = make_cluster(credit_bytes=10).workers
    sender.send(0, 1, batch_of(1))
    sender.send(0, 1, Barrier(CheckpointId(4)))
    assert isinstance(receiver.take(0, 0), BatchElement)
    assert receiver.take(0, 0) == Barrier(CheckpointId(4))


def test_local_elements_pass_by_reference(make_cluster: MakeCluster) -> None:
    worker = make_cluster(1).workers[0]
    element = batch_of(1)
    worker.send(0, 0, element)
    assert worker.take(0, 0) is element


def test_forward_edges_are_one_local_channel_and_need_no_connection() -> None:
    source = Node(NodeName("a"), Role.SOURCE, (), None)
    other = Node(NodeName("b"), Role.SOURCE, (), None)
    inputs = (Edge(NodeName("a")), Edge(NodeName("b")))
    plan = make_plan(Graph((source, other, Node(NodeName("s"), Role.SINK, inputs, None))), 2, 128)
    worker = Worker(1, plan)
    worker.exchange.start(GENERATION, [worker.exchange.address] * 2, 100)
    keys = [channel.key for channel in worker.exchange.inputs(SubtaskId(VertexId("s"), 1))]
    assert keys == [ChannelKey(0, WorkerIndex(1), WorkerIndex(1)), ChannelKey(1, WorkerIndex(1), WorkerIndex(1))]
    assert [channel.key for channel in worker.exchange.outputs(plan.edges[1])] == keys[1:]
    worker.exchange.close()


def test_a_lost_worker_is_reported_once_and_sending_to_it_harms_nobody(make_cluster: MakeCluster) -> None:
    first, second, third = make_cluster(3).workers
    second.exchange.close()
    for survivor in (first, third):
        assert survivor.lost.get(timeout=WAIT)[0] == 1
    for _ in range(100):
        first.output(0, 1).send(Watermark(1))
    third.send(0, 0, batch_of(7))
    assert isinstance(first.take(0, 2), BatchElement)
    assert first.lost.empty()
    assert second.lost.empty()


def test_closing_frees_the_threads(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    cluster.close()
    cluster.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("headgate-data")]


def test_strangers_are_refused_while_a_good_peer_keeps_working(make_cluster: MakeCluster) -> None:
    sender, receiver = make_cluster().workers
    address = receiver.exchange.address
    with pytest.raises(ConnectionLost, match="not let in"):
        connect(address.host, address.port, b"w" * 32, Purpose.DATA)
    garbage = connect(address.host, address.port, SECRET, Purpose.DATA)
    garbage.send([b"\xff" * 4_000])
    with pytest.raises(ConnectionLost):
        garbage.receive_message()
    sender.send(0, 1, batch_of(3))
    assert isinstance(receiver.take(0, 0), BatchElement)
    assert (sender.lost.empty(), receiver.lost.empty()) == (True, True)
    garbage.close()


@pytest.mark.parametrize("generation", [4, 6])
def test_a_worker_of_another_generation_is_refused_by_number(make_cluster: MakeCluster, generation: int) -> None:
    first, second = make_cluster().workers
    connection, answer = as_peer(first, 1, generation)
    assert isinstance(answer, DataRefused)
    assert (answer.generation, f"generation {generation} is not generation 5" in answer.reason) == (5, True)
    connection.close()
    second.send(0, 0, batch_of(3))
    assert isinstance(first.take(0, 1), BatchElement)


def test_a_second_connection_of_the_same_worker_is_refused(make_cluster: MakeCluster) -> None:
    first, second = make_cluster().workers
    connection, answer = as_peer(first, 1, GENERATION)
    assert isinstance(answer, DataRefused)
    connection.close()
    second.send(0, 0, batch_of(3))
    assert isinstance(first.take(0, 1), BatchElement)


def test_a_late_worker_of_an_old_generation_learns_that_it_is_fenced(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    late = Worker(1, plan_of(2))
    with pytest.raises(FencedError) as caught:
        late.exchange.start(Generation(4), cluster.addresses, 100)
    assert (caught.value.mine, caught.value.newest) == (4, 5)
    late.exchange.close()


def test_a_worker_that_never_connects_is_named() -> None:
    worker = Worker(0, plan_of(2))
    with pytest.raises(ConnectionLost, match="worker 1"):
        worker.exchange.start(GENERATION, [worker.exchange.address] * 2, 100, timeout_seconds=0.1)
    worker.exchange.close()


def test_frames_of_another_generation_are_dropped_and_counted() -> None:
    worker = Worker(0, plan_of(2))
    peer = start_with_hand_made_peer(worker)
    peer.send(frame(FrameKind.OPEN, 0, OPENING))
    peer.send(frame(FrameKind.CANCEL, 1, 3, generation=4))
    peer.send(frame(FrameKind.CANCEL, 1, 9))
    assert worker.take(0, 1) == Cancel(CheckpointId(9))
    assert worker.exchange.metrics.frames_refused == 1
    assert worker.lost.empty()
    worker.exchange.close()
    peer.close()


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([frame(FrameKind.CANCEL, 0, 1)], "begins with its schema"),
        ([frame(FrameKind.OPEN, 0, OPENING + 1)], "schema differs"),
        ([frame(FrameKind.OPEN, 0, OPENING), frame(FrameKind.CANCEL, 2, 1)], "sequence 2 where 1 was due"),
        ([frame(FrameKind.OPEN, 0, OPENING), frame(FrameKind.OPEN, 0, OPENING)], "sequence 0 where 1"),
        ([frame(FrameKind.OPEN, 0, OPENING, edge=9)], "edge 9 is not shuffled"),
        ([frame(FrameKind.CREDIT, 1, 10)], "was not due"),
        ([frame(FrameKind.CREDIT, 0, -10)], "was not due"),
        ([[b"\0" * HEADER_BYTES]], "not b'HG' version 1"),
        ([[b"HG\x01".ljust(HEADER_BYTES, b"\0")]], "damaged"),
        ([[b"HG\x01".ljust(HEADER_BYTES + 1, b"\0")]], "changed, repeated, moved or inserted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_peer_that_breaks_a_rule_is_lost_with_the_rule(frames: list[list[Buffer]], problem: str) -> None:
    worker = Worker(0, plan_of(2))
    peer = start_with_hand_made_peer(worker)
    for parts in frames:
        peer.send(parts)
    lost, reason = worker.lost.get(timeout=WAIT)
    assert (lost, problem in reason) == (1, True), reason
    assert len(worker.input(0, 1)) == 0
    worker.exchange.close()
    peer.close()


def test_a_batch_far_beyond_the_credit_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "OVERDRAWN_BYTES_MAX", 0)
    worker = Worker(0, plan_of(2))
    peer = start_with_hand_made_peer(worker, credit_bytes=10)
    peer.send(frame(FrameKind.OPEN, 0, OPENING))
    payload = bytes(batch_of(1).batch.serialize())
    for sequence in (1, 2):
        peer.send([encode_header(FrameKind.BATCH, 0, GENERATION, sequence, 1, [payload])], [payload])
    assert "without credit" in worker.lost.get(timeout=WAIT)[1]
    assert len(worker.input(0, 1)) == 1
    worker.exchange.close()
    peer.close()


def test_closing_frees_a_sender_that_is_blocked_by_a_stopped_peer() -> None:
    worker = Worker(0, plan_of(2))
    peer = start_with_hand_made_peer(worker, credit_bytes=1 << 30)
    big = batch_element(pa.record_batch([np.arange(8_000_000)], schema=SCHEMA))
    sending = threading.Thread(target=worker.output(0, 1).send, args=(big,))
    sending.start()
    for _ in range(3):  # two OPEN frames, and the header of the batch: it is being sent, and nobody reads on
        peer.receive_into(memoryview(bytearray(HEADER_BYTES)))
    worker.exchange.close()
    sending.join(WAIT)
    assert not sending.is_alive()
    assert worker.lost.empty()
    peer.close()


FEEDBACK = 1


def test_credit_for_feedback_is_a_violation() -> None:
    plan = loop_plan(2)
    assert plan.edges[FEEDBACK].is_feedback
    worker = Worker(0, plan)
    peer = start_with_hand_made_peer(worker)
    peer.send(frame(FrameKind.CREDIT, 0, 10, edge=FEEDBACK))
    assert "without credit" in worker.lost.get(timeout=WAIT)[1]
    worker.exchange.close()
    peer.close()


def test_feedback_beyond_the_disk_limit_is_an_error_of_this_worker_and_not_a_lost_peer() -> None:
    worker = Worker(0, loop_plan(2))  # without memory or disk for feedback, and nobody polls
    peer = start_with_hand_made_peer(worker)
    peer.send(frame(FrameKind.OPEN, 0, OPENING, edge=FEEDBACK))
    payload = bytes(batch_of(1).batch.serialize())
    peer.send([encode_header(FrameKind.BATCH, FEEDBACK, GENERATION, 1, 1, [payload])], [payload])
    error = worker.errors.get(timeout=WAIT)
    assert "the loop 'loop'" in str(error)
    assert "loop_disk_bytes_max" in str(error)
    worker.exchange.close()
    assert worker.lost.empty()
    peer.close()
