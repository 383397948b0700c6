"""Which life of a pipeline each owner of transactions is (rules LV2–LV4 of docs/spec/lives.md).

Counterpart: ``sql`` calls these inside its transactions. Never removes anything.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.codec.life import decode_life, encode_life
from headgate.model.ids import Generation
from headgate.model.life import Life, OtherSink, Owner
from headgate.protocol.supervision import lives
from headgate.store.catalogue import tables as t
from headgate.store.open_transaction import owner_directory
from headgate.store.streams import StreamInfo


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


def others(connection: Connection, info: StreamInfo, owner: str, of: str, where: str) -> tuple[OtherSink, ...]:
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
    if found.life is None and lives.may_own(life, found):
        _set(connection, owner, life)
        return Owner(life, found.generation)
    return found


def forget(connection: Connection, owner: str, where: str) -> Owner:
    """Let the next life be ``owner``; return which one was."""
    found = find_owner(connection, owner, where)
    _set(connection, owner, None)
    return found


def hand_over(connection: Connection, owner: str, life: Life) -> None:
    """Let ``life`` be ``owner``, whoever was."""
    _set(connection, owner, life)


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


def _set(connection: Connection, owner: str, life: Life | None) -> None:
    connection.execute(t.owners.delete().where(t.owners.c.owner == owner))
    connection.execute(t.owners.insert().values(owner=owner, life=encode_life(life)))
