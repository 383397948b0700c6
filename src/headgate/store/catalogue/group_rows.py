"""Reader groups in the tables: one row holds the state of each, as JSON, and its holds lie beside those of others.

Counterparts: ``sql`` calls these inside its transactions; ``protocol.store.reader_group`` and
``protocol.store.group_holds`` decide. Source: RG17 and RG28 of docs/spec/reader-groups.md. Never reads
events, and never moves a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.codec.decodable import decodable
from headgate.codec.json_files import MALFORMED
from headgate.errors import CorruptionError, FencedError, TruncatedError, UsageError
from headgate.protocol.store import group_holds, reader_group, reading_order
from headgate.protocol.store.group_holds import HoldMoved
from headgate.protocol.store.group_ownership import Claim, Replaced
from headgate.protocol.store.reader_group import (
    Checkpoint,
    Event,
    Group,
    GroupRefused,
    GroupSegment,
    Joined,
    Lived,
    Member,
    ResetAsked,
    Shares,
    Stale,
    contradictions,
)
from headgate.protocol.store.reading_order import FirstStart, Progress, View
from headgate.protocol.store.truncation import GROUP_HOLDER, is_of_group
from headgate.store.catalogue import stream_rows as sql_streams
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import GroupFound, GroupStart
from headgate.store.catalogue.tables import checked_row, checked_values
from headgate.store.streams import StreamInfo, is_usable_name

_FORMAT = 1

_ProgressRow: TypeAlias = tuple[list[tuple[int, int]], list[int], list[tuple[int, int]]]
"""Positions, what is done, and where others begin: see ``Progress``."""


class _Row(msgspec.Struct, frozen=True):
    """What the bytes are made of. Types are checked while they are read: what is damaged may be of any shape."""

    format: int
    streams: dict[str, int]
    kept: int
    epoch: int
    reset: str
    progress: dict[str, _ProgressRow]
    readers: dict[str, tuple[str, int, int]]
    owners: list[tuple[str, int, str]]
    leaving: list[tuple[str, int]]
    checkpoints: list[tuple[str, list[str], dict[str, _ProgressRow]]]
    claim: Claim | None


def encode_group(group: Group) -> bytes:
    """Return the bytes of ``group``."""
    return msgspec.json.encode(
        {
            "format": _FORMAT,
            "streams": group.streams,
            "kept": group.kept,
            "epoch": group.epoch,
            "reset": group.reset,
            "progress": _progress_rows(group.progress),
            "readers": {name: [x.token, x.lease_ms, x.beats] for name, x in sorted(group.readers.items())},
            "owners": [[*segment, owner] for segment, owner in sorted(group.shares.owners.items())],
            "leaving": [list(segment) for segment in sorted(group.shares.leaving)],
            "checkpoints": [[x.name, list(x.owed_by), _progress_rows(x.progress)] for x in group.checkpoints],
            "claim": group.claim,
        }
    )


def decode_group(data: bytes, name: str) -> Group:
    """Return the group in ``data``; ``name`` is for errors.

    Raises:
        CorruptionError: it is none, of another format, or contradicts itself.
    """
    try:
        found = msgspec.json.decode(data, type=decodable(_Row))
        if found.format != _FORMAT:
            raise ValueError(f"format {found.format}")
        group = _group(found)
        if wrong := contradictions(group):
            raise ValueError(f"it contradicts itself: {wrong[0]}")
        return group
    except MALFORMED as error:
        what = f"the state of reader group '{name}' in the catalogue"
        raise CorruptionError(what, 0, f"format {_FORMAT}", str(error)) from error


def _group(found: _Row) -> Group:
    owners = {GroupSegment(stream, number): reader for stream, number, reader in found.owners}
    return Group(
        found.streams,
        _progress(found.progress),
        found.kept,
        found.epoch,
        found.reset,
        {reader: Member(*row) for reader, row in found.readers.items()},
        Shares(owners, frozenset(GroupSegment(*row) for row in found.leaving)),
        tuple(Checkpoint(key, tuple(owed), _progress(rows)) for key, owed, rows in found.checkpoints),
        found.claim,
    )


def _progress_rows(progress: Mapping[str, Progress]) -> dict[str, _ProgressRow]:
    return {
        name: (sorted(x.positions.items()), sorted(x.done), sorted(x.begins.items()))
        for name, x in sorted(progress.items())
    }


def _progress(rows: Mapping[str, _ProgressRow]) -> dict[str, Progress]:
    return {
        name: Progress(dict(positions), frozenset(done), dict(begins))
        for name, (positions, done, begins) in rows.items()
    }


def holder_of(name: str) -> str:
    """Return as whom a group holds its streams."""
    return f"{GROUP_HOLDER}{name}"


def group_of(holder: str) -> str | None:
    """Return the group that holds under this name; None: it is no group."""
    return holder.removeprefix(GROUP_HOLDER) if is_of_group(holder) else None


def needed_positions(connection: Connection, group: Group, stream: str) -> tuple[StreamInfo, dict[int, int]] | None:
    """Return what the group may still be asked for (``group_holds.needed``).

    None: the stream was deleted, with what was held of it.
    """
    found = find_stream_view(connection, group, stream)
    return None if found is None else (found[0], group_holds.needed(group, stream, found[1]))


def hold_needed(connection: Connection, name: str, group: Group) -> None:
    """Hold what the group needs, and nothing else."""
    for stream in group.streams:
        _hold_needed_of_stream(connection, name, group, stream)


def _hold_needed_of_stream(connection: Connection, name: str, group: Group, stream: str) -> None:
    found = find_stream_view(connection, group, stream)
    if found is not None:
        info, view = found
        wanted = group_holds.worth_holding(view, group_holds.needed(group, stream, view))
        _write_hold(connection, info, holder_of(name), wanted)


def find_stream_view(connection: Connection, group: Group, stream: str) -> tuple[StreamInfo, View] | None:
    """Return a stream as it is, found by its number: one of the same name may have taken its place."""
    row = connection.execute(sa.select(t.streams).where(t.streams.c.id == group.streams[stream])).one_or_none()
    if row is None:
        return None
    info = sql_streams.stream_info(connection, row)
    return info, stream_view(connection, info)


def move_holds(connection: Connection, name: str, before: Group, after: Group) -> None:
    """Hold what the group needs now; reads nothing of what the streams were, unless it has to (RG28)."""
    for stream, stream_id in after.streams.items():
        moved = group_holds.moved(before, after, stream)
        if moved is None or not _is_moved(connection, stream_id, holder_of(name), moved):
            _hold_needed_of_stream(connection, name, after, stream)


def _is_moved(connection: Connection, stream_id: int, holder: str, moved: HoldMoved) -> bool:
    """Move what is held; return whether that was held before: it may have been released."""
    if not moved.positions:
        return True
    own = t.holds.c
    mine = (own.stream_id == stream_id, own.holder == holder)
    held = set(connection.scalars(sa.select(own.segment_id).where(*mine, own.segment_id.in_(moved.positions))))
    if not held or moved.certain - held:
        return False
    rows = [{"at": segment, "now": moved.positions[segment]} for segment in sorted(held)]
    here = own.segment_id == sa.bindparam("at")
    connection.execute(t.holds.update().where(*mine, here).values(position=sa.bindparam("now")), rows)
    return True


def _write_hold(connection: Connection, info: StreamInfo, holder: str, wanted: Mapping[int, int]) -> None:
    mine = (t.holds.c.stream_id == info.stream_id, t.holds.c.holder == holder)
    rows = connection.execute(sa.select(t.holds.c.segment_id, t.holds.c.position).where(*mine))
    held = {row.segment_id: row.position for row in rows}
    changed = [x for x in sorted(held.keys() | wanted.keys()) if held.get(x) != wanted.get(x)]
    gone = [{"at": segment} for segment in changed if segment in held]
    key = {"stream_id": info.stream_id, "holder": holder, "life": "", "epoch": 0}
    new = [{**key, "segment_id": segment, "position": wanted[segment]} for segment in changed if segment in wanted]
    if gone:
        connection.execute(t.holds.delete().where(*mine, t.holds.c.segment_id == sa.bindparam("at")), gone)
    if new:
        connection.execute(t.holds.insert(), new)


def stream_view(connection: Connection, info: StreamInfo) -> View:
    """Return a stream as it is."""
    epoch, is_sealed = sql_streams.look(connection, info)
    layout = sql_streams.find_layout(connection, replace(info, layout_epoch=epoch))
    return View(layout, sql_streams.extents(connection, info), is_sealed)


SEGMENTS_SAMPLED = 32
PARTS_SAMPLED = 100
"""Of so many segments so many parts, to tell what is unread while others wait; of more segments fewer parts each. The
rest is taken to be like these."""


_ALL_PARTS = 1 << 62

_parts = t.parts.c
_of_segment = (_parts.stream_id == sa.bindparam("stream_id"), _parts.segment_id == sa.bindparam("segment"))
_part_at = (
    sa.select(sa.func.max(_parts.start)).where(*_of_segment, _parts.start <= sa.bindparam("position")).scalar_subquery()
)
_PARTS_BEHIND = (
    sa.select(_parts.start, _parts.events_count, _parts.size_bytes)
    .where(*_of_segment, _parts.start >= sa.func.coalesce(_part_at, 0))
    .where(_parts.start + _parts.events_count > sa.bindparam("position"))
    .order_by(_parts.start)
    .limit(sa.bindparam("most"))
)
"""Of a segment, the parts that hold events from a position on: asked for many at a time, so it is made once."""


@t.implements(Catalogue.create_group)
def create_group(
    connection: Connection,
    name: str,
    streams: Sequence[str],
    start: GroupStart,
    kept: int,
    claim: Claim | None = None,
) -> GroupFound:
    """Make a group, ``claim``'s if there is one, or return the one that there is of the same streams."""
    row = _row(connection, name)
    if row is not None:
        found = _group_found(row)
        if sorted(found.group.streams) != sorted(streams):
            raise UsageError(
                f"reader group '{name}' reads {_listed(found.group.streams)}, not {_listed(streams)}; "
                "use another name, or delete the group"
            )
        return found
    if not is_usable_name(name):
        raise UsageError(f"reader group name {name!r} is not usable; use letters, digits, '_', '-', '.' and '/'")
    infos = {stream: sql_streams.find_stream(connection, stream) for stream in streams}
    views = {stream: stream_view(connection, info) for stream, info in infos.items()}
    progress = {x: reading_order.first(views[x], _first(infos[x], views[x], start)) for x in infos}
    group = Group({stream: info.stream_id for stream, info in infos.items()}, progress, kept, claim=claim)
    values = {"name": name, "version": 1, "state": encode_group(group)}
    connection.execute(t.reader_groups.insert().values(**values))
    hold_needed(connection, name, group)
    return GroupFound(name, 1, group)


@t.implements(Catalogue.find_group)
def find_group(connection: Connection, name: str) -> GroupFound:
    """Return a group."""
    row = _row(connection, name)
    if row is None:
        where, there = t.store_of(connection), _listed(names(connection))
        raise UsageError(f"there is no reader group '{name}' in the store at {where}; groups there: {there}")
    return _group_found(row)


@t.implements(Catalogue.groups)
def names(connection: Connection) -> list[str]:
    """Return the names of all groups."""
    return checked_values(connection.scalars(sa.select(t.reader_groups.c.name).order_by(t.reader_groups.c.name)), str)


@t.implements(Catalogue.change_group)
def change_group(connection: Connection, name: str, event: Event) -> GroupFound:
    """Decide about an event and record the answer."""
    found = find_group(connection, name)
    views = {x: _view_of(connection, found.group, x) for x in reader_group.views_for(found.group, event)}
    return _record(connection, found, event, views)


@t.implements(Catalogue.reset_group)
def reset_group(
    connection: Connection,
    name: str,
    token: str,
    start: GroupStart,
    checkpoint: str | None,
    claim: Claim | None = None,
) -> GroupFound:
    """Reset a group (RG15), and let it belong to ``claim`` from now on."""
    found = find_group(connection, name)
    # made by an earlier try with a lost answer: readers that joined since stay
    if found.group.reset == token:
        return found
    infos = {stream: sql_streams.find_stream(connection, stream) for stream in sorted(found.group.streams)}
    views = {stream: stream_view(connection, info) for stream, info in infos.items()}
    ids = {stream: info.stream_id for stream, info in infos.items()}
    begin = {} if checkpoint is not None else {x: _first(infos[x], views[x], start) for x in infos}
    kept = found.group.checkpoint(checkpoint) if checkpoint is not None else None
    if kept is not None and ids == dict(found.group.streams):
        for stream, progress in kept.progress.items():
            _check_there(infos[stream], views[stream], reading_order.next_step(views[stream], progress))
    return _record(connection, found, ResetAsked(token, ids, begin, checkpoint, claim), views)


@t.implements(Catalogue.delete_group)
def delete_group(connection: Connection, name: str) -> bool:
    """Forget a group and what it holds; return whether there was one."""
    connection.execute(t.holds.delete().where(t.holds.c.holder == holder_of(name)))
    return connection.execute(t.reader_groups.delete().where(t.reader_groups.c.name == name)).rowcount > 0


@t.implements(Catalogue.group_cuts)
def group_cuts(connection: Connection, name: str, checkpoint: str | None) -> dict[str, dict[int, int]]:
    """Return, by stream, the cut of a completed checkpoint, or of the durable positions (RG10).

    A stream that was deleted has none.
    """
    found = find_group(connection, name)
    progress = found.group.progress
    if checkpoint is not None:
        kept = found.group.checkpoint(checkpoint)
        if kept is None or not kept.is_complete:
            raise UsageError(f"reader group '{found.name}' has no completed checkpoint '{checkpoint}'")
        progress = kept.progress
    views = _views_of_there(connection, found.group)
    return {x: reading_order.whole_cut(view, progress[x]) for x, view in views.items()}


@t.implements(Catalogue.group_unread)
def group_unread(connection: Connection, name: str) -> dict[GroupSegment, int]:
    """Return the bytes after the durable positions, of every segment that has any. Reads all their parts."""
    found = find_group(connection, name)
    sizes = {}
    for stream, view in _views_of_there(connection, found.group).items():
        cut = reading_order.whole_cut(view, found.group.progress[stream])
        for number, extent in view.extents.items():
            position = max(cut.get(number, 0), extent.head)
            segment = GroupSegment(stream, number)
            sizes[segment] = _unread(connection, found.group.streams[stream], number, position, extent.end)
    return {segment: size for segment, size in sizes.items() if size}


def _record(connection: Connection, found: GroupFound, event: Event, views: Mapping[str, View]) -> GroupFound:
    answer = reader_group.handle(found.group, event, views)
    if isinstance(answer, Stale):
        reader = getattr(event, "reader", "")
        raise FencedError(
            f"reader '{reader}' is not in reader group '{found.name}' any more: {answer.reason}; join again"
        )
    if isinstance(answer, Replaced):
        raise FencedError(f"reader group '{found.name}'", answer.mine, answer.newest)
    if isinstance(answer, GroupRefused):
        raise UsageError(f"reader group '{found.name}': {answer.problem}")
    group = answer.group
    # at joins and heartbeats, not at every commit: to sample sizes, parts are looked at
    is_uneven = len(group.readers) > 1 and isinstance(event, Joined | Lived)
    if group.readers and (group.free or is_uneven):
        group = reader_group.settled(group, _sampled(connection, group))
    # nothing is written, so that no reader is woken to look at what it knows
    if group == found.group:
        return found
    now = GroupFound(found.name, found.version + 1, group)
    mine = t.reader_groups.c.name == found.name
    connection.execute(t.reader_groups.update().where(mine).values(version=now.version, state=encode_group(group)))
    was = found.group
    if (group.streams, group.progress, group.checkpoints) != (was.streams, was.progress, was.checkpoints):
        # in the transaction that moves the positions: no truncation comes in between
        move_holds(connection, found.name, found.group, group)
    return now


def _first(info: StreamInfo, view: View, start: GroupStart) -> FirstStart:
    moment = {number: extent.end for number, extent in view.extents.items()}
    if info.name not in start.cuts:
        return FirstStart(moment, start.from_latest)
    stream_id, positions = start.cuts[info.name]
    if stream_id != info.stream_id:
        raise UsageError(f"the cut is of a former stream '{info.name}', or of another store")
    for number, position in sorted(positions.items()):
        extent = view.extents.get(number)
        if extent is None or position > extent.end:
            raise UsageError(f"stream '{info.name}' has nothing at position {position} of segment {number}")
    first = FirstStart(moment, begin=dict(positions))
    _check_there(info, view, reading_order.first(view, first))
    return first


def _check_there(info: StreamInfo, view: View, progress: Progress) -> None:
    for number in progress.readable:
        if progress.positions[number] < view.extents[number].head:
            raise TruncatedError(info.name, number, progress.positions[number], view.extents[number].head)


def _view_of(connection: Connection, group: Group, stream: str) -> View:
    info = sql_streams.find_stream(connection, stream)
    if info.stream_id != group.streams[stream]:
        raise UsageError(f"stream '{stream}' was deleted and created again; reset the reader group to read it")
    return stream_view(connection, info)


def _views_of_there(connection: Connection, group: Group) -> dict[str, View]:
    """Return the streams of a group as they are, without those that were deleted."""
    found = {stream: find_stream_view(connection, group, stream) for stream in sorted(group.streams)}
    return {stream: there[1] for stream, there in found.items() if there is not None}


def _sampled(connection: Connection, group: Group) -> dict[GroupSegment, int]:
    """Return about how many unread bytes there are in each segment that can be read and has any."""
    waiting = _waiting(connection, group)
    step = -(-len(waiting) // SEGMENTS_SAMPLED) or 1
    events = sizes = 0
    found = {}
    for segment in list(waiting)[::step]:
        position, end = waiting[segment]
        stream_id = group.streams[segment.stream]
        size = _unread(connection, stream_id, segment.segment, position, end, max(1, PARTS_SAMPLED // step))
        found[segment] = size
        events, sizes = events + end - position, sizes + size
    return {x: found[x] if x in found else sizes * (end - at) // events for x, (at, end) in waiting.items()}


def _waiting(connection: Connection, group: Group) -> dict[GroupSegment, tuple[int, int]]:
    """Return durable position and end of the readable segments with events after the position, in order."""
    found = {}
    for stream, progress in sorted(group.progress.items()):
        own = t.segments.c
        mine = (own.stream_id == group.streams[stream], own.segment_id.in_(progress.readable))
        query = sa.select(own.segment_id, own.end_position).where(*mine).order_by(own.segment_id)
        for number, end in (checked_row(row, int, int) for row in connection.execute(query).all()):
            if progress.positions[number] < end:
                found[GroupSegment(stream, number)] = progress.positions[number], end
    return found


def _unread(
    connection: Connection, stream_id: int, number: int, position: int, end: int, limit: int = _ALL_PARTS
) -> int:
    """Return the bytes of a segment from ``position`` to its end; with ``limit`` guessed from so many parts."""
    of = {"stream_id": stream_id, "segment": number, "position": position, "most": limit}
    seen, size = position, 0
    for start, events, size_bytes in connection.execute(_PARTS_BEHIND, of):
        count = start + events - max(start, position)
        size += size_bytes * count // events
        seen = start + events
    return size * (end - position) // (seen - position) if seen > position else 0


def _row(connection: Connection, name: str) -> sa.Row[tuple[object, ...]] | None:
    return connection.execute(sa.select(t.reader_groups).where(t.reader_groups.c.name == name)).one_or_none()


def _group_found(row: sa.Row[tuple[object, ...]]) -> GroupFound:
    name, version = checked_row((row.name, row.version), str, int)
    return GroupFound(name, version, decode_group(row.state, name))


def _listed(names: Sequence[str] | Mapping[str, int]) -> str:
    return ", ".join(sorted(names)[:20]) or "none"
