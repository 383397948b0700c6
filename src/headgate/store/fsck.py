"""Offline check of a store: every invariant of the catalogue, every byte of every chunk.

Counterpart: ``Store.fsck`` and ``headgate streams check``. Source: S40 of docs/spec/stream-store.md.
Never changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.codec.chunk import PartEntry, decode_footer
from headgate.errors import CorruptionError, HeadgateError
from headgate.protocol.store.transactions import Status
from headgate.storage.base import NotFound, Storage
from headgate.store import tables as t
from headgate.store.catalogue import Catalogue
from headgate.store.chunks import StoredPart, read_part
from headgate.store.streams import StreamInfo, stream_info


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it must be. ``is_harmless``: nothing was lost (an orphan of a crash)."""

    where: str
    what: str
    is_harmless: bool = False


def check_store(catalogue: Catalogue, storage: Storage, root: str, *, verify_events: bool) -> list[Problem]:
    """Return the problems found."""
    problems: list[Problem] = []
    with catalogue.read() as connection:
        problems += _check_database(connection, str(catalogue.path))
        streams = [stream_info(row, root) for row in connection.execute(sa.select(t.streams))]
        for stream in streams:
            problems += _check_positions(connection, stream)
            if verify_events:
                problems += _check_events(connection, storage, stream)
        problems += _check_transactions(connection)
        problems += _check_files(connection, storage, verify=verify_events)
    return problems


def _check_database(connection: Connection, path: str) -> list[Problem]:
    rows = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars().all()
    return [Problem(path, str(row)) for row in rows if row != "ok"]


def _check_positions(connection: Connection, stream: StreamInfo) -> list[Problem]:
    """Parts of a segment follow each other from 0 to its end, and there is a row for every segment (LY4)."""
    problems = []
    ends_query = sa.select(t.segments.c.segment, t.segments.c.end_position)
    ends_query = ends_query.where(t.segments.c.stream_id == stream.stream_id)
    ends: dict[int, int] = {row.segment: row.end_position for row in connection.execute(ends_query)}
    if sorted(ends) != list(range(stream.segments_count)):
        problems.append(Problem(stream.name, f"segments are {sorted(ends)}, not 0 to {stream.segments_count - 1}"))
    expected = dict.fromkeys(ends, 0)
    query = sa.select(t.parts).where(t.parts.c.stream_id == stream.stream_id)
    for row in connection.execute(query.order_by(t.parts.c.segment, t.parts.c.start)):
        where = f"{stream.name}/{row.segment}"
        at = expected.get(row.segment)
        if at != row.start:
            problems.append(Problem(where, f"events from position {row.start} where {at} was expected"))
        expected[row.segment] = row.start + row.events_count
    for segment, end in ends.items():
        if expected[segment] != end:
            problems.append(Problem(f"{stream.name}/{segment}", f"ends at {expected[segment]} instead of {end}"))
    return problems


def _check_events(connection: Connection, storage: Storage, stream: StreamInfo) -> list[Problem]:
    problems = []
    columns = [t.parts.c.segment, t.parts.c.start, t.parts.c.events_count, t.parts.c.offset]
    query = (
        sa.select(*columns, t.parts.c.size_bytes, t.parts.c.checksum, t.chunks.c.path)
        .join_from(t.parts, t.chunks, t.parts.c.chunk_id == t.chunks.c.id, isouter=True)
        .where(t.parts.c.stream_id == stream.stream_id)
    )
    for row in connection.execute(query):
        where = f"{stream.name}/{row.segment} position {row.start}"
        if row.path is None:
            problems.append(Problem(where, "its chunk is not in the catalogue"))
            continue
        checksum = int.from_bytes(row.checksum, "big")
        entry = PartEntry(row.segment, row.events_count, row.offset, row.size_bytes, checksum)
        try:
            read_part(storage, StoredPart(row.start, row.path, entry), stream.schema)
        except HeadgateError as error:
            problems.append(Problem(where, str(error)))
    return problems


def _check_transactions(connection: Connection) -> list[Problem]:
    """Only prepared transactions have hidden parts, and as many events as they say (S12, S13)."""
    problems = []
    counts = sa.func.coalesce(sa.func.sum(t.prepared_parts.c.events_count), 0)
    query = (
        sa.select(t.transactions.c.name, t.transactions.c.status, t.transactions.c.events_count, counts)
        .join_from(
            t.transactions,
            t.prepared_parts,
            t.transactions.c.id == t.prepared_parts.c.transaction_id,
            isouter=True,
        )
        .group_by(t.transactions.c.id)
    )
    for name, status, recorded, found in connection.execute(query):
        expected = recorded if status == Status.PREPARED.value else 0
        if found != expected:
            problems.append(Problem(f"transaction '{name}'", f"{status} with {found} hidden events, not {expected}"))
    known = sa.select(t.transactions.c.id)
    lost = connection.scalar(sa.select(sa.func.count()).where(t.prepared_parts.c.transaction_id.not_in(known)))
    if lost:
        problems.append(Problem("catalogue", f"{lost} hidden parts belong to no transaction"))
    return problems


def _check_files(connection: Connection, storage: Storage, *, verify: bool) -> list[Problem]:
    problems = []
    there = set(storage.list(""))
    for row in connection.execute(sa.select(t.chunks)):
        if row.path not in there:
            problems.append(Problem(f"{storage.url}/{row.path}", "is missing"))
            continue
        there.discard(row.path)
        if verify:
            problems += _check_chunk(connection, storage, row.id, row.path)
    problems += [
        Problem(f"{storage.url}/{path}", "belongs to nothing (left by a crash, or being written now)", True)
        for path in sorted(there)
    ]
    return problems


def _check_chunk(connection: Connection, storage: Storage, chunk_id: int, path: str) -> list[Problem]:
    """The footer says what the catalogue says."""
    where = f"{storage.url}/{path}"
    try:
        footer = decode_footer(where, storage.get(path))
    except (CorruptionError, NotFound) as error:
        return [Problem(where, str(error))]
    recorded = set()
    for table in (t.parts, t.prepared_parts):
        columns = (table.c.segment, table.c.offset, table.c.events_count, table.c.checksum)
        rows = connection.execute(sa.select(*columns).where(table.c.chunk_id == chunk_id))
        recorded |= {(row.segment, row.offset, row.events_count, row.checksum) for row in rows}
    found = {(e.segment, e.offset, e.events_count, e.checksum.to_bytes(8, "big")) for e in footer.parts}
    return [] if found == recorded else [Problem(where, "its footer and the catalogue disagree")]
