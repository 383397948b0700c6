"""The exchange of one worker: all its channels, and one connection per other worker for the remote ones.

Counterpart: the exchanges of the other workers of the same generation. Life: construct (listens; the address
goes into ``Register``), ``start`` with what ``Deploy`` says, move elements, ``close``. Rules CH1–CH14:
docs/spec/channels.md. Sends happen in the mailbox thread; one receive thread per peer always drains its socket
into the input channels, which credit bounds, so that a blocking send cannot deadlock (CH11).
Never looks into an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

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
from headgate.errors import CorruptionError, FencedError, ProtocolViolation
from headgate.model.graph import Partitioner
from headgate.model.ids import Generation, SubtaskId, WorkerIndex
from headgate.model.plan import Plan, PlanEdge
from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.runtime.wire.channels import ChannelKey, OutputChannel, local_channel
from headgate.runtime.wire.connection import Connection, ConnectionLost, connect
from headgate.runtime.wire.feedback import MERGE_BYTES_MAX, FeedbackChannel, ReceivingChannel, local_feedback_channel
from headgate.runtime.wire.listener import Listener
from headgate.runtime.wire.peer import EdgeOfPeer, ExchangeCallbacks, Peer
from headgate.runtime.wire.spill import SpillBudget
from headgate.threads import Thread
from headgate.tls import Tls

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
        assert len(schemas) == len(plan.edges)
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
        assert subtask.index == self._worker
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
        assert self._generation is None
        assert len(addresses) == self._plan.parallelism
        deadline = self._now_s() + timeout_seconds
        self._make_channels(generation, credit_bytes)
        with self._changed:
            self._generation = generation
            self._changed.notify_all()
        for other, peer in self._peers.items():
            if other < self._worker:  # CH1: one connection per pair, the higher connects
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
        for other in self._workers() if edges else []:  # without a shuffle nobody needs to connect
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
        assert self._generation is not None
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
        assert self._generation is not None
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
            pass  # it never became a peer, so nobody lost anything: start() reports who is missing
        finally:
            self._release(connection)
            if not is_kept:
                connection.close()

    def _welcome(self, connection: Connection) -> bool:
        """Attach the connection to its peer if it belongs to this generation (CH13)."""
        hello = _receive_greeting(connection)
        if not isinstance(hello, DataHello):
            return False
        with self._changed:
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
        connection.send_message(encode_message(DataWelcome()))
        peer.attach(connection)
        with self._changed:
            self._changed.notify_all()
        return True

    def _hold(self, connection: Connection) -> None:
        with self._changed:
            self._greeting.add(connection)
            if self._is_closed:
                connection.interrupt()

    def _release(self, connection: Connection) -> None:
        with self._changed:
            self._greeting.discard(connection)


def _receive_greeting(connection: Connection) -> DataGreeting:
    return decode_greeting(connection.receive_message(_GREETING_BYTES_MAX))
