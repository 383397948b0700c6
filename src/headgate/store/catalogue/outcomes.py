"""Which decided transactions are remembered: as long as their owner may ask (S17).

Counterpart: ``sql`` calls these inside its transactions. Source: S17 of
docs/spec/stream-store.md. Never forgets what waits for a verdict, nor anything of another owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.protocol.store.transactions import Status
from headgate.store.catalogue import tables as t

OUTCOMES_RETAINED = 100_000
"""Decided transactions remembered for each owner that is no pipeline; a verb for an older one fails as unknown."""

DECISIONS_BETWEEN_LOOKS = 1_000
"""One look costs as much as some hundred decisions, so there may be so many outcomes more."""

_NAMES_AT_A_TIME = 500


def forget_oldest(connection: Connection, owner: str) -> None:
    """Forget the oldest outcomes of ``owner`` beyond the bound, unless it is a pipeline, which says itself (S17)."""
    if connection.scalar(sa.select(t.owners.c.owner).where(t.owners.c.owner == owner)) is not None:
        return
    newest = (
        sa.select(t.transactions.c.id)
        .where(*_decided(owner))
        .order_by(t.transactions.c.changed_ms.desc(), t.transactions.c.id.desc())
    )
    oldest = list(connection.scalars(newest.offset(OUTCOMES_RETAINED)))
    for at in range(0, len(oldest), _NAMES_AT_A_TIME):
        _forget(connection, oldest[at : at + _NAMES_AT_A_TIME])


def forget_named(connection: Connection, owner: str, names: Sequence[str]) -> None:
    """Forget the outcomes of these transactions of ``owner``; one that is not decided, or not there, is passed over."""
    for at in range(0, len(names), _NAMES_AT_A_TIME):
        some = t.transactions.c.name.in_(names[at : at + _NAMES_AT_A_TIME])
        _forget(connection, connection.scalars(sa.select(t.transactions.c.id).where(*_decided(owner), some)).all())


def _forget(connection: Connection, numbers: Sequence[int]) -> None:
    connection.execute(t.transactions.delete().where(t.transactions.c.id.in_(numbers)))
    for table in (t.shared_transactions, t.participants):
        connection.execute(table.delete().where(table.c.transaction_id.in_(numbers)))


def _decided(owner: str) -> tuple[sa.ColumnElement[bool], ...]:
    terminal = t.transactions.c.status.in_([status.value for status in Status if status.is_terminal])
    return (t.transactions.c.owner == owner, terminal)
