"""Channels: FIFO queues of elements with flow control by credit, and feedback channels, which are unbounded.

A sender's credit is what the receiver has room for, in bytes, so queues between subtasks are bounded. The receiving
end of a back edge is not: it keeps batches in memory first and then on disk, because a loop head that waits for room
could wait for itself.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from headgate.codec.frames import Barrier, BatchElement, Cancel, Element, EndOfData
from headgate.dataclass import dataclass
from headgate.errors import StorageError
from headgate.model.ids import CheckpointId, WorkerIndex
from headgate.runtime.wire.spill import Extent, Piece, SpillBudget, SpillFile, compacted


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
            of; as quick as ``on_ready``. None: not needed.
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
        self._return_at = max(1, credit_bytes // 2)  # half a window at a time
        self._on_ready = on_ready
        self._return_credit = return_credit
        self._queue: deque[Element] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self._returned_bytes = 0
        self._put_markers = 0
        self._taken_markers = 0
        self._is_blocked = False

    @property
    def has_marker(self) -> bool:
        """Whether a barrier or a cancel marker waits to be read."""
        return self._put_markers > self._taken_markers and not self._is_blocked

    @property
    def size_bytes(self) -> int:
        """Bytes of batches that wait to be read."""
        return self._put_bytes - self._taken_bytes

    @property
    def fill(self) -> float:
        """The share of the sender's credit that waits to be read, 0 to 1."""
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
            # counted before it can be taken: what waits never looks like less than nothing
            self._put_bytes += element.size_bytes
        self._queue.append(element)
        if isinstance(element, Barrier | Cancel):
            self._put_markers += 1
            if self._on_arrival is not None:  # UA4; it can be found in the queue
                self._arrived.append(element)
                self._on_arrival()
        # once, not for each: a mailbox that found something looks again before it sleeps
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
            assert self._taken_bytes <= self._put_bytes, "what is taken was put before"
            due_bytes = self._taken_bytes - self._returned_bytes
            if due_bytes >= self._return_at:
                self._returned_bytes += due_bytes  # before the sender can know of it: see outstanding_bytes
                assert self._returned_bytes <= self._taken_bytes, "credit was returned for unread bytes"
                self._return_credit(due_bytes)
        elif isinstance(element, Barrier | Cancel):
            self._taken_markers += 1
        return element

    def block(self) -> None:
        """Set the channel aside: ``poll`` returns None, nothing is copied, the sender runs out of credit."""
        self._is_blocked = True

    def unblock(self) -> None:
        """Make the channel readable again."""
        self._is_blocked = False
        # looked at after it was opened: a put before that found it blocked, and did not wake the mailbox
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
        assert credit_bytes > 0, "without credit nothing is ever sent"
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
        """Whether a batch may be sent. Control elements always may."""
        return self._granted_bytes > self._sent_bytes

    def send(self, element: Element) -> None:
        """Send ``element`` after everything sent before.

        The sender looks at ``can_send`` before it *begins* to process an input; what that one input (or a flush in
        front of a barrier) produces may overdraw the credit.
        """
        if type(element) is BatchElement:
            # Charged first: the other end may give credit back before transmit returns.
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
    """Return both ends of a channel inside one worker: elements by reference, the same credit."""

    def return_credit(size_bytes: int) -> None:
        output.add_credit(size_bytes)

    receiving = InputChannel(key, credit_bytes, on_ready, return_credit, on_arrival)
    output = OutputChannel(key, credit_bytes, receiving.put, on_credit)
    return receiving, output


MERGE_BYTES_MAX = 2 << 20
"""Batches that wait are read together up to this size: each shuffle cuts them, and late rounds are small anyway."""
FEEDBACK_CREDIT_BYTES = 1 << 62
"""Credit of the sender of a feedback channel: never used up, so it can always send."""


@dataclass(frozen=True, slots=True)
class FeedbackMetrics:
    """What waits in a feedback channel.

    ``size_bytes`` = ``memory_bytes`` + ``spilled_bytes``; the maximum is over the channel's life.
    """

    elements: int
    size_bytes: int
    memory_bytes: int
    spilled_bytes: int
    size_bytes_max: int


class _Run:
    """Spilled batches that follow each other in one piece: 16 bytes of memory per batch, however small it is."""

    __slots__ = ("_next", "_rows", "_sizes", "end", "offset", "piece")

    def __init__(self, extent: Extent) -> None:
        self.piece: Piece = extent.piece
        self.offset = extent.offset
        self.end = extent.end
        self._sizes = array("Q", [extent.size_bytes])
        self._rows = array("Q", [extent.rows])
        self._next = 0

    def add(self, extent: Extent) -> bool:
        """Append ``extent`` if it is in the piece of this run."""
        if extent.piece is not self.piece:
            return False
        # one thread puts, and a put that failed ended the channel
        assert extent.offset == self.end, "spilled batches of a run follow each other"
        self._sizes.append(extent.size_bytes)
        self._rows.append(extent.rows)
        self.end = extent.end
        return True

    def take(self) -> Extent:
        """Remove and return the first."""
        assert not self.is_empty, "a run that is used up has left the queue"
        extent = Extent(self.piece, self.offset, self._sizes[self._next], self._rows[self._next])
        self._next += 1
        self.offset = extent.end
        return extent

    def left(self) -> list[Extent]:
        """Return those that were not taken."""
        found, offset = [], self.offset
        for at in range(self._next, len(self._sizes)):
            found.append(Extent(self.piece, offset, self._sizes[at], self._rows[at]))
            offset = found[-1].end
        return found

    @property
    def next_bytes(self) -> int:
        """Size of the first."""
        return self._sizes[self._next]

    @property
    def is_empty(self) -> bool:
        """Whether all were taken."""
        return self._next == len(self._sizes)


_Entry: TypeAlias = Element | _Run


@dataclass(frozen=True, slots=True)
class WaitingFeedback:
    """What waits in front of sentinels, in order, still to be read: see ``FeedbackChannel.take_sentinels``.

    Attributes:
        sentinels: barriers that were taken out of the queue, ascending.
        batches: that wait in front of the last of them. Those on disk are in ``file``, where they stay until freed.
    """

    sentinels: tuple[Barrier, ...]
    batches: tuple[BatchElement | Extent, ...]
    file: SpillFile


class FeedbackChannel:
    """The receiving end of a back edge. One thread puts, the mailbox does all the rest.

    A lock guards the queue, which both change; no I/O happens under it, so that a slow disk delays neither the
    elements in memory nor the other thread.

    Args:
        key: its name.
        schema: of its batches.
        budget: of the worker; shared.
        on_ready: as in ``InputChannel``: called when the channel becomes readable, possibly when it no longer is.
        name: of the loop and the channel, for messages; default: the key.
        merge_bytes_max: ``poll`` merges batches that follow each other up to this size; 0: never. Each trip through
            a shuffle cuts batches into smaller ones, until most have one row.
    """

    def __init__(
        self,
        key: ChannelKey,
        schema: pa.Schema,
        budget: SpillBudget,
        on_ready: Callable[[FeedbackChannel], None],
        name: str = "",
        *,
        merge_bytes_max: int = 0,
    ) -> None:
        self.key = key
        self._budget = budget
        self._on_ready = on_ready
        self._merge_bytes_max = merge_bytes_max
        self._file = SpillFile(name or f"feedback {key}", schema, budget)
        self._lock = threading.Lock()
        self._queue: deque[_Entry] = deque()
        self._elements = 0
        self._sentinels: deque[CheckpointId] = deque()
        self._taken_total = 0
        self._memory_bytes = 0
        self._spilled_bytes = 0
        self._size_bytes_max = 0
        self._is_blocked = False
        self._is_closed = False
        self._failure: StorageError | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of batches that wait to be read, in memory and on disk: what a high-water mark looks at."""
        with self._lock:
            return self._memory_bytes + self._spilled_bytes

    @property
    def outstanding_bytes(self) -> int:
        """Always 0: a sender of feedback cannot overdraw, it has unlimited credit."""
        return 0

    @property
    def fill(self) -> float:
        """Never full: its sender's credit does not end."""
        return 0.0

    @property
    def is_blocked(self) -> bool:
        """Whether the channel is set aside."""
        return self._is_blocked

    @property
    def waiting_sentinels(self) -> tuple[CheckpointId, ...]:
        """Checkpoints with sentinels in the queue, in order."""
        with self._lock:
            return tuple(self._sentinels)

    @property
    def taken_total(self) -> int:
        """Elements that were read so far: what ``poll`` merged counts as often as it was put."""
        return self._taken_total

    @property
    def metrics(self) -> FeedbackMetrics:
        """Figures of this moment, consistent with each other."""
        with self._lock:
            return FeedbackMetrics(
                elements=self._elements,
                size_bytes=self._memory_bytes + self._spilled_bytes,
                memory_bytes=self._memory_bytes,
                spilled_bytes=self._spilled_bytes,
                size_bytes_max=self._size_bytes_max,
            )

    def __len__(self) -> int:
        """Number of elements that wait, readable or not. A turn reads as many as this says at its begin."""
        return self._elements

    def put(self, element: Element) -> None:
        """Append ``element``, whatever waits already; wake the mailbox if the channel was empty.

        After ``close`` the element is dropped.

        Raises:
            StorageError: it had to go to disk, and the disk share is used up or the disk full. The element is
                lost, so the generation must fail; every later use of the channel gets the same error.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            return
        # outside the lock: it may write to disk. Only this thread puts, so the order stays.
        stored = self._store(element) if type(element) is BatchElement else element
        with self._lock:
            was_empty = not self._queue
            self._append(stored)
            is_readable = not self._is_blocked
        if was_empty and is_readable:
            self._on_ready(self)

    def poll(self) -> Element | None:
        """Take the next element, or None when there is none or the channel is blocked.

        Batches that follow each other may come as one; nothing else is ever passed or merged.

        Raises:
            StorageError: a spilled batch cannot be read, or a put failed: there is a hole at the end of the queue.
            CorruptionError: the disk returned other bytes than were written.
        """
        if self._failure is not None:
            raise self._failure
        with self._lock:
            if self._is_blocked or not self._queue:
                return None
            size_bytes = self._next_batch_bytes()
            taken = self._take()
            more: list[Element | Extent] = []
            # 0: a control element, which nothing passes and nothing is merged across
            while size_bytes and (next_bytes := self._next_batch_bytes()):
                size_bytes += next_bytes
                if size_bytes > self._merge_bytes_max:
                    break
                more.append(self._take())
        element = self._loaded(taken)
        if not more:
            return element
        batches = [one for one in (element, *map(self._loaded, more)) if isinstance(one, BatchElement)]
        return BatchElement(pa.concat_batches([one.batch for one in batches]), sum(one.size_bytes for one in batches))

    def take_sentinels(self, last: CheckpointId) -> WaitingFeedback | None:
        """Take the sentinel of ``last``, and older ones, out of the queue; None if it does not wait there.

        What is in front of it stays to be read, and is returned: it circulated when the sentinel was sent. None
        also if the end of data is in front of it: then little waits, and it is read in order.
        """
        with self._lock:
            kept: deque[_Entry] = deque()
            sentinels: list[Barrier] = []
            batches: list[BatchElement | Extent] = []
            is_found = False
            for entry in self._queue:
                if is_found:
                    kept.append(entry)
                    continue
                if type(entry) is Barrier and entry.checkpoint <= last:
                    sentinels.append(entry)
                    is_found = entry.checkpoint == last
                    continue
                # a return from here, or below, leaves the queue as it was: it is replaced only at the end
                if type(entry) is EndOfData:
                    return None
                if isinstance(entry, _Run):
                    batches += entry.left()
                elif type(entry) is BatchElement:
                    batches.append(entry)
                kept.append(entry)
            if not is_found:
                return None
            for batch in batches:
                if isinstance(batch, Extent):
                    # wanted twice from now on: by the log, and by the queue in which it still waits
                    self._file.keep(batch)
            assert [one.checkpoint for one in sentinels] == list(self._sentinels)[: len(sentinels)], (
                "sentinels of one channel come in the order of their checkpoints"
            )
            self._queue = kept
            self._elements -= len(sentinels)
            for _ in sentinels:
                self._sentinels.popleft()
            self._taken_total += len(sentinels)
        return WaitingFeedback(tuple(sentinels), tuple(batches), self._file)

    def block(self) -> None:
        """Set the channel aside (L6): ``poll`` returns None; puts go on."""
        self._is_blocked = True

    def unblock(self) -> None:
        """Make the channel readable again."""
        with self._lock:
            self._is_blocked = False
            has_elements = bool(self._queue)
        if has_elements:
            self._on_ready(self)

    def close(self) -> None:
        """Free memory and files; elements not read are lost. Idempotent; the putting thread has ended."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self._elements = 0
            self._sentinels.clear()
            memory_bytes, self._memory_bytes, self._spilled_bytes = self._memory_bytes, 0, 0
        self._budget.release_memory(memory_bytes)
        self._file.close()

    def _store(self, element: BatchElement) -> BatchElement | Extent:
        if self._budget.take_memory(element.size_bytes):
            batch = compacted(element.batch, element.size_bytes)
            return element if batch is element.batch else BatchElement(batch, element.size_bytes)
        try:
            return self._file.write(element.batch)
        except StorageError as error:
            self._failure = error
            self._on_ready(self)  # even if blocked: the mailbox must hear of it
            raise

    def _append(self, stored: Element | Extent) -> None:
        if isinstance(stored, Extent):
            self._spilled_bytes += stored.size_bytes
            last = self._queue[-1] if self._queue else None
            if not (isinstance(last, _Run) and last.add(stored)):
                self._queue.append(_Run(stored))
        else:
            if type(stored) is BatchElement:
                self._memory_bytes += stored.size_bytes
            elif type(stored) is Barrier:
                self._sentinels.append(stored.checkpoint)
            self._queue.append(stored)
        self._elements += 1
        self._size_bytes_max = max(self._size_bytes_max, self._memory_bytes + self._spilled_bytes)

    def _next_batch_bytes(self) -> int:
        """Return the size of the next element if it is a batch, else 0."""
        first = self._queue[0] if self._queue else None
        if isinstance(first, _Run):
            return first.next_bytes
        return first.size_bytes if type(first) is BatchElement else 0

    def _loaded(self, taken: Element | Extent) -> Element:
        """Return what was taken from the queue, from disk if it is there; give its space back."""
        if isinstance(taken, Extent):
            batch = self._file.read(taken)
            self._file.free(taken)
            return BatchElement(batch, taken.size_bytes)
        if type(taken) is BatchElement:
            self._budget.release_memory(taken.size_bytes)
        return taken

    def _take(self) -> Element | Extent:
        assert self._elements > 0, "the queue was checked under the same lock"
        self._elements -= 1
        self._taken_total += 1
        first = self._queue[0]
        if isinstance(first, _Run):
            extent = first.take()
            if first.is_empty:
                self._queue.popleft()
            self._spilled_bytes -= extent.size_bytes
            assert self._spilled_bytes >= 0, "what is taken from disk was counted when it was put"
            return extent
        self._queue.popleft()
        if type(first) is BatchElement:
            self._memory_bytes -= first.size_bytes
            assert self._memory_bytes >= 0, "what is taken from memory was counted when it was put"
        elif type(first) is Barrier:
            self._sentinels.popleft()
        return first


ReceivingChannel: TypeAlias = InputChannel | FeedbackChannel
"""What a subtask reads from."""


def local_feedback_channel(
    key: ChannelKey,
    schema: pa.Schema,
    budget: SpillBudget,
    on_ready: Callable[[FeedbackChannel], None],
    on_credit: Callable[[OutputChannel], None],
    name: str = "",
    *,
    merge_bytes_max: int = 0,
) -> tuple[FeedbackChannel, OutputChannel]:
    """Return both ends of a back edge inside one worker: elements by reference while they fit into memory."""
    receiving = FeedbackChannel(key, schema, budget, on_ready, name, merge_bytes_max=merge_bytes_max)
    return receiving, OutputChannel(key, FEEDBACK_CREDIT_BYTES, receiving.put, on_credit)
