"""One other worker: the connection with it and the remote channels that share it.

Counterpart: the ``Peer`` for this worker in the other worker's exchange. Rules CH1–CH14: docs/spec/channels.md.
The mailbox thread encodes and sends; the receive thread decodes and puts into the input channels.
Never reports the same loss twice, and never raises in its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from headgate.errors import HeadgateError, ProtocolViolation, StorageError
from headgate.model.ids import Generation, WorkerIndex
from headgate.runtime.process import PROCESS
from headgate.runtime.surroundings import Surroundings
from headgate.runtime.wire.channels import ChannelKey, InputChannel, OutputChannel
from headgate.runtime.wire.connection import Connection, ConnectionLost
from headgate.runtime.wire.feedback import FEEDBACK_CREDIT_BYTES, MERGE_BYTES_MAX, FeedbackChannel, ReceivingChannel
from headgate.runtime.wire.spill import SpillBudget
from headgate.threads import Thread


@dataclass(frozen=True, slots=True)
class ExchangeCallbacks:
    """What the exchange tells its worker. All must be quick and thread-safe.

    Attributes:
        on_ready: an input channel became readable (spurious calls are possible).
        on_credit: an output channel can send (spurious calls are possible).
        on_lost: the connection with a worker is gone; at most once per worker, never after ``close``.
        on_error: this worker cannot take what comes (the disk share of its loops is used up, L25); the peer is well.
        on_arrival: a barrier or a cancel marker has come (UA4); None: nobody asks.
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
"""What one input or one flush may produce beyond the credit (CH8): more than any sound operator, far from endless."""


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
        generation: of both; frames of any other are dropped and counted (CH13).
        edges: the shuffled ones, by edge index.
        credit_bytes: initial credit of each channel; feedback channels need none (L22).
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
        """Claim the only place for a connection; False when it is taken (CH1)."""
        with self._lock:
            is_free = not self._is_reserved and not self._is_over
            self._is_reserved = True
            return is_free

    def attach(self, connection: Connection) -> None:
        """Use ``connection``: announce the schemas and begin to receive. The peer owns it from now on."""
        self._connection = connection
        for edge, outgoing in self._outgoing.items():
            self._send(edge, outgoing, FrameKind.OPEN, outgoing.fingerprint)
        name = f"headgate-data-{self._worker}-from-{self.other}"
        thread = self._around.thread(self._receive_loop, name, connection)
        with self._lock:
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
        except (Exception, MemoryError) as error:  # CH12: whatever it is, the worker must hear of it
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
            if header.generation != self._generation:  # CH13
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
        if header.sequence != incoming.sequence:  # CH6
            raise self._violation(header, f"sequence {header.sequence} where {incoming.sequence} was due")
        incoming.sequence += 1
        if (header.kind is FrameKind.OPEN) != (header.sequence == 0):  # CH4
            raise self._violation(header, "a channel begins with its schema, once")
        if header.kind is FrameKind.OPEN:
            if header.value != schema_fingerprint(incoming.schema):
                raise self._violation(header, "the schema differs there; all workers must run the same plan")
            return
        if header.kind is not FrameKind.BATCH:
            incoming.channel.put(control_element(header, payload, source))
            return
        if incoming.channel.outstanding_bytes >= self._credit_bytes + OVERDRAWN_BYTES_MAX:  # CH11
            raise self._violation(header, "a batch was sent without credit")
        incoming.channel.put(decode_batch(header, payload, incoming.schema, source))

    def _on_credit(self, header: FrameHeader, incoming: _Incoming) -> None:
        if isinstance(incoming.channel, FeedbackChannel):
            raise self._violation(header, "feedback is sent without credit (L22)")
        if header.sequence != incoming.credit_sequence or header.value <= 0:
            raise self._violation(header, f"credit {header.sequence} of {header.value} bytes was not due")
        incoming.credit_sequence += 1
        self._outgoing[header.edge].channel.add_credit(header.value)

    def _violation(self, header: FrameHeader, problem: str) -> ProtocolViolation:
        what = f"{header.kind.name} on channel {header.edge}:{self.other}→{self._worker}"
        return ProtocolViolation("exchange", f"{what}: {problem}")
