"""Transactions that several processes write, in the tables: what is decided is applied where it was decided.

Counterpart: ``sql`` calls these inside its transactions; ``protocol.store.transactions`` decides. Source: rules
TX1, TX3, TX4, TX8, TX11 of docs/spec/shared-transactions.md. An open one has a row in ``transactions`` from its
beginning on, and its events are hidden as those of prepared ones are: committing, aborting and recovering are the same
for both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import CorruptionError, FencedError, UsageError
from headgate.protocol.store import transactions as machine
from headgate.protocol.store.layouts import Segment
from headgate.protocol.store.transactions import (
    Participant,
    RefuseFenced,
    RefuseUnknown,
    SharedRecord,
    Status,
    Verb,
    Verdict,
)
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.chunk_index import insert_chunk, part_row
from headgate.store.catalogue.records import ChunkRecord, ExpiredTransaction, Shared
from headgate.store.catalogue.scaling import Reopening
from headgate.store.catalogue.stream_rows import check_takes_events, find_layout, find_schemas, find_stream, look
from headgate.store.catalogue.tables import checked_row
from headgate.store.catalogue.transaction_rows import apply_commit, drop, fence_of, insert, set_fence, set_status
from headgate.store.streams import StreamInfo


@t.implements(Catalogue.begin_shared)
def begin_shared(
    connection: Connection, stream: str, name: str, owner: str, epoch: int, lease_ms: int, now_ms: int
) -> Shared:
    """Record an open transaction, unless it is there (TX1)."""
    present = find_stream(connection, stream)
    check_takes_events(connection, present)
    wanted = Shared(present, name, owner, epoch, lease_ms)
    if isinstance(_decide(connection, wanted, machine.BeginShared(), ""), machine.Apply):
        request = machine.Request(Verb.BEGIN, name, owner, epoch)
        values = {
            "transaction_id": insert(connection, present, request, Status.OPEN, 0, now_ms),
            "stream_id": present.stream_id,
            "begun_ms": now_ms,
            "lease_ms": lease_ms,
            "due_ms": now_ms + lease_ms,
            "is_expired": False,
            "schema_version": present.schema_version,
            "size_bytes": 0,
        }
        connection.execute(t.shared_transactions.insert().values(values))
    return _find(connection, present, name)


@t.implements(Catalogue.find_shared)
def find_shared(connection: Connection, stream: str, name: str) -> Shared:
    """Return a transaction, open or not."""
    return _find(connection, find_stream(connection, stream), name)


def _find(connection: Connection, present: StreamInfo, name: str) -> Shared:
    """Return a transaction with its stream as it was when it began: layout and schema.

    Raises:
        UsageError: there is none of this name, or its outcome was forgotten.
        CorruptionError: what is recorded of it cannot be.
    """
    row = _row(connection, present.stream_id, name)
    if row is None:
        raise _unknown(present.name, name)
    what = f"transaction '{name}' of stream '{present.name}'"
    version, segments = row.schema_version, _segments(connection, present, row.layout_epoch)
    if not 0 <= version <= present.schema_version or not segments:
        expected = f"a schema up to {present.schema_version} and a layout up to {present.layout_epoch}"
        raise CorruptionError(what, 0, expected, f"schema {version} and layout {row.layout_epoch}")
    schema = present.schema
    if version != present.schema_version:
        schema = find_schemas(connection, present)[version]
    stream = replace(
        present,
        schema=schema,
        schema_version=version,
        segments=segments,
        segments_count=len(segments),
        layout_epoch=row.layout_epoch,
    )
    return Shared(stream, *checked_row((row.name, row.owner, row.epoch, row.lease_ms), str, str, int, int))


def _segments(connection: Connection, present: StreamInfo, epoch: int) -> tuple[Segment, ...]:
    """Return the segments of a layout; none if there never was one of this number."""
    if epoch == present.layout_epoch:  # as a rule: who looked at all layouts would take the longer the more there were
        return present.segments
    return find_layout(connection, present).of_epoch(epoch) if epoch < present.layout_epoch else ()


@t.implements(Catalogue.join_shared)
def join_shared(connection: Connection, wanted: Shared, participant: str, token: str, now_ms: int) -> int:
    """Give a participant a new life (TX4); return the number of its last recorded write."""
    _decide(connection, wanted, machine.Join(token), participant)
    transaction_id = _renew(connection, wanted, now_ms)
    known = _participant(connection, transaction_id, participant)
    mine = (t.participants.c.transaction_id == transaction_id, t.participants.c.participant == participant)
    if known is not None:
        connection.execute(t.participants.update().where(*mine).values(token=token))
        return known.sequence
    values = {"transaction_id": transaction_id, "participant": participant, "token": token}
    connection.execute(t.participants.insert().values(**values, sequence=0, events_count=0))
    return 0


@t.implements(Catalogue.write_shared)
def write_shared(
    connection: Connection,
    wanted: Shared,
    participant: str,
    token: str,
    numbers: tuple[int, int],
    chunk: ChunkRecord | None,
    now_ms: int,
) -> None:
    """Record a durable chunk of a participant's writes, hidden, after all that is recorded already (TX3)."""
    answer = _decide(connection, wanted, machine.Write(token, *numbers), participant)
    # an earlier try was recorded and its answer lost: the events are there, and are not added again (TX3)
    if not isinstance(answer, machine.Apply):
        return
    transaction_id = _renew(connection, wanted, now_ms)
    entries = () if chunk is None else chunk.entries
    if chunk is not None:
        _hide(connection, wanted, transaction_id, chunk)
    events = sum(entry.events_count for entry in entries)
    mine = (t.participants.c.transaction_id == transaction_id, t.participants.c.participant == participant)
    more = t.participants.c.events_count + events
    connection.execute(t.participants.update().where(*mine).values(sequence=numbers[1], events_count=more))
    whole = t.transactions.c.id == transaction_id
    more = t.transactions.c.events_count + events
    connection.execute(t.transactions.update().where(whole).values(events_count=more))
    size_bytes = sum(entry.size_bytes for entry in entries)
    _set(connection, transaction_id, size_bytes=t.shared_transactions.c.size_bytes + size_bytes)


def _hide(connection: Connection, shared: Shared, transaction_id: int, chunk: ChunkRecord) -> None:
    """Add the parts of a chunk to those that the transaction makes visible."""
    chunk_id = insert_chunk(connection, shared.stream.stream_id, chunk)
    hidden = t.prepared_parts
    mine = hidden.c.transaction_id == transaction_id
    # after what all participants wrote so far: the numbers give the order at the commit
    last = connection.scalar(sa.select(sa.func.max(hidden.c.number)).where(mine))
    first = 0 if last is None else int(last) + 1
    rows = [
        {"transaction_id": transaction_id, "number": first + at, **part_row(chunk_id, entry)}
        for at, entry in enumerate(chunk.entries)
    ]
    connection.execute(hidden.insert(), rows)


@t.implements(Catalogue.ping_shared)
def ping_shared(connection: Connection, wanted: Shared, now_ms: int) -> None:
    """Renew the lease."""
    if isinstance(_decide(connection, wanted, machine.Ping(), ""), machine.Apply):
        _renew(connection, wanted, now_ms)


@t.implements(Catalogue.decide_shared)
def decide_shared(connection: Connection, wanted: Shared, verdict: Verdict, now_ms: int) -> tuple[str, ...]:
    """Prepare, commit or abort; return the files that nothing refers to any more."""
    answer = _decide(connection, wanted, verdict, "")
    newest = fence_of(connection, wanted.owner)
    set_fence(connection, wanted.owner, newest, machine.next_fence(newest, wanted.epoch))
    if not isinstance(answer, machine.Apply):
        return ()
    match verdict:
        case machine.Prepare():
            set_status(connection, wanted.stream, wanted.name, Status.PREPARED, now_ms)
        case machine.Commit():
            reopening = Reopening(connection, now_ms)
            apply_commit(connection, wanted.stream, wanted.name, reopening, now_ms)
            reopening.close()
        case machine.Abort():
            return drop(connection, wanted.stream, wanted.name, now_ms)
    return ()


@t.implements(Catalogue.expire_shared)
def expire_shared(connection: Connection, stream: StreamInfo, now_ms: int) -> list[ExpiredTransaction]:
    """Look at the leases of a stream (TX8); return who was aborted."""
    is_due = (t.shared_transactions.c.stream_id == stream.stream_id, t.shared_transactions.c.due_ms <= now_ms)
    # The stream is said of both tables: with that of ``transactions`` alone all of them would be looked at.
    query = _ROWS.where(*is_due, t.transactions.c.stream_id == stream.stream_id)
    gone: list[ExpiredTransaction] = []
    for row in connection.execute(query.order_by(t.transactions.c.id)).all():
        match machine.look(_record(row, None), now_ms):
            case machine.Suspect():
                _set(connection, row.transaction_id, suspected_ms=now_ms)
            case machine.Expire():
                orphans = drop(connection, stream, row.name, now_ms)
                _set(connection, row.transaction_id, is_expired=True)
                name, owner = checked_row((row.name, row.owner), str, str)
                gone.append(ExpiredTransaction(name, owner, orphans))
            case machine.Leave():
                pass
    return gone


def _decide(
    connection: Connection, shared: Shared, request: machine.SharedRequest, participant: str
) -> machine.SharedAnswer:
    look(connection, shared.stream)  # a deleted stream is another error than an unknown transaction
    row = _row(connection, shared.stream.stream_id, shared.name)
    known = None if row is None else _participant(connection, row.transaction_id, participant)
    record = None if row is None else _record(row, known)
    answer = machine.decide_shared(request, record, shared.epoch, fence_of(connection, shared.owner))
    _refuse(answer, shared, participant)
    return answer


def _refuse(answer: machine.SharedAnswer, shared: Shared, participant: str) -> None:
    """Raise what a refusing answer means."""
    what = f"transaction '{shared.name}' of stream '{shared.stream.name}'"
    match answer:
        case machine.Apply() | machine.Done():
            return
        case RefuseFenced(newest):
            raise FencedError(f"'{shared.owner}' ({what})", shared.epoch, newest)
        case RefuseUnknown():
            raise _unknown(shared.stream.name, shared.name)
        case machine.RefuseEnded(problem):
            raise FencedError(f"{what} {problem}")
        case machine.RefuseReplaced():
            raise FencedError(
                f"participant '{participant}' of {what} was opened again since, perhaps by another process: "
                "only that one writes now"
            )
        case machine.RefuseGap(expected):
            raise UsageError(f"participant '{participant}' of {what}: write {expected} was expected next")


def _unknown(stream: str, name: str) -> UsageError:
    return UsageError(
        f"stream '{stream}' knows no transaction '{name}': it was never begun there, or it was decided so long ago "
        "that its outcome is forgotten; whether it was committed, only its events can tell"
    )


_ROWS = sa.select(
    *(t.transactions.c[column] for column in ("name", "owner", "epoch", "status", "layout_epoch")),
    *(t.shared_transactions.c[column] for column in ("transaction_id", "lease_ms", "due_ms", "suspected_ms")),
    *(t.shared_transactions.c[column] for column in ("is_expired", "schema_version")),
).join_from(t.transactions, t.shared_transactions, t.transactions.c.id == t.shared_transactions.c.transaction_id)


def _row(connection: Connection, stream_id: int, name: str) -> Any:
    """Return what is recorded of a transaction; None: nothing."""
    mine = (t.transactions.c.stream_id == stream_id, t.transactions.c.name == name)
    return connection.execute(_ROWS.where(*mine)).one_or_none()


def _record(row: Any, participant: Participant | None) -> SharedRecord:
    return SharedRecord(Status(row.status), row.lease_ms, row.due_ms, row.suspected_ms, row.is_expired, participant)


def _participant(connection: Connection, transaction_id: int, name: str) -> Participant | None:
    mine = (t.participants.c.transaction_id == transaction_id, t.participants.c.participant == name)
    row = connection.execute(sa.select(t.participants).where(*mine)).one_or_none()
    return None if row is None else Participant(*checked_row((row.token, row.sequence), str, int))


def _renew(connection: Connection, shared: Shared, now_ms: int) -> int:
    """Note a sign of life; return the number of the transaction."""
    row = _row(connection, shared.stream.stream_id, shared.name)
    assert row is not None, "its lease is renewed after a decision about it, in one transaction"
    _set(connection, row.transaction_id, due_ms=now_ms + row.lease_ms, suspected_ms=None)
    return int(row.transaction_id)


def _set(connection: Connection, transaction_id: int, **values: object) -> None:
    mine = t.shared_transactions.c.transaction_id == transaction_id
    connection.execute(t.shared_transactions.update().where(mine).values(**values))
