"""A writer outside transactions: buffers batches, flushes them as one chunk, acknowledges what is durable.

Counterpart: ``reader``. Source: S9 of docs/spec/stream-store.md. Never acknowledges
before chunk and catalogue are synced, and never appends twice what it retries.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.environment import Clock, Thread, Threads
from headgate.errors import FencedError, HeadgateError, StorageError, UsageError
from headgate.storage.base import NotFound
from headgate.store.catalogue.records import Numbers
from headgate.store.chunks import FLUSH_BYTES, BatchChunk, check_events, chunk_path, delete_quietly, encode_batches
from headgate.store.core import StoreCore
from headgate.store.routing import hash_text
from headgate.store.streams import (
    OtherLayoutError,
    RemovedFileError,
    SchemaHistory,
    StreamInfo,
    check_same_schema,
    schema_difference,
)


@dataclass(frozen=True, slots=True)
class AppendedRange:
    """Where events of one append are: ``events_count`` of ``segment`` from ``start`` on."""

    segment: int
    start: int
    events_count: int


@dataclass(frozen=True, slots=True)
class Appended:
    """A durable append.

    Attributes:
        ranges: where its events are, without segments in which they were truncated before anybody could tell.
        is_duplicate: its sequence number was there already, nothing was added.
    """

    ranges: tuple[AppendedRange, ...] = ()
    is_duplicate: bool = False


Starts: TypeAlias = Mapping[int, int]
"""Segment → position of the first event of a flush; without the segments where nothing of it is left."""

TRUNCATED: Starts = {}
"""A flush took effect, and what it had added is gone by now."""


@dataclass(slots=True)
class PendingAppend:
    """An append that waits to be durable."""

    batch: pa.RecordBatch
    future: Future[Appended]
    sequence: int


@dataclass(slots=True)
class FlushAttempt:
    """One flush; it stays until its outcome is known and returned, so that a retry cannot append twice.

    Attributes:
        encoded: None until it was encoded.
        is_uncertain: it was tried before, so it may have taken effect.
        starts: once it is durable: segment → position of its first event.
    """

    path: str
    items: list[PendingAppend]
    turn: int
    encoded: BatchChunk | None = None
    is_uncertain: bool = False
    starts: Starts | None = None

    def begin_again(self, path: str) -> None:
        """It certainly did not take effect: let it be another one, of the same events in the same order."""
        self.path, self.encoded, self.is_uncertain = path, None, False

    def acknowledge(self) -> None:
        """Complete the futures of what is durable; repeating completes those that are left."""
        assert self.encoded is not None, "it is encoded before it is tried"
        assert self.starts is not None, "only what is durable is acknowledged"
        starts = dict(self.starts)
        # all appends lie in one file, in their order: each begins where the one before it ends
        for item, counts in zip(self.items, self.encoded.counts.tolist(), strict=True):
            ranges = []
            for segment, count in zip(self.encoded.segments, counts, strict=True):
                if count and segment in starts:
                    ranges.append(AppendedRange(segment, starts[segment], count))
                    starts[segment] += count
            if not item.future.done():
                item.future.set_result(Appended(tuple(ranges)))


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

LINGER = "5ms"
"""Default: far below the time that a sync of a disk takes, long enough for the threads of one writer to share it."""

RETRY_FIRST_MS, RETRY_LATEST_MS = 20, 1_000
"""Pauses between tries while the storage is failing; each is twice the one before."""

IDLE_S = 1.0


class FlushTimer:
    """Calls ``flush`` in a thread of its own, ``linger_ms`` after ``arm``; again and again while it returns False."""

    def __init__(self, linger_ms: int, flush: Callable[[], bool], threads: Threads, clock: Clock) -> None:
        self._linger_ms = linger_ms
        self._flush = flush
        self._threads = threads
        self._clock = clock
        self._changed = threads.condition()
        self._due_ms: int | None = None
        self._thread: Thread | None = None
        self._is_waiting_for_work = False
        self._is_closed = False

    def arm(self) -> bool:
        """Something waits to be flushed, from now on unless something did before.

        False: the system has no thread for it, and the caller is to flush.
        """
        with self._changed:
            # the first that waits sets the time: with later ones pushing it back, it might never come
            if self._is_closed or self._due_ms is not None:
                return True
            if self._thread is None:
                thread = self._threads.thread(self._run, "headgate-linger")
                try:
                    thread.start()  # which waits for the lock that is held here
                except RuntimeError:
                    return False
                self._thread = thread
            elif self._is_waiting_for_work:
                self._changed.notify_all()
            self._due_ms = self._clock.monotonic_ms() + self._linger_ms
            return True

    def disarm(self) -> None:
        """Nothing waits any more."""
        with self._changed:
            self._due_ms = None

    def close(self, *, wait: bool = True) -> None:
        """End the thread; with ``wait`` it is gone afterwards. Not under a lock that ``flush`` takes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        # without the lock, which the thread takes to notice that it is over
        if wait and thread is not None and not thread.is_current:
            thread.join()

    def _run(self) -> None:
        pause_ms = RETRY_FIRST_MS
        while self._is_due():
            if self._flush():
                pause_ms = RETRY_FIRST_MS
                continue
            with self._changed:
                # in place of what the flush has armed again: pauses grow while the storage fails
                self._due_ms = self._clock.monotonic_ms() + pause_ms
            pause_ms = min(2 * pause_ms, RETRY_LATEST_MS)

    def _is_due(self) -> bool:
        """Wait until it is time; False when this thread is not needed any more."""
        with self._changed:
            while not self._is_closed:
                due_ms = self._due_ms
                if due_ms is None:
                    self._is_waiting_for_work = True
                    is_wanted = self._waits_for_change(None, IDLE_S)
                    self._is_waiting_for_work = False
                    if not is_wanted:
                        break
                    continue
                left_ms = due_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    # taken: what is appended during the flush arms again
                    self._due_ms = None
                    return True
                self._waits_for_change(due_ms, left_ms / 1_000)
            # under the lock, so that the next `arm` begins a thread instead of waking this one
            self._thread = None
            return False

    def _waits_for_change(self, due_ms: int | None, timeout_s: float) -> bool:
        """Wait until it is due at another time than ``due_ms``, or over; False: neither came in time."""
        return self._changed.wait_for(lambda: self._is_closed or self._due_ms != due_ms, timeout_s)


_log = logging.getLogger("headgate")


class StreamWriter:
    """Appends events to one stream. Several threads may share a writer, and then share its flushes (group commit)."""

    def __init__(
        self,
        core: StoreCore,
        stream: StreamInfo,
        writer_id: str,
        epoch: int,
        linger_ms: int | None,
        look_after: Callable[[str], None],
    ) -> None:
        """Use ``Store.writer``."""
        self._look_after = look_after
        self._threads = core.threads
        self._clock = core.clock
        self._catalogue = core.catalogue
        self._storage = core.storage
        self.stream = stream
        self._schemas = SchemaHistory(core.catalogue, stream)
        self._writer_id = writer_id
        self._epoch = epoch
        self._linger_ms = linger_ms
        self._new_name = core.new_name
        self._failure: Exception | None = None
        self._is_closed = False
        self._is_late = False
        self._durable_sequence = core.catalogue.register_writer(stream, writer_id, epoch) if writer_id else 0
        self._begin_in_this_process()

    def _begin_in_this_process(self) -> None:
        """Begin with nothing buffered. After a fork the parent keeps what it had, and the threads are its own.

        So is the time that it noted: what the child does must not end it.
        """
        self._pid = self._threads.process_id
        name = self._writer_id or self._new_name()
        self._turn = hash_text(name)
        self._owner = f"writer:{name}"
        self._is_timed = False
        self._buffer_lock = self._threads.lock()
        self._flush_lock = self._threads.reentrant_lock()  # a future's callback may append and flush
        self._buffer: list[PendingAppend] = []
        self._buffered_bytes = 0
        self._attempt: FlushAttempt | None = None
        self._unacknowledged: dict[int, Future[Appended]] = {}
        self._linger = None if self._linger_ms is None else self._make_linger(self._linger_ms)
        self.next_sequence = self._durable_sequence + 1
        """Number of the next append; after a restart, the first that the store does not have."""

    def _make_linger(self, linger_ms: int) -> FlushTimer:
        return FlushTimer(linger_ms, self._flush_in_time, self._threads, self._clock)

    def append(self, batch: pa.RecordBatch, sequence: int | None = None) -> Future[Appended]:
        """Append events. They are durable when the returned future completes: with ``flush``, or soon after the call.

        ``Store.writer`` says how soon. If the future fails, its error is what ended the writer, and the events may or
        may not be in the store. The future cannot be cancelled.

        Args:
            batch: events with the stream's schema.
            sequence: the number of this append, from 1, for writers with a stable id. An append that the store already
                has is dropped; an append that is still waiting to become durable returns the future of the first.
                Default: the next number.

        Raises:
            UsageError: the batch has another schema, an event is too large, there is a gap in the numbers, or the
                writer is closed.
            StorageError: the buffer is full and cannot be written now. Nothing was appended.
            HeadgateError: what ended the writer before, such as FencedError. Nothing was appended.
        """
        self._take_schema(batch.schema)
        check_events(self.stream.name, batch)
        self._check_number(sequence)
        self._notice_fork()
        # before anything is taken, so that an error leaves this batch to the caller; a repeated one takes no room
        if self._buffered_bytes >= FLUSH_BYTES and (sequence is None or sequence >= self.next_sequence):
            self.flush()
        with self._buffer_lock:
            self._check_open()
            number = self.next_sequence if sequence is None else sequence
            if number < self.next_sequence:
                return self._future_of_first(number)
            if number > self.next_sequence:
                raise UsageError(
                    f"writer '{self._writer_id}' of stream '{self.stream.name}': append {number} came where "
                    f"{self.next_sequence} was expected; numbers must follow each other"
                )
            future: Future[Appended] = Future()
            # cancelling would say that its events are not in the store, which may be wrong from now on
            future.set_running_or_notify_cancel()
            self.next_sequence = number + 1
            # with a stable id an empty one is recorded, too: its number must not be expected again
            if batch.num_rows == 0 and not self._writer_id:
                future.set_result(Appended())
                return future
            assert not self._buffer or self._buffer[-1].sequence < number, "numbers rise within a flush"
            self._buffer.append(PendingAppend(batch, future, number))
            self._buffered_bytes += batch.nbytes
            if self._writer_id:
                self._unacknowledged[number] = future
            is_due = self._buffered_bytes >= FLUSH_BYTES
            if self._linger is not None and not self._linger.arm():
                is_due = True
        # without the buffer lock: `flush` takes it within its own
        if is_due:
            with contextlib.suppress(HeadgateError):  # taken: the future, or the next call, says what is wrong
                self.flush()
        return future

    def flush(self) -> None:
        """Make everything appended so far durable and visible, and complete the futures.

        Raises:
            StorageError: nothing more was acknowledged. If the error is transient, the events are kept, and calling
                again continues.
            FencedError: a newer epoch of this writer id exists.
            HeadgateError: what ended the writer before. Events that it had not acknowledged were dropped.
        """
        self._notice_fork()
        with self._flush_lock:
            # what an earlier call left comes first: its events precede those in the buffer; a callback may leave more
            while self._attempt is not None:
                self._finish(self._attempt)
            with self._buffer_lock:
                if self._failure is not None:
                    raise self._failure
                if self._linger is not None:
                    self._linger.disarm()
                if self._buffer:
                    self._turn += 1
                    self._attempt = FlushAttempt(self._new_path(), self._buffer, self._turn)
                    self._buffer, self._buffered_bytes = [], 0
            if self._attempt is None:
                return
            # the buffer lock is free meanwhile: others append to the next flush
            self._finish(self._attempt)
        self._look_after(self.stream.name)  # S71

    def note_time(self, time: datetime) -> None:
        """Note that no event that this writer appends from now on is earlier than ``time``; flush first.

        A pipeline that reads the stream takes its watermark from that, so it needs no guess of how far events are out
        of order, also for a backlog. The stream has come as far as the last of those who note times; this writer counts
        until it is closed, or has noted nothing for ten minutes. Note a time before the first append, too: before it,
        the largest event time of the records is the watermark. The equivalent of Pravega's ``noteTime``.

        Args:
            time: one without a zone is in UTC.

        Raises:
            UsageError: the writer is closed, or the stream is sealed or was deleted.
            FencedError: a newer epoch of this writer id exists.
            StorageError: see ``flush``; call it again.
        """
        if not isinstance(time, datetime):
            raise UsageError(f"note_time takes a datetime, not {type(time).__name__}")
        known = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
        self._notice_fork()
        self._check_open()
        # before the flush: from its parts on, readers are given the time of the stream (S90)
        self._is_timed = True
        self.flush()
        # after the flush: what was appended before this call may be earlier than the time
        event_ms = (known - EPOCH) // timedelta(milliseconds=1)
        writer = (self._writer_id, self._epoch) if self._writer_id else None
        self._catalogue.note_time(self.stream, self._owner, event_ms, self._clock.wall_ms(), writer=writer)

    def close(self) -> None:
        """Flush, and take no more events. If it raises, call it again to continue; nothing happens by itself."""
        self._notice_fork()
        with self._buffer_lock:
            self._is_closed = True
        if self._linger is not None:
            self._linger.close()
        self.flush()
        # last: while anything is not durable, this writer holds the time of the stream back
        if self._is_timed:
            self._catalogue.forget_time(self.stream, self._owner)

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        self._notice_fork()
        what = f"the block of the writer of stream '{self.stream.name}' ended with an error"
        with self._flush_lock:
            self._end(UsageError(f"{what} before this append was acknowledged"))
        if self._linger is not None:
            self._linger.close()

    def _take_schema(self, schema: pa.Schema) -> None:
        """Check that events have a schema of the stream; from its first newer one on, write in that."""
        if not schema_difference(self.stream.schema, schema):
            return
        version = self._schemas.fitting(schema)
        if version is None:
            check_same_schema(self.stream.name, self.stream.schema, schema)
        elif version > self.stream.schema_version:
            newer = self._schemas.of(version)
            with self._flush_lock:  # a flush goes on in one schema and one layout
                # another thread may have been quicker, and have taken a still newer one
                if version > self.stream.schema_version:
                    self.stream = replace(self.stream, schema=newer, schema_version=version)

    def _check_number(self, sequence: int | None) -> None:
        if sequence is None:
            return
        if not self._writer_id:
            raise UsageError(
                f"append {sequence} to stream '{self.stream.name}': the store knows the numbers of writers with a "
                "stable id only; open the writer with writer_id=…, or append without a number"
            )
        if sequence < 1:
            raise UsageError(
                f"writer '{self._writer_id}' of stream '{self.stream.name}': appends are numbered from 1, "
                f"so there is no append {sequence}"
            )

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise UsageError(f"the writer of stream '{self.stream.name}' is closed; open another one")

    def _notice_fork(self) -> None:
        if self._threads.process_id != self._pid:
            self._begin_in_this_process()

    def _future_of_first(self, number: int) -> Future[Appended]:
        """Return the future of an append that came before: a repeated one is as durable as the first."""
        waiting = self._unacknowledged.get(number)
        if waiting is not None:
            return waiting
        # numbers leave `_unacknowledged` only when they are durable, under the lock that is held here
        assert number <= self._durable_sequence, "an append that neither waits nor is durable had a number"
        future: Future[Appended] = Future()
        future.set_result(Appended(is_duplicate=True))
        return future

    def _flush_in_time(self) -> bool:
        """Flush because events waited long enough; False when it is to be tried again."""
        try:
            self.flush()
        except Exception as error:
            # raised here, an error would end the thread, and what waits would be flushed by the next call only
            if self._failure is not None:
                return True  # it ended the writer: the futures have it
            if not self._is_late:
                _log.warning("appends to stream '%s' are not durable yet: %s; trying again", self.stream.name, error)
            self._is_late = True
            return False
        self._is_late = False
        return True

    def _finish(self, attempt: FlushAttempt) -> None:
        """Make ``attempt`` durable if it is not, then acknowledge it. Under the flush lock."""
        if attempt.starts is None:
            try:
                attempt.starts = self._make_durable(attempt)
            except StorageError as error:
                # a transient one leaves the attempt in place: the next call, or the timer, goes on with it
                if not error.is_transient:
                    self._end(error)
                elif self._linger is not None:
                    self._linger.arm()
                raise
            except Exception as error:  # a retry would fail again
                self._end(error)
                raise
        with self._buffer_lock:
            assert attempt.items[-1].sequence >= self._durable_sequence, "flushes are finished in their order"
            # before futures complete: a callback may repeat an append, which must find its number durable
            self._durable_sequence = attempt.items[-1].sequence
            for item in attempt.items:
                self._unacknowledged.pop(item.sequence, None)
        attempt.acknowledge()
        if self._attempt is attempt:  # a callback may have flushed more
            self._attempt = None

    def _end(self, error: Exception) -> None:
        """End the writer: nothing that waits is acknowledged, nothing more is taken. Under the flush lock."""
        with self._buffer_lock:
            self._failure = error
            # taken out under the lock, so that no append comes in between and waits for ever
            items = (self._attempt.items if self._attempt is not None else []) + self._buffer
            self._attempt, self._buffer, self._buffered_bytes = None, [], 0
        if self._linger is not None:
            self._linger.close(wait=False)
        for item in items:
            if not item.future.done():
                item.future.set_exception(error)

    def _make_durable(self, attempt: FlushAttempt) -> Starts:
        while True:
            try:
                return self._append(attempt)
            except OtherLayoutError:  # it was scaled: the same events, in the same order, are routed again
                attempt.begin_again(self._new_path())
                self.stream = self._scaled()
            except RemovedFileError:  # taken for an orphan: the same events go into another file
                attempt.begin_again(self._new_path())

    def _append(self, attempt: FlushAttempt) -> Starts:
        # once: a retry is of the same file, of which `_found` knows how many events each segment got
        if attempt.encoded is None:
            attempt.encoded = encode_batches(self.stream, [item.batch for item in attempt.items], attempt.turn)
        if attempt.is_uncertain:
            known = self._found(attempt.path, attempt.encoded)
            if known is not None:  # the earlier try took effect although it reported an error
                return known
        self._storage.put(attempt.path, attempt.encoded.chunk.buffers)  # durable before visible
        # before the catalogue is asked: from here on an error may hide that it took effect
        attempt.is_uncertain = True
        record = attempt.encoded.record(attempt.path)
        try:
            numbers, now_ms = self._numbers(attempt), self._clock.wall_ms()
            return self._catalogue.append(self.stream, record, numbers, now_ms, self._is_timed)
        except (FencedError, UsageError):  # refused, so certainly not recorded
            delete_quietly(self._storage, [attempt.path])
            raise

    def _scaled(self) -> StreamInfo:
        """Return the stream with its present layout."""
        found = self._catalogue.find_stream(self.stream.name)
        if found.stream_id != self.stream.stream_id:
            raise UsageError(f"stream '{self.stream.name}' was deleted and created again; open another writer")
        return found

    def _new_path(self) -> str:
        return chunk_path(self.stream.stream_id, "appended", self._new_name())

    def _found(self, path: str, encoded: BatchChunk) -> Starts | None:
        """Return where the events of a flush with a lost answer are, or None if it did not take effect.

        The catalogue is asked before the storage: an entry that a truncation removes loses its file only after that.
        """
        found = self._catalogue.find_append(path)
        if found.ends is not None:
            counts = dict(zip(encoded.segments, encoded.counts.sum(axis=0).tolist(), strict=True))
            return {segment: end - counts[segment] for segment, end in found.ends.items()}
        if found.is_truncated:
            return TRUNCATED
        try:
            self._storage.get_range(path, 0, 1)
        except NotFound:
            if self._catalogue.find_append(path).is_condemned:  # which is recorded before a file is removed
                return None
            # the record that it is garbage goes after its file: then only a head that has moved tells of the truncation
            extents = self._catalogue.extents(self.stream)  # of a stream that was deleted nothing is acknowledged
            return TRUNCATED if any(extent.head for extent in extents.values()) else None
        return None

    def _numbers(self, attempt: FlushAttempt) -> Numbers | None:
        if not self._writer_id:
            return None
        return Numbers(self._writer_id, self._epoch, attempt.items[0].sequence, attempt.items[-1].sequence)
