"""Channels: FIFO queues of elements with flow control by credit in bytes.

An ``InputChannel`` belongs to the subtask that reads it, an ``OutputChannel`` to the one that sends; ``exchange``
joins them, by reference inside a worker and over a connection between two. Rules CH6–CH12: docs/spec/channels.md.
Never decides when to read: alignment sets a channel aside by not reading it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from headgate.codec.frames import Barrier, BatchElement, Cancel, Element
from headgate.model.ids import CheckpointId, WorkerIndex


class ChannelKey(NamedTuple):
    """Names a channel within one generation: ``Plan.edges`` index and the workers at its ends."""

    edge: int
    sender: WorkerIndex
    receiver: WorkerIndex

    def __str__(self) -> str:
        return f"channel {self.edge}:{self.sender}→{self.receiver}"


class InputChannel:
    """The receiving end. One thread puts, one other thread (the mailbox) does all the rest.

    Lock-free: a deque's ends are thread-safe, and each counter has one writer.

    Args:
        key: its name.
        credit_bytes: credit that the sender was given at the start.
        on_ready: called, in the putting thread or from ``unblock``, when the channel becomes readable; must be
            quick and thread-safe. May be called when there is nothing to read any more.
        return_credit: called in the mailbox thread with bytes that the sender may use again.
        on_arrival: called in the putting thread when a barrier or a cancel marker has come, which ``arrived`` tells
            of; as quick as ``on_ready``. None: not needed (UA1).
    """

    def __init__(
        self,
        key: ChannelKey,
        credit_bytes: int,
        on_ready: Callable[[InputChannel], None],
        return_credit: Callable[[int], None],
        on_arrival: Callable[[], None] | None = None,
    ) -> None:
        assert credit_bytes > 0, "without credit nothing is ever sent"
        self.key = key
        self._on_arrival = on_arrival
        self._arrived: deque[Barrier | Cancel] = deque()
        self._credit_bytes = credit_bytes
        self._return_at = max(1, credit_bytes // 2)  # CH9: half a window at a time
        self._on_ready = on_ready
        self._return_credit = return_credit
        self._queue: deque[Element] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self._returned_bytes = 0
        self._is_blocked = False

    @property
    def size_bytes(self) -> int:
        """Bytes of batches that wait to be read."""
        return self._put_bytes - self._taken_bytes

    @property
    def fill(self) -> float:
        """The share of the sender's credit that waits to be read, 0 to 1 (OM14)."""
        return min(self.size_bytes / self._credit_bytes, 1.0)

    @property
    def outstanding_bytes(self) -> int:
        """Bytes of received batches without returned credit: a sender may send only below its credit."""
        return self._put_bytes - self._returned_bytes

    @property
    def is_blocked(self) -> bool:
        """Whether the channel is set aside."""
        return self._is_blocked

    def __len__(self) -> int:
        """Number of elements that wait, readable or not."""
        return len(self._queue)

    def put(self, element: Element) -> None:
        """Append ``element``; wake the mailbox if the channel was empty."""
        if type(element) is BatchElement:
            self._put_bytes += element.size_bytes
        self._queue.append(element)
        if self._on_arrival is not None and isinstance(element, Barrier | Cancel):  # UA4; it can be found in the queue
            self._arrived.append(element)
            self._on_arrival()
        if len(self._queue) == 1 and not self._is_blocked:
            self._on_ready(self)

    def arrived(self) -> Barrier | Cancel | None:
        """Return the next barrier or cancel marker that has come since the last call, read or not; None: no more."""
        return self._arrived.popleft() if self._arrived else None

    def waiting_before(self, checkpoint: CheckpointId) -> list[BatchElement]:
        """Return the batches that stand in front of the barrier of ``checkpoint``, which has arrived (UA7)."""
        found: list[BatchElement] = []
        for element in self._queue.copy():  # the other thread may append meanwhile
            if isinstance(element, BatchElement):
                found.append(element)
            elif isinstance(element, Barrier) and element.checkpoint == checkpoint:
                return found
        raise AssertionError(f"the barrier of checkpoint {checkpoint} is not in {self.key}")

    def poll(self) -> Element | None:
        """Take the next element, or None when there is none or the channel is blocked.

        Taking a batch is consuming it: its credit goes back to the sender, half a window at a time.
        """
        if self._is_blocked or not self._queue:
            return None
        element = self._queue.popleft()
        if type(element) is BatchElement:
            self._taken_bytes += element.size_bytes
            due_bytes = self._taken_bytes - self._returned_bytes
            if due_bytes >= self._return_at:
                self._returned_bytes += due_bytes  # before the sender can know of it: see outstanding_bytes
                assert self._returned_bytes <= self._taken_bytes, "credit was returned for unread bytes"
                self._return_credit(due_bytes)
        return element

    def block(self) -> None:
        """Set the channel aside: ``poll`` returns None, nothing is copied, the sender runs out of credit."""
        self._is_blocked = True  # CH14

    def unblock(self) -> None:
        """Make the channel readable again."""
        self._is_blocked = False
        if self._queue:
            self._on_ready(self)


class OutputChannel:
    """The sending end. The mailbox sends; any one other thread may add credit.

    Args:
        key: its name.
        credit_bytes: credit at the start.
        transmit: moves an element to the other end, in order; called in the mailbox thread.
        on_credit: called in the thread that adds credit, when ``can_send`` is true then; must be quick and
            thread-safe.
    """

    def __init__(
        self,
        key: ChannelKey,
        credit_bytes: int,
        transmit: Callable[[Element], None],
        on_credit: Callable[[OutputChannel], None],
    ) -> None:
        self.key = key
        self._transmit = transmit
        self._on_credit = on_credit
        self._granted_bytes = credit_bytes  # written by the thread that adds credit
        self._sent_bytes = 0  # written by the mailbox

    @property
    def credit_bytes(self) -> int:
        """What may still be sent; below zero by at most what one input produced."""
        return self._granted_bytes - self._sent_bytes

    @property
    def can_send(self) -> bool:
        """Whether a batch may be sent. Control elements always may (CH7)."""
        return self._granted_bytes > self._sent_bytes

    def send(self, element: Element) -> None:
        """Send ``element`` after everything sent before.

        The sender looks at ``can_send`` before it *begins* to process an input; what that one input (or a flush in
        front of a barrier) produces may overdraw the credit (CH8).
        """
        if type(element) is BatchElement:
            # Charged first: the other end may give credit back before transmit returns (CH8).
            self._sent_bytes += element.size_bytes
        self._transmit(element)

    def add_credit(self, size_bytes: int) -> None:
        """The receiver consumed ``size_bytes``."""
        assert size_bytes > 0, "credit only grows"
        self._granted_bytes += size_bytes
        if self.can_send:  # also when it could before: the mailbox may have overdrawn in between
            self._on_credit(self)


def local_channel(
    key: ChannelKey,
    credit_bytes: int,
    on_ready: Callable[[InputChannel], None],
    on_credit: Callable[[OutputChannel], None],
    on_arrival: Callable[[], None] | None = None,
) -> tuple[InputChannel, OutputChannel]:
    """Return both ends of a channel inside one worker: elements by reference, the same credit (CH10)."""

    def return_credit(size_bytes: int) -> None:
        output.add_credit(size_bytes)

    receiving = InputChannel(key, credit_bytes, on_ready, return_credit, on_arrival)
    output = OutputChannel(key, credit_bytes, receiving.put, on_credit)
    return receiving, output
