"""Writers with a stable id in the tables: their epoch and their last number.

Counterpart: ``sql`` calls these inside its transactions. Source: S7 and S9 of docs/spec/stream-store.md.
Never lets an older epoch, or a number out of turn, pass.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import CorruptionError, FencedError, UsageError
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.values import Numbers
from headgate.store.streams import StreamInfo


def register(connection: Connection, stream: StreamInfo, writer_id: str, epoch: int) -> int:
    """Fence older epochs of the writer id (S9); return its last sequence number."""
    where = (t.writers.c.stream_id == stream.stream_id, t.writers.c.writer_id == writer_id)
    row = connection.execute(sa.select(t.writers).where(*where)).one_or_none()
    if row is None:
        key = {"stream_id": stream.stream_id, "writer_id": writer_id}
        connection.execute(t.writers.insert().values(**key, epoch=epoch, sequence=0))
        return 0
    if row.epoch > epoch:
        raise FencedError(f"writer '{writer_id}' of stream '{stream.name}'", epoch, row.epoch)
    connection.execute(t.writers.update().where(*where).values(epoch=epoch))
    return int(row.sequence)


def advance(connection: Connection, stream: StreamInfo, numbers: Numbers) -> None:
    """Compare-and-set the last sequence number, in the transaction that appends (S7)."""
    where = (t.writers.c.stream_id == stream.stream_id, t.writers.c.writer_id == numbers.writer_id)
    row = connection.execute(sa.select(t.writers).where(*where)).one_or_none()
    who = f"writer '{numbers.writer_id}' of stream '{stream.name}'"
    if row is None:
        raise CorruptionError(who, 0, "its numbers in the catalogue", "none")
    if row.epoch != numbers.epoch:
        raise FencedError(who, numbers.epoch, row.epoch)
    if row.sequence != numbers.first - 1:
        raise UsageError(f"{who} is used twice at the same time; give each a writer id or epoch of its own")
    connection.execute(t.writers.update().where(*where).values(sequence=numbers.last))
