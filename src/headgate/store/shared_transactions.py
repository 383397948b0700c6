"""Transactions that several processes write: their verbs, and the writer of one participant.

Counterpart: ``store.Store`` makes them, ``catalogue.shared_transaction_rows`` records them. Source: rules TX1 to TX13
of docs/spec/shared-transactions.md. Never takes a file away that the catalogue may count on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from headgate.errors import FencedError, HeadgateError, StorageError, UsageError
from headgate.protocol.store.transactions import PINGS_PER_LEASE, Abort, Commit, Prepare, Verdict
from headgate.store.catalogue.records import Shared, TransactionInfo
from headgate.store.chunks import (
    FLUSH_BYTES,
    BatchChunk,
    check_events,
    chunk_path,
    delete_quietly,
    encode_batches,
    transaction_directory,
)
from headgate.store.core import StoreCore
from headgate.store.routing import hash_text
from headgate.store.schema_conversion import SchemaHistory
from headgate.store.streams import RemovedFileError
from headgate.store.transactions import check_schema_at_begin, remove_leftovers


@dataclass(slots=True)
class _Flush:
    """Writes on their way; kept until it is known that they are recorded, so that none is there twice.

    Attributes:
        encoded: None: they have no events.
        is_put: its file is durable.
        is_uncertain: it was tried before, so it may be recorded.
    """

    path: str
    numbers: tuple[int, int]
    encoded: BatchChunk | None
    is_put: bool = False
    is_uncertain: bool = False

    def begin_again(self, path: str) -> None:
        """It certainly is not recorded: let it be another file, of the same events."""
        self.path, self.is_put, self.is_uncertain = path, False, False


class TransactionWriter:
    """Writes events of one participant into a shared transaction. Use it in one process, one thread at a time.

    Writes are numbered from 1. They are part of the transaction when ``flush`` or ``close`` has returned; before that
    they are lost with the process. As a context manager, the writer closes at the end of the block, unless an error
    ended it.
    """

    def __init__(self, core: StoreCore, shared: Shared, participant: str) -> None:
        """Use ``SharedTransaction.writer``."""
        self.participant = participant
        self._core = core
        self._shared = shared
        self._schemas = SchemaHistory(core.catalogue, shared.stream)
        self._token = core.new_name()
        self._process = core.threads.process_id
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._on_its_way: _Flush | None = None
        self._failure: HeadgateError | None = None
        self._is_closed = False
        # without a routing key all of a transaction goes to one segment, in order (S2)
        self._fallback = hash_text(f"{shared.owner}/{shared.epoch}/{shared.name}")
        last = core.catalogue.join_shared(shared, participant, self._token, core.clock.wall_ms())
        self._durable = last
        self._heard_ms = core.clock.monotonic_ms()
        self.next_sequence = last + 1
        """Number of the next write: the first that the transaction does not have."""

    def write(self, batch: pa.RecordBatch, sequence: int | None = None) -> None:
        """Add events behind those that this participant wrote before. ``flush`` and ``close`` make them durable.

        Args:
            batch: events with the schema that the stream had when the transaction began.
            sequence: the number of this write, from 1. A write whose number was used before is dropped. Default: the
                next number.

        Raises:
            UsageError: the batch has another schema, an event is too large, there is a gap in the numbers, or the
                writer is closed.
            FencedError: the transaction takes no more events, or this participant was opened elsewhere.
            StorageError: earlier writes cannot be made durable now. Nothing of ``batch`` was added.
        """
        self._check_open()
        what = f"transaction '{self._shared.name}'"
        check_schema_at_begin(self._shared.stream, self._schemas, what, batch.schema)
        check_events(self._shared.stream.name, batch)
        number = self.next_sequence if sequence is None else sequence
        if number < 1 or number > self.next_sequence:
            raise UsageError(
                f"participant '{self.participant}' of {what}: write {number} came where {self.next_sequence} was "
                "expected; numbers begin with 1 and must follow each other"
            )
        if number < self.next_sequence:
            return
        if self._buffered_bytes + batch.nbytes >= FLUSH_BYTES:
            self.flush()  # memory stays bounded
        self._buffer.append(batch)
        self._buffered_bytes += batch.nbytes
        self.next_sequence += 1
        self._ping_in_time()

    def flush(self) -> None:
        """Make everything written so far durable, but not yet visible. This also renews the lease.

        Raises:
            StorageError: it is unknown whether the events are durable. Call it again to continue; no event is written
                twice.
            FencedError: the transaction takes no more events, or this participant was opened elsewhere. The transaction
                does not contain what was not flushed before.
        """
        self._check_open()
        self._finish()
        if self._buffer:
            self._on_its_way = self._begin_flush()
            self._finish()
        elif self._core.clock.monotonic_ms() != self._heard_ms:
            self.ping()

    def ping(self) -> None:
        """Renew the lease of the transaction.

        Raises:
            FencedError: the transaction was aborted.
        """
        self._check_open()
        try:
            self._core.catalogue.ping_shared(self._shared, self._core.clock.wall_ms())
        except (FencedError, UsageError) as error:
            self._failure = error
            raise
        self._heard_ms = self._core.clock.monotonic_ms()

    def close(self) -> None:
        """Flush, and take no more events. The call can be repeated."""
        if not self._is_closed:
            self.flush()
            self._is_closed = True

    def __enter__(self) -> TransactionWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        self._is_closed = True

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise UsageError(f"a writer of transaction '{self._shared.name}' is closed; open another one")
        if self._core.threads.process_id != self._process:
            raise UsageError(
                f"a writer of transaction '{self._shared.name}' belongs to the process that opened it; open one here"
            )

    def _ping_in_time(self) -> None:
        """Give a sign of life if none was given for a while (TX7)."""
        silent_ms = self._core.clock.monotonic_ms() - self._heard_ms
        if silent_ms * PINGS_PER_LEASE >= self._shared.lease_ms:
            with suppress(StorageError):  # the next write tries again; what was written is taken
                self.ping()

    def _begin_flush(self) -> _Flush:
        stream, batches = self._shared.stream, [batch for batch in self._buffer if batch.num_rows]
        encoded = encode_batches(stream, batches, self._fallback) if batches else None
        found = _Flush(self._new_path(), (self._durable + 1, self.next_sequence - 1), encoded)
        self._buffer, self._buffered_bytes = [], 0
        return found

    def _new_path(self) -> str:
        stream_id = self._shared.stream.stream_id
        directory = transaction_directory(stream_id, self._shared.owner, self._shared.name).partition("/")[2]
        return chunk_path(stream_id, directory, self._core.new_name())

    def _finish(self) -> None:
        """Make what is on its way durable, then have it recorded, once (TX3)."""
        while self._on_its_way is not None:
            try:
                self._record(self._on_its_way)
            except RemovedFileError:  # taken for an orphan: the same events go into another file (S89)
                self._on_its_way.begin_again(self._new_path())

    def _record(self, flush: _Flush) -> None:
        core = self._core
        if flush.encoded is not None and not flush.is_put:
            core.storage.put(flush.path, flush.encoded.chunk.buffers)  # durable before it is recorded (LY3)
            flush.is_put = True
        chunk = None if flush.encoded is None else flush.encoded.record(flush.path)
        was_uncertain, flush.is_uncertain = flush.is_uncertain, True
        now_ms = core.clock.wall_ms()
        try:
            core.catalogue.write_shared(self._shared, self.participant, self._token, flush.numbers, chunk, now_ms)
        except RemovedFileError:
            raise
        except (FencedError, UsageError) as error:
            self._failure = error
            if not was_uncertain:  # else a former try may have been recorded, and the file belongs to the store
                delete_quietly(core.storage, [flush.path])
            raise
        self._durable = flush.numbers[1]
        self._on_its_way = None
        self._heard_ms = core.clock.monotonic_ms()


class SharedTransaction:
    """A transaction of a stream that several processes write, and that is committed or aborted as a whole.

    Any process that has opened the store can find it by its stream and its ``id`` (``Store.transaction``). Every method
    may be repeated after a ``StorageError``.
    """

    def __init__(self, core: StoreCore, shared: Shared, look_after: Callable[[str], None]) -> None:
        """Use ``Store.begin_shared`` or ``Store.transaction``."""
        self._look_after = look_after
        self._core = core
        self._shared = shared

    @property
    def id(self) -> str:
        """The id by which other processes find this transaction."""
        return self._shared.name

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return self._shared.stream.name

    @property
    def lease_ms(self) -> int:
        """The lease in ms: an open transaction is aborted if it is not renewed for this long."""
        return self._shared.lease_ms

    def writer(self, participant: str = "") -> TransactionWriter:
        """Return a writer of this transaction. Any number of writers, in any processes, can write at the same time.

        Args:
            participant: a name that stays the same when the process is started again. Numbered writes that are already
                durable are then not written twice, and the former writer of that name is refused from now on. Default:
                a new name.

        Raises:
            FencedError: the transaction takes no more events, or its owner was replaced.
            UsageError: the stream was deleted, or the transaction is no longer known.
        """
        return TransactionWriter(self._core, self._shared, participant or self._core.new_name())

    def ping(self) -> None:
        """Renew the lease, as a write does. If you work on a batch for long, call it several times per lease.

        Raises:
            FencedError: the transaction was aborted, perhaps because its lease was over. Begin another one.
        """
        self._core.catalogue.ping_shared(self._shared, self._core.clock.wall_ms())

    def prepare(self) -> None:
        """Take no more events, and wait without any limit for ``commit`` or ``abort``: the lease no longer applies.

        The transaction contains what its participants have flushed. It does not contain what they have not flushed;
        they get an error.

        Raises:
            FencedError: the transaction was aborted, perhaps because its lease was over. Begin another one.
        """
        self._decide(Prepare())

    def commit(self) -> None:
        """Make all events visible in one step. Each participant's events are in the order in which it wrote them.

        Raises:
            FencedError: the transaction was aborted, perhaps because its lease was over. Its events are gone.
            UsageError: the transaction is no longer known, so it is unknown how it ended.
        """
        self._decide(Commit())
        self._sweep()
        self._look_after(self.stream)

    def abort(self) -> None:
        """Drop the events of the transaction, which may be open or prepared.

        Raises:
            FencedError: the transaction was committed, and readers may have seen its events.
            UsageError: the transaction is no longer known, so it is unknown how it ended.
        """
        self._decide(Abort())
        self._sweep()

    def status(self) -> TransactionInfo:
        """Return the recorded status of the transaction.

        Raises:
            UsageError: the transaction is no longer known.
        """
        core, shared = self._core, self._shared
        found = core.catalogue.transactions(shared.owner, shared.name, shared.stream.name)
        for info in found:
            if info.name == shared.name:
                return info
        core.catalogue.find_shared(shared.stream.name, shared.name)  # says what is missing
        raise UsageError(f"transaction '{shared.name}' of stream '{shared.stream.name}' came just now; ask again")

    def _decide(self, verdict: Verdict) -> None:
        now_ms = self._core.clock.wall_ms()
        orphans = self._core.catalogue.decide_shared(self._shared, verdict, now_ms)
        delete_quietly(self._core.storage, orphans)

    def _sweep(self) -> None:
        remove_leftovers(self._core, self._shared.stream.stream_id, self._shared.owner, self._shared.name)
