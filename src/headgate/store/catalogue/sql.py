"""The verbs of a catalogue in SQL: each is one database transaction around what its neighbours do in the tables.

Counterpart: ``base.Catalogue`` says what each means. Source: docs/spec/stream-store.md §3.
Never decides: that is ``protocol.store.transactions``, asked inside the transaction that applies its answer.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import sqlalchemy as sa

from headgate.errors import UsageError, gone
from headgate.model.pipeline_identity import Life, Mine, Owner
from headgate.protocol.store.autoscaling import Observed, ScalingPolicy
from headgate.protocol.store.group_ownership import Claim
from headgate.protocol.store.layouts import Layout, Plan
from headgate.protocol.store.reader_group import Event, GroupSegment
from headgate.protocol.store.transactions import Request, Verb, Verdict, Write
from headgate.protocol.store.truncation import Extent, Hold
from headgate.store.catalogue import audit as audit_module
from headgate.store.catalogue import (
    chunk_index,
    group_rows,
    markers,
    ownership,
    scaling,
    shared_transaction_rows,
    stream_rows,
    transaction_rows,
    truncation,
)
from headgate.store.catalogue import stream_rows as sql_streams
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.audit import SqlAudit
from headgate.store.catalogue.opening import open_database
from headgate.store.catalogue.records import (
    AppendFound,
    ChunkRecord,
    Contents,
    ExpiredTransaction,
    Frontier,
    GroupFound,
    GroupStart,
    Numbers,
    PartsFound,
    Reading,
    Recovered,
    Shared,
    Swept,
    TransactionInfo,
)
from headgate.store.catalogue.sqlite import Database, MemoryDatabase
from headgate.store.catalogue.tables import checked_values
from headgate.store.catalogue.transaction_rows import (
    OUTCOME_CLEANUP_INTERVAL,
    forget_oldest_outcomes,
    forget_outcomes,
    transaction_infos,
)
from headgate.store.catalogue.versions import make_tables
from headgate.store.policies import RetentionPolicy
from headgate.store.streams import StreamDefinition, StreamInfo, StreamReset


class SqlCatalogue:
    """A catalogue whose tables are in ``database``. ``where`` is the store's root, for messages."""

    def __init__(self, database: Database, where: str) -> None:
        self._database = database
        self._where = where
        self._decisions_count = 0

    @classmethod
    def open(cls, path: Path) -> SqlCatalogue:
        """Open the SQLite file at ``path``, creating it when there is none; see ``opening.open_database``."""
        return cls(open_database(path), str(path.parent))

    @property
    def path(self) -> str:
        """See ``Catalogue``."""
        return self._database.path

    @property
    def is_untouched(self) -> bool:
        """See ``Catalogue``."""
        return self._database.is_untouched

    def close(self) -> None:
        """See ``Catalogue``."""
        self._database.close()

    def changes(self) -> int:
        """See ``Catalogue``."""
        return self._database.changes()

    # -- streams -----------------------------------------------------------------------------------------------------

    def create_stream(self, wanted: StreamDefinition, now_ms: int, *, if_not_exists: bool) -> StreamInfo:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return sql_streams.insert_stream(connection, wanted, now_ms, if_not_exists=if_not_exists, where=self._where)

    def find_stream(self, name: str) -> StreamInfo:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return sql_streams.find_stream(connection, name, self._where)

    def describe_stream(self, name: str) -> StreamInfo:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            (found,) = sql_streams.with_counts(connection, [sql_streams.find_stream(connection, name, self._where)])
            return found

    def list_streams(self, scope: str) -> list[StreamInfo]:
        """See ``Catalogue``."""
        query = sa.select(t.streams).order_by(t.streams.c.name)
        if scope:
            query = query.where(t.streams.c.name.startswith(scope.rstrip("/") + "/", autoescape=True))
        with self._database.read() as connection:
            infos = [sql_streams.stream_info(row, self._where) for row in connection.execute(query).all()]
            return sql_streams.with_counts(connection, infos)

    def update_schema(self, name: str, wanted: pa.Schema, *, is_whole: bool) -> StreamInfo:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            info = sql_streams.find_stream(connection, name, self._where)
            return stream_rows.update_schema(connection, info, wanted, is_whole=is_whole)

    def schemas(self, stream: StreamInfo) -> tuple[pa.Schema, ...]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return sql_streams.find_schemas(connection, stream, self._where)

    def layout(self, name: str) -> Layout:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return sql_streams.find_layout(connection, sql_streams.find_stream(connection, name, self._where))

    def scale_stream(self, name: str, plan: Plan, now_ms: int) -> Layout:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return scaling.scale(connection, sql_streams.find_stream(connection, name, self._where), plan, now_ms)

    def set_scaling(self, name: str, policy: ScalingPolicy | None) -> StreamInfo:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return sql_streams.set_scaling(connection, name, policy, self._where)

    def observe(self, stream: StreamInfo, now_ms: int) -> Observed | None:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return scaling.observe(connection, stream, now_ms)

    def autoscale(self, stream: StreamInfo, plan: Plan, now_ms: int) -> bool:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return scaling.autoscale(connection, stream, plan, now_ms)

    def layout_and_extents(self, stream: StreamInfo) -> tuple[Layout, dict[int, Extent]]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            epoch, _ = sql_streams.look(connection, stream)
            layout = sql_streams.find_layout(connection, replace(stream, layout_epoch=epoch))
            return layout, truncation.extents(connection, stream)

    def look(self, stream: StreamInfo) -> tuple[int, bool]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return sql_streams.look(connection, stream)

    def seal_stream(self, name: str) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            sql_streams.seal_stream(connection, sql_streams.find_stream(connection, name, self._where))

    def delete_stream(self, name: str, *, force: bool) -> StreamInfo:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            info = sql_streams.find_stream(connection, name, self._where)
            if not info.is_sealed and not force:
                raise UsageError(f"stream '{name}' is not sealed, so it may be in use; seal it first, or force")
            if not force:
                truncation.check_not_held(connection, info)
            sql_streams.delete_stream(connection, info)
        return info

    # -- appends -----------------------------------------------------------------------------------------------------

    def register_writer(self, stream: StreamInfo, writer_id: str, epoch: int) -> int:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return chunk_index.register_writer(connection, stream, writer_id, epoch)

    def append(self, stream: StreamInfo, chunk: ChunkRecord, numbers: Numbers | None, now_ms: int) -> dict[int, int]:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            sql_streams.check_writable(connection, stream)
            if numbers is not None:
                chunk_index.advance_writer(connection, stream, numbers)
            chunk_id = chunk_index.insert_chunk(connection, stream.stream_id, chunk)
            parts = [(chunk_id, entry) for entry in chunk.entries]
            return chunk_index.assign_positions(connection, stream.stream_id, parts, now_ms)

    def find_append(self, path: str) -> AppendFound:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return chunk_index.find_append(connection, path)

    # -- reading -----------------------------------------------------------------------------------------------------

    def parts(self, stream: StreamInfo, segment: int, position: int, limit: int) -> PartsFound:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return chunk_index.find_parts(connection, stream, segment, position, limit)

    # -- heads and holds -----------------------------------------------------------------------------------------------

    def extents(self, stream: StreamInfo) -> dict[int, Extent]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return truncation.extents(connection, stream)

    def cut_at(self, stream: StreamInfo, date_ms: int) -> dict[int, int]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return truncation.cut_at(connection, stream, date_ms)

    def truncate(self, stream: StreamInfo, cut: Mapping[int, int], *, anyway: bool) -> dict[int, int]:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return truncation.truncate(connection, stream, cut, anyway=anyway)

    def retention_cut(self, stream: StreamInfo, now_ms: int) -> dict[int, int]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return truncation.retention_cut(connection, stream, now_ms)

    def retain(self, stream: StreamInfo, cut: Mapping[int, int]) -> dict[int, int]:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return truncation.retain(connection, stream, cut)

    def sweep(self, stream: StreamInfo, limit: int) -> Swept:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return truncation.sweep(connection, stream, limit)

    def swept(self, paths: Sequence[str]) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            truncation.forget_garbage(connection, paths)

    def set_retention(self, name: str, policy: RetentionPolicy | None) -> StreamInfo:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return sql_streams.set_retention(connection, name, policy, self._where)

    def hold(self, stream: StreamInfo, hold: Hold) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            truncation.hold(connection, stream, hold)

    def release(self, stream: StreamInfo, holder: str) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            truncation.release(connection, stream, holder)

    def holds(self, stream: StreamInfo) -> list[Hold]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return truncation.holds(connection, stream)

    # -- markers of checkpoints ----------------------------------------------------------------------------------------

    def mark(self, stream: str, owner: str, generation: int, checkpoint: int) -> dict[int, int]:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            info = sql_streams.find_stream(connection, stream, self._where)
            return markers.mark(connection, info, owner, generation, checkpoint)

    def frontier(self, stream: str, owner: str, generation: int, segments: Sequence[int] | None = None) -> Frontier:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            info = sql_streams.find_stream(connection, stream, self._where)
            return markers.frontier(connection, info, owner, generation, segments)

    def unmark(self, owner: str, generation: int, first: int, last: int) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            markers.unmark(connection, owner, generation, first, last)

    def unmark_others(self, owner: str, generation: int) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            markers.unmark_others(connection, owner, generation)

    # -- what pipelines have passed ------------------------------------------------------------------------------------

    def pass_segments(self, stream: StreamInfo, reader: Reading, segments: Collection[int]) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            scaling.pass_segments(connection, stream, reader, segments)

    def passed(self, stream: StreamInfo, reader: Reading) -> set[int]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return scaling.passed(connection, stream, reader)

    # -- reader groups -------------------------------------------------------------------------------------------------

    def create_group(
        self, name: str, streams: Sequence[str], start: GroupStart, kept: int, claim: Claim | None = None
    ) -> GroupFound:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return group_rows.create(connection, name, streams, start, kept, self._where, claim)

    def find_group(self, name: str) -> GroupFound:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return group_rows.find(connection, name, self._where)

    def groups(self) -> list[str]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return group_rows.names(connection)

    def change_group(self, name: str, event: Event) -> GroupFound:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return group_rows.change(connection, name, event, self._where)

    def reset_group(
        self, name: str, token: str, start: GroupStart, checkpoint: str | None, claim: Claim | None = None
    ) -> GroupFound:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return group_rows.reset(connection, name, token, start, checkpoint, self._where, claim)

    def group_cuts(self, name: str, checkpoint: str | None) -> dict[str, dict[int, int]]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return group_rows.cuts(connection, group_rows.find(connection, name, self._where), checkpoint)

    def group_unread(self, name: str) -> dict[GroupSegment, int]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return group_rows.unread(connection, group_rows.find(connection, name, self._where))

    def delete_group(self, name: str) -> bool:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return group_rows.delete(connection, name)

    def mend_groups(self) -> list[str]:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return audit_module.mend_groups(connection)

    # -- transactions ------------------------------------------------------------------------------------------------

    def begin(self, stream: str, name: str, owner: str, epoch: int) -> StreamInfo:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            info = sql_streams.find_stream(connection, stream, self._where)
            sql_streams.check_writable(connection, info)
            transaction_rows.check_begin(connection, info, Request(Verb.BEGIN, name, owner, epoch))
        return info

    def prepare(
        self, stream: StreamInfo, name: str, owner: str, epoch: int, chunks: Sequence[ChunkRecord], now_ms: int
    ) -> None:
        """See ``Catalogue``."""
        request = Request(Verb.PREPARE, name, owner, epoch, ",".join(chunk.path for chunk in chunks))
        with self._database.write() as connection:
            sql_streams.check_takes_events(connection, stream)
            transaction_rows.prepare(connection, stream, request, chunks, now_ms)

    def commit(self, names: Sequence[tuple[str, str]], owner: str, epoch: int, now_ms: int) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            reopening = scaling.Reopening(connection, now_ms)
            for stream_name, name in names:
                stream = self._promised(connection, stream_name, owner, epoch)
                transaction_rows.commit(connection, stream, Request(Verb.COMMIT, name, owner, epoch), reopening, now_ms)
            reopening.close()
            self._decided(connection, owner)

    def _promised(self, connection: sa.Connection, stream: str, owner: str, epoch: int) -> StreamInfo:
        """Return a stream that is to be committed to. Whoever was replaced is told that, not that it is gone (S18)."""
        try:
            return sql_streams.find_stream(connection, stream, self._where)
        except UsageError as error:
            transaction_rows.raise_fence(connection, owner, epoch)
            gone(error)
            raise

    def abort(self, stream: str, name: str, owner: str, epoch: int, now_ms: int) -> tuple[str, ...]:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            info = sql_streams.find_stream(connection, stream, self._where)
            orphans = transaction_rows.abort(connection, info, Request(Verb.ABORT, name, owner, epoch), now_ms)
            self._decided(connection, owner)
        return orphans

    def recover(self, stream: str, owner: str, epoch: int, keep: Collection[str], now_ms: int) -> Recovered:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            transaction_rows.raise_fence(connection, owner, epoch)  # before it says that there is no stream
            present = sql_streams.find_stream(connection, stream, self._where)
            return transaction_rows.recover(connection, present, owner, epoch, keep, now_ms, self._where)

    def fence(self, owner: str, epoch: int) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            transaction_rows.raise_fence(connection, owner, epoch)

    def forget_outcomes(self, names: Sequence[str], owner: str, epoch: int) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            transaction_rows.raise_fence(connection, owner, epoch)
            forget_outcomes(connection, owner, names)

    def transactions(self, owner: str | None, prefix: str, stream: str | None) -> list[TransactionInfo]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return transaction_infos(connection, owner, prefix, stream)

    # -- transactions of several processes -----------------------------------------------------------------------------

    def begin_shared(self, stream: str, name: str, owner: str, epoch: int, lease_ms: int, now_ms: int) -> Shared:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            present = sql_streams.find_stream(connection, stream, self._where)
            shared_transaction_rows.begin(connection, Shared(present, name, owner, epoch, lease_ms), now_ms)
            return shared_transaction_rows.find(connection, present, name, self._where)

    def find_shared(self, stream: str, name: str) -> Shared:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            present = sql_streams.find_stream(connection, stream, self._where)
            return shared_transaction_rows.find(connection, present, name, self._where)

    def join_shared(self, wanted: Shared, participant: str, token: str, now_ms: int) -> int:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return shared_transaction_rows.join(connection, wanted, participant, token, now_ms)

    def write_shared(
        self,
        wanted: Shared,
        participant: str,
        token: str,
        numbers: tuple[int, int],
        chunk: ChunkRecord | None,
        now_ms: int,
    ) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            shared_transaction_rows.write(connection, wanted, participant, Write(token, *numbers), chunk, now_ms)

    def ping_shared(self, wanted: Shared, now_ms: int) -> None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            shared_transaction_rows.ping(connection, wanted, now_ms)

    def decide_shared(self, wanted: Shared, verdict: Verdict, now_ms: int) -> tuple[str, ...]:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            reopening = scaling.Reopening(connection, now_ms)
            orphans = shared_transaction_rows.give_verdict(connection, wanted, verdict, reopening, now_ms)
            reopening.close()
            self._decided(connection, wanted.owner)
        return orphans

    def expire_shared(self, stream: StreamInfo, now_ms: int) -> list[ExpiredTransaction]:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            gone = shared_transaction_rows.expire(connection, stream, now_ms)
            for expired in gone:
                self._decided(connection, expired.owner)
        return gone

    # -- owners ------------------------------------------------------------------------------------------------------

    def owner(self, owner: str, stream: str = "", of: str = "") -> Owner:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            found = ownership.find_owner(connection, owner, self._where)
            row = connection.execute(sa.select(t.streams).where(t.streams.c.name == stream)).one_or_none()
            if row is None:
                return found
            info = sql_streams.stream_info(row, self._where)
            return replace(found, others=ownership.other_sinks(connection, info, owner, of, self._where))

    def own(self, owner: str, life: Life) -> Owner:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return ownership.own(connection, owner, life, self._where)

    def forget_owner(self, owner: str) -> Owner:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return ownership.forget_owner(connection, owner, self._where)

    def contents(self, stream: str, of: str, mine: Mine) -> Contents:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return ownership.contents(connection, stream, of, mine, self._where)

    def start_over(self, reset: StreamReset, now_ms: int) -> str | None:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            if ownership.is_reset(connection, reset.owner, reset.life, self._where):
                return None
            # What is there is looked at before its owner is fenced.
            found = {
                stream: ownership.contents(connection, stream, reset.of, reset.mine, self._where)
                for stream in reset.streams
            }
            shared = next((stream for stream in found if found[stream].is_shared), None)
            if shared is not None:
                return shared
            transaction_rows.raise_fence(connection, reset.owner, reset.epoch)
            for stream in found:
                ownership.empty_stream(connection, reset, stream, found[stream], now_ms, self._where)
            ownership.hand_over(connection, reset.owner, reset.life)  # of all of them: it is one owner (SO6)
            return None

    # -- files and checks --------------------------------------------------------------------------------------------

    def chunk_paths(self, below: str = "") -> set[str]:
        """See ``Catalogue``."""
        query = sa.select(t.chunks.c.file)
        if below:
            query = query.where(t.chunks.c.file.startswith(f"{below}/", autoescape=True))
        with self._database.read() as connection:
            return set(checked_values(connection.scalars(query), str))

    def known_chunks(self, paths: Collection[str]) -> set[str]:
        """See ``Catalogue``."""
        with self._database.read() as connection:
            return chunk_index.known_chunks(connection, sorted(paths))

    def condemn(self, paths: Collection[str]) -> set[str]:
        """See ``Catalogue``."""
        with self._database.write() as connection:
            return chunk_index.condemn(connection, sorted(paths))

    @contextlib.contextmanager
    def audit(self) -> Iterator[SqlAudit]:
        """See ``Catalogue``."""
        with self._database.read() as connection, self._database.sound_part(connection) as (sound, damage):
            yield SqlAudit(sound, [(self.path, problem) for problem in damage], self._where)

    def _decided(self, connection: sa.Connection, owner: str) -> None:
        """Forget old outcomes of ``owner``, not every time (S17)."""
        if self._decisions_count % OUTCOME_CLEANUP_INTERVAL == 0:
            forget_oldest_outcomes(connection, owner)
        self._decisions_count += 1


def memory_catalogue(name: str) -> SqlCatalogue:
    """Return a new, empty catalogue, called ``name`` in messages."""
    database = MemoryDatabase(name, sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
    with database.write() as connection:
        make_tables(connection, name)
    return SqlCatalogue(database, name)
