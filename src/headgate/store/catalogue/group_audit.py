"""What a catalogue says about its reader groups: each can be read, is of what there is, and holds what it needs.

Counterparts: ``audit`` asks; ``groups`` writes these rows. Source: RG24 and RG25 of docs/spec/reader-groups.md. Never
changes where a group is: what it holds is all that is mended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import CorruptionError
from headgate.protocol.store.reader_group import Group
from headgate.store.catalogue import group_holding, groups
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.group_rows import decode_group
from headgate.store.findings import Found, checked


def problems(connection: Connection) -> Found:
    """Return what is wrong with groups, and with what is held for them."""
    found: Found = []
    for name, group in _all(connection):
        where = f"reader group '{name}'"
        if isinstance(group, CorruptionError):
            found.append((where, f"{group}; 'headgate streams groups delete' removes it"))
            continue
        for stream in sorted(group.streams):
            found += checked(where, _of_stream, connection, name, group, stream)
    return found + [
        (f"reader group '{name}'", f"there is none, and stream '{stream}' is held for it; --repair lets go of it")
        for stream, name in _held_for_nobody(connection)
    ]


def mend(connection: Connection) -> list[str]:
    """Have each group hold what it needs, and nobody hold for one that there is not; return what was mended."""
    done = []
    for stream, name in _held_for_nobody(connection):
        connection.execute(t.holds.delete().where(t.holds.c.holder == group_holding.holder_of(name)))
        done.append(f"stream '{stream}' is not held any more for reader group '{name}', which there is not")
    for name, group in _all(connection):
        if isinstance(group, CorruptionError) or not all(_fits(connection, group, x) for x in group.streams):
            continue  # nobody knows what it needs
        too_little = [x for x in sorted(group.streams) if _is_held_too_little(connection, name, group, x)]
        if too_little:
            group_holding.hold(connection, name, group)
        done += [f"what reader group '{name}' needs of stream '{stream}' is held again" for stream in too_little]
    return done


def _of_stream(connection: Connection, name: str, group: Group, stream: str) -> Iterator[str]:
    beyond = _beyond(connection, group, stream)
    yield from (f"{problem}; 'headgate streams groups reset' gives it another place" for problem in beyond)
    if not beyond and _is_held_too_little(connection, name, group, stream):
        yield f"stream '{stream}' is not held from where it reads on, and may be truncated; --repair holds it"


def _beyond(connection: Connection, group: Group, stream: str) -> list[str]:
    """Positions of segments that there are not, or behind their end."""
    ends = _ends(connection, group.streams[stream])
    if not ends:
        return []  # deleted: its readers are told
    found = [("it", group.progress[stream])]
    found += [(f"checkpoint '{x.name}'", x.progress[stream]) for x in group.checkpoints]
    return [
        f"{who} is at position {position} of segment {segment} of stream '{stream}', which ends at {ends.get(segment)}"
        for who, progress in found
        for segment, position in sorted({**progress.begins, **progress.positions}.items())
        if segment not in ends or position > ends[segment]
    ]


def _fits(connection: Connection, group: Group, stream: str) -> bool:
    return not _beyond(connection, group, stream)


def _is_held_too_little(connection: Connection, name: str, group: Group, stream: str) -> bool:
    """Whether what the group needs may be truncated. It may hold more than that: heads move, and it is told late."""
    found = group_holding.needed(connection, group, stream)
    if found is None:
        return False
    mine = (t.holds.c.stream_id == found[0].stream_id, t.holds.c.holder == group_holding.holder_of(name))
    rows = connection.execute(sa.select(t.holds.c.segment_id, t.holds.c.position).where(*mine))
    held = {row.segment_id: row.position for row in rows}
    return not held or any(position > found[1].get(segment, 0) for segment, position in held.items())


def _held_for_nobody(connection: Connection) -> list[tuple[str, str]]:
    """Return (stream, group) of holds whose group there is not."""
    query = (
        sa.select(t.streams.c.name, t.holds.c.holder)
        .join_from(t.holds, t.streams, t.holds.c.stream_id == t.streams.c.id)
        .distinct()
        .order_by(t.streams.c.name, t.holds.c.holder)
    )
    there = set(groups.names(connection))
    named = [(row.name, group_holding.group_of(row.holder)) for row in connection.execute(query)]
    return [(stream, name) for stream, name in named if name is not None and name not in there]


def _ends(connection: Connection, stream_id: int) -> Mapping[int, int]:
    query = sa.select(t.segments.c.segment_id, t.segments.c.end_position).where(t.segments.c.stream_id == stream_id)
    return {row.segment_id: row.end_position for row in connection.execute(query)}


def _all(connection: Connection) -> Iterator[tuple[str, Group | CorruptionError]]:
    for row in connection.execute(sa.select(t.reader_groups).order_by(t.reader_groups.c.name)).all():
        try:
            yield row.name, decode_group(row.state, row.name)
        except CorruptionError as error:
            yield row.name, error
