"""What is recorded of transactions, for those who look at them.

Counterpart: ``sql`` calls these inside its transactions. Source: S15 of docs/spec/stream-store.md and TX14 of
docs/spec/shared-transactions.md. Never changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.protocol.store.transactions import Status
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.kinds import of_kinds
from headgate.store.catalogue.values import ParticipantInfo, TransactionInfo


def transaction_infos(
    connection: Connection, owner: str | None, prefix: str, stream: str | None
) -> list[TransactionInfo]:
    """Return recorded transactions by name."""
    wanted: list[sa.ColumnElement[bool]] = []
    if owner is not None:
        wanted.append(t.transactions.c.owner == owner)
    if stream is not None:
        wanted.append(t.streams.c.name == stream)
    if prefix:
        wanted.append(t.transactions.c.name.startswith(prefix, autoescape=True))
    sizes, participants = _sizes(connection, wanted), _participants(connection, wanted)
    shared = t.shared_transactions
    query = (
        sa.select(t.transactions, t.streams.c.name.label("stream"), *_OF_SHARED)
        .join_from(t.transactions, t.streams, t.transactions.c.stream_id == t.streams.c.id)
        .join(shared, t.transactions.c.id == shared.c.transaction_id, isouter=True)
    )
    return [
        TransactionInfo(
            row.stream,
            row.name,
            row.owner,
            row.epoch,
            Status(row.status),
            row.events_count,
            row.changed_ms,
            size_bytes=sizes.get(row.id, 0) if row.shared_bytes is None else row.shared_bytes,
            begun_ms=row.begun_ms,
            lease_ms=row.lease_ms,
            due_ms=row.due_ms,
            is_expired=bool(row.is_expired),
            participants=tuple(participants.get(row.id, ())),
        )
        for row in map(_sound, connection.execute(query.where(*wanted).order_by(*_BY_NAME)).all())
    ]


def _sound(row: sa.Row[Any]) -> sa.Row[Any]:
    of_kinds((row.stream, row.name, row.owner), str, str, str)
    of_kinds((row.epoch, row.events_count, row.changed_ms), int, int, int)
    of_kinds((row.begun_ms, row.lease_ms, row.due_ms, row.shared_bytes), *[int | None] * 4)
    return row


_BY_NAME = (t.transactions.c.name, t.streams.c.name)
_shared = t.shared_transactions.c
_OF_SHARED = (
    *(_shared.begun_ms, _shared.lease_ms, _shared.due_ms, _shared.is_expired),
    _shared.size_bytes.label("shared_bytes"),
)


def _sizes(connection: Connection, wanted: list[sa.ColumnElement[bool]]) -> Mapping[int, int]:
    """Return the size of what is hidden, by the number of its transaction."""
    hidden = t.prepared_parts
    query = (
        sa.select(t.transactions.c.id, sa.func.sum(hidden.c.size_bytes))
        .join_from(t.transactions, t.streams, t.transactions.c.stream_id == t.streams.c.id)
        .join(hidden, t.transactions.c.id == hidden.c.transaction_id)
    )
    found = connection.execute(query.where(*wanted).group_by(t.transactions.c.id))
    return {int(row[0]): int(row[1]) for row in found}


def _participants(connection: Connection, wanted: list[sa.ColumnElement[bool]]) -> dict[int, list[ParticipantInfo]]:
    """Return who writes, by the number of the transaction, by name."""
    query = (
        sa.select(t.participants)
        .join_from(t.participants, t.transactions, t.transactions.c.id == t.participants.c.transaction_id)
        .join(t.streams, t.transactions.c.stream_id == t.streams.c.id)
    )
    found: dict[int, list[ParticipantInfo]] = {}
    for row in connection.execute(query.where(*wanted).order_by(t.participants.c.participant)):
        who = ParticipantInfo(*of_kinds((row.participant, row.sequence, row.events_count), str, int, int))
        found.setdefault(row.transaction_id, []).append(who)
    return found
