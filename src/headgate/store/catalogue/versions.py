"""The tables of a catalogue are made, or raised from an older version.

Counterpart: ``opening`` does it to a store's file, ``untouched`` to a copy of it. Source: rules CT3 and CT6 of
docs/spec/stream-store.md. Never changes tables that a newer release made.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.errors import CorruptionError, UsageError
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.streams import insert_segments
from headgate.store.catalogue.tables import CATALOGUE_VERSION
from headgate.store.streams import first_layout


def make_tables(connection: Connection, where: str) -> None:
    """Make the tables, or raise those of an older version, one version after the other.

    Raises:
        UsageError: a newer release made them.
    """
    if not sa.inspect(connection).has_table(t.meta.name):
        t.metadata.create_all(connection)
        connection.execute(t.meta.insert().values(key="version", value=str(CATALOGUE_VERSION)))
        return
    found = int(connection.execute(sa.select(t.meta.c.value).where(t.meta.c.key == "version")).scalar_one())
    if found > CATALOGUE_VERSION:
        raise UsageError(
            f"stream store at {where} has version {found}, this Headgate reads up to {CATALOGUE_VERSION}; "
            "upgrade Headgate"
        )
    for version in range(found, CATALOGUE_VERSION):
        _RAISES[version](connection)
    connection.execute(t.meta.update().where(t.meta.c.key == "version").values(value=str(CATALOGUE_VERSION)))


def _from_1(connection: Connection) -> None:
    t.owners.create(connection, checkfirst=True)


def _from_2(connection: Connection) -> None:
    """Give every segment its keys; a process of an older release that has the store open fails from now on (CT6)."""
    connection.exec_driver_sql("ALTER TABLE streams ADD COLUMN layout_epoch INTEGER DEFAULT '0' NOT NULL")
    for table in ("parts", "prepared_parts"):
        connection.exec_driver_sql(f"ALTER TABLE {table} RENAME COLUMN segment TO segment_id")
    connection.exec_driver_sql("ALTER TABLE segments RENAME TO segments_2")
    t.segments.create(connection)
    ends = connection.exec_driver_sql("SELECT stream_id, segment, end_position FROM segments_2").all()
    by_stream: dict[int, dict[int, int]] = {}
    for stream_id, segment, end in ends:
        by_stream.setdefault(stream_id, {})[segment] = end
    for stream_id, count in connection.execute(sa.select(t.streams.c.id, t.streams.c.segments_count)).all():
        found = by_stream.get(stream_id, {})
        if sorted(found) != list(range(count)):
            raise CorruptionError(
                "the stream store's catalogue",
                0,
                f"segments 0 to {count - 1} of stream {stream_id}",
                f"{sorted(found)}",
            )
        insert_segments(connection, stream_id, first_layout(count).segments, found)
    connection.exec_driver_sql("DROP TABLE segments_2")


def _from_3(connection: Connection) -> None:
    t.markers.create(connection, checkfirst=True)


_RAISES: dict[int, Callable[[Connection], None]] = {1: _from_1, 2: _from_2, 3: _from_3}
"""By version: raises the tables to the next one."""
