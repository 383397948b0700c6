"""Ownership in the tables: which life of a pipeline each owner of transactions is, and the reset of what it wrote.

Counterpart: ``sql`` calls these inside its transactions, so that fence, events and owner change in one step. Source:
LV2 to LV4 of docs/spec/lives.md, SO4 to SO6 of docs/spec/starting-over.md. Never removes what others have written.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.codec.json_files import decode_life, encode_life
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Life, Mine, OtherSink, Owner
from headgate.protocol.supervision import ownership
from headgate.store.catalogue import stream_rows as sql_streams
from headgate.store.catalogue import tables as t
from headgate.store.catalogue import transaction_rows
from headgate.store.catalogue.records import Contents
from headgate.store.streams import StreamDefinition, StreamInfo, StreamReset
from headgate.store.transactions import owner_directory


def find_owner(connection: Connection, owner: str, where: str) -> Owner:
    """Return what the store at ``where`` remembers of ``owner``.

    Raises:
        CorruptionError
    """
    fence = connection.scalar(sa.select(t.fences.c.epoch).where(t.fences.c.owner == owner))
    generation = Generation(0 if fence is None else int(fence))
    data = connection.scalar(sa.select(t.owners.c.life).where(t.owners.c.owner == owner))
    if data is None:
        return Owner(None, generation)
    life = decode_life(data, f"owner '{owner}' of the stream store at {where}")
    return Owner(life, generation, is_forgotten=life is None)


def other_sinks(connection: Connection, info: StreamInfo, owner: str, of: str, where: str) -> tuple[OtherSink, ...]:
    """Return who else begins with ``of`` and has written to the stream: the directory of a chunk tells (LV9)."""
    names = sorted(name for name in names_of(connection, of) if name != owner and _has_written(connection, info, name))
    return tuple(OtherSink(name.removeprefix(of), find_owner(connection, name, where)) for name in names)


def names_of(connection: Connection, of: str) -> set[str]:
    """Return all owners that begin with ``of`` and ever claimed anything."""
    columns = (t.fences.c.owner, t.owners.c.owner, t.transactions.c.owner)
    queries = [sa.select(column).where(column.startswith(of, autoescape=True)) for column in columns]
    return {owner for query in queries for owner in connection.scalars(query)}


def own(connection: Connection, owner: str, life: Life, where: str) -> Owner:
    """Let ``life`` be ``owner``, unless another one is; return which one is then."""
    found = find_owner(connection, owner, where)
    if found.life is None and ownership.may_own(life, found):
        _set_life(connection, owner, life)
        return Owner(life, found.generation)
    return found


def forget_owner(connection: Connection, owner: str, where: str) -> Owner:
    """Let the next life be ``owner``; return which one was."""
    found = find_owner(connection, owner, where)
    _set_life(connection, owner, None)
    return found


def hand_over(connection: Connection, owner: str, life: Life) -> None:
    """Let ``life`` be ``owner``, whoever was."""
    _set_life(connection, owner, life)


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


def _set_life(connection: Connection, owner: str, life: Life | None) -> None:
    connection.execute(t.owners.delete().where(t.owners.c.owner == owner))
    connection.execute(t.owners.insert().values(owner=owner, life=encode_life(life)))


def contents(connection: Connection, stream: str, of: str, mine: Mine, where: str) -> Contents:
    """Return what is in ``stream``: the directory of a chunk tells who wrote it.

    Ours is what owners that begin with ``of`` wrote, as far as they are ``mine``. What they have prepared does not
    count: it is aborted in any case. What others have prepared does.
    """
    info = _find_stream(connection, stream, where)
    if info is None:
        return Contents()
    known = {name: find_owner(connection, name, where) for name in names_of(connection, of)}
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


def is_reset(connection: Connection, owner: str, life: Life, where: str) -> bool:
    """Whether ``life`` is ``owner`` already: then all its streams were emptied, or are its own by now (SO6)."""
    known = find_owner(connection, owner, where).life
    return known is not None and known.id == life.id


def empty_stream(
    connection: Connection, reset: StreamReset, stream: str, found: Contents, now_ms: int, where: str
) -> None:
    """Abort what its owner has prepared, then empty ``stream``, unless ``found`` says that it is somebody else's."""
    info = _find_stream(connection, stream, where)
    if info is None:
        return
    transaction_rows.recover(connection, info, reset.owner, reset.epoch, (), now_ms, where)
    if found.others:
        return
    sql_streams.delete_stream(connection, info)
    is_made_alike = reset.streams[stream] == (info.segments_count, info.routing_key, info.retention)
    if info.scaling is not None or not is_made_alike:
        again = StreamDefinition(
            info.name, info.schema, info.segments_count, info.routing_key, info.retention, info.scaling
        )
        sql_streams.insert_stream(connection, again, now_ms, if_not_exists=False, where=where)


def _find_stream(connection: Connection, stream: str, where: str) -> StreamInfo | None:
    row = connection.execute(sa.select(t.streams).where(t.streams.c.name == stream)).one_or_none()
    return None if row is None else sql_streams.stream_info(row, where)
