"""What pipelines have in the tables: markers of their checkpoints, and ownership of what they write.

A marker is one moment of a stream, as a position in each of its segments. An owner of transactions records which life
of a pipeline it is; a reset empties what it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.codec.json_files import decode_life, encode_life
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Mine, OtherSink, Owner, PipelineIdentity
from headgate.protocol.supervision import ownership
from headgate.store.catalogue import stream_rows as sql_streams
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import Contents, Frontier, Marker
from headgate.store.catalogue.stream_rows import create_stream, find_stream, find_stream_or_none, remove_stream
from headgate.store.catalogue.tables import checked_row
from headgate.store.catalogue.transaction_rows import fence, recover
from headgate.store.chunks import owner_directory
from headgate.store.streams import StreamDefinition, StreamInfo, StreamReset


@t.implements(Catalogue.mark)
def mark(connection: Connection, stream: str, owner: str, generation: int, checkpoint: int) -> dict[int, int]:
    """Record where every segment ends now that takes events, once for each checkpoint; return it.

    Closed ones have ended for good: of those nothing has to be recorded.
    """
    info = find_stream(connection, stream)
    found = _find_markers(connection, info, owner, generation, checkpoint)
    # asked again after a lost answer: the first moment stays, though more events may have come
    if found:
        return found
    query = sa.select(t.segments.c.segment_id, t.segments.c.end_position).where(*t.open_segments(info.stream_id))
    ends = dict(checked_row(row, int, int) for row in connection.execute(query).all())
    key = {"stream_id": info.stream_id, "owner": owner, "generation": generation, "checkpoint": checkpoint}
    connection.execute(
        t.markers.insert(), [{**key, "segment_id": segment, "position": end} for segment, end in ends.items()]
    )
    return ends


@t.implements(Catalogue.frontier)
def frontier(
    connection: Connection, stream: str, owner: str, generation: int, segments: Sequence[int] | None = None
) -> Frontier:
    """Return how far a reader of ``segments``, or of all, may read, and what markers lie in between."""
    info = find_stream(connection, stream)
    query = sa.select(t.markers.c.segment_id, t.markers.c.checkpoint, t.markers.c.position).where(
        t.markers.c.stream_id == info.stream_id, t.markers.c.owner == owner, t.markers.c.generation == generation
    )
    found: dict[int, dict[int, int]] = {}
    newest: dict[int, int] = {}
    for segment, checkpoint, position in (checked_row(row, int, int, int) for row in connection.execute(query).all()):
        found.setdefault(segment, {})[checkpoint] = position
        newest[checkpoint] = max(segment, newest.get(checkpoint, segment))
    ends, closed = _ends(connection, info, segments)
    for segment in closed:
        # it was there when a marker names later ones, and closed when it does not name this one.
        before = {checkpoint: ends[segment] for checkpoint, last in newest.items() if segment <= last}
        if before:
            found[segment] = before | found.get(segment, {})
    markers = {x: tuple(Marker(*marker) for marker in sorted(of_x.items())) for x, of_x in sorted(found.items())}
    return Frontier(ends, markers, info.is_sealed, frozenset(closed))


@t.implements(Catalogue.unmark)
def unmark(connection: Connection, owner: str, generation: int, first: int, last: int) -> None:
    """Forget the markers of checkpoints ``first`` to ``last`` of one generation, in all streams."""
    connection.execute(
        t.markers.delete().where(
            t.markers.c.owner == owner,
            t.markers.c.generation == generation,
            t.markers.c.checkpoint.between(first, last),
        )
    )


@t.implements(Catalogue.unmark_others)
def unmark_others(connection: Connection, owner: str, generation: int) -> None:
    """Forget the markers of every generation of ``owner`` but this one."""
    connection.execute(t.markers.delete().where(t.markers.c.owner == owner, t.markers.c.generation != generation))


def _find_markers(
    connection: Connection, stream: StreamInfo, owner: str, generation: int, checkpoint: int
) -> dict[int, int]:
    query = sa.select(t.markers.c.segment_id, t.markers.c.position).where(
        t.markers.c.stream_id == stream.stream_id,
        t.markers.c.owner == owner,
        t.markers.c.generation == generation,
        t.markers.c.checkpoint == checkpoint,
    )
    return {int(row[0]): int(row[1]) for row in connection.execute(query)}


def _ends(
    connection: Connection, stream: StreamInfo, segments: Sequence[int] | None
) -> tuple[dict[int, int], list[int]]:
    """Return where these segments end, or all, and which of them are closed."""
    own = t.segments.c
    query = sa.select(own.segment_id, own.end_position, own.closed_epoch).where(own.stream_id == stream.stream_id)
    if segments is not None:
        query = query.where(own.segment_id.in_(segments))
    rows = [checked_row(row, int, int, int | None) for row in connection.execute(query.order_by(own.segment_id)).all()]
    return {number: end for number, end, _ in rows}, [number for number, _, closed in rows if closed is not None]


@t.implements(Catalogue.owner)
def describe_owner(connection: Connection, owner: str, stream: str = "", of: str = "") -> Owner:
    """Return what the store remembers of ``owner``, and which others have written to ``stream``."""
    found, info = find_owner(connection, owner), find_stream_or_none(connection, stream)
    return found if info is None else replace(found, others=_other_sinks(connection, info, owner, of))


def find_owner(connection: Connection, owner: str) -> Owner:
    """Return what the store remembers of ``owner``.

    Raises:
        CorruptionError
    """
    fence = connection.scalar(sa.select(t.fences.c.epoch).where(t.fences.c.owner == owner))
    generation = Generation(0 if fence is None else int(fence))
    data = connection.scalar(sa.select(t.owners.c.life).where(t.owners.c.owner == owner))
    if data is None:
        return Owner(None, generation)
    life = decode_life(data, f"owner '{owner}' of the stream store at {t.store_of(connection)}")
    return Owner(life, generation, is_forgotten=life is None)


def _other_sinks(connection: Connection, info: StreamInfo, owner: str, of: str) -> tuple[OtherSink, ...]:
    """Return the others that begin with ``of`` and have written to the stream: the directory of a chunk tells."""
    names = sorted(name for name in names_of(connection, of) if name != owner and _has_written(connection, info, name))
    return tuple(OtherSink(name.removeprefix(of), find_owner(connection, name)) for name in names)


def names_of(connection: Connection, of: str) -> set[str]:
    """Return all owners that begin with ``of`` and ever claimed anything."""
    columns = (t.fences.c.owner, t.owners.c.owner, t.transactions.c.owner)
    queries = [sa.select(column).where(column.startswith(of, autoescape=True)) for column in columns]
    return {owner for query in queries for owner in connection.scalars(query)}


@t.implements(Catalogue.own)
def own(connection: Connection, owner: str, life: PipelineIdentity) -> Owner:
    """Record ``life`` for ``owner``, unless another one is recorded; return the one that is recorded then."""
    found = find_owner(connection, owner)
    if found.life is None and ownership.may_own(life, found):
        _set_life(connection, owner, life)
        return Owner(life, found.generation)
    return found


@t.implements(Catalogue.forget_owner)
def forget_owner(connection: Connection, owner: str) -> Owner:
    """Let the next life own ``owner``; return the former one."""
    found = find_owner(connection, owner)
    _set_life(connection, owner, None)
    return found


def _has_written(connection: Connection, info: StreamInfo, owner: str) -> bool:
    directory = owner_directory(info.stream_id, owner)
    path = t.chunks.c.file
    # A range goes by the index of the paths, which LIKE does not; "0" follows "/".
    query = sa.select(path).where(path >= f"{directory}/", path < f"{directory}0").limit(1)
    if connection.scalar(query) is not None:
        return True
    former = t.former_authors.c.directory
    mine = (t.former_authors.c.stream_id == info.stream_id, former == directory)
    return connection.scalar(sa.select(former).where(*mine)) is not None


def _set_life(connection: Connection, owner: str, life: PipelineIdentity | None) -> None:
    connection.execute(t.owners.delete().where(t.owners.c.owner == owner))
    connection.execute(t.owners.insert().values(owner=owner, life=encode_life(life)))


@t.implements(Catalogue.contents)
def contents(connection: Connection, stream: str, of: str, mine: Mine) -> Contents:
    """Return what is in ``stream``: the directory of a chunk tells who wrote it.

    Ours is what owners that begin with ``of`` wrote, as far as they are ``mine``. What they have prepared does not
    count: it is aborted in any case. What others have prepared does.
    """
    info = find_stream_or_none(connection, stream)
    if info is None:
        return Contents()
    known = {name: find_owner(connection, name) for name in names_of(connection, of)}
    own = tuple(f"{owner_directory(info.stream_id, name)}/" for name, owner in known.items() if mine(owner))
    left = tuple(f"{owner_directory(info.stream_id, name)}/" for name, owner in known.items() if owner.is_forgotten)
    chunks = sa.select(t.chunks.c.id, t.chunks.c.file).where(t.chunks.c.stream_id == info.stream_id)
    visible = set(connection.scalars(sa.select(t.parts.c.chunk_id).where(t.parts.c.stream_id == info.stream_id)))
    rows = list(connection.execute(chunks))
    found = [(path.startswith(own), number in visible) for number, path in rows]
    former = sa.select(t.former_authors.c.directory).where(t.former_authors.c.stream_id == info.stream_id)
    truncated = [f"{directory}/" for directory in connection.scalars(former)]
    (counted,) = sql_streams.with_counts(connection, [info])
    return Contents(
        counted.events_count,
        ours=any(is_mine and is_visible for is_mine, is_visible in found),
        others=not all(path.startswith(own) for path in (*truncated, *(path for _, path in rows))),
        forgotten=any(path.startswith(left) for path in (*truncated, *(path for _, path in rows))),
    )


@t.implements(Catalogue.start_over)
def start_over(connection: Connection, reset: StreamReset, mine: Mine, now_ms: int) -> str | None:
    """Fence, empty the streams and record another life as their owner; a stream that others wrote to is returned."""
    known = find_owner(connection, reset.owner).life
    if known is not None and known.id == reset.life.id:
        return None  # done before: its streams were emptied, or are its own by now
    # What is there is looked at before its owner is fenced.
    found = {stream: contents(connection, stream, reset.of, mine) for stream in reset.streams}
    shared = next((stream for stream in found if found[stream].is_shared), None)
    if shared is not None:
        return shared
    fence(connection, reset.owner, reset.epoch)
    for stream in found:
        _empty_stream(connection, reset, stream, found[stream], now_ms)
    _set_life(connection, reset.owner, reset.life)  # of all of them: it is one owner
    return None


def _empty_stream(connection: Connection, reset: StreamReset, stream: str, found: Contents, now_ms: int) -> None:
    """Abort what its owner has prepared, then empty ``stream``, unless ``found`` says that others wrote to it."""
    info = find_stream_or_none(connection, stream)
    if info is None:
        return
    recover(connection, stream, reset.owner, reset.epoch, (), now_ms)
    if found.others:
        return
    remove_stream(connection, info)
    is_made_alike = reset.streams[stream] == (info.segments_count, info.routing_key, info.retention)
    if info.scaling is not None or not is_made_alike:
        again = StreamDefinition(
            info.name, info.schema, info.segments_count, info.routing_key, info.retention, info.scaling
        )
        create_stream(connection, again, now_ms, if_not_exists=False)
