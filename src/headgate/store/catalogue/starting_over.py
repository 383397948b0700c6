"""Empties streams of what one pipeline wrote, in the tables (SO4 to SO6 of docs/spec/starting-over.md).

Counterpart: ``sql`` calls these inside its transactions, so that fence, events and owner change in one step. Never
removes what others have written.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.model.life import Life, Mine
from headgate.store.catalogue import streams as sql_streams
from headgate.store.catalogue import tables as t
from headgate.store.catalogue import transactions
from headgate.store.catalogue.owners import find_owner, names_of
from headgate.store.catalogue.values import Contents
from headgate.store.open_transaction import owner_directory
from headgate.store.streams import StreamDefinition, StreamInfo, StreamReset


def contents(connection: Connection, stream: str, of: str, mine: Mine, where: str) -> Contents:
    """Return what is in ``stream``: the directory of a chunk tells who wrote it.

    Ours is what owners that begin with ``of`` wrote, as far as they are ``mine``. What they have prepared does not
    count: it is aborted in any case. What others have prepared does.
    """
    info = _find(connection, stream, where)
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


def is_over(connection: Connection, owner: str, life: Life, where: str) -> bool:
    """Whether ``life`` is ``owner`` already: then all its streams were emptied, or are its own by now (SO6)."""
    known = find_owner(connection, owner, where).life
    return known is not None and known.id == life.id


def empty(connection: Connection, reset: StreamReset, stream: str, found: Contents, now_ms: int, where: str) -> None:
    """Abort what its owner has prepared, then empty ``stream``, unless ``found`` says that it is somebody else's."""
    info = _find(connection, stream, where)
    if info is None:
        return
    transactions.recover(connection, info, reset.owner, reset.epoch, (), now_ms, where)
    if found.others:
        return
    sql_streams.delete_stream(connection, info)
    is_made_alike = reset.streams[stream] == (info.segments_count, info.routing_key, info.retention)
    if info.scaling is not None or not is_made_alike:
        again = StreamDefinition(
            info.name, info.schema, info.segments_count, info.routing_key, info.retention, info.scaling
        )
        sql_streams.insert_stream(connection, again, now_ms, if_not_exists=False, where=where)


def _find(connection: Connection, stream: str, where: str) -> StreamInfo | None:
    row = connection.execute(sa.select(t.streams).where(t.streams.c.name == stream)).one_or_none()
    return None if row is None else sql_streams.stream_info(row, where)
