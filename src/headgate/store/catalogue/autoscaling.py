"""What a stream got lately, from the tables; and the step that its policy makes of it.

Counterpart: ``sql`` calls these inside its transactions; ``protocol.store.autoscaling`` decides. Source: S79 to S81 of
docs/spec/stream-store.md. Nobody counts anything for it: positions, sizes and dates of the parts say what came.
"""

from __future__ import annotations

from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.protocol.store import autoscaling as policies
from headgate.protocol.store.autoscaling import Observed, Unit
from headgate.protocol.store.layouts import Plan, Segment
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.scaling import scale
from headgate.store.catalogue.streams import find_layout, look
from headgate.store.scaling import decode_scaling
from headgate.store.streams import StreamInfo


def observe(connection: Connection, stream: StreamInfo, now_ms: int) -> Observed | None:
    """Return what the policy of ``stream`` decides upon, of one moment; None if it has none, or takes no more events.

    Raises:
        UsageError: the stream was deleted.
    """
    epoch, is_sealed = look(connection, stream)
    policy = stream.scaling
    if policy is None or is_sealed:
        return None
    layout = find_layout(connection, replace(stream, layout_epoch=epoch))
    scaled_ms = connection.scalar(sa.select(t.streams.c.scaled_ms).where(t.streams.c.id == stream.stream_id)) or 0
    amounts = {x.segment_id: _amounts(connection, stream, x, policy.unit, now_ms) for x in layout.present}
    return Observed(layout, now_ms - scaled_ms, amounts)


def autoscale(connection: Connection, stream: StreamInfo, plan: Plan, now_ms: int) -> bool:
    """Make the step that the policy of ``stream`` has decided upon; return whether it was made.

    Not if the stream has another policy by now, or another layout: somebody else has scaled it (S81).

    Raises:
        UsageError: the stream was deleted, or sealed.
    """
    row = connection.execute(sa.select(t.streams).where(t.streams.c.id == stream.stream_id)).one_or_none()
    if row is None or decode_scaling("the stream store's catalogue", row.scaling) != stream.scaling:
        return False
    if row.layout_epoch != plan.epoch:
        return False
    scale(connection, replace(stream, layout_epoch=plan.epoch), plan, now_ms)
    return True


def _amounts(
    connection: Connection, stream: StreamInfo, segment: Segment, unit: Unit, now_ms: int
) -> tuple[int | None, ...]:
    """Return what a segment got over each of the windows; None where some of that is truncated."""
    parts = t.parts.c
    mine = (parts.stream_id == stream.stream_id, parts.segment_id == segment.segment_id)
    before = sa.select(parts.start).where(*mine, parts.visible_ms <= now_ms - policies.WINDOWS_MS[-1])
    # It is looked for from the end back, so this takes as long as what came lately is, not the segment.
    first = connection.scalar(before.order_by(parts.start.desc()).limit(1))
    size = parts.events_count if unit is Unit.EVENTS else parts.size_bytes
    sums = [_sum(sa.case((parts.visible_ms > now_ms - window_ms, size), else_=0)) for window_ms in policies.WINDOWS_MS]
    lately = (*mine, parts.start > (-1 if first is None else first))
    *found, oldest_ms = connection.execute(sa.select(*sums, sa.func.min(parts.visible_ms)).where(*lately)).one()
    head = sa.select(t.segments.c.head_position).where(
        t.segments.c.stream_id == stream.stream_id, t.segments.c.segment_id == segment.segment_id
    )
    is_whole = first is not None or not connection.scalar(head)
    return tuple(
        int(amount) if is_whole or (oldest_ms is not None and oldest_ms <= now_ms - window_ms) else None
        for amount, window_ms in zip(found, policies.WINDOWS_MS, strict=True)
    )


def _sum(column: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    return sa.func.coalesce(sa.func.sum(column), 0)
