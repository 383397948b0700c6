"""The exchange of one worker: all its channels, and one connection per other worker for the remote ones.

Life: construct (listens; the address goes into ``Register``), ``start`` with what ``Deploy`` says, move elements,
``close``. Source: docs/spec/channels.md. The mailbox thread encodes and sends; one receive thread per peer
always drains its socket into the input channels, which credit bounds, so that a blocking send cannot deadlock.
Never looks into an element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pyarrow as pa

from headgate.codec.frames import (
    HEADER_BYTES,
    BatchElement,
    BatchEncoder,
    Buffer,
    Element,
    FrameHeader,
    FrameKind,
    control_element,
    control_frame,
    decode_batch,
    decode_header,
    encode_header,
    schema_fingerprint,
)
from headgate.codec.handshake import Purpose
from headgate.codec.messages import (
    Address,
    DataGreeting,
    DataHello,
    DataRefused,
    DataWelcome,
    decode_greeting,
    encode_message,
)
from headgate.dataclass import dataclass
from headgate.environment import Thread
from headgate.errors import CorruptionError, FencedError, HeadgateError, ProtocolViolation, StorageError
from headgate.model.graph import Partitioner
from headgate.model.ids import Generation, SubtaskId, WorkerIndex
from headgate.model.plan import Plan, PlanEdge
from headgate.runtime.surroundings import PROCESS, Surroundings
from headgate.runtime.wire.channels import (
    FEEDBACK_CREDIT_BYTES,
    MERGE_BYTES_MAX,
    ChannelKey,
    FeedbackChannel,
    InputChannel,
    OutputChannel,
    ReceivingChannel,
    local_channel,
    local_feedback_channel,
)
from headgate.runtime.wire.connection import Connection, ConnectionLost, Listener, connect
from headgate.runtime.wire.spill import SpillBudget
from headgate.tls import Tls


@dataclass(frozen=True, slots=True)
class ExchangeCallbacks:
    """What the exchange tells its worker. All must be quick and thread-safe.

    Attributes:
        on_ready: an input channel became readable (spurious calls are possible).
        on_credit: an output channel can send (spurious calls are possible).
        on_lost: the connection with a worker is gone; at most once per worker, never after ``close``.
        on_error: this worker cannot take what comes (the disk share of its loops is used up); the peer is well.
        on_arrival: a barrier or a cancel marker has come (UA4); None: not needed.
    """

    on_ready: Callable[[ReceivingChannel], None]
    on_credit: Callable[[OutputChannel], None]
    on_lost: Callable[[WorkerIndex, str], None]
    on_error: Callable[[HeadgateError], None]
    on_arrival: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class EdgeOfPeer:
    """A shuffled edge: the schema of its batches and, of a feedback edge, the loop's name for messages."""

    schema: pa.Schema
    loop: str = ""


OVERDRAWN_BYTES_MAX = 1 << 30
"""What one input or one flush may produce beyond the credit: more than any sound operator, far from endless."""


@dataclass(slots=True)
class _Incoming:
    """This worker's end of a channel from the peer, and of the credit for the channel to it."""

    channel: ReceivingChannel
    schema: pa.Schema
    sequence: int = 0
    credit_sequence: int = 0


@dataclass(slots=True)
class _Outgoing:
    """This worker's end of a channel to the peer, and of the credit for the channel from it."""

    channel: OutputChannel
    encoder: BatchEncoder
    fingerprint: int
    sequence: int = 0
    credit_sequence: int = 0


class Peer:
    """All remote channels between this worker and one other.

    Args:
        worker: this worker.
        other: the other one.
        generation: of both; frames of any other are dropped and counted.
        edges: the shuffled ones, by edge index.
        credit_bytes: initial credit of each channel; feedback channels need none.
        callbacks: of the exchange.
        budget: of the feedback channels.
    """

    def __init__(
        self,
        worker: WorkerIndex,
        other: WorkerIndex,
        generation: Generation,
        edges: Mapping[int, EdgeOfPeer],
        credit_bytes: int,
        callbacks: ExchangeCallbacks,
        budget: SpillBudget,
        around: Surroundings = PROCESS,
    ) -> None:
        self.other = other
        assert other != worker, "a worker has no connection with itself"
        self._around = around
        self.frames_in = 0
        self.frames_out = 0
        self.frames_refused = 0
        self._worker = worker
        self._generation = generation
        self._credit_bytes = credit_bytes
        self._callbacks = callbacks
        self._budget = budget
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._connection: Connection | None = None
        self._thread: Thread | None = None
        self._lock = around.lock()
        self._is_reserved = False
        self._is_over = False  # lost and reported, or closed
        for index, edge in edges.items():
            self._add_edge(index, edge)

    @property
    def inputs(self) -> dict[ChannelKey, ReceivingChannel]:
        """The channels from the other worker."""
        return {incoming.channel.key: incoming.channel for incoming in self._incoming.values()}

    @property
    def outputs(self) -> dict[ChannelKey, OutputChannel]:
        """The channels to the other worker."""
        return {outgoing.channel.key: outgoing.channel for outgoing in self._outgoing.values()}

    @property
    def is_attached(self) -> bool:
        """Whether frames flow."""
        return self._thread is not None

    @property
    def bytes_in(self) -> int:
        """Bytes received."""
        return self._connection.bytes_in if self._connection else 0

    @property
    def bytes_out(self) -> int:
        """Bytes sent."""
        return self._connection.bytes_out if self._connection else 0

    def reserve(self) -> bool:
        """Claim the only place for a connection; False when it is taken."""
        with self._lock:
            is_free = not self._is_reserved and not self._is_over
            self._is_reserved = True
            return is_free

    def attach(self, connection: Connection) -> None:
        """Use ``connection``: announce the schemas and begin to receive. The peer owns it from now on."""
        assert self._connection is None, "one connection per pair of workers"
        self._connection = connection
        for edge, outgoing in self._outgoing.items():
            # The schema is the first frame of each channel. The mailbox sends nothing before start() has returned, so
            # none can be in front of it.
            self._send(edge, outgoing, FrameKind.OPEN, outgoing.fingerprint)
        name = f"headgate-data-{self._worker}-from-{self.other}"
        thread = self._around.thread(self._receive_loop, name, connection)
        with self._lock:
            # under the lock: close() either finds a thread to join, or has left word in _is_over
            self._thread = thread
            thread.start()
            is_over = self._is_over
        if is_over:
            connection.interrupt()

    def close(self) -> None:
        """Close the connection and end the thread. Nothing is reported any more. Idempotent."""
        with self._lock:
            self._is_over = True
            thread, connection = self._thread, self._connection
        if connection is not None:
            connection.interrupt()
        # interrupted, then joined, then freed: the thread may be in a call on it until it has ended
        if thread is not None and not thread.is_current:
            thread.join()
        if connection is not None:
            connection.close()

    def _add_edge(self, index: int, edge: EdgeOfPeer) -> None:
        inward, outward = (
            ChannelKey(index, self.other, self._worker),
            ChannelKey(index, self._worker, self.other),
        )
        on_ready, credit_bytes = self._callbacks.on_ready, self._credit_bytes
        receiving: ReceivingChannel
        if edge.loop:
            receiving = FeedbackChannel(
                inward, edge.schema, self._budget, on_ready, edge.loop, merge_bytes_max=MERGE_BYTES_MAX
            )
            credit_bytes = FEEDBACK_CREDIT_BYTES
        else:
            give_back, on_arrival = partial(self._return_credit, index), self._callbacks.on_arrival
            receiving = InputChannel(inward, credit_bytes, on_ready, give_back, on_arrival)
        sending = OutputChannel(outward, credit_bytes, partial(self._transmit, index), self._callbacks.on_credit)
        self._incoming[index] = _Incoming(receiving, edge.schema)
        self._outgoing[index] = _Outgoing(sending, BatchEncoder(edge.schema), schema_fingerprint(edge.schema))

    def _transmit(self, edge: int, element: Element) -> None:
        outgoing = self._outgoing[edge]
        if type(element) is BatchElement:
            parts = outgoing.encoder.encode(element.batch)
            self._send(edge, outgoing, FrameKind.BATCH, element.batch.num_rows, parts)
        else:
            self._send(edge, outgoing, *control_frame(element))

    def _return_credit(self, edge: int, size_bytes: int) -> None:
        outgoing = self._outgoing[edge]
        header = encode_header(FrameKind.CREDIT, edge, self._generation, outgoing.credit_sequence, size_bytes)
        # numbered apart from what is sent: credit belongs to the channel of the other direction
        outgoing.credit_sequence += 1
        self._put_on_wire(header, [])

    def _send(
        self, edge: int, outgoing: _Outgoing, kind: FrameKind, value: int, parts: list[Buffer] | None = None
    ) -> None:
        payload = parts or []
        header = encode_header(kind, edge, self._generation, outgoing.sequence, value, payload)
        outgoing.sequence += 1
        self._put_on_wire(header, payload)

    def _put_on_wire(self, header: bytes, payload: list[Buffer]) -> None:
        """Send one frame: a block of its header, and one of its payload if it has one.

        After a loss it is dropped, because the loss was reported and ends the generation.
        """
        connection = self._connection
        if connection is None or self._is_over:
            return
        try:
            connection.send([header], *([payload] if payload else []))
            self.frames_out += 1
        except ConnectionLost as lost:
            self._lose(lost.reason)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        if self._connection is not None:
            self._connection.interrupt()
        self._callbacks.on_lost(self.other, reason)

    def _receive_loop(self, connection: Connection) -> None:
        try:
            self._receive_frames(connection)
        except ConnectionLost as lost:
            self._lose(lost.reason)
        except StorageError as error:  # ours, not the peer's; the mailbox may have no credit to find out by itself
            self._callbacks.on_error(error)
        except HeadgateError as error:
            self._lose(str(error))
        except (Exception, MemoryError) as error:  # whatever it is, the worker must hear of it
            self._lose(f"the receive thread failed: {error!r}")

    def _receive_frames(self, connection: Connection) -> None:
        source = f"frame from worker {self.other}"
        head = memoryview(bytearray(HEADER_BYTES))
        while True:
            connection.receive_into(head)
            header = decode_header(head, source)
            payload = None
            if header.payload_bytes:
                payload = pa.allocate_buffer(header.payload_bytes)
                connection.receive_into(memoryview(payload))
            # read to its end all the same: the next frame begins after it
            if header.generation != self._generation:
                self.frames_refused += 1
                continue
            self.frames_in += 1
            self._dispatch(header, payload, source)

    def _dispatch(self, header: FrameHeader, payload: pa.Buffer | None, source: str) -> None:
        incoming = self._incoming.get(header.edge)
        if incoming is None:
            raise self._violation(header, f"edge {header.edge} is not shuffled")
        if header.kind is FrameKind.CREDIT:
            self._on_credit(header, incoming)
            return
        if header.sequence != incoming.sequence:
            raise self._violation(header, f"sequence {header.sequence} where {incoming.sequence} was due")
        incoming.sequence += 1
        if (header.kind is FrameKind.OPEN) != (header.sequence == 0):
            raise self._violation(header, "a channel begins with its schema, once")
        if header.kind is FrameKind.OPEN:
            if header.value != schema_fingerprint(incoming.schema):
                raise self._violation(header, "the schema differs there; all workers must run the same plan")
            return
        if header.kind is not FrameKind.BATCH:
            incoming.channel.put(control_element(header, payload, source))
            return
        # what bounds the memory here against a sender that goes wrong: the queue itself has no limit
        if incoming.channel.outstanding_bytes >= self._credit_bytes + OVERDRAWN_BYTES_MAX:
            raise self._violation(header, "a batch was sent without credit")
        incoming.channel.put(decode_batch(header, payload, incoming.schema, source))

    def _on_credit(self, header: FrameHeader, incoming: _Incoming) -> None:
        if isinstance(incoming.channel, FeedbackChannel):
            raise self._violation(header, "feedback is sent without credit")
        if header.sequence != incoming.credit_sequence or header.value <= 0:
            raise self._violation(header, f"credit {header.sequence} of {header.value} bytes was not due")
        incoming.credit_sequence += 1
        self._outgoing[header.edge].channel.add_credit(header.value)

    def _violation(self, header: FrameHeader, problem: str) -> ProtocolViolation:
        what = f"{header.kind.name} on channel {header.edge}:{self.other}→{self._worker}"
        return ProtocolViolation("exchange", f"{what}: {problem}")


START_SECONDS = 30.0
"""All workers of a generation must have connected to each other within this time."""

_GREETING_BYTES_MAX = 4_096
_RETRY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ExchangeMetrics:
    """Totals over all connections of this worker; local channels do not count."""

    bytes_in: int
    bytes_out: int
    frames_in: int
    frames_out: int
    frames_refused: int


class Exchange:
    """The data plane of one worker in one generation.

    Args:
        worker: its index.
        plan: what runs; every worker has the same.
        schemas: of the records on each edge, by edge index.
        secret: of the job.
        callbacks: see there.
        budget: of the feedback channels; needed when the plan has loops.
        host: interface to listen on, and the name under which others reach it.
    """

    def __init__(
        self,
        worker: WorkerIndex,
        plan: Plan,
        schemas: Sequence[pa.Schema],
        secret: bytes,
        callbacks: ExchangeCallbacks,
        *,
        budget: SpillBudget | None = None,
        host: str = "127.0.0.1",
        tls: Tls | None = None,
        around: Surroundings = PROCESS,
    ) -> None:
        self._around = around
        assert len(schemas) == len(plan.edges), "every edge has a schema"
        self._worker = worker
        self._plan = plan
        self._schemas = tuple(schemas)
        self._secret = secret
        self._callbacks = callbacks
        self._budget = budget or SpillBudget(0, 0)
        self._tls = tls
        self._generation: Generation | None = None
        self._inputs: dict[ChannelKey, ReceivingChannel] = {}
        self._outputs: dict[ChannelKey, OutputChannel] = {}
        self._peers: dict[WorkerIndex, Peer] = {}
        self._greeting: set[Connection] = set()
        self._changed = around.condition()
        self._is_closed = False
        name = f"headgate-data-{worker}"
        self._listener = Listener(
            secret, Purpose.DATA, self._on_connection, name=name, host=host, tls=tls, around=around
        )

    @property
    def address(self) -> Address:
        """Where the other workers reach this one."""
        return Address(self._listener.host, self._listener.port)

    @property
    def metrics(self) -> ExchangeMetrics:
        """Totals so far."""
        peers = list(self._peers.values())
        return ExchangeMetrics(
            bytes_in=sum(peer.bytes_in for peer in peers),
            bytes_out=sum(peer.bytes_out for peer in peers),
            frames_in=sum(peer.frames_in for peer in peers),
            frames_out=sum(peer.frames_out for peer in peers),
            frames_refused=sum(peer.frames_refused for peer in peers),
        )

    def inputs(self, subtask: SubtaskId) -> tuple[ReceivingChannel, ...]:
        """Return the input channels of ``subtask`` (of this worker), by ``ChannelIndex``. After ``start``."""
        assert subtask.index == self._worker, "a worker runs the subtasks of its own number"
        keys = (
            ChannelKey(channel.edge.index, WorkerIndex(channel.upstream.index), self._worker)
            for channel in self._plan.inputs(subtask)
        )
        return tuple(self._inputs[key] for key in keys)

    def outputs(self, edge: PlanEdge) -> tuple[OutputChannel, ...]:
        """Return this worker's output channels of ``edge``. After ``start``.

        A FORWARD edge has one, to this worker; every other edge one per worker, in their order.
        """
        is_local = edge.partitioner is Partitioner.FORWARD
        receivers = [self._worker] if is_local else self._workers()
        return tuple(self._outputs[ChannelKey(edge.index, self._worker, other)] for other in receivers)

    def start(
        self,
        generation: Generation,
        addresses: Sequence[Address],
        credit_bytes: int,
        *,
        timeout_seconds: float = START_SECONDS,
    ) -> None:
        """Make the channels and connect with every other worker; blocks until all are connected. Once.

        Raises:
            ConnectionLost: a worker cannot be reached in time.
            FencedError: a worker already belongs to a newer generation: leave.
        """
        assert self._generation is None, "an exchange serves one generation"
        assert len(addresses) == self._plan.parallelism, "every worker has an address"
        deadline = self._now_s() + timeout_seconds
        # before the generation is known: a peer that connects waits for it, and must then find its channels
        self._make_channels(generation, credit_bytes)
        with self._changed:
            self._generation = generation
            self._changed.notify_all()
        for other, peer in self._peers.items():
            if other < self._worker:  # one connection per pair, the higher connects
                peer.attach(self._connect(other, addresses[other], deadline))
        with self._changed:
            peers = self._peers.values()
            self._changed.wait_for(
                lambda: self._is_closed or all(peer.is_attached for peer in peers),
                deadline - self._now_s(),
            )
        missing = [str(peer.other) for peer in self._peers.values() if not peer.is_attached]
        if missing:
            names = ", ".join(missing)
            raise ConnectionLost(f"worker {names}", f"it did not connect within {timeout_seconds:g} s")

    def close(self) -> None:
        """Close all connections, free the port and the threads. Idempotent; elements not read are lost."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            greeting = list(self._greeting)
        self._listener.close()
        for connection in greeting:
            connection.interrupt()
        for peer in self._peers.values():
            peer.close()
        for channel in self._inputs.values():
            # after the peers: their threads, which put, have ended
            if isinstance(channel, FeedbackChannel):
                channel.close()

    def _now_s(self) -> float:
        return self._around.monotonic_ns() / 1e9

    def _workers(self) -> list[WorkerIndex]:
        return [WorkerIndex(index) for index in range(self._plan.parallelism)]

    def _make_channels(self, generation: Generation, credit_bytes: int) -> None:
        for edge in self._plan.edges:
            key = ChannelKey(edge.index, self._worker, self._worker)
            ready, credit = self._callbacks.on_ready, self._callbacks.on_credit
            if edge.is_feedback:
                self._inputs[key], self._outputs[key] = local_feedback_channel(
                    key,
                    self._schemas[edge.index],
                    self._budget,
                    ready,
                    credit,
                    f"the loop '{edge.target}'",
                    merge_bytes_max=MERGE_BYTES_MAX,
                )
            else:
                self._inputs[key], self._outputs[key] = local_channel(
                    key, credit_bytes, ready, credit, self._callbacks.on_arrival
                )
        edges = {
            edge.index: EdgeOfPeer(self._schemas[edge.index], f"the loop '{edge.target}'" if edge.is_feedback else "")
            for edge in self._plan.edges
            if edge.partitioner is not Partitioner.FORWARD
        }
        for other in self._workers() if edges else []:  # without a shuffle no worker needs to connect
            if other == self._worker:
                continue
            peer = Peer(
                self._worker, other, generation, edges, credit_bytes, self._callbacks, self._budget, self._around
            )
            self._peers[other] = peer
            self._inputs.update(peer.inputs)
            self._outputs.update(peer.outputs)

    def _connect(self, other: WorkerIndex, address: Address, deadline: float) -> Connection:
        """Connect with a lower worker, patiently until ``deadline``: it may not have been deployed yet."""
        assert self._generation is not None, "start() sets the generation before it connects"
        hello = encode_message(DataHello(self._worker, self._generation))
        while True:
            try:
                connection = connect(
                    address.host, address.port, self._secret, Purpose.DATA, tls=self._tls, around=self._around
                )
                break
            except ConnectionLost:
                if self._is_closed or self._now_s() >= deadline:
                    raise
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, _RETRY_SECONDS)
        try:
            self._hold(connection)
            connection.send_message(hello)
            self._check_welcome(other, _receive_greeting(connection))
        except BaseException:
            connection.close()
            raise
        finally:
            self._release(connection)
        return connection

    def _check_welcome(self, other: WorkerIndex, answer: DataGreeting) -> None:
        assert self._generation is not None, "start() sets the generation before it connects"
        match answer:
            case DataWelcome():
                return
            case DataRefused(generation, reason) if generation > self._generation:
                raise FencedError(f"worker {self._worker} ({reason})", self._generation, generation)
            case DataRefused(_, reason):
                raise ConnectionLost(f"worker {other}", reason)
            case DataHello():
                raise ProtocolViolation("exchange", f"worker {other} answered a greeting with a greeting")

    def _on_connection(self, connection: Connection, thread: Thread) -> None:
        """A process of this job connected (in a thread of its own)."""
        is_kept = False
        try:
            self._hold(connection)
            is_kept = self._welcome(connection)
        except (ConnectionLost, ProtocolViolation, CorruptionError):
            pass  # it never became a peer, so nothing was lost: start() reports who is missing
        finally:
            self._release(connection)
            if not is_kept:
                connection.close()

    def _welcome(self, connection: Connection) -> bool:
        """Attach the connection to its peer if it belongs to this generation."""
        hello = _receive_greeting(connection)
        if not isinstance(hello, DataHello):
            return False
        with self._changed:
            # a peer may have been deployed a moment earlier than this worker
            self._changed.wait_for(lambda: self._is_closed or self._generation is not None, START_SECONDS)
            generation = self._generation
            peer = self._peers.get(WorkerIndex(hello.worker))
        if generation is None or self._is_closed:
            return False
        problem = ""
        if hello.generation != generation:
            problem = f"generation {hello.generation} is not generation {generation} of worker {self._worker}"
        elif peer is None or hello.worker < self._worker or not peer.reserve():
            problem = f"worker {self._worker} expects no connection from worker {hello.worker}"
        if problem or peer is None:
            connection.send_message(encode_message(DataRefused(generation, problem)))
            return False
        # the greeting is over before frames flow: after attach() the receive thread owns what comes
        connection.send_message(encode_message(DataWelcome()))
        peer.attach(connection)
        with self._changed:
            self._changed.notify_all()
        return True

    def _hold(self, connection: Connection) -> None:
        with self._changed:
            self._greeting.add(connection)
            if self._is_closed:
                # close() has made its list without this one
                connection.interrupt()

    def _release(self, connection: Connection) -> None:
        with self._changed:
            self._greeting.discard(connection)


def _receive_greeting(connection: Connection) -> DataGreeting:
    return decode_greeting(connection.receive_message(_GREETING_BYTES_MAX))
