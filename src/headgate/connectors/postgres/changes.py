"""Change data capture: the rows of tables of PostgreSQL, and then every change of them, from a logical slot.

The slot is made first and exports a snapshot, in which the rows are read; then come the changes after it, so there is
no gap and no repeat. The snapshot ends with its connection: what was read of it is in no checkpoint, because the hook
lets none begin before the rows have been read. A start without a checkpoint begins with a new slot.

The slot keeps the log of the server up to what the driver says (``hold``): the oldest position in a checkpoint that
may be restored. It tells the reader through the log itself, by a message in a transaction, which lets tables without
changes advance as well. Source: docs/spec/connectors.md. Counterparts: ``changes_reader``, ``pgoutput``.
"""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import pyarrow as pa

from headgate.connectors.base import (
    ASK_AGAIN,
    AskAgain,
    CoordinatorHook,
    HoldContext,
    HookContext,
    Source,
    SourceContext,
)
from headgate.connectors.postgres.catalogue import (
    Table,
    check_server,
    look_up,
    published_tables,
    union_of,
)
from headgate.connectors.postgres.changes_reader import CONFIRM, LATEST, SPLIT, ChangesReader
from headgate.connectors.postgres.connection import (
    check_url,
    client_libraries,
    connect,
    database_of,
    translated,
)
from headgate.connectors.postgres.pgoutput import (
    METADATA,
    TABLE,
)
from headgate.connectors.postgres.slots import Position, drop_slot, lock_of
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import UsageError
from headgate.model.config import check_switches
from headgate.model.lineage import Location
from headgate.model.state_schema import Form
from headgate.operators.changes import OP, OP_FIELD

ASK_S = 0.1

_SLOT = re.compile(r"[a-z0-9_]{1,40}")


class PostgresChanges(Source):
    """Reads tables of PostgreSQL: the rows that they have, and then each change, as a stream with changes.

    ``PostgresChanges("postgresql://headgate@db/shop", "orders")`` needs ``wal_level = logical`` on the server, a user
    with the attribute REPLICATION, and PostgreSQL 14 or newer. If the table has REPLICA IDENTITY FULL, updates and
    deletes have the old row (retractions); otherwise it needs a primary key. Needs the package psycopg:
    ``pip install 'headgate-streams[postgres]'``.

    Several tables, as in ``PostgresChanges(url, ["orders", "customers"])``, are read from one slot, their changes in
    the order of their transactions. The stream has ordinary records then: a column ``table`` with the name, such as
    ``"public.orders"``, the columns of all tables, null where a table has none of that name, and ``op``.
    """

    environment: ClassVar[Environment] = SYSTEM_ENVIRONMENT

    def __init__(
        self,
        url: str,
        table: str | Sequence[str] = (),
        *,
        slot: str = "",
        publication: str = "",
        snapshot: bool = True,
        metadata: Sequence[str] = (),
        as_text: Sequence[str] = (),
        truncate: Literal["error", "ignore"] = "error",
        end: Literal["latest"] | None = None,
    ) -> None:
        """Configure.

        Args:
            url: the database, as ``"postgresql://user@host/database"``, without a password.
            table: its name, as ``"orders"`` or ``"sales.orders"``; by default in the schema ``public``. Or several
                names; or none, for all tables that ``publication`` has when the pipeline is built.
            slot: how the slot is called, to which each life of the pipeline adds its own ending. By default it is
                named after pipeline and operator. Without ``snapshot``: the slot that you made.
            publication: a publication that you made, which has the tables. By default one for these tables alone is
                made, which their owner may do.
            snapshot: False reads changes only, from a slot of the plugin pgoutput that you made, and keep.
            metadata: columns beside those of the table, of ``"commit_time"``, ``"lsn"`` and ``"transaction"``. With
                any, the stream has ordinary records with a column ``op``: a change and the row that it takes back
                differ in these columns.
            as_text: columns that are read as the text that the server writes, for example because a date may be
                ``infinity``.
            truncate: what happens when a table is truncated: ``"error"``, or ``"ignore"`` to keep its rows.
            end: ``"latest"`` ends after what was committed at the first start. None: it never ends.

        Raises:
            UsageError: an option is wrong, or the package is not installed.
        """
        check_url(url, "", "PostgresChanges")
        self.url = url
        self.tables = tuple(_name(one) for one in ([table] if isinstance(table, str) else table))
        """Schema and name of each; none: those of the publication."""
        self.is_of_one_table = isinstance(table, str)
        self.slot, self.publication, self.snapshot = slot, publication, snapshot
        self.metadata, self.as_text, self.truncate, self.end = tuple(metadata), tuple(as_text), truncate, end
        self.is_look = False
        """Whether it is read for a look, with a slot that ends with the connection."""
        self._known: tuple[Table, ...] | None = None
        check_switches("PostgresChanges: ", snapshot=snapshot)
        if not self.tables and not publication:
            raise UsageError("PostgresChanges needs a table, several, or publication=... for all that it has")
        if len(set(self.tables)) < len(self.tables):
            raise UsageError("PostgresChanges names a table twice")
        if slot and not _SLOT.fullmatch(slot):
            raise UsageError(f"slot={slot!r}: use at most 40 small letters, digits and '_'")
        if not snapshot and not slot:
            raise UsageError("snapshot=False needs slot=..., a slot that you made: it says where the changes begin")
        if unknown := [one for one in self.metadata if one not in METADATA]:
            raise UsageError(f"metadata={unknown[0]!r} of PostgresChanges is none of {', '.join(METADATA)}")
        if truncate not in ("error", "ignore"):
            raise UsageError(f"truncate={truncate!r} must be 'error' or 'ignore'")
        if end not in (None, LATEST):
            raise UsageError(f"end={end!r} of PostgresChanges must be 'latest' or None")
        with client_libraries("PostgresChanges"):
            import adbc_driver_postgresql
            import psycopg  # noqa: F401

            assert adbc_driver_postgresql

    def __repr__(self) -> str:
        return f"PostgresChanges({database_of(self.url)!r}, {self._what!r})"

    @property
    def _what(self) -> str:
        """What is read, for people."""
        return ", ".join(map(".".join, self.tables)) or f"publication {self.publication}"

    def found_tables(self) -> tuple[Table, ...]:
        """Return what the catalogue says of the tables: once, in the driver.

        Raises:
            UsageError: one cannot be read like this.
        """
        if self._known is None:
            url = self.url
            with connect(url) as connection, translated(url, "look at"):
                check_server(connection, url)
                names = self.tables or published_tables(connection, url, self.publication)
                found = tuple(look_up(connection, url, one, self.as_text, self.publication) for one in names)
            columns = {column.name for table in found for column in table.columns}
            if unknown := [name for name in self.as_text if name not in columns]:
                raise UsageError(f"as_text names '{unknown[0]}', which table {self._what} does not have")
            self._known = found
        return self._known

    def schema(self) -> pa.Schema:
        """See ``Source``: the name of the table if there are several, the columns, ``op``, and metadata."""
        names = [] if self.is_of_one_table else [TABLE]
        columns = union_of([(table.where, table.columns) for table in self.found_tables()])
        fields = [*columns, OP_FIELD, *(pa.field(name, METADATA[name]) for name in self.metadata)]
        schema = pa.schema([pa.field(name, pa.large_string()) for name in names] + fields)
        for name in (*names, OP, *self.metadata):
            if schema.names.count(name) > 1:
                raise UsageError(
                    f"table {self._what} has a column '{name}', which is to say what changes; rename the column"
                )
        return schema

    def changes(self) -> tuple[tuple[str, ...], bool] | None:
        if self.metadata or not self.is_of_one_table:
            return None
        (table,) = self.found_tables()
        return tuple(column.name for column in table.columns if column.is_key), table.has_whole_rows

    def identity(self) -> str:
        """See ``Source``. The server and the slot are part of positions."""
        tables = (f"{one.where}, {'whole rows' if one.has_whole_rows else 'keys'}" for one in self.found_tables())
        return Form.POSTGRES.value + "; ".join(tables)

    def locations(self) -> tuple[Location, ...]:
        """See ``Source``. Without the host, which may change: positions have the identity of the server."""
        names = [f"postgresql:{'.'.join(one)}" for one in self.tables] or [f"postgresql:publication:{self.publication}"]
        return tuple(Location(name, name) for name in names)

    def how_to_end(self) -> str | None:
        return "give end='latest'" if self.end is None else None

    def open(self, context: SourceContext) -> ChangesReader:
        """Return a reader of the changes in the first subtask; the others read nothing."""
        return ChangesReader(self, context)

    def coordinator_hook(self) -> CoordinatorHook | None:
        """See ``Source``: it makes checkpoints wait for the snapshot."""
        return SnapshotHook(self) if self.snapshot and not self.is_look else None

    def without_hook(self) -> Source:
        """See ``Source``: a look at the rows has a slot of its own, which ends with it."""
        look = copy.copy(self)
        look.is_look = True
        return look

    @property
    def holds(self) -> bool:
        return not self.is_look

    def hold(self, context: HoldContext, needed: Sequence[Mapping[str, bytes]]) -> None:
        """Let the reader confirm what no checkpoint needs: a message in the log says so."""
        found = [Position.decode(positions[SPLIT]) for positions in needed if SPLIT in positions]
        # a checkpoint without a position needs everything
        if not found or len(found) < len(needed):
            return
        oldest = min(found, key=lambda one: one.lsn)
        # only the connection that reads a slot can confirm it, and a worker has that: the message gets there in the log
        with connect(self.url) as connection, translated(self.url, "confirm changes in"):
            connection.execute(
                "SELECT pg_logical_emit_message(true, %s, %s::text)", (CONFIRM + oldest.slot, str(oldest.lsn))
            )

    def base_slot(self, pipeline: str, node: str) -> str:
        """Return how slots of all lives of a pipeline begin."""
        if self.slot:
            return f"{self.slot}_"
        plain = re.sub(r"[^a-z0-9]+", "_", f"{pipeline}_{node}".lower()).strip("_")[:28]
        return f"hg_{plain}_{zlib.crc32(f'{pipeline}/{node}'.encode()):08x}_"

    def slot_of(self, pipeline: str, node: str, life: str) -> str:
        """Return the name of the slot of one life."""
        return self.slot if not self.snapshot else f"{self.base_slot(pipeline, node)}{zlib.crc32(life.encode()):08x}"


def _name(table: str) -> tuple[str, str]:
    schema, dot, name = table.rpartition(".")
    return schema if dot else "public", name


class SnapshotHook(CoordinatorHook):
    """Lets no checkpoint begin before the snapshot was read, and removes the slots of former lives."""

    timeout = "365d"
    """A checkpoint waits for the snapshot, however long it takes (EI8)."""

    def __init__(self, source: PostgresChanges) -> None:
        self._source = source
        self._context = HookContext("", "", 0)
        self._is_read = False

    def open(self, context: HookContext) -> None:
        self._context, self._is_read = context, False

    def trigger(self, checkpoint_id: int) -> AskAgain | None:
        """Return None when the reader has let go of the lock that it has while it reads the snapshot."""
        if not self._is_read:
            slot = self._source.slot_of(self._context.pipeline, self._context.hook, self._context.life)
            with connect(self._source.url) as connection, translated(self._source.url, "look at"):
                row = connection.execute(
                    "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = %s) AND NOT EXISTS (SELECT FROM "
                    "pg_locks WHERE locktype = 'advisory' AND (classid::bigint << 32 | objid::bigint) = %s)",
                    (slot, lock_of(slot)),
                ).fetchone()
            self._is_read = bool(row and row[0])
        if not self._is_read:
            self._source.environment.sleep(ASK_S)
            return ASK_AGAIN
        return None

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        self._is_read = True

    def reset(self) -> None:
        """Remove the slots of all lives: a start without a checkpoint takes a new snapshot."""
        base = self._source.base_slot(self._context.pipeline, self._context.hook)
        with connect(self._source.url) as connection, translated(self._source.url, "remove a slot in"):
            rows = connection.execute(
                "SELECT slot_name FROM pg_replication_slots WHERE starts_with(slot_name, %s) AND NOT temporary", (base,)
            ).fetchall()
            for (slot,) in rows:
                if re.fullmatch(r"[0-9a-f]{8}", slot.removeprefix(base)):
                    drop_slot(self._source.url, self._source.environment, connection, slot)
