"""Scaling of streams, by hand or by their policy; and what pipelines have read of closed segments.

Counterpart: ``sql`` calls these inside its transactions; ``protocol.store.layouts``
decides. Source: S72 and S75–S81 of docs/spec/stream-store.md.
Never moves an event.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import CorruptionError, UsageError
from headgate.protocol.store import layouts
from headgate.protocol.store import layouts as policies
from headgate.protocol.store.layouts import Change, Layout, ObservedLoad, Outdated, Plan, Range, Refused, Segment, Unit
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import Reading
from headgate.store.catalogue.stream_rows import check_takes_events, find_layout, find_stream, look
from headgate.store.catalogue.tables import checked_values
from headgate.store.streams import OtherLayoutError, StreamInfo, decode_scaling


@t.implements(Catalogue.scale_stream)
def scale_stream(connection: Connection, name: str, plan: Plan, now_ms: int) -> Layout:
    """Carry out ``plan`` for the stream of this name."""
    return scale(connection, find_stream(connection, name), plan, now_ms)


def scale(connection: Connection, stream: StreamInfo, plan: Plan, now_ms: int) -> Layout:
    """Carry out ``plan``, unless that was done before; return the layout.

    Raises:
        OtherLayoutError: it was made for another layout.
        UsageError: the stream is sealed, or the plan does not fit.
    """
    check_takes_events(connection, stream)
    layout = find_layout(connection, stream)
    answer = layouts.scale(layout, plan)
    match answer:
        case Outdated():
            raise OtherLayoutError(f"stream '{stream.name}' was scaled by another process meanwhile; try again")
        case Refused(problem):
            raise UsageError(f"stream '{stream.name}' cannot be scaled: {problem}")
        case Change():
            return _apply_change(connection, stream, answer, now_ms)
        case _:
            return layout


class Reopening:
    """Streams that get segments of former layouts once more, for transactions that were routed by these (S75)."""

    def __init__(self, connection: Connection, now_ms: int) -> None:
        self._connection = connection
        self._now_ms = now_ms
        self._ranges: dict[int, tuple[StreamInfo, list[Range]]] = {}

    def places(self, stream: StreamInfo, epoch: int, touched: Collection[int]) -> dict[int, int]:
        """Return where events of the segments ``touched`` of a layout go to.

        Raises:
            CorruptionError: there never was such a layout.
        """
        present = check_takes_events(self._connection, stream)
        if present == epoch:
            return {number: number for number in touched}
        layout = find_layout(self._connection, replace(stream, layout_epoch=present))
        lost = sorted(set(touched) - {segment.segment_id for segment in layout.of_epoch(epoch)})
        if lost or not 0 <= epoch < present:
            what = f"layout {epoch} of stream '{stream.name}', by which events were routed"
            expected = f"one before layout {present} with the segments {sorted(touched)}"
            raise CorruptionError(what, 0, expected, f"one without {lost}")
        found = layouts.reopen(layout, epoch, touched)
        if found.change is not None:
            # those before the first reopening: later ones of the same commit must not take ours for the stream's own
            self._ranges.setdefault(stream.stream_id, (stream, [segment.keys for segment in layout.present]))
            _apply_change(self._connection, stream, found.change, self._now_ms)
        return found.places

    def close(self) -> None:
        """Give all streams the ranges back that they had."""
        for stream, ranges in self._ranges.values():
            present = check_takes_events(self._connection, stream)
            layout = find_layout(self._connection, replace(stream, layout_epoch=present))
            change = layouts.back(layout, ranges)
            if change is not None:
                _apply_change(self._connection, stream, change, self._now_ms)


@t.implements(Catalogue.pass_segments)
def pass_segments(connection: Connection, stream: StreamInfo, reader: Reading, segments: Collection[int]) -> None:
    """Record that a pipeline has passed these segments; forget what its former generations had."""
    mine = (t.passed.c.stream_id == stream.stream_id, t.passed.c.reader == reader.reader)
    former = (t.passed.c.life == reader.life, t.passed.c.generation < reader.generation)
    connection.execute(t.passed.delete().where(*mine, *former))
    key = {
        "stream_id": stream.stream_id,
        "reader": reader.reader,
        "life": reader.life,
        "generation": reader.generation,
    }
    # a repeat after a lost answer adds nothing
    new = sorted(set(segments) - passed(connection, stream, reader))
    if new:
        connection.execute(t.passed.insert(), [{**key, "segment_id": segment} for segment in new])


@t.implements(Catalogue.passed)
def passed(connection: Connection, stream: StreamInfo, reader: Reading) -> set[int]:
    """Return the segments that were passed in one generation."""
    query = sa.select(t.passed.c.segment_id).where(
        t.passed.c.stream_id == stream.stream_id,
        t.passed.c.reader == reader.reader,
        t.passed.c.life == reader.life,
        t.passed.c.generation == reader.generation,
    )
    return set(checked_values(connection.scalars(query), int))


def _apply_change(connection: Connection, stream: StreamInfo, change: Change, now_ms: int) -> Layout:
    segments = t.segments.c
    mine = segments.stream_id == stream.stream_id
    latest_ms = connection.scalar(sa.select(sa.func.max(segments.latest_ms)).where(*t.open_segments(stream.stream_id)))
    connection.execute(
        t.segments.update()
        .where(mine, segments.segment_id == sa.bindparam("at"))
        .values(closed_epoch=change.layout.epoch),
        [{"at": number} for number in change.closed],
    )
    rows = [
        {
            "stream_id": stream.stream_id,
            "segment_id": segment.segment_id,
            "key_low": segment.key_low,
            "key_high": segment.key_high,
            "created_epoch": segment.created_epoch,
            "end_position": 0,
            "latest_ms": latest_ms,  # no date goes back past it
        }
        for segment in change.opened
    ]
    connection.execute(t.segments.insert(), rows)
    connection.execute(
        t.streams.update()
        .where(t.streams.c.id == stream.stream_id)
        .values(layout_epoch=change.layout.epoch, segments_count=len(change.layout.present), scaled_ms=now_ms)
    )
    return change.layout


@t.implements(Catalogue.observe)
def observe(connection: Connection, stream: StreamInfo, now_ms: int) -> ObservedLoad | None:
    """Return what the policy of ``stream`` decides upon, of one moment; None if it has none or takes no more events."""
    epoch, is_sealed = look(connection, stream)
    policy = stream.scaling
    if policy is None or is_sealed:
        return None
    layout = find_layout(connection, replace(stream, layout_epoch=epoch))
    scaled_ms = connection.scalar(sa.select(t.streams.c.scaled_ms).where(t.streams.c.id == stream.stream_id)) or 0
    amounts = {x.segment_id: _amounts(connection, stream, x, policy.unit, now_ms) for x in layout.present}
    return ObservedLoad(layout, now_ms - scaled_ms, amounts)


@t.implements(Catalogue.autoscale)
def autoscale(connection: Connection, stream: StreamInfo, plan: Plan, now_ms: int) -> bool:
    """Make the step that the policy of ``stream`` has decided upon; return whether it was made.

    Not if the stream has another policy by now, or another layout, because it was scaled (S81).
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
