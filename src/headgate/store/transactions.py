"""Transactions: events that become visible together, when their owner says so.

Counterpart: ``protocol.transactions`` decides, this module records. Source: S11 to S18 of docs/spec/stream-store.md.
An open transaction writes nothing to the catalogue: until ``prepare`` its chunks are orphans below
``<stream>/txn/<owner>/<epoch>/``, which ``TransactionLog.recover`` of a newer epoch sweeps.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import pyarrow as pa
import sqlalchemy as sa
import xxhash
from sqlalchemy.engine import Connection

from headgate.codec.chunk import PartEntry
from headgate.errors import CorruptionError, FencedError, UsageError
from headgate.protocol.transactions import (
    Decision,
    Ignored,
    Proceed,
    Record,
    RefuseContradiction,
    RefuseFenced,
    RefuseUnknown,
    Request,
    Status,
    TransactionRecord,
    Verb,
    decide,
    next_fence,
)
from headgate.store import tables as t
from headgate.store.catalogue import Catalogue
from headgate.store.chunks import (
    FLUSH_BYTES,
    assign_positions,
    delete_quietly,
    encode_batches,
    insert_chunk,
    new_chunk_path,
    part_row,
)
from headgate.store.limits import check_event_sizes
from headgate.store.local import sweep_unfinished
from headgate.store.routing import hash_text
from headgate.store.schemas import check_same_schema
from headgate.store.storage import Storage
from headgate.store.streams import StreamInfo, check_writable, find_stream, inserted_id

OUTCOMES_RETAINED = 100_000
"""Decided transactions remembered (S17): weeks of checkpoints; a verb for an older one fails loudly as unknown."""


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """A recorded transaction. ``events_count`` is what it holds; ``changed_ms`` when its status last changed."""

    stream: str
    name: str
    owner: str
    epoch: int
    status: Status
    events_count: int
    changed_ms: int


def _epoch_of(path: str) -> int:
    """Return the epoch in whose directory ``path`` is; a file that is not ours belongs to none, and is never swept."""
    name = path.split("/")[0]
    return int(name) if name.isascii() and name.isdigit() else sys.maxsize


def owner_directory(stream_id: int, owner: str) -> str:
    """Return where an owner's chunks are, prepared or not."""
    return f"{stream_id}/txn/{xxhash.xxh3_64_hexdigest(owner.encode())}"


class TransactionLog:
    """Transactions of one store: the verbs, each one database transaction."""

    def __init__(self, catalogue: Catalogue, storage: Storage, now_ms: Callable[[], int]) -> None:
        """Use ``Store``."""
        self._catalogue = catalogue
        self._storage = storage
        self._now_ms = now_ms
        self._where = str(catalogue.path.parent)

    def begin(self, stream: StreamInfo, name: str, owner: str, epoch: int) -> Transaction:
        """Return an open transaction.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            UsageError: the name is taken, or the stream is sealed.
        """
        if not owner or epoch < 0:
            raise UsageError(f"a transaction needs an owner and an epoch of at least 0, not {owner!r} and {epoch}")
        with self._catalogue.read() as connection:
            check_writable(connection, stream)
            record = _find_record(connection, stream.stream_id, name)
            decision = decide(Request(Verb.BEGIN, name, owner, epoch), record, _fence_of(connection, owner))
        _refuse(decision, Request(Verb.BEGIN, name, owner, epoch), stream.name)
        return Transaction(self, self._storage, stream, name, owner, epoch)

    def prepare(self, transaction: Transaction, chunks: Sequence[PreparedChunk]) -> None:
        """Record ``transaction`` as prepared, with the durable files that hold its events (S12)."""
        stream = transaction.stream
        content = ",".join(chunk.path for chunk in chunks)
        request = Request(Verb.PREPARE, transaction.name, transaction.owner, transaction.epoch, content)
        with self._catalogue.write() as connection:
            check_writable(connection, stream)
            decision = self._decide(connection, stream, request)
            if isinstance(decision, Record):
                count = sum(entry.events_count for chunk in chunks for entry in chunk.entries)
                transaction_id = self._insert(connection, stream.stream_id, request, decision.status, count)
                _insert_prepared(connection, stream.stream_id, transaction_id, chunks)

    def commit(self, names: Sequence[tuple[str, str]], owner: str, epoch: int) -> None:
        """Commit (stream, transaction name) pairs in one step: readers see all of them or nothing (S14).

        Raises:
            FencedError: a newer epoch of ``owner`` exists; nothing was committed.
            CorruptionError: one is unknown or was aborted (S13); nothing was committed.
            StorageError: the outcome is unknown; repeating is safe.
        """
        with self._catalogue.write() as connection:
            for stream_name, name in names:
                stream = find_stream(connection, stream_name, self._where)
                decision = self._decide(connection, stream, Request(Verb.COMMIT, name, owner, epoch))
                if isinstance(decision, Record):
                    self._apply_commit(connection, stream, name)
            _forget_old_outcomes(connection)

    def abort(self, stream_name: str, name: str, owner: str, epoch: int) -> None:
        """Abort a transaction; its events go away.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            CorruptionError: it was committed (S13).
        """
        with self._catalogue.write() as connection:
            stream = find_stream(connection, stream_name, self._where)
            orphans = self._abort(connection, stream, Request(Verb.ABORT, name, owner, epoch))
        delete_quietly(self._storage, orphans)

    def fence(self, owner: str, epoch: int) -> None:
        """Refuse every verb of older epochs of ``owner`` from now on (S18).

        Raises:
            FencedError: a newer epoch exists.
        """
        with self._catalogue.write() as connection:
            self._raise_fence(connection, owner, epoch)

    def recover(self, stream_name: str, owner: str, epoch: int, keep: Collection[str]) -> list[str]:
        """Fence older epochs, abort what ``owner`` has prepared and is not in ``keep``, sweep what is left of them.

        Returns:
            the names aborted.

        Raises:
            FencedError: a newer epoch exists.
        """
        orphans: list[str] = []
        with self._catalogue.write() as connection:
            self._raise_fence(connection, owner, epoch)
            stream = find_stream(connection, stream_name, self._where)
            query = sa.select(t.transactions.c.name).where(
                t.transactions.c.owner == owner,
                t.transactions.c.stream_id == stream.stream_id,
                t.transactions.c.status == Status.PREPARED.value,
            )
            aborted = sorted(name for name in connection.scalars(query) if name not in keep)
            for name in aborted:
                orphans += self._abort(connection, stream, Request(Verb.ABORT, name, owner, epoch))
        delete_quietly(self._storage, orphans)
        self._sweep(stream, owner, epoch)
        return aborted

    def infos(self, owner: str | None, prefix: str, stream: str | None) -> list[TransactionInfo]:
        """Return recorded transactions by name."""
        query = sa.select(t.transactions, t.streams.c.name.label("stream")).join_from(
            t.transactions, t.streams, t.transactions.c.stream_id == t.streams.c.id
        )
        if owner is not None:
            query = query.where(t.transactions.c.owner == owner)
        if stream is not None:
            query = query.where(t.streams.c.name == stream)
        if prefix:
            query = query.where(t.transactions.c.name.startswith(prefix, autoescape=True))
        with self._catalogue.read() as connection:
            rows = connection.execute(query.order_by(t.transactions.c.name)).all()
        return [
            TransactionInfo(
                row.stream, row.name, row.owner, row.epoch, Status(row.status), row.events_count, row.changed_ms
            )
            for row in rows
        ]

    def _decide(self, connection: Connection, stream: StreamInfo, request: Request) -> Decision:
        record = _find_record(connection, stream.stream_id, request.name)
        fence = _fence_of(connection, request.owner)
        decision = decide(request, record, fence)
        _refuse(decision, request, stream.name)
        _set_fence(connection, request.owner, fence, next_fence(fence, request.epoch))
        return decision

    def _insert(
        self, connection: Connection, stream_id: int, request: Request, status: Status, events_count: int
    ) -> int:
        values = {
            "stream_id": stream_id,
            "name": request.name,
            "owner": request.owner,
            "epoch": request.epoch,
            "status": status.value,
            "content": request.content,
            "events_count": events_count,
            "changed_ms": self._now_ms(),
        }
        return inserted_id(connection.execute(t.transactions.insert().values(values)))

    def _apply_commit(self, connection: Connection, stream: StreamInfo, name: str) -> None:
        transaction_id = self._set_status(connection, stream, name, Status.COMMITTED)
        mine = t.prepared_parts.c.transaction_id == transaction_id
        rows = connection.execute(sa.select(t.prepared_parts).where(mine).order_by(t.prepared_parts.c.number)).all()
        parts = [
            (
                int(row.chunk_id),
                PartEntry(
                    row.segment, row.events_count, row.offset, row.size_bytes, int.from_bytes(row.checksum, "big")
                ),
            )
            for row in rows
        ]
        assign_positions(connection, stream.stream_id, parts)
        connection.execute(t.prepared_parts.delete().where(mine))

    def _abort(self, connection: Connection, stream: StreamInfo, request: Request) -> list[str]:
        """Record the abort; return the files that nothing refers to any more."""
        decision = self._decide(connection, stream, request)
        if not isinstance(decision, Record):
            return []
        if _find_record(connection, stream.stream_id, request.name) is None:
            self._insert(connection, stream.stream_id, request, decision.status, 0)
            return []
        transaction_id = self._set_status(connection, stream, request.name, decision.status)
        mine = t.prepared_parts.c.transaction_id == transaction_id
        numbers = set(connection.scalars(sa.select(t.prepared_parts.c.chunk_id).where(mine)))
        paths = list(connection.scalars(sa.select(t.chunks.c.path).where(t.chunks.c.id.in_(numbers))))
        connection.execute(t.prepared_parts.delete().where(mine))
        connection.execute(t.chunks.delete().where(t.chunks.c.id.in_(numbers)))
        return paths

    def _set_status(self, connection: Connection, stream: StreamInfo, name: str, status: Status) -> int:
        where = (t.transactions.c.stream_id == stream.stream_id, t.transactions.c.name == name)
        connection.execute(t.transactions.update().where(*where).values(status=status.value, changed_ms=self._now_ms()))
        return int(connection.scalars(sa.select(t.transactions.c.id).where(*where)).one())

    def _raise_fence(self, connection: Connection, owner: str, epoch: int) -> None:
        fence = _fence_of(connection, owner)
        if epoch < fence:
            raise FencedError(f"'{owner}'", epoch, fence)
        _set_fence(connection, owner, fence, epoch)

    def _sweep(self, stream: StreamInfo, owner: str, epoch: int) -> None:
        """Remove chunks that older epochs left without a record: they can never be prepared any more."""
        base = owner_directory(stream.stream_id, owner)
        sweep_unfinished(self._storage, base)
        found = [path for path in self._storage.list(base) if _epoch_of(path[len(base) + 1 :]) < epoch]
        if not found:
            return
        with self._catalogue.read() as connection:
            query = sa.select(t.chunks.c.path).where(t.chunks.c.path.startswith(base + "/", autoescape=True))
            known = set(connection.scalars(query))
        delete_quietly(self._storage, [path for path in found if path not in known])


@dataclass(frozen=True, slots=True)
class PreparedChunk:
    """A durable file of a transaction that is not prepared yet."""

    path: str
    size_bytes: int
    entries: tuple[PartEntry, ...]


class Transaction:
    """An open transaction. ``write`` and ``seal`` belong to one thread, ``prepare`` to any one after ``seal``."""

    def __init__(
        self, log: TransactionLog, storage: Storage, stream: StreamInfo, name: str, owner: str, epoch: int
    ) -> None:
        """Use ``Store.begin``."""
        self.stream = stream
        self.name = name
        self.owner = owner
        self.epoch = epoch
        self.events_count = 0
        self._log = log
        self._storage = storage
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._written: list[PreparedChunk] = []
        self._spill: Future[None] | None = None
        self._spilling: list[pa.RecordBatch] = []
        self._is_open = True
        # without a routing key all of a transaction goes to one segment, in order (S2)
        self._fallback = hash_text(f"{owner}/{epoch}/{name}" if name else secrets.token_hex(8))

    def write(self, batch: pa.RecordBatch) -> None:
        """Add events. Memory stays bounded: large transactions are written as they come, still invisible.

        Raises:
            UsageError: other schema, too large an event, or the transaction is not open.
            StorageError: an earlier part could not be written; ``prepare`` may be tried, or give up with ``abort``.
        """
        if not self._is_open:
            raise UsageError(f"transaction '{self.name}' of stream '{self.stream.name}' takes no more events (S12)")
        check_same_schema(self.stream.name, self.stream.schema, batch.schema)
        check_event_sizes(self.stream.name, batch)
        if batch.num_rows == 0:
            return
        self._buffer.append(batch)
        self.events_count += batch.num_rows
        self._buffered_bytes += batch.nbytes
        if self._buffered_bytes >= FLUSH_BYTES:
            self._finish_spill()  # one at a time: bounded, and in order
            self._spilling, self._buffer, self._buffered_bytes = self._buffer, [], 0
            self._spill = _spill_threads().submit(self._write_chunk, self._spilling)

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
        if not self.name:
            raise UsageError(f"a transaction of '{self.owner}' needs a name before it can be prepared")
        self._finish_spill()
        if self._buffer:
            self._write_chunk(self._buffer)
            self._buffer = []
        self._log.prepare(self, self._written)

    def abort(self) -> None:
        """Drop an open transaction and its files. For a prepared one use ``Store.abort_transaction``."""
        self.seal()
        self._buffer = []
        if self._spill is not None:
            self._spill.exception()  # wait for it
            self._spill, self._spilling = None, []
        delete_quietly(self._storage, [chunk.path for chunk in self._written])
        self._written = []

    def _write_chunk(self, batches: list[pa.RecordBatch]) -> None:
        encoded = encode_batches(self.stream, batches, self._fallback).chunk
        base = owner_directory(self.stream.stream_id, self.owner).partition("/")[2]
        path = new_chunk_path(self.stream.stream_id, f"{base}/{self.epoch}")
        self._storage.put(path, encoded.buffers)
        self._written.append(PreparedChunk(path, encoded.size_bytes, encoded.entries))

    def _finish_spill(self) -> None:
        """Wait for the part being written; write it again if that failed."""
        if self._spill is None:
            return
        if self._spill.exception() is not None:
            self._write_chunk(self._spilling)
        self._spill, self._spilling = None, []


@cache
def _spill_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=2, thread_name_prefix="headgate-spill")


def _insert_prepared(
    connection: Connection, stream_id: int, transaction_id: int, chunks: Sequence[PreparedChunk]
) -> None:
    rows: list[dict[str, object]] = []
    for chunk in chunks:
        chunk_id = insert_chunk(connection, stream_id, chunk.path, chunk.size_bytes)
        rows += [
            {"transaction_id": transaction_id, "number": len(rows) + number, **part_row(chunk_id, entry)}
            for number, entry in enumerate(chunk.entries)
        ]
    if rows:
        connection.execute(t.prepared_parts.insert(), rows)


def _find_record(connection: Connection, stream_id: int, name: str) -> TransactionRecord | None:
    where = (t.transactions.c.stream_id == stream_id, t.transactions.c.name == name)
    row = connection.execute(sa.select(t.transactions).where(*where)).one_or_none()
    if row is None:
        return None
    return TransactionRecord(row.name, row.owner, row.epoch, Status(row.status), row.content)


def _fence_of(connection: Connection, owner: str) -> int:
    found = connection.scalar(sa.select(t.fences.c.epoch).where(t.fences.c.owner == owner))
    return 0 if found is None else int(found)


def _set_fence(connection: Connection, owner: str, old: int, new: int) -> None:
    if new == old:
        return
    if connection.execute(t.fences.update().where(t.fences.c.owner == owner).values(epoch=new)).rowcount == 0:
        connection.execute(t.fences.insert().values(owner=owner, epoch=new))


def _forget_old_outcomes(connection: Connection) -> None:
    newest = connection.scalar(sa.select(sa.func.max(t.transactions.c.id)))
    if newest is not None and newest > OUTCOMES_RETAINED:
        connection.execute(
            t.transactions.delete().where(
                t.transactions.c.id <= newest - OUTCOMES_RETAINED,
                t.transactions.c.status != Status.PREPARED.value,
            )
        )


def _refuse(decision: Decision, request: Request, stream: str) -> None:
    """Raise what a refusing decision means."""
    what = f"transaction '{request.name}' of stream '{stream}'"
    match decision:
        case Proceed() | Record() | Ignored():
            return
        case RefuseFenced(newest):
            raise FencedError(f"'{request.owner}' ({request.verb.value} of {what})", request.epoch, newest)
        case RefuseUnknown():
            raise CorruptionError(what, 0, "a prepared transaction to commit", "no record of it")
        case RefuseContradiction(recorded, problem):
            if request.verb in (Verb.COMMIT, Verb.ABORT):
                raise CorruptionError(what, 0, f"one to {request.verb.value}", f"{recorded.value}: {problem}")
            raise UsageError(f"{what} is {recorded.value} already: {problem}; choose another name")
