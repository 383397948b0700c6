"""Transactions: open, spilled to chunks, prepared, committed or aborted; written by one process or by several.

Counterpart: ``protocol.store.transactions`` decides, ``catalogue`` records. Source: S12–S14 and S18 of
docs/spec/stream-store.md; rules TX1, TX3, TX4, TX8, TX11 of docs/spec/shared-transactions.md. An open transaction of
one process writes nothing to the catalogue: until ``prepare`` its chunks are orphans below
``<stream>/txn/<owner>/<epoch>/``, which ``Transactions.recover`` of a newer epoch sweeps. Never takes a file away that
the catalogue may count on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.errors import FencedError, HeadgateError, StorageError, UsageError
from headgate.protocol.store.transactions import PINGS_PER_LEASE, Abort, Commit, Prepare, Verdict
from headgate.store.catalogue.records import ChunkRecord, Shared, TransactionInfo
from headgate.store.chunks import (
    FLUSH_BYTES,
    BatchChunk,
    check_events,
    chunk_path,
    delete_quietly,
    encode_batches,
    owner_directory,
    transaction_directory,
)
from headgate.store.core import Spill, StoreCore
from headgate.store.routing import hash_text
from headgate.store.streams import RemovedFileError, SchemaHistory, StreamInfo, check_same_schema, schema_difference


def check_schema_at_begin(stream: StreamInfo, schemas: SchemaHistory, what: str, schema: pa.Schema) -> None:
    """Check that events of a transaction have the schema that its stream had when it began, or a former one."""
    if not schema_difference(stream.schema, schema):
        return
    version = schemas.fitting(schema)
    if version is None:
        check_same_schema(stream.name, stream.schema, schema)
    elif version > stream.schema_version:
        raise UsageError(
            f"{what} began before stream '{stream.name}' got the columns of these events; write them in another one"
        )


class Transaction:
    """An open transaction. ``write`` and ``seal`` belong to one thread, ``prepare`` to any one after ``seal``."""

    def __init__(self, core: StoreCore, stream: StreamInfo, name: str, owner: str, epoch: int) -> None:
        """Use ``Transactions.begin``."""
        self.stream = stream
        self.name = name
        self.owner = owner
        self.epoch = epoch
        self.events_count = 0
        self._core = core
        self._schemas = SchemaHistory(core.catalogue, stream)
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._written: list[ChunkRecord] = []
        self._part: Spill | None = None
        self._is_open = True
        self._is_aborted = False
        self._may_be_prepared = False
        # without a routing key all of a transaction goes to one segment, in order (S2)
        self._fallback = hash_text(f"{owner}/{epoch}/{name}" if name else core.new_name())

    def write(self, batch: pa.RecordBatch) -> None:
        """Add events. Memory stays bounded: large transactions are written as they come, still invisible.

        Raises:
            UsageError: other schema, too large an event, or the transaction is not open.
            StorageError: an earlier part could not be written, and nothing of ``batch`` was taken: repeat it, or give
                up with ``abort``.
        """
        if not self._is_open:
            raise UsageError(f"transaction '{self.name}' of stream '{self.stream.name}' takes no more events")  # S12
        check_schema_at_begin(self.stream, self._schemas, f"transaction '{self.name}'", batch.schema)
        check_events(self.stream.name, batch)
        if batch.num_rows == 0:
            return
        is_full = self._buffered_bytes + batch.nbytes >= FLUSH_BYTES
        if is_full:
            # before the batch is taken: if it raises, the caller may repeat the same batch
            self._wait_for_spill()  # one at a time: bounded, and in order
        self._buffer.append(batch)
        self.events_count += batch.num_rows
        self._buffered_bytes += batch.nbytes
        if is_full:
            self._part = self._core.spills.begin(self._buffer, self._write_chunk)
            self._buffer, self._buffered_bytes = [], 0

    def seal(self, name: str | None = None) -> None:
        """Take no more events; give it its final name. No I/O."""
        self._is_open = False
        if name is not None:
            self.name = name

    def prepare(self) -> None:
        """Make it durable, immutable and still invisible (S12). May be repeated after it raised.

        Raises:
            StorageError: it is not prepared, or its outcome is unknown; repeating is safe.
            FencedError: a newer epoch of the owner exists.
        """
        self.seal()
        if self._is_aborted:
            raise UsageError(f"transaction '{self.name}' of stream '{self.stream.name}' was aborted; begin another one")
        if not self.name:
            raise UsageError(f"a transaction of '{self.owner}' needs a name before it can be prepared")
        self._wait_for_spill()
        # a repeat finds the buffer empty if only the catalogue failed; the chunks are in `_written` then
        if self._buffer:
            self._write_chunk(self._buffer)
            self._buffer = []
        assert self._part is None, "a part that is still being written is not in `_written`"
        assert sum(x.events_count for chunk in self._written for x in chunk.entries) == self.events_count, (
            "each event is in one chunk"
        )
        # before the call: if its answer is lost, the files may belong to the store
        self._may_be_prepared = True
        now_ms = self._core.clock.wall_ms()
        self._core.catalogue.prepare(self.stream, self.name, self.owner, self.epoch, self._written, now_ms)

    def abort(self) -> None:
        """Drop the transaction and its files. It is open, or ``prepare`` raised; one that is prepared is aborted, too.

        Raises:
            FencedError, CorruptionError, StorageError: ``prepare`` was tried; see ``Transactions.abort``.
        """
        self.seal()
        if self._may_be_prepared:  # then its files may belong to the store: only a recorded verdict frees them
            now_ms = self._core.clock.wall_ms()
            orphans = self._core.catalogue.abort(self.stream.name, self.name, self.owner, self.epoch, now_ms)
            delete_quietly(self._core.storage, orphans)
        self._is_aborted = True
        self._buffer = []
        if self._part is not None:
            # until then its file is not in `_written`, and would be left
            self._part.is_written()  # wait for it
            self._part = None
        delete_quietly(self._core.storage, [chunk.path for chunk in self._written])
        self._written = []

    def _write_chunk(self, batches: Sequence[pa.RecordBatch]) -> None:
        encoded = encode_batches(self.stream, batches, self._fallback)
        base = owner_directory(self.stream.stream_id, self.owner).partition("/")[2]
        path = chunk_path(self.stream.stream_id, f"{base}/{self.epoch}", self._core.new_name())
        self._core.storage.put(path, encoded.chunk.buffers)
        # only now: a put that failed leaves an orphan at most, which the next epoch sweeps
        self._written.append(encoded.record(path))

    def _wait_for_spill(self) -> None:
        """Wait for the part being written; write it again if that failed."""
        if self._part is None:
            return
        if not self._part.is_written():
            self._write_chunk(self._part.batches)
        self._part = None


_CHUNK = re.compile(r"([0-9]+)/[^/]+\.chunk")
"""What this module writes below an owner's directory: epoch and file."""


class Transactions:
    """Transactions of one process, by owner: ``Store.transactions``, for sinks of pipelines."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core

    def begin(self, stream: str, *, owner: str, epoch: int, name: str = "") -> Transaction:
        """Begin a transaction that only this process writes; ``Store.begin_shared`` begins one that others write, too.

        You can also pass ``name`` later, to ``Transaction.seal``. The transaction leaves no trace until it is prepared.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            UsageError: there is no such stream, it is sealed, or the name is taken.
        """
        if not owner or epoch < 0:
            raise UsageError(f"a transaction needs an owner and an epoch of at least 0, not {owner!r} and {epoch}")
        info = self._core.catalogue.begin(stream, name, owner, epoch)
        return Transaction(self._core, info, name, owner, epoch)

    def commit(
        self, names: Sequence[tuple[str, str]], *, owner: str, epoch: int, times: Mapping[str, int] | None = None
    ) -> None:
        """Commit prepared transactions, given as (stream, name), in one step: readers see all of them or nothing (S14).

        ``times``: stream → milliseconds; what ``owner`` commits later has no event as early as that.

        Raises:
            FencedError: a newer epoch of ``owner`` exists; nothing was committed.
            CorruptionError: one is unknown or was aborted (S13); nothing was committed.
            StorageError: the outcome is unknown; repeating is safe.
        """
        self._core.catalogue.commit(names, owner, epoch, self._core.clock.wall_ms(), times or {})

    def abort(self, stream: str, name: str, *, owner: str, epoch: int) -> None:
        """Abort a prepared transaction, or make sure that none can be prepared under this name.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            CorruptionError: it was committed (S13).
        """
        orphans = self._core.catalogue.abort(stream, name, owner, epoch, self._core.clock.wall_ms())
        delete_quietly(self._core.storage, orphans)

    def forget_outcomes(self, names: Sequence[str], *, owner: str, epoch: int) -> None:
        """Forget how these transactions of ``owner`` were decided, because it will never ask again.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
        """
        self._core.catalogue.forget_outcomes(names, owner, epoch)

    def fence(self, owner: str, epoch: int) -> None:
        """Refuse all older epochs of ``owner`` from now on (S18).

        Raises:
            FencedError: a newer epoch exists.
        """
        self._core.catalogue.fence(owner, epoch)

    def recover(
        self,
        stream: str,
        *,
        owner: str,
        epoch: int,
        keep: Collection[str] = (),
        leave: Callable[[StorageError], None] = lambda error: None,
    ) -> list[str]:
        """Fence older epochs, abort prepared transactions that are not in ``keep``, and remove leftovers.

        ``stream`` is the stream that ``owner`` writes from now on; its transactions in other streams are aborted as
        well. Leftovers that cannot be removed now are harmless and stay for the next epoch; ``leave`` is called
        with the reason. Returns the names of the aborted transactions.

        Raises:
            FencedError: a newer epoch exists.
        """
        # first: once older epochs are fenced, none of them can record a file that is removed below
        recovered = self._core.catalogue.recover(stream, owner, epoch, keep, self._core.clock.wall_ms())
        # after the aborts are recorded: a crash in between leaves orphans, not prepared transactions without files
        delete_quietly(self._core.storage, recovered.orphans)
        try:
            for info in recovered.streams:
                self._sweep(info, owner, epoch)
        except StorageError as error:
            leave(error)
        return list(recovered.aborted)

    def abort_all(self, owner: str) -> int:
        """Abort the prepared and open transactions of ``owner`` that no process will decide any more.

        Never call it while a process of the owner is alive. Returns the number of aborted transactions.
        """
        epoch = self._core.catalogue.owner(owner).generation
        waiting = [x for x in self._core.catalogue.transactions(owner, "", None) if not x.status.is_terminal]
        for transaction in waiting:
            self.abort(transaction.stream, transaction.name, owner=owner, epoch=epoch)
        return len(waiting)

    def _sweep(self, stream: StreamInfo, owner: str, epoch: int) -> None:
        """Remove chunks that older epochs left without a record: they can never be prepared any more."""
        base = owner_directory(stream.stream_id, owner)
        self._core.storage.sweep_unfinished(base)
        matches = [(path, _CHUNK.fullmatch(path[len(base) + 1 :])) for path in self._core.storage.list(base)]
        found = [path for path, match in matches if match and int(match[1]) < epoch]  # a stranger's file stays
        if found:
            known = self._core.catalogue.chunk_paths(base)
            delete_quietly(self._core.storage, [path for path in found if path not in known])


def remove_leftovers(core: StoreCore, stream_id: int, owner: str, name: str) -> None:
    """Remove what participants that died left of a transaction that has ended: nothing can record it any more."""
    with suppress(StorageError):  # then ``Store.collect_orphans`` finds it
        base = transaction_directory(stream_id, owner, name)
        found = core.storage.list(base)
        core.storage.sweep_unfinished(base)
        known = core.catalogue.known_chunks(found)  # after the list of files
        delete_quietly(core.storage, [path for path in found if path not in known])


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
        # from here on the former writer of this participant is refused (TX4)
        last = core.catalogue.join_shared(shared, participant, self._token, core.clock.wall_ms())
        self._durable = last
        self._heard_ms = core.clock.monotonic_ms()
        self.next_sequence = last + 1
        """Number of the next write: the first that the transaction does not have."""

    def write(self, batch: pa.RecordBatch, sequence: int | None = None) -> None:
        """Add events after those that this participant wrote before. ``flush`` and ``close`` make them durable.

        Args:
            batch: events with the schema that the stream had when the transaction began.
            sequence: the number of this write, from 1. A write with a number that was used before is dropped. Default:
            the
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
        # durable, or in the buffer: either way it is written once, and `flush` says when it is durable
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
        # nothing to write, but a flush renews the lease; unless `_finish` has done so just now
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
        """Give a sign of life if none was given for a while."""
        silent_ms = self._core.clock.monotonic_ms() - self._heard_ms
        if silent_ms * PINGS_PER_LEASE >= self._shared.lease_ms:
            with suppress(StorageError):  # the next write tries again; what was written is taken
                self.ping()

    def _begin_flush(self) -> _Flush:
        assert self._on_its_way is None, "one flush at a time: the next one's numbers follow those of this"
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
            except RemovedFileError:  # taken for an orphan: the same events go into another file
                self._on_its_way.begin_again(self._new_path())

    def _record(self, flush: _Flush) -> None:
        core = self._core
        if flush.encoded is not None and not flush.is_put:
            core.storage.put(flush.path, flush.encoded.chunk.buffers)  # durable before it is recorded
            flush.is_put = True
        chunk = None if flush.encoded is None else flush.encoded.record(flush.path)
        # before the call: whatever it raises may come after the writes were recorded
        was_uncertain, flush.is_uncertain = flush.is_uncertain, True
        now_ms = core.clock.wall_ms()
        try:
            core.catalogue.write_shared(self._shared, self.participant, self._token, flush.numbers, chunk, now_ms)
        except RemovedFileError:
            raise  # no end: `_finish` goes on with another file
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
        # decided first: what is swept below is what can never be recorded any more
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
