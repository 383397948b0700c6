"""Reader groups in the tables: one row holds the state of each, and what it holds of its streams lies beside it.

Counterparts: ``sql`` calls these inside its transactions, ``group_holding`` writes what is held;
``protocol.store.reader_group`` decides. Source: RG16, RG28 and RG29 of docs/spec/reader-groups.md. Never reads events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import FencedError, TruncatedError, UsageError
from headgate.protocol.store import group_progress, reader_group
from headgate.protocol.store.group_claims import Claim, Replaced
from headgate.protocol.store.group_progress import Progress, View
from headgate.protocol.store.group_shares import GroupSegment
from headgate.protocol.store.reader_group import Event, Group, GroupRefused, Joined, Lived, ResetAsked, Stale
from headgate.protocol.store.reading_order import FirstStart
from headgate.store.catalogue import group_holding
from headgate.store.catalogue import streams as sql_streams
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.group_rows import decode_group, encode_group
from headgate.store.catalogue.kinds import all_of, of_kinds
from headgate.store.catalogue.values import GroupFound, GroupStart
from headgate.store.streams import StreamInfo, is_usable_name

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


def create(
    connection: Connection,
    name: str,
    streams: Sequence[str],
    start: GroupStart,
    kept: int,
    where: str,
    claim: Claim | None = None,
) -> GroupFound:
    """Make a group, ``claim``'s if there is one, or return the one that there is of the same streams.

    Raises:
        UsageError: a stream is missing, the name cannot be, the start is no cut of them, or it has other streams.
    """
    row = _row(connection, name)
    if row is not None:
        found = _found(row)
        if sorted(found.group.streams) != sorted(streams):
            raise UsageError(
                f"reader group '{name}' reads {_listed(found.group.streams)}, not {_listed(streams)}; "
                "use another name, or delete the group"
            )
        return found
    if not is_usable_name(name):
        raise UsageError(f"reader group name {name!r} is not usable; use letters, digits, '_', '-', '.' and '/'")
    infos = {stream: sql_streams.find_stream(connection, stream, where) for stream in streams}
    views = {stream: group_holding.view(connection, info) for stream, info in infos.items()}
    progress = {x: group_progress.first(views[x], _first(infos[x], views[x], start)) for x in infos}
    group = Group({stream: info.stream_id for stream, info in infos.items()}, progress, kept, claim=claim)
    values = {"name": name, "version": 1, "state": encode_group(group)}
    connection.execute(t.reader_groups.insert().values(**values))
    group_holding.hold(connection, name, group)
    return GroupFound(name, 1, group)


def find(connection: Connection, name: str, where: str) -> GroupFound:
    """Return a group.

    Raises:
        UsageError: there is none.
    """
    row = _row(connection, name)
    if row is None:
        there = _listed(names(connection))
        raise UsageError(f"there is no reader group '{name}' in the store at {where}; groups there: {there}")
    return _found(row)


def names(connection: Connection) -> list[str]:
    """Return the names of all groups."""
    return all_of(connection.scalars(sa.select(t.reader_groups.c.name).order_by(t.reader_groups.c.name)), str)


def change(connection: Connection, name: str, event: Event, where: str) -> GroupFound:
    """Decide about an event and record the answer.

    Raises:
        FencedError: it comes from a reader that is not in the group any more (RG12).
        UsageError: it is refused, or there is no such group.
    """
    found = find(connection, name, where)
    views = {x: _view_of(connection, found.group, x, where) for x in reader_group.views_for(found.group, event)}
    return _record(connection, found, event, views)


def reset(
    connection: Connection,
    name: str,
    token: str,
    start: GroupStart,
    checkpoint: str | None,
    where: str,
    claim: Claim | None = None,
) -> GroupFound:
    """Have a group begin anew (RG15), and be ``claim``'s from now on.

    Raises:
        FencedError: a newer generation has it.
        TruncatedError: what it would begin with is gone; nothing has changed.
        UsageError: there is no such group or checkpoint, a stream is missing, or a cut is of another one.
    """
    found = find(connection, name, where)
    if found.group.reset == token:
        return found
    infos = {stream: sql_streams.find_stream(connection, stream, where) for stream in sorted(found.group.streams)}
    views = {stream: group_holding.view(connection, info) for stream, info in infos.items()}
    ids = {stream: info.stream_id for stream, info in infos.items()}
    begin = {} if checkpoint is not None else {x: _first(infos[x], views[x], start) for x in infos}
    kept = found.group.checkpoint(checkpoint) if checkpoint is not None else None
    if kept is not None and ids == dict(found.group.streams):
        for stream, progress in kept.progress.items():
            _check_there(infos[stream], views[stream], group_progress.next_step(views[stream], progress))
    return _record(connection, found, ResetAsked(token, ids, begin, checkpoint, claim), views)


def delete(connection: Connection, name: str) -> bool:
    """Forget a group and what it holds; return whether there was one."""
    connection.execute(t.holds.delete().where(t.holds.c.holder == group_holding.holder_of(name)))
    return connection.execute(t.reader_groups.delete().where(t.reader_groups.c.name == name)).rowcount > 0


def cuts(connection: Connection, found: GroupFound, checkpoint: str | None) -> dict[str, dict[int, int]]:
    """Return, by stream, the cut of a completed checkpoint, or of the durable positions (RG10).

    A stream that was deleted has none (RG26).

    Raises:
        UsageError: there is no such checkpoint, or it is not complete.
    """
    progress = found.group.progress
    if checkpoint is not None:
        kept = found.group.checkpoint(checkpoint)
        if kept is None or not kept.is_complete:
            raise UsageError(f"reader group '{found.name}' has no completed checkpoint '{checkpoint}'")
        progress = kept.progress
    views = _views_of_there(connection, found.group)
    return {x: group_progress.whole_cut(view, progress[x]) for x, view in views.items()}


def unread(connection: Connection, found: GroupFound) -> dict[GroupSegment, int]:
    """Return the bytes behind the durable positions, of every segment that has any. Reads all their parts."""
    sizes = {}
    for stream, view in _views_of_there(connection, found.group).items():
        cut = group_progress.whole_cut(view, found.group.progress[stream])
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
    is_uneven = len(group.readers) > 1 and isinstance(event, Joined | Lived)
    if group.readers and (group.free or is_uneven):
        group = reader_group.settled(group, _sampled(connection, group))
    if group == found.group:
        return found
    now = GroupFound(found.name, found.version + 1, group)
    mine = t.reader_groups.c.name == found.name
    connection.execute(t.reader_groups.update().where(mine).values(version=now.version, state=encode_group(group)))
    was = found.group
    if (group.streams, group.progress, group.checkpoints) != (was.streams, was.progress, was.checkpoints):
        group_holding.move(connection, found.name, found.group, group)
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
    _check_there(info, view, group_progress.first(view, first))
    return first


def _check_there(info: StreamInfo, view: View, progress: Progress) -> None:
    for number in progress.readable:
        if progress.positions[number] < view.extents[number].head:
            raise TruncatedError(info.name, number, progress.positions[number], view.extents[number].head)


def _view_of(connection: Connection, group: Group, stream: str, where: str) -> View:
    info = sql_streams.find_stream(connection, stream, where)
    if info.stream_id != group.streams[stream]:
        raise UsageError(f"stream '{stream}' was deleted and created again; reset the reader group to read it")
    return group_holding.view(connection, info)


def _views_of_there(connection: Connection, group: Group) -> dict[str, View]:
    """Return the streams of a group as they are, without those that were deleted."""
    found = {stream: group_holding.seen(connection, group, stream) for stream in sorted(group.streams)}
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
    """Return durable position and end of the segments that can be read and have something behind it, in order."""
    found = {}
    for stream, progress in sorted(group.progress.items()):
        own = t.segments.c
        mine = (own.stream_id == group.streams[stream], own.segment_id.in_(progress.readable))
        query = sa.select(own.segment_id, own.end_position).where(*mine).order_by(own.segment_id)
        for number, end in (of_kinds(row, int, int) for row in connection.execute(query).all()):
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


def _found(row: sa.Row[tuple[object, ...]]) -> GroupFound:
    name, version = of_kinds((row.name, row.version), str, int)
    return GroupFound(name, version, decode_group(row.state, name))


def _listed(names: Sequence[str] | Mapping[str, int]) -> str:
    return ", ".join(sorted(names)[:20]) or "none"
