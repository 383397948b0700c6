"""Reads the snapshot of a slot of PostgreSQL, and then the changes: in a thread, which also confirms changes.

Up to where it confirms them comes with the changes. Source: docs/spec/connectors.md. Counterpart: ``changes``.
"""

from __future__ import annotations

import os
import select
import struct
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from headgate import fault_points
from headgate.connectors.base import FailStopReader, SourceBatch, SourceContext, SplitPosition
from headgate.connectors.postgres import slots
from headgate.connectors.postgres.catalogue import Table, identifier, parsed
from headgate.connectors.postgres.connection import connect, connect_arrow, failure, place_of, translated
from headgate.connectors.postgres.pgoutput import (
    COMMIT,
    COMMIT_TIME,
    HEADER,
    LSN,
    METADATA,
    TABLE,
    TRANSACTION,
    Decoder,
    Point,
)
from headgate.connectors.postgres.slots import Position, drop_slot, lock_of, lsn_of, lsn_text, slot_in_use
from headgate.dataclass import dataclass
from headgate.environment import Environment, ThreadEnded
from headgate.errors import StorageError, UsageError
from headgate.operators.changes import INSERT, OP, OPS, op_column

LATEST = "latest"
SPLIT = "changes"
CONFIRM = "headgate.confirm."
"""In front of the name of a slot: the prefix of messages in the log that say how far it may be confirmed."""

MESSAGES_MAX = 65_536
"""So many messages are decoded at a time at most; a larger transaction comes in several batches."""
READY_MAX = 3
STATUS_MS = 5_000
WAIT_S = 1.0
"""How long the thread waits for changes before it looks at the time."""
WAKEUP_MS = 5


class ChangesOptions(Protocol):
    """What a reader takes of its source, ``PostgresChanges``, where each option is described."""

    environment: ClassVar[Environment]
    url: str
    tables: tuple[tuple[str, str], ...]
    is_of_one_table: bool
    slot: str
    publication: str
    snapshot: bool
    metadata: tuple[str, ...]
    truncate: Literal["error", "ignore"]
    end: Literal["latest"] | None
    is_look: bool

    def found_tables(self) -> tuple[Table, ...]:
        """Return what the catalogue says of the tables."""

    def schema(self) -> pa.Schema:
        """Return the columns of the stream."""

    def slot_of(self, pipeline: str, node: str, life: str) -> str:
        """Return the name of the slot of one life."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Changes or rows, and the position after them; None: in the middle of the snapshot."""

    batch: pa.RecordBatch
    position: Position | None
    written_ms: int | None = None
    is_end: bool = False


class ChangesReader(FailStopReader):
    """Reads the changes in the first subtask; a thread of its own receives and decodes."""

    def __init__(self, source: ChangesOptions, context: SourceContext) -> None:
        """Use ``PostgresChanges.open``."""
        self._position: Position | None = None
        self._is_finished = False
        self._thread: _ChangesThread | None = None
        if context.subtask_index != 0:
            self._is_finished = True
            return
        stored = (context.positions or {}).get(SPLIT)
        if stored is not None:
            self._position = Position.decode(stored)
            self._is_finished = _is_over(self._position)
        elif not source.snapshot:
            self._position = _at_slot(source)
        if not self._is_finished:
            self._thread = _ChangesThread(source, context, self._position)

    def splits(self) -> Sequence[str]:
        return [] if self._is_finished else [SPLIT]

    def progress(self) -> Mapping[str, SplitPosition]:
        """See ``SourceReader``: bytes of the server's log."""
        if self._position is None or self._thread is None:
            return {}
        end = max(self._thread.server_lsn, self._position.lsn)
        return {SPLIT: SplitPosition(self._position.lsn, end, "bytes")}

    def wakeup_ms(self) -> int:
        return WAKEUP_MS

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    def _poll(self) -> SourceBatch | None:
        found = None if self._thread is None else self._thread.take()
        if found is None:
            return None
        self._position = found.position
        self._is_finished = found.is_end
        if not found.batch.num_rows and not found.is_end:
            return None
        return SourceBatch(SPLIT, found.batch, is_split_finished=found.is_end, written_ms=found.written_ms)

    def _has_ended(self) -> bool:
        return self._is_finished

    def _positions(self) -> dict[str, bytes]:
        if self._thread is None and self._position is None:
            return {}
        if self._position is None:
            raise UsageError(
                "a snapshot of a table of PostgreSQL cannot be continued, so it has no position; wait until it was read"
            )
        return {SPLIT: self._position.encode()}


def _at_slot(source: ChangesOptions) -> Position:
    """Return the position at which the slot that the user made begins."""
    with connect(source.url, replication=True) as connection, translated(source.url, "begin to read changes of"):
        row = connection.pgconn.exec_(b"IDENTIFY_SYSTEM")
        system, timeline, end = (row.get_value(0, at) or b"" for at in range(3))
        slot = connection.pgconn.exec_(
            f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{source.slot}'".encode()
        )
        begin = slot.get_value(0, 0) if slot.ntuples else None
        if begin is None:
            raise UsageError(
                f"there is no logical slot '{source.slot}' in {place_of(source.url)}; SELECT "
                f"pg_create_logical_replication_slot('{source.slot}', 'pgoutput')"
            )
        bound = lsn_of(end.decode()) if source.end == LATEST else None
        return Position(source.slot, system.decode(), int(timeline), lsn_of(begin.decode()), 0, bound)


def _is_over(position: Position) -> bool:
    return position.end is not None and position.lsn >= position.end


class _ClosedError(Exception):
    """The reader was closed."""


class _ChangesThread:
    """Receives and decodes beside the mailbox thread, and tells the server how far it may forget."""

    def __init__(self, source: ChangesOptions, context: SourceContext, begin: Position | None) -> None:
        self._source, self._tables, self._schema = source, source.found_tables(), source.schema()
        self._slot = source.slot_of(context.pipeline, context.node, context.life)
        if source.is_look and source.snapshot:
            self._slot = f"hg_look_{source.environment.token(8).hex()}"
        label = zlib.crc32(f"{context.pipeline}/{context.node}/{context.life}/{self._slot}".encode())
        self._label, self._generation = f"headgate {label:08x}", int(context.generation)
        self._environment = source.environment
        self._position = begin
        self._link: Any = None
        self._confirmed = 0
        self._status_ms = 0
        self._trouble_ms = 0
        """Since when the server does not let it read; 0: it does."""
        self.server_lsn = 0
        """Where the server's log ended, as it said last."""
        self._changed = self._environment.condition()
        self._ready: deque[Delivery] = deque()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._woken, self._waker = os.pipe()
        self._thread = self._environment.thread(self._run, "postgres-changes")
        self._thread.start()

    def take(self) -> Delivery | None:
        """Return what came next, or None.

        Raises:
            HeadgateError: reading failed for good.
        """
        with self._changed:
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._failure is not None:
                raise self._failure
            return None

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                # ends whatever ``select`` the thread is in
                os.close(self._waker)
            self._changed.notify_all()
        self._thread.join(2)

    # -- the thread

    def _run(self) -> None:
        import psycopg

        try:
            if self._position is None:
                self._begin()
            while True:
                self._trouble_ms = self._trouble_ms or self._environment.monotonic_ms()
                try:
                    self._follow()
                    return
                except (psycopg.Error, OSError, StorageError) as error:
                    found = error if isinstance(error, StorageError) else failure(error, self._source.url, "read")
                    if not found.is_transient:
                        raise self._explained(found) from error
                    self._disconnect()
                    if self._trouble_ms and self._environment.monotonic_ms() > self._trouble_ms + slots.PATIENCE_MS:
                        is_in_use = "is active" in str(found)
                        raise (slot_in_use(self._source.url, self._slot) if is_in_use else found) from error
                    self._wait(slots.RETRY_S)
        except _ClosedError:
            pass
        except ThreadEnded:
            raise
        except BaseException as error:
            with self._changed:
                self._failure = error
        finally:
            self._disconnect()
            os.close(self._woken)

    def _connect(self) -> None:
        """Connect, and end readers of former generations, which may live on in a worker that was given up.

        Raises:
            StorageError: a later generation reads.
        """
        self._link = connect(self._source.url, replication=True, name=f"{self._label} {self._generation}")
        others = "FROM pg_stat_activity WHERE application_name LIKE"
        number = "split_part(application_name, ' ', 3)::bigint"
        later = self._command(f"SELECT 1 {others} '{self._label} %' AND {number} > {self._generation}")
        if later.ntuples:
            # its connection may also be left of a process that is gone: the server notices that a little later
            raise StorageError("read changes of", place_of(self._source.url), "a later generation does")
        self._command(f"SELECT pg_terminate_backend(pid) {others} '{self._label} %' AND {number} < {self._generation}")

    def _explained(self, error: StorageError) -> Exception:
        said = str(error)
        if "publication" in said and "does not exist" in said:
            return UsageError(
                f"the publication of {self._names()} did not exist yet when the changes were made "
                f"that slot '{self._slot}' begins with, or was removed; make it before the slot, and start over"
            )
        return error

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)
        self._check_open()

    def _check_open(self) -> None:
        if self._is_closed:
            raise _ClosedError

    def _put(self, delivery: Delivery) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed or len(self._ready) < READY_MAX, WAIT_S):
                    self._check_open()
                    self._ready.append(delivery)
                    return
            # while the pipeline takes nothing: the server would end a connection that is silent for long
            if self._link is not None and delivery.position is not None:
                self._send_status()

    def _wait_until_taken(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._ready)
        self._check_open()

    def _command(self, sql: str) -> Any:
        """Run a command on the replication connection; a slot may wait long for transactions of others."""
        with translated(self._source.url, "read changes of"):
            pg = self._link.pgconn
            pg.send_query(sql.encode())
            while pg.is_busy():
                select.select([pg.socket, self._woken], [], [])
                self._check_open()
                pg.consume_input()
            result = pg.get_result()
            from psycopg.pq import ExecStatus

            if result.status == ExecStatus.FATAL_ERROR:
                from psycopg import errors

                raise errors.error_from_result(result)
            if result.status != ExecStatus.COPY_BOTH:
                while pg.get_result() is not None:
                    pass
            return result

    def _system(self) -> tuple[str, int]:
        row = self._command("IDENTIFY_SYSTEM")
        return row.get_value(0, 0).decode(), int(row.get_value(0, 1))

    # -- the snapshot

    def _begin(self) -> None:
        """Make the slot, read its snapshot, and take the first position."""
        source = self._source
        self._connect()
        name = f"{self._label} {self._generation}"
        with connect(source.url, name=name) as control, translated(source.url, "begin to read changes of"):
            end = None
            if source.end == LATEST:
                end = lsn_of(_one(control, "SELECT pg_current_wal_flush_lsn()"))
            system, timeline = self._system()
            while not _one(control, "SELECT pg_try_advisory_lock(%s)", lock_of(self._slot)):
                self._wait(slots.RETRY_S)  # a reader of a former generation ends
            drop_slot(source.url, source.environment, control, self._slot)
            self._make_publication(control)
            kind = "TEMPORARY LOGICAL" if source.is_look else "LOGICAL"
            made = self._command(f"CREATE_REPLICATION_SLOT {identifier(self._slot)} {kind} pgoutput EXPORT_SNAPSHOT")
            begin, snapshot = lsn_of(made.get_value(0, 1).decode()), made.get_value(0, 2).decode()
            self._read_snapshot(snapshot, begin)
            self._position = Position(self._slot, system, timeline, begin, 0, max(begin, end) if end else None)
            is_end = _is_over(self._position)
            self._put(Delivery(self._empty(), self._position, is_end=is_end))
            self._wait_until_taken()  # the reader has the position then, which the next checkpoint asks for
            # from here on checkpoints may begin: ``SnapshotHook`` looks at the lock
            control.execute("SELECT pg_advisory_unlock(%s)", (lock_of(self._slot),))
            if is_end:
                raise _ClosedError

    def _empty(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([], schema=self._schema)

    def _names(self) -> str:
        return ", ".join(table.where for table in self._tables)

    def _publication(self) -> str:
        plain = "_".join(f"{table.schema}_{table.name}" for table in self._tables)
        return self._source.publication or f"headgate_{zlib.crc32(plain.encode()):08x}_{plain}"[:63]

    def _make_publication(self, control: Any) -> None:
        import psycopg

        if self._source.publication:
            return
        name, tables = self._publication(), ", ".join(table.sql for table in self._tables)
        if control.execute("SELECT FROM pg_publication WHERE pubname = %s", (name,)).fetchone() is not None:
            # a table that was dropped and made again is not in it any more
            control.execute(f"ALTER PUBLICATION {identifier(name)} SET TABLE {tables}".encode())
            return
        root = " WITH (publish_via_partition_root = true)"
        try:
            control.execute(f"CREATE PUBLICATION {identifier(name)} FOR TABLE {tables}{root}".encode())
        except psycopg.errors.DuplicateObject:
            return
        except psycopg.errors.InsufficientPrivilege as error:
            raise UsageError(
                f"this user may not make a publication for table {self._names()}; have its owner run "
                f"CREATE PUBLICATION name FOR TABLE {tables}, and give publication='name'"
            ) from error

    def _read_snapshot(self, snapshot: str, begin: int) -> None:
        """Deliver the rows of the tables, as of the moment at which the slot begins."""
        with connect_arrow(self._source.url) as connection, connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            for table in self._tables:
                cursor.execute(f"SELECT {', '.join(one.expression() for one in table.columns)} FROM {table.sql}")
                for found in cursor.fetch_record_batch():
                    for first in range(0, found.num_rows, MESSAGES_MAX):
                        self._put(Delivery(self._rows_of(table, found.slice(first, MESSAGES_MAX), begin), None))
                        fault_points.reach("in-table-snapshot")

    def _rows_of(self, table: Table, found: pa.RecordBatch, begin: int) -> pa.RecordBatch:
        """Return rows of a table as inserts."""
        metadata = {COMMIT_TIME: self._environment.wall_ms() * 1_000, LSN: begin, TRANSACTION: 0}
        arrays = {one.name: parsed(found.column(at), one) for at, one in enumerate(table.columns)}
        arrays[OP] = op_column(np.full(len(found), OPS.index(INSERT), np.int8))
        if not self._source.is_of_one_table:
            arrays[TABLE] = pa.repeat(pa.scalar(table.where, pa.large_string()), len(found))
        for name in self._source.metadata:
            arrays[name] = pa.array(np.full(len(found), metadata[name])).cast(METADATA[name])
        columns = [
            arrays[field.name] if field.name in arrays else pa.nulls(len(found), field.type) for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    # -- changes

    def _follow(self) -> None:
        """Deliver changes until the end. Each call begins where the last one came to."""
        position = self._position
        assert position is not None, "changes come after the snapshot"
        if self._link is None:
            self._connect()
        # with each connection: server, slot or publication may have been replaced meanwhile
        position = self._position = self._checked(position)
        options = [
            "proto_version '1'",
            f"publication_names '{identifier(self._publication())}'",
            "messages 'true'",
        ]
        slot = identifier(position.slot)
        self._command(f"START_REPLICATION SLOT {slot} LOGICAL {lsn_text(position.lsn)} ({', '.join(options)})")
        decoder = Decoder(
            self._tables,
            self._schema,
            Point(position.lsn, position.index),
            whole_publication="" if self._source.tables else self._source.publication,
            ignores_truncate=self._source.truncate == "ignore",
            end_lsn=position.end,
        )
        pending = _Pending()
        self._trouble_ms = 0
        while True:
            alive_lsn = self._receive(pending)
            self.server_lsn = max(self.server_lsn, alive_lsn or 0)
            if whole := pending.take():
                decoded = decoder.decode(whole)
                self._hear(decoded.messages)
                self._deliver(decoder.point, decoded.batch, decoded.commit_ms)
            # within a transaction the position is that of what was delivered of it
            if alive_lsn is not None and not pending.messages:
                decoder.passed(alive_lsn)
                self._deliver(decoder.point, self._empty(), None)
            self._send_status()

    def _deliver(self, point: Point, batch: pa.RecordBatch, commit_ms: int | None) -> None:
        position = self._position
        assert position is not None
        moved = msgspec.structs.replace(position, lsn=point.lsn, index=point.index)
        is_end = _is_over(moved)
        if moved == position and not batch.num_rows and not is_end:
            return
        self._position = moved
        self._put(Delivery(batch, moved, commit_ms, is_end))
        if is_end:
            raise _ClosedError

    def _checked(self, position: Position) -> Position:
        """Check that slot and server are those that the position is of; return it in the server's timeline.

        Raises:
            UsageError: they are not; the message says what to do.
        """
        where, over = place_of(self._source.url), "start the pipeline over, so that it takes a new snapshot"
        system, timeline = self._system()
        if system != position.system:
            raise UsageError(f"{where} is another server than the one of the restored position; {over}")
        slot = position.slot.replace("'", "''")
        found = self._command(
            "SELECT confirmed_flush_lsn, COALESCE(to_jsonb(s) ->> 'wal_status', ''), "
            "COALESCE(to_jsonb(s) ->> 'failover', 'false'), pg_current_wal_flush_lsn() "
            f"FROM pg_replication_slots s WHERE slot_name = '{slot}'"
        )
        if not found.ntuples:
            raise UsageError(f"slot '{slot}' is not in {where} any more, and its changes are lost; {over}")
        confirmed, wal, failover, end = ((found.get_value(0, at) or b"").decode() for at in range(4))
        if wal == "lost":
            raise UsageError(
                f"slot '{slot}' of {where} was invalidated, because the server kept as much of its log as "
                f"max_slot_wal_keep_size allows; {over}"
            )
        if timeline != position.timeline and failover != "true":
            raise UsageError(
                f"{where} was restored from a backup or replaced by a standby since the position was taken (timeline "
                f"{timeline}, not {position.timeline}), and may not have all changes that were read; {over}"
            )
        if timeline != position.timeline and self._end_of_timeline(position.timeline, timeline) < position.lsn:
            raise UsageError(
                f"{where} was replaced by a standby that did not have all changes that were read: their log ends where "
                f"timeline {position.timeline} does, and differs after that; have the primary wait for the standby "
                f"(synchronized_standby_slots), and {over}"
            )
        if lsn_of(end) < position.lsn:
            raise UsageError(f"the log of {where} ends before the restored position: it was set back; {over}")
        publication = self._publication().replace("'", "''")
        listed = self._command(
            f"SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = '{publication}'"
        )
        there = {tuple((listed.get_value(row, at) or b"").decode() for at in range(2)) for row in range(listed.ntuples)}
        for table in self._tables:
            if (table.schema, table.name) not in there:
                raise UsageError(
                    f"table {table.where} is not in publication '{publication}' of {where} any more: it was taken out, "
                    f"or dropped and made again, so changes are lost; {over}"
                )
        if lsn_of(confirmed) > position.lsn:
            raise UsageError(
                f"slot '{slot}' of {where} was confirmed beyond the restored position, by another reader or because it "
                f"was removed and created again, so changes are lost; {over}"
            )
        return msgspec.structs.replace(position, timeline=timeline)

    def _end_of_timeline(self, former: int, now: int) -> int:
        """Return where a former timeline of the server ends; 0: it is not one."""
        history = self._command(f"TIMELINE_HISTORY {now}").get_value(0, 1) or b""
        entries = [line.split() for line in history.decode().splitlines()]  # number, end, reason
        return next((lsn_of(entry[1]) for entry in entries if len(entry) > 1 and entry[0] == str(former)), 0)

    def _receive(self, pending: _Pending) -> int | None:
        """Append messages; return how far the server has read if it said so after them."""
        pg = self._link.pgconn
        get, messages, has_waited = pg.get_copy_data, pending.messages, False
        while len(messages) < MESSAGES_MAX:
            count, data = get(1)
            if count == 0:
                if has_waited:
                    return None
                select.select([pg.socket, self._woken], [], [], WAIT_S)
                self._check_open()
                pg.consume_input()
                has_waited = True
                continue
            if count < 0:
                self._raise_end(pg)
            kind = data[0]
            if kind == 0x77:  # w
                what = data[HEADER]
                if what != 0x4D or data[HEADER + 1]:  # no message outside of transactions
                    messages.append(bytes(data))  # a view of it would be one more object to collect
                    if what == COMMIT:
                        pending.whole = len(messages)
            elif kind == 0x6B:  # k
                lsn, _, wants_reply = struct.unpack("!QQ?", data[1:18])
                if wants_reply:
                    self._status_ms = 0
                return int(lsn)
        return None

    def _raise_end(self, pg: Any) -> None:
        from psycopg import errors

        result = pg.get_result()
        if result is not None and result.error_message:
            raise errors.error_from_result(result)
        raise StorageError("read changes of", place_of(self._source.url), "the server ended the connection")

    def _hear(self, messages: Sequence[tuple[str, bytes]]) -> None:
        assert self._position is not None
        for prefix, content in messages:
            if prefix == CONFIRM + self._position.slot and content.isdigit() and int(content) > self._confirmed:
                self._confirmed, self._status_ms = int(content), 0

    def _send_status(self) -> None:
        """Tell the server that this lives, and what it may forget."""
        now_ms = self._environment.monotonic_ms()
        if self._status_ms and now_ms < self._status_ms + STATUS_MS:
            return
        assert self._position is not None
        self._status_ms = now_ms
        read = max(self._position.lsn, self._confirmed)
        # in microseconds since 2000, as PostgreSQL counts
        time = self._environment.wall_ms() * 1_000 - 946_684_800_000_000
        pg = self._link.pgconn
        pg.put_copy_data(b"r" + struct.pack("!QQQqB", read, self._confirmed, self._confirmed, time, 0))
        pg.flush()


class _Pending:
    """Messages that came and are not decoded yet.

    Attributes:
        messages: in order.
        whole: so many of them are up to the last end of a transaction.
    """

    __slots__ = ("messages", "whole")

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.whole = 0

    def take(self) -> list[bytes]:
        """Return whole transactions and forget them; all messages, if one is too large to wait for its end."""
        assert self.whole <= len(self.messages), "more messages are whole than have come"
        count = self.whole or (len(self.messages) if len(self.messages) >= MESSAGES_MAX else 0)
        taken = self.messages[:count]
        del self.messages[:count]
        self.whole = 0
        return taken


def _one(connection: Any, query: str, *values: Any) -> Any:
    return connection.execute(query, values).fetchone()[0]
