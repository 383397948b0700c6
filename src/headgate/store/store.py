"""The stream store: streams of events on a storage, with a catalogue of what there is.

Counterpart: ``connectors.streams`` and ``headgate streams`` use it. Source: docs/spec/stream-store.md. Any number of
processes may have it open, on one machine, or with a server for the catalogue on several; each call is atomic and
durable when it returns.
"""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from headgate.environment import SYSTEM_CLOCK, SYSTEM_THREADS, Clock, Threads
from headgate.errors import CorruptionError, TruncatedError, UsageError
from headgate.model.config import Access, Duration, check_switches, duration_ms
from headgate.protocol.store import layouts
from headgate.protocol.store.layouts import Layout, Plan, Refused
from headgate.protocol.store.transactions import LEASE_MS_MAX, LEASE_MS_MIN
from headgate.protocol.store.truncation import Extent, Hold, is_of_group, needed_by
from headgate.storage import local_files
from headgate.storage.base import Storage
from headgate.storage.local import LocalStorage
from headgate.storage.local_files import access_in, checked_access, make_root
from headgate.store import location
from headgate.store.addresses import is_server_url
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.records import Shared, TransactionInfo
from headgate.store.chunks import delete_quietly, random_name
from headgate.store.core import StoreCore
from headgate.store.follower import EARLIEST, StreamFollower, open_follower
from headgate.store.fsck import Problem, check_store
from headgate.store.location import ROOT_VARIABLE, is_shared, open_shared, shared_exists, store_root
from headgate.store.maintenance import Maintenance
from headgate.store.pipelines import Pipelines
from headgate.store.reader import SegmentReader
from headgate.store.reader_groups import ReaderGroup, group_start
from headgate.store.streams import (
    OtherLayoutError,
    Retention,
    Scaling,
    StreamCut,
    StreamDefinition,
    StreamInfo,
    check_open,
    retention_policy_of,
    scaling_policy_of,
)
from headgate.store.transactions import SharedTransaction, Transactions
from headgate.store.writer import LINGER, StreamWriter

if TYPE_CHECKING:
    from headgate.store.server.server import ServerOptions, StoreServer

TRANSACTION_LEASE = "10 minutes"

TRANSACTION_OWNER = "writers"


class Store:
    """An open stream store.

    ``transactions`` and ``pipelines`` have what sinks and sources of pipelines do with it.
    """

    def __init__(
        self,
        root: str,
        catalogue: Catalogue,
        storage: Storage,
        *,
        new_name: Callable[[], str] = random_name,
        threads: Threads = SYSTEM_THREADS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Use ``Store.open``. ``new_name`` gives names that nothing has."""
        self.root = root
        self._core = StoreCore(catalogue, storage, clock, threads, new_name)
        self._maintenance = Maintenance(self._core)
        self.transactions = Transactions(self._core)
        """Transactions of one process, for sinks of pipelines."""
        self.pipelines = Pipelines(self._core)
        """Ownership of output, markers of checkpoints, and reader groups of sources, for pipelines."""

    @classmethod
    def open(
        cls,
        root: str | Path | None = None,
        *,
        storage: Storage | None = None,
        access: str = Access.OWNER.value,
        chunks: str | Path | None = None,
    ) -> Store:
        """Open the store at ``root`` (see ``store_root``); create it if it does not exist.

        Args:
            root: the directory of the store. For a store that several machines share:
                ``postgresql://user@host/database``, or ``headgate://host:port`` where ``headgate store serve`` offers
                it.
            storage: where to keep chunks instead of ``<root>/chunks`` (for tests).
            access: who may use a new store: "owner", or "group" to share it with the directory's group.
            chunks: where a new store on PostgreSQL keeps its events: a URL such as ``s3://bucket/prefix``, or a
                directory that all machines share. The store remembers it.

        Raises:
            UsageError: the store cannot be created, is not shared although ``access`` asks for it, or was written by
                another release.
        """
        directory = store_root(root)
        if is_server_url(directory):
            return cls._open_served(directory, storage, chunks)
        if "://" in directory:
            catalogue, place, clock = open_shared(directory, chunks)
            return cls(directory, catalogue, storage if storage is not None else place, clock=clock)
        if chunks is not None:
            raise UsageError(f"chunks= is for a store on PostgreSQL; the one at {directory} keeps its events there")
        return cls._open_directory(directory, storage, access)

    @classmethod
    def _open_served(cls, url: str, storage: Storage | None, chunks: str | Path | None) -> Store:
        if chunks is not None:
            raise UsageError(f"chunks= is for a store on PostgreSQL; the server at {url} keeps the events of its store")
        from headgate.store.client.remote_store import open_remote_store

        served = open_remote_store(url)
        place = storage if storage is not None else served.storage
        return cls(url, served.catalogue, place, clock=served.clock)

    @classmethod
    def _open_directory(cls, directory: str, storage: Storage | None, access: str) -> Store:
        wanted = checked_access(access, "Store.open(access=)", Access.OWNER, Access.GROUP)
        try:
            make_root(Path(directory), wanted, "stream store")
        except OSError as error:
            raise UsageError(
                f"stream store directory {directory} cannot be created ({error.strerror}); set {ROOT_VARIABLE} "
                "to a writable directory"
            ) from error
        from headgate.store.catalogue.sql import SqlCatalogue  # SQLAlchemy takes a fifth of the imports of a start

        catalogue = SqlCatalogue.open(_catalogue_file(directory))
        return cls(directory, catalogue, storage if storage is not None else _chunks_in(directory))

    @staticmethod
    def shared(root: str | Path | None = None) -> Store:
        """Return the store at ``root`` that this process shares. It is never closed."""
        directory = store_root(root)
        scheme, separator, name = directory.partition("://")
        if scheme in location.OPENERS and separator:  # looked up there: the simulator binds another one
            opened: Store = location.OPENERS[scheme](name)
            return opened
        return _shared(directory)

    @staticmethod
    def exists(root: str | Path | None = None) -> bool:
        """Return whether there is a store at ``root``. Unlike ``open``, this never creates one.

        Raises:
            UsageError, StorageError: the server of the store does not answer.
        """
        directory = store_root(root)
        if is_shared(directory):
            return shared_exists(directory)
        return "://" in directory or _catalogue_file(directory).is_file()

    def close(self) -> None:
        """Close the catalogue, fetch nothing ahead any more, and hold no directory of the store open."""
        self._core.prefetcher.close()
        self._core.catalogue.close()
        for place in (self.root, self._core.storage.url):
            if "://" not in place:
                local_files.SYNCED.forget_below(Path(place))

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- streams -------------------------------------------------------------------------------------------------------

    def create_stream(
        self,
        name: str,
        schema: pa.Schema,
        *,
        segments: int = 4,
        routing_key: str | None = None,
        if_not_exists: bool = False,
        retention: Retention | None = None,
        scaling: Scaling | None = None,
    ) -> StreamInfo:
        """Create a stream.

        Args:
            name: ``scope/stream`` or ``stream``.
            schema: the columns of its events. Metadata is dropped, and every column may be null.
            segments: the number of segments, which is also how many readers can share the stream.
            routing_key: the column that routes events: equal values go to the same segment and so stay in order. None:
            appends have
                no order among each other.
            if_not_exists: return an existing stream if its schema and routing key fit.
            retention: how long events stay. None: until the stream is truncated or deleted.
            scaling: how to adjust the number of segments automatically. None: only by hand.

        Raises:
            UsageError: a stream of this name exists, or something that was given cannot be used.
        """
        check_switches("create_stream: ", if_not_exists=if_not_exists)
        policies = retention_policy_of(retention), scaling_policy_of(scaling)
        wanted = StreamDefinition(name, schema, segments, routing_key, *policies).checked()
        return self._core.catalogue.create_stream(wanted, self._core.clock.wall_ms(), if_not_exists=if_not_exists)

    def list_streams(self, scope: str = "") -> list[StreamInfo]:
        """Return all streams by name, with their counts. ``scope`` limits them to names below ``scope/``."""
        return self._core.catalogue.list_streams(scope)

    def find(self, name: str, *, schema_version: int | None = None) -> StreamInfo:
        """Return a stream without its counts, which take time to compute if it has many chunks.

        Args:
            name: the name of the stream.
            schema_version: show the stream with this version of ``schemas``; default: the current one.

        Raises:
            UsageError: there is no such stream or schema.
        """
        info = self._core.catalogue.find_stream(name)
        if schema_version is None or schema_version == info.schema_version:
            return info
        schemas = self._core.catalogue.schemas(info)
        if not 0 <= schema_version < len(schemas):
            raise UsageError(f"stream '{name}' has schemas 0 to {len(schemas) - 1}, not {schema_version}")
        return replace(info, schema=schemas[schema_version], schema_version=schema_version)

    def describe(self, name: str) -> StreamInfo:
        """Return a stream with its counts.

        Raises:
            UsageError: there is no such stream.
        """
        return self._core.catalogue.describe_stream(name)

    def seal(self, name: str) -> None:
        """End a stream: it takes no more events, and readers reach its end. The call can be repeated.

        Raises:
            UsageError: there is no such stream, prepared transactions wait for a decision, or a transaction that
                several processes write is open.
        """
        self._core.catalogue.seal_stream(name)

    def delete(self, name: str, *, force: bool = False) -> None:
        """Delete a sealed stream with its events, which all pipelines, reader groups and other holders have read.

        ``force`` also deletes a stream that is in use: pipelines that read it then fail for good.

        Raises:
            UsageError: there is no such stream, it is not sealed, or a holder still needs some of its events.
        """
        check_switches("delete: ", force=force)
        info = self._core.catalogue.delete_stream(name, force=force)
        delete_quietly(self._core.storage, self._core.storage.list(str(info.stream_id)))

    def update_stream(
        self, name: str, *, schema: pa.Schema | None = None, columns: pa.Schema | None = None
    ) -> StreamInfo:
        """Change the columns of a stream: add new ones at the end, or give columns wider number types.

        No event is rewritten; existing events have null in new columns. Readers and writers that use an earlier schema
        continue with it. Repeating the call changes nothing.

        Args:
            name: the name of the stream.
            schema: all columns from now on, the existing ones first.
            columns: instead of ``schema``, only the columns that are added or get a wider type. The others stay.

        Raises:
            UsageError: there is no such stream, it is sealed, or it cannot have these columns. The message names the
                first such column, with its old and its new type.
        """
        wanted = columns if schema is None else schema
        if wanted is None or (schema is not None and columns is not None):
            raise UsageError(f"say how stream '{name}' is to be updated: with schema= or columns=, one of both")
        return self._core.catalogue.update_schema(name, wanted, is_whole=schema is not None)

    def schemas(self, name: str) -> tuple[pa.Schema, ...]:
        """Return all schemas of a stream by version; the last one is the current schema.

        Raises:
            UsageError: there is no such stream.
        """
        return self._core.catalogue.schemas(self._core.catalogue.find_stream(name))

    # -- writers and readers -------------------------------------------------------------------------------------------

    def writer(
        self, name: str, *, writer_id: str = "", epoch: int = 0, linger: Duration | None = LINGER
    ) -> StreamWriter:
        """Return a writer; its appends are durable when acknowledged.

        Args:
            name: the name of the stream.
            writer_id: a stable id. It makes appends idempotent across restarts, by their sequence number.
            epoch: a newer epoch fences older ones of the same writer id.
            linger: how long an append waits for others with which it shares a flush. None: until ``flush``, ``close``,
                or a full buffer.

        Raises:
            UsageError: there is no such stream, it is sealed, or ``linger`` is not a duration.
            FencedError: a newer epoch of this writer id exists.
        """
        linger_ms = None if linger is None else duration_ms(linger, "linger")
        info = self._core.catalogue.find_stream(name)
        check_open(info)
        return StreamWriter(self._core, info, writer_id, epoch, linger_ms, self.look_after)

    def reader(
        self, name: str, segment: int, position: int | None = None, *, schema_version: int | None = None
    ) -> SegmentReader:
        """Return a reader of one segment that begins at ``position``, or at the first event that still exists.

        The reader ends where the segment was closed or the stream was sealed. It returns all events in one schema,
        whatever schema they were written in.

        Args:
            name: the name of the stream.
            segment: the number of the segment.
            position: where to begin.
            schema_version: the version of ``schemas`` in which to return events; default: the current one.

        Raises:
            UsageError: there is no such stream, segment, position or schema.
            TruncatedError: the segment begins after the position.
        """
        info = self.find(name, schema_version=schema_version)
        extents = self._core.catalogue.extents(info)
        if segment not in extents:
            raise UsageError(f"stream '{name}' has segments 0 to {len(extents) - 1}, not {segment}")
        head, end = extents[segment].head, extents[segment].end
        position = head if position is None else position
        if 0 <= position < head:
            raise TruncatedError(name, segment, position, head)
        if not 0 <= position <= end:
            raise UsageError(
                f"segment {segment} of stream '{name}' has positions {head} to {end}, not {position}; the position "
                "comes from another store, or the stream was deleted and created again"
            )
        return SegmentReader(self._core, info, segment, position)

    def follow(
        self,
        name: str,
        *,
        start: str | StreamCut | dt.datetime = EARLIEST,
        end: str | StreamCut | None = None,
        key: object = None,
    ) -> StreamFollower:
        """Return a reader of all segments of a stream, including those that it gets when it is scaled.

        Args:
            name: the name of the stream.
            start: ``"earliest"``, ``"latest"`` (only events from now on), a cut, or a date (only events that became
                visible then or later).
            end: where to end: a cut, or ``"latest"`` for the present end. None: where the stream is sealed.
            key: return only events with this value of the routing key. None: all events.

        Raises:
            UsageError: there is no such stream, the cut is of another stream, or the stream has no routing key.
            TruncatedError: the events at ``start`` no longer exist.
        """
        return open_follower(self._core, self._core.catalogue.find_stream(name), start, end, key)

    def reader_group(
        self,
        name: str,
        streams: str | Sequence[str] = (),
        *,
        start: str = "earliest",
        cuts: Sequence[StreamCut] = (),
        checkpoints_kept: int = 1,
    ) -> ReaderGroup:
        """Return a reader group; create it if it does not exist and ``streams`` are given.

        The events that a group still needs are not truncated, until the group is deleted.

        Args:
            name: the name of the group.
            streams: the streams that it reads; may be left out for an existing group.
            start: where a new group begins, "earliest" or "latest", in the streams that have no cut in ``cuts``.
            cuts: the cuts at which a new group begins in its streams.
            checkpoints_kept: how many completed checkpoints a new group can go back to.

        Raises:
            UsageError: the group does not exist and no stream is given, a stream is missing, or the group reads other
                streams.
            TruncatedError: the events at which it would begin no longer exist.
        """
        wanted = (streams,) if isinstance(streams, str) else tuple(dict.fromkeys(streams))
        begin = group_start(start, cuts)
        unknown = sorted(begin.cuts.keys() - set(wanted))
        if unknown:
            raise UsageError(f"reader group '{name}' does not read stream '{unknown[0]}', of which a cut is given")
        if checkpoints_kept < 1:
            raise UsageError(f"checkpoints_kept is at least 1, not {checkpoints_kept}")
        if wanted:
            self._core.catalogue.create_group(name, wanted, begin, checkpoints_kept)
        else:
            self._core.catalogue.find_group(name)
        return ReaderGroup(self._core, name)

    def reader_groups(self) -> list[str]:
        """Return the names of the reader groups."""
        return self._core.catalogue.groups()

    def delete_reader_group(self, name: str) -> bool:
        """Delete a reader group and release the events that it holds; return whether it existed. Its readers fail."""
        return self._core.catalogue.delete_group(name)

    # -- transactions that several processes write ---------------------------------------------------------------------

    def begin_shared(
        self, stream: str, *, lease: Duration = TRANSACTION_LEASE, owner: str = TRANSACTION_OWNER, epoch: int = 0
    ) -> SharedTransaction:
        """Begin a transaction that several processes write. They find it by its ``id`` with ``transaction``.

        Args:
            stream: the stream that receives the events.
            lease: the transaction is aborted if no process writes to it or pings it for this long; 0.1 seconds to one
                day. A prepared transaction has no lease.
            owner: who begins it. The store remembers outcomes, and lists transactions, by owner.
            epoch: with ``fence``, a newer epoch refuses all writers of transactions of the owner's older epochs.

        Raises:
            FencedError: a newer epoch of ``owner`` exists.
            UsageError: there is no such stream, it is sealed, or the lease is out of range.
        """
        lease_ms = duration_ms(lease, "lease")
        if not LEASE_MS_MIN <= lease_ms <= LEASE_MS_MAX:
            raise UsageError(f"the lease of a transaction is {LEASE_MS_MIN} ms to {LEASE_MS_MAX} ms, not {lease_ms} ms")
        if not owner or epoch < 0:
            raise UsageError(f"a transaction needs an owner and an epoch of at least 0, not {owner!r} and {epoch}")
        name = self._core.new_name()
        now_ms = self._core.clock.wall_ms()
        shared = self._core.catalogue.begin_shared(stream, name, owner, epoch, lease_ms, now_ms)
        return self._opened(shared)

    def transaction(self, stream: str, id: str) -> SharedTransaction:
        """Return a transaction that any process began with ``begin_shared``, whether or not it has been decided since.

        Raises:
            UsageError: there is no such stream, or no such transaction: it was never begun there, or was decided so
                long ago that its outcome is forgotten.
        """
        return self._opened(self._core.catalogue.find_shared(stream, id))

    def expire_transactions(self, stream: str) -> list[str]:
        """Check the leases of a stream's open transactions, and return the ids of those that this call aborted.

        Writing to the stream, committing, and beginning or finding a transaction do this automatically. It takes two
        checks to abort a transaction: the first one only notes that the lease is over, and another one, half a lease
        later, aborts.

        Raises:
            UsageError: there is no such stream.
        """
        return self._maintenance.expire(self._core.catalogue.find_stream(stream))

    def _opened(self, shared: Shared) -> SharedTransaction:
        self._maintenance.expire_in_passing(shared.stream)
        return SharedTransaction(self._core, shared, self.look_after)

    def commit_transactions(
        self, names: Sequence[tuple[str, str]], *, owner: str, epoch: int, times: Mapping[str, int] | None = None
    ) -> None:
        """Commit prepared transactions, given as (stream, name), in one step.

        ``times``: stream → milliseconds; what ``owner`` commits later has no event as early as that.

        Raises:
            FencedError, CorruptionError, StorageError: see ``Transactions.commit``.
        """
        self.transactions.commit(names, owner=owner, epoch=epoch, times=times)

    def list_transactions(
        self, *, owner: str | None = None, prefix: str = "", stream: str | None = None
    ) -> list[TransactionInfo]:
        """Return all recorded transactions by name: prepared and decided ones, and open ones of several processes."""
        return self._core.catalogue.transactions(owner, prefix, stream)

    # -- stream cuts ---------------------------------------------------------------------------------------------------

    def head(self, name: str) -> StreamCut:
        """Return the cut at which a stream begins."""
        return self._cut(name, lambda extent: extent.head)

    def tail(self, name: str) -> StreamCut:
        """Return the cut at which a stream ends now."""
        return self._cut(name, lambda extent: extent.end)

    def cut_at(self, name: str, date: dt.datetime) -> StreamCut:
        """Return the cut in front of all events that became visible at ``date`` or later.

        Args:
            name: the name of the stream.
            date: a date with a time zone, or in the time zone of the machine.
        """
        stream = self._core.catalogue.find_stream(name)
        positions = self._core.catalogue.cut_at(stream, round(date.timestamp() * 1_000))
        return StreamCut(stream.name, stream.stream_id, positions)

    def events_between(self, begin: StreamCut, end: StreamCut | None = None) -> int:
        """Return the number of events between two cuts of a stream. Without a second cut: up to its end.

        Raises:
            UsageError: they are not cuts of one existing stream.
        """
        stream = self._stream_of(begin)
        if end is not None:
            end.check(stream)
        extents = self._core.catalogue.extents(stream)
        last = {segment: extent.end for segment, extent in extents.items()} if end is None else end.positions
        return sum(_between(begin.positions, last, segment, extent) for segment, extent in extents.items())

    def truncate(self, cut: StreamCut, *, force: bool = False) -> StreamCut:
        """Remove the events before ``cut`` for good, and return where the stream begins now.

        Repeating the call, or passing a cut before the head, changes nothing.

        Args:
            cut: where to truncate: a cut such as ``tail`` or ``cut_at`` returns.
            force: also remove events that a holder still needs.

        Raises:
            UsageError: it is not a cut of an existing stream, or a holder still needs events before it; the message
                names the holder.
        """
        check_switches("truncate: ", force=force)
        stream = self._stream_of(cut)
        self._core.catalogue.truncate(stream, cut.positions, anyway=force)
        self._maintenance.tidy(stream)
        return self.head(stream.name)

    def hold(self, cut: StreamCut, *, holder: str, life: str = "", epoch: int = 0) -> None:
        """Keep all events after ``cut``, until ``holder`` holds another cut of the stream or releases it.

        Args:
            cut: the holder needs no events before it.
            holder: the name of the holder, which holds one cut per stream.
            life: for a holder that another process may replace.
            epoch: a later one of the same life fences it.

        Raises:
            TruncatedError: events after the cut have already been truncated.
            FencedError: a later epoch of the same life already holds a cut.
            UsageError: it is not a cut of an existing stream, or the name is that of a reader group.
        """
        if is_of_group(holder):
            raise UsageError(f"'{holder}' is the name under which a reader group holds; hold it under another one")
        self._core.catalogue.hold(self._stream_of(cut), Hold(holder, cut.positions, life, epoch))

    def release(self, name: str, *, holder: str) -> None:
        """Release the cut that ``holder`` holds of a stream. The call can be repeated."""
        self._core.catalogue.release(self._core.catalogue.find_stream(name), holder)

    def holds(self, name: str) -> dict[str, StreamCut]:
        """Return the held cuts of a stream, by holder."""
        stream = self._core.catalogue.find_stream(name)
        found = self._core.catalogue.holds(stream)
        return {hold.holder: StreamCut(stream.name, stream.stream_id, hold.positions) for hold in found}

    def needed_by(self, name: str) -> list[str]:
        """Return the holders that have not read a stream to its present end."""
        stream = self._core.catalogue.find_stream(name)
        _, extents = self._core.catalogue.layout_and_extents(stream)
        return list(needed_by(extents, self._core.catalogue.holds(stream)))

    # -- retention and scaling -----------------------------------------------------------------------------------------

    def set_retention(self, name: str, retention: Retention | None) -> StreamInfo:
        """Set how long events of a stream stay, from the next look on. None: for ever.

        Raises:
            UsageError: there is no such stream, or the retention is impossible.
        """
        return self._core.catalogue.set_retention(name, retention_policy_of(retention))

    def retain(self, name: str) -> StreamCut:
        """Truncate a stream now as far as its retention says, and return where it begins.

        Writers and sinks do this by themselves, once a minute.
        """
        stream = self._core.catalogue.find_stream(name)
        if self._maintenance.retain(stream):
            self._maintenance.tidy(stream)
        return self.head(name)

    def look_after(self, name: str) -> None:
        """Do what ``retain`` and ``autoscale`` do, unless this process has just done so. It never takes long.

        It never fails: what cannot be removed now is removed by a later look.
        """
        self._maintenance.look_after(name)

    def layout(self, name: str) -> Layout:
        """Return the segments of a stream, and the keys that each of them takes.

        Raises:
            UsageError: there is no such stream.
        """
        return self._core.catalogue.layout(name)

    def split(self, name: str, segment: int, into: int = 2) -> Layout:
        """Scale a stream: from now on, ``into`` segments take the keys of one segment. No event moves.

        Writers, transactions and pipelines that read the stream continue. The events of each key stay in order.

        Raises:
            UsageError: there is no such stream, or the segment takes no events any more.
        """
        return self._scale(name, lambda layout: layouts.split(layout, segment, into))

    def merge(self, name: str, segments: Collection[int]) -> Layout:
        """Scale a stream: from now on, one segment takes the keys of several neighbouring segments; see ``split``.

        Raises:
            UsageError: there is no such stream, or the segments are not neighbours that take events.
        """
        return self._scale(name, lambda layout: layouts.merge(layout, segments))

    def resize(self, name: str, segments: int) -> Layout:
        """Scale a stream: from now on, this number of segments share the keys equally; see ``split``.

        Raises:
            UsageError: there is no such stream, or it already has these segments.
        """
        return self._scale(name, lambda layout: layouts.resize(layout, segments))

    def set_scaling(self, name: str, scaling: Scaling | None) -> StreamInfo:
        """Set how a stream is scaled automatically, from the next look on. None: only by hand.

        Raises:
            UsageError: there is no such stream, or the policy is impossible.
        """
        return self._core.catalogue.set_scaling(name, scaling_policy_of(scaling))

    def autoscale(self, name: str) -> bool:
        """Scale a stream now as its policy says. Return whether its segments have changed.

        Writers and sinks do this by themselves, once a minute.

        Raises:
            UsageError: there is no such stream.
        """
        return self._maintenance.autoscale(self._core.catalogue.find_stream(name))

    # -- the store as a whole ------------------------------------------------------------------------------------------

    def changes(self) -> int:
        """Return a number that changes when another connection changes anything in the store. Takes some µs.

        Compare it with a number that you took before you looked at the streams.
        """
        return self._core.catalogue.changes()

    @property
    def is_untouched(self) -> bool:
        """Whether this process reads a copy of the catalogue, because it may not write the store."""
        return self._core.catalogue.is_untouched

    def fsck(
        self, *, verify_events: bool = True, on_bytes: Callable[[int], None] = lambda size_bytes: None
    ) -> list[Problem]:
        """Check every invariant; with ``verify_events`` also every byte of every visible chunk.

        ``on_bytes`` is called with the number of further bytes read, in total about twice the size of the store. It is
        not called if a server makes the check.
        """
        check_switches("fsck: ", verify_events=verify_events)
        return check_store(self._core.catalogue, self._core.storage, verify_events=verify_events, on_bytes=on_bytes)

    def repair(self) -> list[str]:
        """Repair findings of ``fsck`` that can be repaired without loss: the holds of reader groups.

        Returns what was repaired.
        """
        return self._core.catalogue.mend_groups()

    def collect_orphans(self) -> int:
        """Remove files that nothing refers to, and return their number. Only call it while no process writes.

        A process that writes all the same loses nothing that was acknowledged as durable: its writers write again what
        is removed before it was recorded, and a transaction that lost a file cannot be prepared.

        Raises:
            CorruptionError: something is damaged, so that it is unknown what such a file belongs to.
            StorageError: a file cannot be removed. Call it again to go on.
        """
        for problem in self.fsck(verify_events=False):
            if not problem.is_harmless:
                expected = "a sound store, where a file that nothing refers to has no owner"
                raise CorruptionError(problem.where, 0, expected, f"this: {problem.what}")
        there = self._core.storage.list("")
        known = self._core.catalogue.chunk_paths()
        orphans = self._core.catalogue.condemn([path for path in there if path not in known])  # after the list of files
        # condemned first: a writer that is slow cannot record a file that is gone, and writes its events again
        for path in sorted(orphans):
            self._core.storage.delete(path)
        swept = self._core.storage.sweep_unfinished()
        return len(orphans) + swept

    def serve(self, options: ServerOptions) -> AbstractContextManager[StoreServer]:
        """Offer this store to other processes while a ``with`` block runs (docs/spec/served-store.md).

        Raises:
            UsageError: the store is not in a directory of this machine, or cannot be offered with these arguments; see
                ``serving_store``.
        """
        from headgate.store.server.server import serve_store

        if "://" in self.root:
            raise UsageError(
                f"the store at {self.root} is shared already: open it there; one in a directory can be served"
            )
        return serve_store(Path(self.root), self._core.catalogue, _chunks_in(self.root), options)

    def _scale(self, name: str, plan: Callable[[Layout], Plan | Refused]) -> Layout:
        while True:
            wanted = plan(self._core.catalogue.layout(name))
            if isinstance(wanted, Refused):
                raise UsageError(f"stream '{name}' cannot be scaled: {wanted.problem}")
            with suppress(OtherLayoutError):  # it was scaled meanwhile, or by a late commit (S75): plan again
                return self._core.catalogue.scale_stream(name, wanted, self._core.clock.wall_ms())

    def _stream_of(self, cut: StreamCut) -> StreamInfo:
        stream = self._core.catalogue.find_stream(cut.stream)
        cut.check(stream)
        return stream

    def _cut(self, name: str, position: Callable[[Extent], int]) -> StreamCut:
        stream = self._core.catalogue.find_stream(name)
        extents = self._core.catalogue.extents(stream)
        return StreamCut(stream.name, stream.stream_id, {segment: position(x) for segment, x in extents.items()})


def _between(first: Mapping[int, int], last: Mapping[int, int], segment: int, extent: Extent) -> int:
    begin = max(first.get(segment, extent.head), extent.head)
    return max(0, min(last.get(segment, 0), extent.end) - begin)  # what a cut does not name came after it


def _chunks_in(directory: str) -> LocalStorage:
    chunks = Path(directory) / "chunks"
    return LocalStorage(chunks, access_in(chunks))


def _catalogue_file(directory: str) -> Path:
    return Path(directory) / "catalogue.sqlite"


@functools.cache
def _shared(root: str) -> Store:
    return Store.open(root)
