"""The tables of a catalogue are made, or raised from an older version.

Counterpart: ``opening`` does it to a store's file, ``untouched`` to a copy of it. Source: rules CT3 and CT6 of
docs/spec/stream-store.md. Never changes tables that a newer release made.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from headgate.environment import SYSTEM_CLOCK
from headgate.errors import CorruptionError, UsageError
from headgate.protocol.store.layouts import first_layout
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.stream_rows import insert_segments
from headgate.store.catalogue.tables import CATALOGUE_VERSION


def make_tables(connection: Connection, where: str, metadata: sa.MetaData = t.metadata) -> None:
    """Make the tables, or raise those of an older version, one version after the other.

    ``metadata``: the tables as this kind of database has them.

    Raises:
        UsageError: a newer release made them.
    """
    if not sa.inspect(connection).has_table(t.meta.name):
        metadata.create_all(connection)
        connection.execute(t.meta.insert().values(key="version", value=str(CATALOGUE_VERSION)))
        return
    found = int(connection.execute(sa.select(t.meta.c.value).where(t.meta.c.key == "version")).scalar_one())
    check_not_newer(found, where)
    for version in range(found, CATALOGUE_VERSION):
        _RAISES[version](connection)
    connection.execute(t.meta.update().where(t.meta.c.key == "version").values(value=str(CATALOGUE_VERSION)))


def check_not_newer(version: int, where: str) -> None:
    """Check that this release knows tables of ``version``.

    Raises:
        UsageError: a newer release made them.
    """
    if version > CATALOGUE_VERSION:
        raise UsageError(
            f"stream store at {where} has version {version}, this Headgate reads up to {CATALOGUE_VERSION}; "
            "upgrade Headgate"
        )


def _making(*tables: sa.Table) -> Callable[[Connection], None]:
    def make(connection: Connection) -> None:
        for table in tables:
            table.create(connection, checkfirst=True)

    return make


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


def _from_4(connection: Connection) -> None:
    """Nothing was truncated; what is there counts from now on, as nobody knows since when it is (S66)."""
    connection.execute(t.meta.insert().values(key=t.DATED_SINCE, value=str(SYSTEM_CLOCK.wall_ms())))
    connection.exec_driver_sql("ALTER TABLE streams ADD COLUMN retention VARCHAR")
    for table, column in (("segments", "head_position"), ("segments", "latest_ms"), ("parts", "visible_ms")):
        known = {found["name"] for found in sa.inspect(connection).get_columns(table)}
        if column not in known:  # ``_from_2`` makes the table of segments as it is today
            connection.exec_driver_sql(f"ALTER TABLE {table} ADD COLUMN {column} BIGINT DEFAULT '0' NOT NULL")
    for new in (t.holds, t.garbage, t.former_authors):
        new.create(connection, checkfirst=True)


def _from_5(connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE transactions ADD COLUMN layout_epoch INTEGER DEFAULT '0' NOT NULL")
    t.passed.create(connection, checkfirst=True)
    t.present_segments.create(connection, checkfirst=True)


def _from_6(connection: Connection) -> None:
    """All events have the one schema of their stream; a process of an older release that has the store open fails."""
    for table in ("streams", "chunks"):
        connection.exec_driver_sql(f"ALTER TABLE {table} ADD COLUMN schema_version INTEGER DEFAULT '0' NOT NULL")
    connection.exec_driver_sql("ALTER TABLE streams ADD COLUMN scaling VARCHAR")
    connection.exec_driver_sql("ALTER TABLE streams ADD COLUMN scaled_ms BIGINT DEFAULT '0' NOT NULL")
    connection.exec_driver_sql("ALTER TABLE chunks RENAME COLUMN path TO file")
    t.former_schemas.create(connection, checkfirst=True)


_RAISES: dict[int, Callable[[Connection], None]] = dict(
    enumerate(
        (
            *(_making(t.owners), _from_2, _making(t.markers), _from_4, _from_5, _from_6),
            *(_making(t.reader_groups), _making(t.shared_transactions, t.participants)),
        ),
        start=1,
    )
)
"""By version: raises the tables to the next one."""
