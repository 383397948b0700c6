"""Transactions in the tables: what ``protocol.store.transactions`` decides is applied where it was decided.

Counterpart: ``sql`` calls these inside its transactions, so that nothing comes between a decision and its record.
Source: S12–S14 and S18 of docs/spec/stream-store.md, docs/spec/shared-transactions.md. An open transaction
of one process is in no table; ``shared_transaction_rows`` has those of several.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from msgspec import structs
from sqlalchemy.engine import Connection

from headgate.errors import CorruptionError, FencedError, UsageError, gone
from headgate.protocol.store.transactions import (
    AlreadyDone,
    Decision,
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
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.chunk_index import (
    assign_positions,
    event_time,
    insert_chunk,
    note,
    part_entry,
    part_row,
    segment_ends,
)
from headgate.store.catalogue.records import ChunkRecord, ParticipantInfo, Recovered, TransactionInfo
from headgate.store.catalogue.scaling import Reopening
from headgate.store.catalogue.stream_rows import (
    check_takes_events,
    check_writable,
    find_stream,
    inserted_id,
    stream_info,
)
from headgate.store.catalogue.tables import checked_row, checked_values
from headgate.store.streams import StreamInfo

OUTCOMES_RETAINED = 100_000
"""Decided transactions remembered for each owner that is no pipeline; a verb for an older one fails as unknown."""

OUTCOME_CLEANUP_INTERVAL = 1_000
"""One look costs as much as some hundred decisions, so there may be so many outcomes more."""

_NAMES_AT_A_TIME = 500


def _clean_up_outcomes(connection: Connection, transaction_id: int) -> None:
    """Forget old outcomes of the owner of a transaction that was decided: on average once in so many decisions."""
    if zlib.crc32(transaction_id.to_bytes(8, "big")) % OUTCOME_CLEANUP_INTERVAL == 0:
        owner = connection.scalar(sa.select(t.transactions.c.owner).where(t.transactions.c.id == transaction_id))
        forget_oldest_outcomes(connection, str(owner))


def forget_oldest_outcomes(connection: Connection, owner: str) -> None:
    """Forget the oldest outcomes of ``owner`` beyond the bound, unless it is a pipeline, which says itself."""
    if connection.scalar(sa.select(t.owners.c.owner).where(t.owners.c.owner == owner)) is not None:
        return
    newest = (
        sa.select(t.transactions.c.id)
        .where(*_is_decided(owner))
        .order_by(t.transactions.c.changed_ms.desc(), t.transactions.c.id.desc())
    )
    oldest = list(connection.scalars(newest.offset(OUTCOMES_RETAINED)))
    for at in range(0, len(oldest), _NAMES_AT_A_TIME):
        _forget_numbers(connection, oldest[at : at + _NAMES_AT_A_TIME])


@t.implements(Catalogue.forget_outcomes)
def forget_outcomes(connection: Connection, names: Sequence[str], owner: str, epoch: int) -> None:
    """Forget the outcomes of these transactions of ``owner``; one that is not decided, or not there, is passed over."""
    fence(connection, owner, epoch)
    for at in range(0, len(names), _NAMES_AT_A_TIME):
        some = t.transactions.c.name.in_(names[at : at + _NAMES_AT_A_TIME])
        _forget_numbers(
            connection, connection.scalars(sa.select(t.transactions.c.id).where(*_is_decided(owner), some)).all()
        )


def _forget_numbers(connection: Connection, numbers: Sequence[int]) -> None:
    connection.execute(t.transactions.delete().where(t.transactions.c.id.in_(numbers)))
    for table in (t.shared_transactions, t.participants):
        connection.execute(table.delete().where(table.c.transaction_id.in_(numbers)))


def _is_decided(owner: str) -> tuple[sa.ColumnElement[bool], ...]:
    terminal = t.transactions.c.status.in_([status.value for status in Status if status.is_terminal])
    return (t.transactions.c.owner == owner, terminal)


@t.implements(Catalogue.transactions)
def transactions(connection: Connection, owner: str | None, prefix: str, stream: str | None) -> list[TransactionInfo]:
    """Return recorded transactions by name."""
    wanted: list[sa.ColumnElement[bool]] = []
    if owner is not None:
        wanted.append(t.transactions.c.owner == owner)
    if stream is not None:
        wanted.append(t.streams.c.name == stream)
    if prefix:
        wanted.append(t.transactions.c.name.startswith(prefix, autoescape=True))
    sizes, participants = _sizes(connection, wanted), _participants(connection, wanted)
    shared = t.shared_transactions
    query = (
        sa.select(t.transactions, t.streams.c.name.label("stream"), *_OF_SHARED)
        .join_from(t.transactions, t.streams, t.transactions.c.stream_id == t.streams.c.id)
        .join(shared, t.transactions.c.id == shared.c.transaction_id, isouter=True)
    )
    return [
        TransactionInfo(
            row.stream,
            row.name,
            row.owner,
            row.epoch,
            Status(row.status),
            row.events_count,
            row.changed_ms,
            size_bytes=sizes.get(row.id, 0) if row.shared_bytes is None else row.shared_bytes,
            begun_ms=row.begun_ms,
            lease_ms=row.lease_ms,
            due_ms=row.due_ms,
            is_expired=bool(row.is_expired),
            participants=tuple(participants.get(row.id, ())),
        )
        for row in map(_checked_listing, connection.execute(query.where(*wanted).order_by(*_BY_NAME)).all())
    ]


def _checked_listing(row: sa.Row[Any]) -> sa.Row[Any]:
    checked_row((row.stream, row.name, row.owner), str, str, str)
    checked_row((row.epoch, row.events_count, row.changed_ms), int, int, int)
    checked_row((row.begun_ms, row.lease_ms, row.due_ms, row.shared_bytes), *[int | None] * 4)
    return row


_BY_NAME = (t.transactions.c.name, t.streams.c.name)
_shared_columns = t.shared_transactions.c
_OF_SHARED = (
    *(_shared_columns.begun_ms, _shared_columns.lease_ms, _shared_columns.due_ms, _shared_columns.is_expired),
    _shared_columns.size_bytes.label("shared_bytes"),
)


def _sizes(connection: Connection, wanted: list[sa.ColumnElement[bool]]) -> Mapping[int, int]:
    """Return the size of what is hidden, by the number of its transaction."""
    hidden = t.prepared_parts
    query = (
        sa.select(t.transactions.c.id, sa.func.sum(hidden.c.size_bytes))
        .join_from(t.transactions, t.streams, t.transactions.c.stream_id == t.streams.c.id)
        .join(hidden, t.transactions.c.id == hidden.c.transaction_id)
    )
    found = connection.execute(query.where(*wanted).group_by(t.transactions.c.id))
    return {int(row[0]): int(row[1]) for row in found}


def _participants(connection: Connection, wanted: list[sa.ColumnElement[bool]]) -> dict[int, list[ParticipantInfo]]:
    """Return who writes, by the number of the transaction, by name."""
    query = (
        sa.select(t.participants)
        .join_from(t.participants, t.transactions, t.transactions.c.id == t.participants.c.transaction_id)
        .join(t.streams, t.transactions.c.stream_id == t.streams.c.id)
    )
    found: dict[int, list[ParticipantInfo]] = {}
    for row in connection.execute(query.where(*wanted).order_by(t.participants.c.participant)):
        who = ParticipantInfo(*checked_row((row.participant, row.sequence, row.events_count), str, int, int))
        found.setdefault(row.transaction_id, []).append(who)
    return found


@t.implements(Catalogue.begin)
def begin(connection: Connection, stream: str, name: str, owner: str, epoch: int) -> StreamInfo:
    """Return the stream, if a transaction of this name may be begun; record nothing."""
    info = find_stream(connection, stream)
    check_writable(connection, info)
    request = Request(Verb.BEGIN, name, owner, epoch)
    record = _find_record(connection, info.stream_id, name)
    _refuse(decide(request, record, fence_of(connection, owner)), request, stream)
    return info


@t.implements(Catalogue.prepare)
def prepare(
    connection: Connection,
    stream: StreamInfo,
    name: str,
    owner: str,
    epoch: int,
    chunks: Sequence[ChunkRecord],
    now_ms: int,
) -> None:
    """Record a transaction as prepared, with the files that hold its events (S12)."""
    # not its layout: events that were routed by a former one get their places at the commit (S75)
    check_takes_events(connection, stream)
    request = Request(Verb.PREPARE, name, owner, epoch, ",".join(chunk.path for chunk in chunks))
    decision = _decide(connection, stream, request)
    if not isinstance(decision, Record):
        return
    count = sum(entry.events_count for chunk in chunks for entry in chunk.entries)
    transaction_id = insert(connection, stream, request, decision.status, count, now_ms)
    rows: list[dict[str, object]] = []
    for chunk in chunks:
        chunk_id = insert_chunk(connection, stream.stream_id, chunk)
        rows += [
            {"transaction_id": transaction_id, "number": len(rows) + number, **part_row(chunk_id, entry)}
            for number, entry in enumerate(chunk.entries)
        ]
    if rows:
        connection.execute(t.prepared_parts.insert(), rows)


@t.implements(Catalogue.commit)
def commit(
    connection: Connection,
    names: Sequence[tuple[str, str]],
    owner: str,
    epoch: int,
    now_ms: int,
    times: Mapping[str, int],
) -> None:
    """Make the events of prepared transactions visible, of all at once; nothing of those that are visible already."""
    reopening = Reopening(connection, now_ms)
    # without names there is no decision that looks at the fence
    if times and not names:
        fence(connection, owner, epoch)
    promised = {stream for stream, _ in names} & times.keys()
    timed = {name: _find_promised_stream(connection, name, owner, epoch) for name in sorted(promised)}
    timed |= {name: find_stream(connection, name) for name in sorted(times.keys() - promised)}
    # before the commits: the time is given to what they add, not to what was there
    ends = {name: segment_ends(connection, stream.stream_id) for name, stream in timed.items()}
    for stream_name, name in names:
        stream = _find_promised_stream(connection, stream_name, owner, epoch)
        if isinstance(_decide(connection, stream, Request(Verb.COMMIT, name, owner, epoch)), Record):
            event_ms = event_time(connection, stream.stream_id) if stream_name in timed else None
            apply_commit(connection, stream, name, reopening, now_ms, event_ms)
    # once, after the last of them: several may have been routed by the same former layout
    reopening.close()
    for name, stream in timed.items():
        note(connection, stream.stream_id, owner, times[name], now_ms, ends[name])


def _find_promised_stream(connection: Connection, stream: str, owner: str, epoch: int) -> StreamInfo:
    """Return a stream that is to be committed to. A fenced owner hears that, not that the stream is gone (S18)."""
    try:
        return find_stream(connection, stream)
    except UsageError as error:
        fence(connection, owner, epoch)
        gone(error)
        raise


@t.implements(Catalogue.abort)
def abort(connection: Connection, stream: str, name: str, owner: str, epoch: int, now_ms: int) -> tuple[str, ...]:
    """Record the abort; return the files that nothing refers to any more."""
    return _abort(connection, find_stream(connection, stream), Request(Verb.ABORT, name, owner, epoch), now_ms)


def _abort(connection: Connection, stream: StreamInfo, request: Request, now_ms: int) -> tuple[str, ...]:
    decision = _decide(connection, stream, request)
    if not isinstance(decision, Record):
        return ()
    if _find_record(connection, stream.stream_id, request.name) is None:
        # nothing to drop, but the name is spent: a prepare that is under way must be refused
        _clean_up_outcomes(connection, insert(connection, stream, request, decision.status, 0, now_ms))
        return ()
    return drop(connection, stream, request.name, now_ms)


def drop(connection: Connection, stream: StreamInfo, name: str, now_ms: int) -> tuple[str, ...]:
    """Abort a transaction that is open or prepared; return the files that nothing refers to any more."""
    # rows first, files after this transaction: a crash in between leaves orphans, not parts without a file
    transaction_id = set_status(connection, stream, name, Status.ABORTED, now_ms)
    mine = t.prepared_parts.c.transaction_id == transaction_id
    numbers = set(connection.scalars(sa.select(t.prepared_parts.c.chunk_id).where(mine)))
    paths = tuple(checked_values(connection.scalars(sa.select(t.chunks.c.file).where(t.chunks.c.id.in_(numbers))), str))
    connection.execute(t.prepared_parts.delete().where(mine))
    connection.execute(t.chunks.delete().where(t.chunks.c.id.in_(numbers)))
    _clean_up_outcomes(connection, transaction_id)
    return paths


@t.implements(Catalogue.recover)
def recover(
    connection: Connection, stream: str, owner: str, epoch: int, keep: Collection[str], now_ms: int
) -> Recovered:
    """Abort what ``owner`` has prepared or open and is not in ``keep``, in ``stream`` and wherever it wrote."""
    fence(connection, owner, epoch)  # before it says that there is no stream
    present = find_stream(connection, stream)
    orphans: list[str] = []
    aborted: list[str] = []
    streams = [present, *_other_streams(connection, present, owner)]
    for each in streams:
        names = sa.select(t.transactions.c.name).where(
            t.transactions.c.owner == owner,
            t.transactions.c.stream_id == each.stream_id,
            t.transactions.c.status.in_([Status.PREPARED.value, Status.OPEN.value]),
        )
        for name in sorted(set(connection.scalars(names)) - set(keep)):
            orphans += _abort(connection, each, Request(Verb.ABORT, name, owner, epoch), now_ms)
            aborted.append(name)
    return Recovered(tuple(sorted(aborted)), tuple(orphans), tuple(streams))


@t.implements(Catalogue.fence)
def fence(connection: Connection, owner: str, epoch: int) -> None:
    """Refuse older epochs from now on (S18)."""
    newest = fence_of(connection, owner)
    if epoch < newest:
        raise FencedError(f"'{owner}'", epoch, newest)
    set_fence(connection, owner, newest, epoch)


def _other_streams(connection: Connection, present: StreamInfo, owner: str) -> list[StreamInfo]:
    mine = sa.select(t.transactions.c.stream_id).where(t.transactions.c.owner == owner)
    others = sa.select(t.streams).where(t.streams.c.id.in_(mine), t.streams.c.id != present.stream_id)
    return [stream_info(connection, row) for row in connection.execute(others.order_by(t.streams.c.id))]


def _decide(connection: Connection, stream: StreamInfo, request: Request) -> Decision:
    record = _find_record(connection, stream.stream_id, request.name)
    newest = fence_of(connection, request.owner)
    decision = decide(request, record, newest)
    _refuse(decision, request, stream.name)
    # only what was accepted moves the fence
    set_fence(connection, request.owner, newest, next_fence(newest, request.epoch))
    return decision


def insert(
    connection: Connection, stream: StreamInfo, request: Request, status: Status, events_count: int, now_ms: int
) -> int:
    """Record a transaction with events that were routed by the layout of ``stream``; return its number."""
    values = {
        "stream_id": stream.stream_id,
        "name": request.name,
        "owner": request.owner,
        "epoch": request.epoch,
        "status": status.value,
        "content": request.content,
        "events_count": events_count,
        "changed_ms": now_ms,
        "layout_epoch": stream.layout_epoch,
    }
    return inserted_id(connection.execute(t.transactions.insert().values(values)))


def apply_commit(
    connection: Connection,
    stream: StreamInfo,
    name: str,
    reopening: Reopening,
    now_ms: int,
    event_ms: int | None = None,
) -> None:
    """Make the hidden events of a transaction visible, in the order of their numbers."""
    transaction_id = set_status(connection, stream, name, Status.COMMITTED, now_ms)
    columns = (t.transactions.c.events_count, t.transactions.c.layout_epoch)
    promised, epoch = connection.execute(sa.select(*columns).where(t.transactions.c.id == transaction_id)).one()
    mine = t.prepared_parts.c.transaction_id == transaction_id
    rows = connection.execute(sa.select(t.prepared_parts).where(mine).order_by(t.prepared_parts.c.number)).all()
    parts = [(int(row.chunk_id), part_entry(row)) for row in rows]
    found = sum(entry.events_count for _, entry in parts)
    # raised, it undoes the transaction of the database with the new status: nothing was committed
    if found != promised:
        what = f"transaction '{name}' of stream '{stream.name}'"
        raise CorruptionError(what, 0, f"{promised} prepared events", f"{found}")
    places = reopening.places(stream, epoch, {entry.segment for _, entry in parts})
    placed = [(chunk_id, structs.replace(entry, segment=places[entry.segment])) for chunk_id, entry in parts]
    assign_positions(connection, stream.stream_id, placed, now_ms, event_ms)
    connection.execute(t.prepared_parts.delete().where(mine))
    _clean_up_outcomes(connection, transaction_id)


def set_status(connection: Connection, stream: StreamInfo, name: str, status: Status, now_ms: int) -> int:
    """Record another status, which is not open and has no lease; return the number of the transaction."""
    where = (t.transactions.c.stream_id == stream.stream_id, t.transactions.c.name == name)
    connection.execute(t.transactions.update().where(*where).values(status=status.value, changed_ms=now_ms))
    transaction_id = int(connection.scalars(sa.select(t.transactions.c.id).where(*where)).one())
    shared = t.shared_transactions
    connection.execute(shared.update().where(shared.c.transaction_id == transaction_id).values(due_ms=None))
    return transaction_id


def _find_record(connection: Connection, stream_id: int, name: str) -> TransactionRecord | None:
    where = (t.transactions.c.stream_id == stream_id, t.transactions.c.name == name)
    row = connection.execute(sa.select(t.transactions).where(*where)).one_or_none()
    if row is None:
        return None
    return TransactionRecord(row.name, row.owner, row.epoch, Status(row.status), row.content)


def fence_of(connection: Connection, owner: str) -> int:
    """Return the newest epoch known of ``owner``."""
    found = connection.scalar(sa.select(t.fences.c.epoch).where(t.fences.c.owner == owner))
    return 0 if found is None else int(found)


def set_fence(connection: Connection, owner: str, old: int, new: int) -> None:
    """Let ``new`` be the newest epoch of ``owner``, which was ``old``."""
    if new == old:
        return
    if connection.execute(t.fences.update().where(t.fences.c.owner == owner).values(epoch=new)).rowcount == 0:
        connection.execute(t.fences.insert().values(owner=owner, epoch=new))


def _refuse(decision: Decision, request: Request, stream: str) -> None:
    """Raise what a refusing decision means."""
    what = f"transaction '{request.name}' of stream '{stream}'"
    match decision:
        case Proceed() | Record() | AlreadyDone():
            return
        case RefuseFenced(newest):
            raise FencedError(f"'{request.owner}' ({request.verb.value} of {what})", request.epoch, newest)
        case RefuseUnknown():
            raise gone(CorruptionError(what, 0, "a prepared transaction to commit", "no record of it"))
        case RefuseContradiction(recorded, problem):
            if request.verb is not Verb.BEGIN:
                error = CorruptionError(what, 0, f"one to {request.verb.value}", f"{recorded.value}: {problem}")
                raise gone(error) if (request.verb, recorded) == (Verb.COMMIT, Status.ABORTED) else error
            raise UsageError(f"{what} is {recorded.value} already: {problem}; choose another name")
