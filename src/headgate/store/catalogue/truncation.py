"""Where the segments of a stream begin, who holds what, and what goes when a head moves, in the tables.

Counterpart: ``sql`` calls these inside its transactions; ``protocol.store.truncation`` decides. Source: S65 to S71 of
docs/spec/stream-store.md. Never deletes a file: it says which ones may go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import FencedError, TruncatedError, UsageError
from headgate.protocol.store import truncation
from headgate.protocol.store.truncation import Held, Hold, Move, Outside
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import Swept
from headgate.store.catalogue.stream_rows import extents, find_extents, find_stream, remove_stream
from headgate.store.catalogue.tables import checked_row, checked_values
from headgate.store.chunks import TRANSACTIONS
from headgate.store.streams import RetentionPolicy, StreamInfo, decode_retention


@t.implements(Catalogue.cut_at)
def cut_at(connection: Connection, stream: StreamInfo, date_ms: int) -> dict[int, int]:
    """Return the first event of every segment that became visible at ``date_ms`` or later, or its end."""

    of_stream = t.parts.c.stream_id == stream.stream_id
    query = (
        sa.select(t.parts.c.segment_id, sa.func.min(t.parts.c.start).label("start"))
        .where(of_stream, t.parts.c.visible_ms >= date_ms)
        .group_by(t.parts.c.segment_id)
    )
    first = {row.segment_id: row.start for row in connection.execute(query)}
    found = extents(connection, stream)
    return {segment: max(extent.head, first.get(segment, extent.end)) for segment, extent in found.items()}


@t.implements(Catalogue.truncate)
def truncate(connection: Connection, stream: StreamInfo, cut: Mapping[int, int], *, anyway: bool) -> dict[int, int]:
    """Move heads forward to ``cut``; return those that moved."""
    answer = truncation.truncate(cut, extents(connection, stream), holds(connection, stream), anyway=anyway)
    if isinstance(answer, Outside):
        raise _outside(stream, answer)
    if isinstance(answer, Held):
        raise UsageError(
            f"'{answer.holder}' needs the events of segment {answer.segment} of stream '{stream.name}' from position "
            f"{answer.position} on, so it cannot be truncated at {answer.wanted}; truncate it up to there, or "
            "remove the events although they are needed (truncate(force=True), --force)"
        )
    return _move(connection, stream, answer)


@t.implements(Catalogue.delete_stream)
def delete_stream(connection: Connection, name: str, *, force: bool) -> StreamInfo:
    """Delete a stream that is sealed and that no holder needs, or any with ``force``."""
    info = find_stream(connection, name)
    if not force:
        if not info.is_sealed:
            raise UsageError(f"stream '{name}' is not sealed, so it may be in use; seal it first, or force")
        check_not_held(connection, info)
    remove_stream(connection, info)
    return info


def check_not_held(connection: Connection, stream: StreamInfo) -> None:
    """Check that the events of a stream that is to be deleted have been read by everybody who holds them.

    Raises:
        UsageError: some are needed; the message names all holders that need some.
    """
    needed = truncation.needed_by(extents(connection, stream), holds(connection, stream))
    if needed:
        named = ", ".join(f"'{holder}'" for holder in needed)
        raise UsageError(
            f"events of stream '{stream.name}' are still needed by {named}; let them read to its end, release a "
            "pipeline that will not start again (headgate streams release) or delete the group (headgate streams "
            "groups delete), or delete the stream although it is needed (delete(force=True), --force)"
        )


@t.implements(Catalogue.retention_cut)
def retention_cut(connection: Connection, stream: StreamInfo, now_ms: int) -> dict[int, int]:
    """Return the heads that ``stream.retention`` would move, up to what holders need; reads all parts of the stream."""
    policy = stream.retention
    if policy is None:
        return {}
    date_ms = max(_dates(connection, stream, policy, now_ms), default=None)
    if date_ms is None:
        return {}
    return dict(_retention_move(connection, stream, cut_at(connection, stream, date_ms)).heads)


@t.implements(Catalogue.retain)
def retain(connection: Connection, stream: StreamInfo, cut: Mapping[int, int]) -> dict[int, int]:
    """Move heads forward to what ``retention_cut`` found, up to what holders need by now; return those that moved.

    None moves if ``stream.retention`` is not the policy of the stream any more: the present one found no cut.
    """
    move = _retention_move(connection, stream, cut)
    return _move(connection, stream, move) if _policy(connection, stream) == stream.retention else {}


@t.implements(Catalogue.sweep)
def sweep(connection: Connection, stream: StreamInfo, limit: int) -> Swept:
    """Forget at most ``limit`` parts before the heads; give what is to be deleted, also what an earlier sweep left."""
    left, found = limit, extents(connection, stream)
    for segment in connection.scalars(_WITH_PARTS_BEFORE_HEAD, {"stream_id": stream.stream_id}).all():
        left -= _forget_parts(connection, stream.stream_id, segment, found[segment].head, left)
        if left <= 0:
            break
    paths = connection.scalars(sa.select(t.garbage.c.path).where(t.garbage.c.stream_id == stream.stream_id))
    return Swept(tuple(sorted(checked_values(paths, str))), is_done=left > 0)


_WITH_PARTS_BEFORE_HEAD = (
    sa.select(t.segments.c.segment_id)
    .where(
        t.segments.c.stream_id == sa.bindparam("stream_id"),
        sa.exists().where(
            t.parts.c.stream_id == t.segments.c.stream_id,
            t.parts.c.segment_id == t.segments.c.segment_id,
            t.parts.c.start < t.segments.c.head_position,
            t.parts.c.start + t.parts.c.events_count <= t.segments.c.head_position,
        ),
    )
    .order_by(t.segments.c.segment_id)
)
"""Segments of which something is to be forgotten: of a stream with a long history these are few."""


@t.implements(Catalogue.swept)
def forget_garbage(connection: Connection, paths: Sequence[str]) -> None:
    """Remove the records of garbage after its files were deleted."""
    for path in paths:
        connection.execute(t.garbage.delete().where(t.garbage.c.path == path))


@t.implements(Catalogue.hold)
def hold(connection: Connection, stream: StreamInfo, hold: Hold) -> None:
    """Let ``hold`` take the place of what its holder held in the stream before."""
    # none found: it names none, or none that there is, or the stream was deleted; all segments tell which
    named = t.segments.c.segment_id.in_(sorted(hold.positions))  # of those only: a stream may have had many
    found = find_extents(connection, t.segments.c.stream_id == stream.stream_id, named) or extents(connection, stream)
    newest = _newest(connection, stream, hold.holder)
    if newest is not None and hold.is_replaced_by(*newest):
        raise FencedError(f"'{hold.holder}'", hold.epoch, newest[1])
    for segment, position in sorted(hold.positions.items()):
        extent = found.get(segment)
        if extent is None or position > extent.end:
            raise _outside(stream, Outside(segment, position, extent))
        if position < extent.head:
            raise TruncatedError(stream.name, segment, position, extent.head)
    release(connection, stream, hold.holder)
    first = min(found)
    positions = hold.positions or {first: found[first].head}  # a holder that names none needs all, and has a row
    key = {"stream_id": stream.stream_id, "holder": hold.holder, "life": hold.life, "epoch": hold.epoch}
    rows = [{**key, "segment_id": segment, "position": position} for segment, position in positions.items()]
    connection.execute(t.holds.insert(), rows)


@t.implements(Catalogue.release)
def release(connection: Connection, stream: StreamInfo, holder: str) -> None:
    """Forget what ``holder`` holds in the stream."""
    connection.execute(t.holds.delete().where(t.holds.c.stream_id == stream.stream_id, t.holds.c.holder == holder))


@t.implements(Catalogue.holds)
def holds(connection: Connection, stream: StreamInfo) -> list[Hold]:
    """Return who holds what in the stream, by holder."""
    columns = (t.holds.c.holder, t.holds.c.segment_id, t.holds.c.position)
    query = sa.select(*columns).where(t.holds.c.stream_id == stream.stream_id)
    found: dict[str, dict[int, int]] = {}
    for holder, segment, position in (checked_row(row, str, int, int) for row in connection.execute(query).all()):
        found.setdefault(holder, {})[segment] = position
    return [Hold(holder, found[holder]) for holder in sorted(found)]


def _newest(connection: Connection, stream: StreamInfo, holder: str) -> tuple[str, int] | None:
    """Return life and generation of who holds already."""
    mine = (t.holds.c.stream_id == stream.stream_id, t.holds.c.holder == holder)
    row = connection.execute(sa.select(t.holds.c.life, t.holds.c.epoch).where(*mine).limit(1)).one_or_none()
    if row is None:
        return None
    life, epoch = checked_row(row, str, int)
    return life, epoch


def _outside(stream: StreamInfo, answer: Outside) -> UsageError:
    if answer.extent is None:
        return UsageError(f"stream '{stream.name}' has no segment {answer.segment}")
    return UsageError(
        f"segment {answer.segment} of stream '{stream.name}' ends at position {answer.extent.end}, so nothing can be "
        f"cut at {answer.position}"
    )


def _retention_move(connection: Connection, stream: StreamInfo, cut: Mapping[int, int]) -> Move:
    return truncation.retain(cut, extents(connection, stream), holds(connection, stream))


def _policy(connection: Connection, stream: StreamInfo) -> RetentionPolicy | None:
    """Return the policy that the stream has now."""
    text = connection.scalar(sa.select(t.streams.c.retention).where(t.streams.c.id == stream.stream_id))
    return decode_retention(f"stream '{stream.name}'", text)


def _move(connection: Connection, stream: StreamInfo, move: Move) -> dict[int, int]:
    if move.heads:
        connection.execute(
            t.segments.update()
            .where(t.segments.c.stream_id == stream.stream_id, t.segments.c.segment_id == sa.bindparam("at"))
            .values(head_position=sa.bindparam("head")),
            [{"at": segment, "head": head} for segment, head in move.heads.items()],
        )
    return dict(move.heads)


def _dates(connection: Connection, stream: StreamInfo, policy: RetentionPolicy, now_ms: int) -> list[int]:
    """Return, for age and size, when what stays became visible; nothing where all of it stays."""
    found = []
    if policy.age_ms is not None:
        found.append(now_ms - policy.age_ms)
    if policy.size_bytes is not None:
        parts = t.parts.c
        behind = sa.func.sum(parts.size_bytes).over(order_by=parts.visible_ms.desc(), range_=(None, 0))
        sizes = (
            sa.select(parts.visible_ms, behind.label("size_bytes"))
            .where(parts.stream_id == stream.stream_id)
            .subquery()
        )
        # The last one of those that go, from the newest on, has at least the size after it, or within it.
        enough = sa.select(sa.func.max(sizes.c.visible_ms)).where(sizes.c.size_bytes >= policy.size_bytes)
        date_ms = connection.scalar(enough)
        if date_ms is not None:
            found.append(int(date_ms))
    return found


def _forget_parts(connection: Connection, stream_id: int, segment: int, head: int, limit: int) -> int:
    """Forget parts of a segment that end at its head or before it; return how many."""
    parts = t.parts.c
    mine = (parts.stream_id == stream_id, parts.segment_id == segment, parts.start < head)
    query = (
        sa.select(parts.start, parts.chunk_id)
        .where(*mine, parts.start + parts.events_count <= head)
        .order_by(parts.start)
        .limit(limit)
    )
    rows = connection.execute(query).all()
    if not rows:
        return 0
    # up to the last one that was found: where there were more than `limit`, the rest is for the next call
    connection.execute(t.parts.delete().where(*mine, parts.start <= rows[-1].start))
    _forget_chunks(connection, stream_id, sorted({row.chunk_id for row in rows}))
    return len(rows)


def _forget_chunks(connection: Connection, stream_id: int, numbers: Sequence[int]) -> None:
    """Make garbage of those chunks that hold no part any more, and remember who wrote them."""
    for number in numbers:
        used = sa.select(t.parts.c.chunk_id).where(t.parts.c.chunk_id == number).limit(1)
        if connection.scalar(used) is not None:
            continue
        path = connection.scalar(sa.select(t.chunks.c.file).where(t.chunks.c.id == number))
        if path is None:
            continue  # a damaged catalogue, which its check says: the file is unknown
        connection.execute(t.chunks.delete().where(t.chunks.c.id == number))
        # recorded before the file is deleted: after a crash in between, the next sweep goes on with it
        connection.execute(t.garbage.insert().values(path=path, stream_id=stream_id))
        _remember_author(connection, stream_id, path)


def _remember_author(connection: Connection, stream_id: int, path: str) -> None:
    """Keep the directory of an owner, ``<stream>/txn/<owner>`` (its epochs are below it), or that of appends."""
    names = path.split("/")
    directory = "/".join(names[:3] if names[1:2] == [TRANSACTIONS] else names[:-1])
    known = sa.select(t.former_authors.c.directory).where(
        t.former_authors.c.stream_id == stream_id, t.former_authors.c.directory == directory
    )
    if connection.scalar(known) is None:
        connection.execute(t.former_authors.insert().values(stream_id=stream_id, directory=directory))
