"""Audit of a catalogue: its rows must agree with each other, those of reader groups included.

Counterparts: ``integrity`` has left out what makes no sense at all, ``fsck`` compares the rest with the files.
Source: docs/spec/stream-store.md, RG24 of docs/spec/reader-groups.md. Whatever cannot be checked is a
problem, and the others are checked all the same. Never changes anything but holds of groups, when it is asked to mend
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.codec.json_files import decode_life
from headgate.errors import CorruptionError
from headgate.protocol.store.layouts import Layout
from headgate.protocol.store.reader_group import Group
from headgate.protocol.store.schema_update import Incompatible, update
from headgate.protocol.store.transactions import Status
from headgate.store.catalogue import group_rows
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.chunk_index import STORED_PARTS, part_entry, stored_part
from headgate.store.catalogue.group_rows import decode_group
from headgate.store.catalogue.records import ChunkRecord, StoredPart
from headgate.store.catalogue.stream_rows import find_schemas, recorded_layout, stream_info
from headgate.store.fsck import Findings, check_at, check_or_report
from headgate.store.streams import StreamInfo, columns_of


def group_problems(connection: Connection) -> Findings:
    """Return what is wrong with groups, and with what is held for them."""
    found: Findings = []
    for name, group in _all_groups(connection):
        where = f"reader group '{name}'"
        if isinstance(group, CorruptionError):
            found.append((where, f"{group}; 'headgate streams groups delete' removes it"))
            continue
        for stream in sorted(group.streams):
            found += check_at(where, _problems_of_group, connection, name, group, stream)
    return found + [
        (f"reader group '{name}'", f"there is none, and stream '{stream}' is held for it; --repair lets go of it")
        for stream, name in _holds_without_group(connection)
    ]


@t.implements(Catalogue.mend_groups)
def mend_groups(connection: Connection) -> list[str]:
    """Repair the holds of reader groups, which may lack or be left over; return what was repaired."""
    done = []
    for stream, name in _holds_without_group(connection):
        connection.execute(t.holds.delete().where(t.holds.c.holder == group_rows.holder_of(name)))
        done.append(f"stream '{stream}' is not held any more for reader group '{name}', which there is not")
    for name, group in _all_groups(connection):
        # to hold by guess could hold too little, and say that all is well
        if isinstance(group, CorruptionError) or any(
            _positions_beyond_end(connection, group, x) for x in group.streams
        ):
            continue  # what it needs is unknown
        too_little = [x for x in sorted(group.streams) if _is_held_too_little(connection, name, group, x)]
        if too_little:
            group_rows.hold_needed(connection, name, group)
        done += [f"what reader group '{name}' needs of stream '{stream}' is held again" for stream in too_little]
    return done


def _problems_of_group(connection: Connection, name: str, group: Group, stream: str) -> Iterator[str]:
    beyond = _positions_beyond_end(connection, group, stream)
    yield from (f"{problem}; 'headgate streams groups reset' gives it another place" for problem in beyond)
    if not beyond and _is_held_too_little(connection, name, group, stream):
        yield f"stream '{stream}' is not held from where it reads on, and may be truncated; --repair holds it"


def _positions_beyond_end(connection: Connection, group: Group, stream: str) -> list[str]:
    """Return a group's positions in segments that do not exist, and positions after the end of a segment."""
    ends = _ends(connection, group.streams[stream])
    if not ends:
        return []  # deleted: its readers get an error
    found = [("it", group.progress[stream])]
    found += [(f"checkpoint '{x.name}'", x.progress[stream]) for x in group.checkpoints]
    return [
        f"{who} is at position {position} of segment {segment} of stream '{stream}', which ends at {ends.get(segment)}"
        for who, progress in found
        for segment, position in sorted({**progress.begins, **progress.positions}.items())
        if segment not in ends or position > ends[segment]
    ]


def _is_held_too_little(connection: Connection, name: str, group: Group, stream: str) -> bool:
    """Whether events that the group needs may be truncated. It may hold more: heads move, and its hold follows late."""
    found = group_rows.needed_positions(connection, group, stream)
    if found is None:
        return False
    mine = (t.holds.c.stream_id == found[0].stream_id, t.holds.c.holder == group_rows.holder_of(name))
    rows = connection.execute(sa.select(t.holds.c.segment_id, t.holds.c.position).where(*mine))
    held = {row.segment_id: row.position for row in rows}
    return not held or any(position > found[1].get(segment, 0) for segment, position in held.items())


def _holds_without_group(connection: Connection) -> list[tuple[str, str]]:
    """Return (stream, group) of holds without a group."""
    query = (
        sa.select(t.streams.c.name, t.holds.c.holder)
        .join_from(t.holds, t.streams, t.holds.c.stream_id == t.streams.c.id)
        .distinct()
        .order_by(t.streams.c.name, t.holds.c.holder)
    )
    there = set(group_rows.names(connection))
    named = [(row.name, group_rows.group_of(row.holder)) for row in connection.execute(query)]
    return [(stream, name) for stream, name in named if name is not None and name not in there]


def _ends(connection: Connection, stream_id: int) -> Mapping[int, int]:
    query = sa.select(t.segments.c.segment_id, t.segments.c.end_position).where(t.segments.c.stream_id == stream_id)
    return {row.segment_id: row.end_position for row in connection.execute(query)}


def _all_groups(connection: Connection) -> Iterator[tuple[str, Group | CorruptionError]]:
    for row in connection.execute(sa.select(t.reader_groups).order_by(t.reader_groups.c.name)).all():
        try:
            yield row.name, decode_group(row.state, row.name)
        except CorruptionError as error:
            yield row.name, error


_DIGITS_MAX = 18
"""Of the number of a stream."""


class SqlAudit:
    """See ``base.Audit``: all that it says is of the moment in which its transaction began."""

    def __init__(self, connection: Connection, damage: Findings) -> None:
        """``damage``: what was found already, and is not in the tables of ``connection``."""
        self._connection = connection
        self._damage = damage

        self._layouts: dict[int, Layout | None] = {}

    def streams(self) -> list[StreamInfo]:
        return [stream for stream in self._streams.values() if isinstance(stream, StreamInfo)]

    def problems(self) -> Findings:
        found = [*self._damage, *self._lives()]
        found += [(name, str(error)) for name, error in self._streams.items() if isinstance(error, CorruptionError)]
        for stream in self.streams():
            for check in (self._layout, self._positions, self._schemas):
                found += check_or_report(stream.name, check, stream)
        return found + check_or_report("catalogue", self._transactions) + group_problems(self._connection)

    @cached_property
    def _streams(self) -> dict[str, StreamInfo | CorruptionError]:
        """All streams, or why one cannot be read, by name."""
        found: dict[str, StreamInfo | CorruptionError] = {}
        for row in self._connection.execute(sa.select(t.streams)):
            try:
                found[row.name] = stream_info(self._connection, row)
            except CorruptionError as error:
                found[row.name] = error
        return found

    def schemas(self, stream: StreamInfo) -> tuple[pa.Schema, ...]:
        with suppress(CorruptionError):
            return find_schemas(self._connection, stream)
        return ()

    def parts(self, stream: StreamInfo) -> Iterator[StoredPart]:
        mine = t.parts.c.stream_id == stream.stream_id
        for row in self._connection.execute(STORED_PARTS.where(mine)):
            yield stored_part(row)

    def chunks(self) -> Iterator[ChunkRecord]:
        for chunk in self._connection.execute(sa.select(t.chunks)):
            entries = [
                part_entry(row)
                for table in (t.parts, t.prepared_parts)
                for row in self._connection.execute(sa.select(table).where(table.c.chunk_id == chunk.id))
            ]
            yield ChunkRecord(chunk.file, chunk.size_bytes, tuple(entries), chunk.schema_version)

    def garbage(self) -> set[str]:
        return set(self._connection.scalars(sa.select(t.garbage.c.path).where(t.garbage.c.stream_id != t.NO_STREAM)))

    def heirs(self, chunk: ChunkRecord, segment: int) -> set[int]:
        number = chunk.path.partition("/")[0]
        stream_id = int(number) if number.isdecimal() and len(number) <= _DIGITS_MAX else -1
        if stream_id not in self._layouts:
            found = next((stream for stream in self.streams() if stream.stream_id == stream_id), None)
            self._layouts[stream_id] = None if found is None else recorded_layout(self._connection, found)
        layout = self._layouts[stream_id]
        return {segment} if layout is None else layout.heirs(segment)

    def is_truncated(self, chunk: ChunkRecord, segment: int) -> bool:
        query = (
            sa.select(sa.func.max(t.segments.c.head_position))
            .join_from(t.segments, t.chunks, t.segments.c.stream_id == t.chunks.c.stream_id)
            .where(t.chunks.c.file == chunk.path, t.segments.c.segment_id.in_(self.heirs(chunk, segment)))
        )
        return bool(self._connection.scalar(query))

    def _lives(self) -> Findings:
        """Every owner's life can be read (LV2)."""
        found: Findings = []
        for row in self._connection.execute(sa.select(t.owners).order_by(t.owners.c.owner)):
            found += check_at(f"owner '{row.owner}'", _problems_of_life, row.life)
        return found

    def _layout(self, stream: StreamInfo) -> Findings:
        """Every key is in one segment, and there are as many as the stream says (CT6)."""
        layout = recorded_layout(self._connection, stream)
        found = [(stream.name, problem) for problem in layout.problems()]
        if len(layout.present) != stream.segments_count:
            found.append((stream.name, f"it has {len(layout.present)} segments, not {stream.segments_count}"))
        return found

    def _schemas(self, stream: StreamInfo) -> Findings:
        """Every schema that a stream had is there, and each became the next one by an update; chunks name one (S76)."""
        try:
            schemas = find_schemas(self._connection, stream)
        except CorruptionError as error:
            return [(stream.name, str(error))]
        columns = [columns_of(schema) for schema in schemas]
        found = [
            (stream.name, f"its schema {version} cannot have become the next one: {answer.problem}")
            for version, (old, new) in enumerate(itertools.pairwise(columns))
            if isinstance(answer := update(old, new, stream.routing_key), Incompatible)
        ]
        mine = (t.chunks.c.stream_id == stream.stream_id, t.chunks.c.schema_version >= len(schemas))
        unknown = self._connection.execute(sa.select(t.chunks.c.file, t.chunks.c.schema_version).where(*mine))
        return found + [
            (stream.name, f"chunk {row.file} has schema {row.schema_version}, which is none") for row in unknown
        ]

    def _positions(self, stream: StreamInfo) -> Findings:
        """Parts of a segment follow each other from its head, or before it, to its end (S65)."""
        found: Findings = []
        of_stream = t.segments.c.stream_id == stream.stream_id
        query = sa.select(t.segments).where(of_stream)
        segments = self._connection.execute(query).all()
        ends: dict[int, int] = {row.segment_id: row.end_position for row in segments}
        heads: dict[int, int] = {row.segment_id: row.head_position for row in segments}
        expected: dict[int, int] = {}
        parts = (
            sa.select(t.parts, t.chunks.c.file)
            .join_from(t.parts, t.chunks, t.parts.c.chunk_id == t.chunks.c.id, isouter=True)
            .where(t.parts.c.stream_id == stream.stream_id)
            .order_by(t.parts.c.segment_id, t.parts.c.start)
        )
        for row in self._connection.execute(parts):
            where = f"{stream.name}/{row.segment_id}"
            if row.events_count < 1:
                found.append((f"{where} position {row.start}", f"a part of {row.events_count} events"))
            at = expected.get(row.segment_id, min(row.start, heads.get(row.segment_id, -1)))
            if at != row.start:
                found.append((where, f"events from position {row.start} where {at} was expected"))
            if row.file is None:
                found.append((f"{where} position {row.start}", "its chunk is not in the catalogue"))
            expected[row.segment_id] = row.start + row.events_count
        for segment, end in ends.items():
            last = expected.get(segment, heads[segment])
            if last != end:
                found.append((f"{stream.name}/{segment}", f"ends at {last} instead of {end}"))
        return found

    def _transactions(self) -> Findings:
        """Only undecided transactions have hidden parts, and as many events as they say (S12, S13, TX3)."""
        found: Findings = []
        counts = sa.func.coalesce(sa.func.sum(t.prepared_parts.c.events_count), 0)
        same = t.transactions.c.id == t.prepared_parts.c.transaction_id
        query = (
            sa.select(t.transactions.c.name, t.transactions.c.status, t.transactions.c.events_count, counts)
            .join_from(t.transactions, t.prepared_parts, same, isouter=True)
            .group_by(t.transactions.c.id)
        )
        for name, status, recorded, hidden in self._connection.execute(query):
            expected = 0 if Status(status).is_terminal else recorded
            if hidden != expected:
                found.append((f"transaction '{name}'", f"{status} with {hidden} hidden events, not {expected}"))
        known = sa.select(t.transactions.c.id)
        lost_ones = t.prepared_parts.c.transaction_id.not_in(known)
        lost = self._connection.scalar(sa.select(sa.func.count()).where(lost_ones))
        if lost:
            found.append(("catalogue", f"{lost} hidden parts belong to no transaction"))
        return found + self._leases()

    def _leases(self) -> Findings:
        """Exactly the open transactions have a lease, and participants write what is there."""
        shared = t.shared_transactions
        known = sa.select(t.transactions.c.id, t.transactions.c.name, t.transactions.c.status, shared.c.due_ms)
        joined = known.join_from(t.transactions, shared, t.transactions.c.id == shared.c.transaction_id, isouter=True)
        found: Findings = [
            (f"transaction '{row.name}'", f"{row.status}, and its lease is {row.due_ms}")
            for row in self._connection.execute(joined)
            if (row.status == Status.OPEN.value) != (row.due_ms is not None)
        ]
        for table in (shared, t.participants):
            lost = table.c.transaction_id.not_in(sa.select(t.transactions.c.id))
            count = self._connection.scalar(sa.select(sa.func.count()).select_from(table).where(lost))
            if count:
                found.append(("catalogue", f"{count} rows of {table.name} belong to no transaction"))
        return found


def _problems_of_life(data: bytes) -> list[str]:
    decode_life(data, "its life")
    return []
