"""Transactions: events that become visible together, when their owner says so.

Counterpart: ``protocol.store.transactions`` decides, this module records. Source: S12 to S18 of
docs/spec/stream-store.md. An open transaction writes nothing to the catalogue: until ``prepare`` its chunks are orphans
below ``<stream>/txn/<owner>/<epoch>/``, which ``TransactionLog.recover`` of a newer epoch sweeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.codec.chunk import PartEntry
from headgate.errors import CorruptionError, FencedError, UsageError
from headgate.protocol.store.transactions import (
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
from headgate.storage.base import Storage
from headgate.storage.local import sweep_unfinished
from headgate.store import tables as t
from headgate.store.catalogue import Catalogue
from headgate.store.chunks import (
    assign_positions,
    delete_quietly,
    insert_chunk,
    part_row,
)
from headgate.store.open_transaction import PreparedChunk, Transaction, owner_directory
from headgate.store.outcomes import DECISIONS_BETWEEN_LOOKS, forget_named, forget_oldest
from headgate.store.streams import StreamInfo, check_writable, find_stream, inserted_id, stream_info

_CHUNK = re.compile(r"([0-9]+)/[^/]+\.chunk")
"""What this module writes below an owner's directory: epoch and file."""


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


class TransactionLog:
    """Transactions of one store: the verbs, each one database transaction."""

    def __init__(self, catalogue: Catalogue, storage: Storage, now_ms: Callable[[], int]) -> None:
        """Use ``Store``."""
        self._catalogue = catalogue
        self._storage = storage
        self._now_ms = now_ms
        self._where = str(catalogue.path.parent)
        self._decisions_count = 0

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
            self._decided(connection, owner)

    def abort(self, stream_name: str, name: str, owner: str, epoch: int) -> None:
        """Abort a transaction; its events go away.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            CorruptionError: it was committed (S13).
        """
        with self._catalogue.write() as connection:
            stream = find_stream(connection, stream_name, self._where)
            orphans = self._abort(connection, stream, Request(Verb.ABORT, name, owner, epoch))
            self._decided(connection, owner)
        delete_quietly(self._storage, orphans)

    def forget(self, names: Sequence[str], owner: str, epoch: int) -> None:
        """Forget the outcomes of these transactions: ``owner`` will never ask for them again (S17).

        Raises:
            FencedError: a newer epoch exists.
        """
        with self._catalogue.write() as connection:
            self._raise_fence(connection, owner, epoch)
            forget_named(connection, owner, names)

    def fence(self, owner: str, epoch: int) -> None:
        """Refuse every verb of older epochs of ``owner`` from now on (S18).

        Raises:
            FencedError: a newer epoch exists.
        """
        with self._catalogue.write() as connection:
            self._raise_fence(connection, owner, epoch)

    def recover(self, stream_name: str, owner: str, epoch: int, keep: Collection[str]) -> list[str]:
        """Fence older epochs, abort what ``owner`` has prepared and is not in ``keep``, sweep what is left of them.

        In every stream of the store: the owner may have written to another one before (S43).

        Returns:
            the names aborted.

        Raises:
            FencedError: a newer epoch exists.
        """
        orphans: list[str] = []
        aborted: list[str] = []
        with self._catalogue.write() as connection:
            self._raise_fence(connection, owner, epoch)
            streams = {stream_name: find_stream(connection, stream_name, self._where)}
            mine = sa.select(t.transactions.c.stream_id).where(t.transactions.c.owner == owner)
            for row in connection.execute(sa.select(t.streams).where(t.streams.c.id.in_(mine))):
                streams[row.name] = stream_info(row, self._where)
            for stream in streams.values():
                names = sa.select(t.transactions.c.name).where(
                    t.transactions.c.owner == owner,
                    t.transactions.c.stream_id == stream.stream_id,
                    t.transactions.c.status == Status.PREPARED.value,
                )
                for name in sorted(set(connection.scalars(names)) - set(keep)):
                    orphans += self._abort(connection, stream, Request(Verb.ABORT, name, owner, epoch))
                    aborted.append(name)
        delete_quietly(self._storage, orphans)
        for stream in streams.values():
            self._sweep(stream, owner, epoch)
        return sorted(aborted)

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

    def _decided(self, connection: Connection, owner: str) -> None:
        """Forget old outcomes of ``owner``, not every time."""
        if self._decisions_count % DECISIONS_BETWEEN_LOOKS == 0:
            forget_oldest(connection, owner)
        self._decisions_count += 1

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
        promised = connection.scalar(
            sa.select(t.transactions.c.events_count).where(t.transactions.c.id == transaction_id)
        )
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
        found = sum(entry.events_count for _, entry in parts)
        if found != promised:
            what = f"transaction '{name}' of stream '{stream.name}'"
            raise CorruptionError(what, 0, f"{promised} prepared events", f"{found}")
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
        matches = [(path, _CHUNK.fullmatch(path[len(base) + 1 :])) for path in self._storage.list(base)]
        found = [path for path, match in matches if match and int(match[1]) < epoch]  # a stranger's file stays
        if not found:
            return
        with self._catalogue.read() as connection:
            query = sa.select(t.chunks.c.path).where(t.chunks.c.path.startswith(base + "/", autoescape=True))
            known = set(connection.scalars(query))
        delete_quietly(self._storage, [path for path in found if path not in known])


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
            if request.verb is not Verb.BEGIN:
                raise CorruptionError(what, 0, f"one to {request.verb.value}", f"{recorded.value}: {problem}")
            raise UsageError(f"{what} is {recorded.value} already: {problem}; choose another name")
