"""What reader groups hold of their streams, in the tables: rows beside those of all who hold.

Counterparts: ``groups`` calls these with each change of a group, ``group_audit`` looks whether they are right;
``protocol.store.group_holds`` decides. Source: RG17 and RG28 of docs/spec/reader-groups.md. Never moves a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.protocol.store import group_holds
from headgate.protocol.store.group_holds import HoldMoved
from headgate.protocol.store.group_progress import View
from headgate.protocol.store.reader_group import Group
from headgate.protocol.store.truncation import GROUP_HOLDER, is_of_group
from headgate.store.catalogue import heads
from headgate.store.catalogue import streams as sql_streams
from headgate.store.catalogue import tables as t
from headgate.store.streams import StreamInfo


def holder_of(name: str) -> str:
    """Return as whom a group holds its streams."""
    return f"{GROUP_HOLDER}{name}"


def group_of(holder: str) -> str | None:
    """Return the group that holds under this name; None: it is no group."""
    return holder.removeprefix(GROUP_HOLDER) if is_of_group(holder) else None


def needed(connection: Connection, group: Group, stream: str) -> tuple[StreamInfo, dict[int, int]] | None:
    """Return what the group may still be asked for (``group_holds.needed``).

    None: the stream was deleted, with what was held of it.
    """
    found = seen(connection, group, stream)
    return None if found is None else (found[0], group_holds.needed(group, stream, found[1]))


def hold(connection: Connection, name: str, group: Group) -> None:
    """Hold what the group needs, and nothing else."""
    for stream in group.streams:
        _hold(connection, name, group, stream)


def _hold(connection: Connection, name: str, group: Group, stream: str) -> None:
    found = seen(connection, group, stream)
    if found is not None:
        info, view = found
        wanted = group_holds.worth_holding(view, group_holds.needed(group, stream, view))
        _write_hold(connection, info, holder_of(name), wanted)


def seen(connection: Connection, group: Group, stream: str) -> tuple[StreamInfo, View] | None:
    """Return a stream as it is, found by its number: one of the same name may have taken its place."""
    row = connection.execute(sa.select(t.streams).where(t.streams.c.id == group.streams[stream])).one_or_none()
    if row is None:
        return None
    info = sql_streams.stream_info(row, "")
    return info, view(connection, info)


def move(connection: Connection, name: str, before: Group, after: Group) -> None:
    """Hold what the group needs now; reads nothing of what the streams were, unless it has to (RG28)."""
    for stream, stream_id in after.streams.items():
        moved = group_holds.moved(before, after, stream)
        if moved is None or not _is_moved(connection, stream_id, holder_of(name), moved):
            _hold(connection, name, after, stream)


def _is_moved(connection: Connection, stream_id: int, holder: str, moved: HoldMoved) -> bool:
    """Move what is held; return whether that was held before: somebody may have let go of it."""
    if not moved.positions:
        return True
    own = t.holds.c
    mine = (own.stream_id == stream_id, own.holder == holder)
    held = set(connection.scalars(sa.select(own.segment_id).where(*mine, own.segment_id.in_(moved.positions))))
    if not held or moved.certain - held:
        return False
    rows = [{"at": segment, "now": moved.positions[segment]} for segment in sorted(held)]
    here = own.segment_id == sa.bindparam("at")
    connection.execute(t.holds.update().where(*mine, here).values(position=sa.bindparam("now")), rows)
    return True


def _write_hold(connection: Connection, info: StreamInfo, holder: str, wanted: Mapping[int, int]) -> None:
    mine = (t.holds.c.stream_id == info.stream_id, t.holds.c.holder == holder)
    rows = connection.execute(sa.select(t.holds.c.segment_id, t.holds.c.position).where(*mine))
    held = {row.segment_id: row.position for row in rows}
    changed = [x for x in sorted(held.keys() | wanted.keys()) if held.get(x) != wanted.get(x)]
    gone = [{"at": segment} for segment in changed if segment in held]
    key = {"stream_id": info.stream_id, "holder": holder, "life": "", "epoch": 0}
    new = [{**key, "segment_id": segment, "position": wanted[segment]} for segment in changed if segment in wanted]
    if gone:
        connection.execute(t.holds.delete().where(*mine, t.holds.c.segment_id == sa.bindparam("at")), gone)
    if new:
        connection.execute(t.holds.insert(), new)


def view(connection: Connection, info: StreamInfo) -> View:
    """Return a stream as it is."""
    epoch, is_sealed = sql_streams.look(connection, info)
    layout = sql_streams.find_layout(connection, replace(info, layout_epoch=epoch))
    return View(layout, heads.extents(connection, info), is_sealed)
