"""The stream store: streams of events on a storage, with a catalogue of what there is.

Counterpart: ``connectors.streams`` and ``headgate streams`` use it. Source: docs/spec/stream-store.md.
Any number of processes may have it open, on one machine, or with a server for the catalogue on several; each call is
atomic and durable when it returns.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.errors import CorruptionError, TruncatedError, UsageError
from headgate.model.config import Duration, duration_ms
from headgate.model.security import Access
from headgate.storage.access import access_in
from headgate.storage.backends import absolute_location
from headgate.storage.base import Storage
from headgate.storage.local import LocalStorage
from headgate.storage.roots import checked_access, make_root
from headgate.store.catalogue.base import Catalogue
from headgate.store.chunks import delete_quietly, random_name
from headgate.store.fetching import Fetching
from headgate.store.fsck import Problem, check_store
from headgate.store.linger import LINGER
from headgate.store.owned_store import OwnedStore
from headgate.store.reader import SegmentReader
from headgate.store.retention import Retention, policy_of
from headgate.store.scaling import Scaling, scaling_policy_of
from headgate.store.shared import is_served, is_shared, open_shared, shared_exists, shared_root
from headgate.store.streams import StreamDefinition, StreamInfo, check_open
from headgate.store.transactions import TransactionLog
from headgate.store.writer import StreamWriter
from headgate.threads import SYSTEM_THREADS, Threads

if TYPE_CHECKING:
    from headgate.store.serving.server import ServerOptions, StoreServer

ROOT_VARIABLE = "HEADGATE_STORE"
ROOT_DEFAULT = ".headgate/store"

OPENERS: dict[str, Callable[[str], Store]] = {}
"""Stores of other surroundings, by scheme: the simulator's."""


def store_root(root: str | Path | None = None) -> str:
    """Return the store's absolute directory, or URL: ``root``, else $HEADGATE_STORE, else ``.headgate/store``.

    Raises:
        UsageError: it is no directory and not the URL of a store.
    """
    chosen = str(root) if root is not None else os.environ.get(ROOT_VARIABLE) or ROOT_DEFAULT
    scheme, separator, _ = chosen.partition("://")
    if scheme in OPENERS:
        return chosen
    shared = shared_root(chosen)
    if shared is not None:
        return shared
    place = chosen if separator else absolute_location(chosen)
    if "://" in place:
        raise UsageError(
            "the stream store needs a local directory, postgresql://user@host/database, or headgate://host:port, "
            f"not {chosen}"
        )
    return place


class Store(OwnedStore):
    """An open stream store.

    Some of its methods are in base classes: ``CutStore`` (where streams begin), ``SchemaStore`` (columns),
    ``ScaledStore`` and ``AutoscaledStore`` (segments), ``FollowedStore`` (readers of whole streams), ``GroupedStore``
    (reader groups), ``TransactionalStore`` (transactions that several processes write), and ``OwnedStore``
    (transactions of one process, markers of checkpoints, and owners).
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
        super().__init__(catalogue, storage, clock)
        self.root = root
        self._threads = threads
        self._fetching = Fetching(threads)
        self._new_name = new_name
        self._transactions = TransactionLog(catalogue, storage, clock.wall_ms, new_name, threads)

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
            UsageError: the store cannot be created, is not shared although ``access`` asks for it, or was written by a
                newer release.
        """
        directory = store_root(root)
        if is_served(directory):
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
        from headgate.store.served.opening import open_served

        served = open_served(url)
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
        return OPENERS[scheme](name) if scheme in OPENERS and separator else _shared(directory)

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
        """Close the catalogue, and fetch nothing ahead any more."""
        self._fetching.close()
        self._catalogue.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            routing_key: the column whose equal values go to the same segment and so stay in order. None: appends have
                no order among each other.
            if_not_exists: return an existing stream if its schema and routing key fit.
            retention: how long events stay. None: until the stream is truncated or deleted.
            scaling: how to adjust the number of segments automatically. None: only by hand.

        Raises:
            UsageError: a stream of this name exists, or something that was given cannot be used.
        """
        policies = policy_of(retention), scaling_policy_of(scaling)
        wanted = StreamDefinition(name, schema, segments, routing_key, *policies).checked()
        return self._catalogue.create_stream(wanted, self._now_ms(), if_not_exists=if_not_exists)

    def list_streams(self, scope: str = "") -> list[StreamInfo]:
        """Return all streams by name, with their counts. ``scope`` limits them to names below ``scope/``."""
        return self._catalogue.list_streams(scope)

    def find(self, name: str, *, schema_version: int | None = None) -> StreamInfo:
        """Return a stream without its counts, which take time to compute if it has many chunks.

        Args:
            name: the name of the stream.
            schema_version: show the stream with this version of ``schemas``; default: the current one.

        Raises:
            UsageError: there is no such stream or schema.
        """
        info = self._catalogue.find_stream(name)
        if schema_version is None or schema_version == info.schema_version:
            return info
        schemas = self._catalogue.schemas(info)
        if not 0 <= schema_version < len(schemas):
            raise UsageError(f"stream '{name}' has schemas 0 to {len(schemas) - 1}, not {schema_version}")
        return replace(info, schema=schemas[schema_version], schema_version=schema_version)

    def describe(self, name: str) -> StreamInfo:
        """Return a stream with its counts.

        Raises:
            UsageError: there is no such stream.
        """
        return self._catalogue.describe_stream(name)

    def seal(self, name: str) -> None:
        """End a stream: it takes no more events, and readers reach its end. The call can be repeated.

        Raises:
            UsageError: there is no such stream, prepared transactions wait for a decision, or a transaction that
                several processes write is open.
        """
        self._catalogue.seal_stream(name)

    def delete(self, name: str, *, force: bool = False) -> None:
        """Delete a sealed stream with its events, which all pipelines, reader groups and other holders have read.

        ``force`` also deletes a stream that is in use: pipelines that read it then fail for good.

        Raises:
            UsageError: there is no such stream, it is not sealed, or a holder still needs some of its events.
        """
        info = self._catalogue.delete_stream(name, force=force)
        delete_quietly(self._storage, self._storage.list(str(info.stream_id)))

    def writer(
        self, name: str, *, writer_id: str = "", epoch: int = 0, linger: Duration | None = LINGER
    ) -> StreamWriter:  # S7, S9
        """Return a writer whose appends are durable when acknowledged.

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
        info = self._catalogue.find_stream(name)
        check_open(info)
        return StreamWriter(
            self._catalogue,
            self._storage,
            info,
            writer_id,
            epoch,
            linger_ms,
            self._new_name,
            self._threads,
            self._clock,
            self.look_after,
        )

    def reader(
        self, name: str, segment: int, position: int | None = None, *, schema_version: int | None = None
    ) -> SegmentReader:  # S77
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
            TruncatedError: the segment begins behind the position.
        """
        info = self.find(name, schema_version=schema_version)
        extents = self._catalogue.extents(info)
        if segment not in extents:
            raise UsageError(f"stream '{name}' has segments 0 to {len(extents) - 1}, not {segment}")
        head, end = extents[segment].head, extents[segment].end
        position = head if position is None else position
        if 0 <= position < head:
            raise TruncatedError(name, segment, position, head)
        if not 0 <= position <= end:
            raise UsageError(
                f"segment {segment} of stream '{name}' has positions {head} to {end}, not {position}; the position "
                "comes from another store, or the stream was deleted and created anew"
            )
        return SegmentReader(self._catalogue, self._storage, info, segment, position, self._fetching)

    def changes(self) -> int:
        """Return a number that changes when another connection changes anything in the store. Takes some µs.

        Compare it with a number that you took before you looked at the streams.
        """
        return self._catalogue.changes()

    def fsck(
        self, *, verify_events: bool = True, on_bytes: Callable[[int], None] = lambda size_bytes: None
    ) -> list[Problem]:  # S40
        """Check every invariant; with ``verify_events`` also every byte of every visible chunk.

        ``on_bytes`` is called with the number of further bytes read, in total about twice the size of the store. It is
        not called if a server makes the check.
        """
        return check_store(self._catalogue, self._storage, verify_events=verify_events, on_bytes=on_bytes)

    def repair(self) -> list[str]:
        """Repair findings of ``fsck`` that can be repaired without loss: the holds of reader groups.

        Returns what was repaired.
        """
        return self._catalogue.mend_groups()

    def serve(self, options: ServerOptions) -> AbstractContextManager[StoreServer]:
        """Offer this store to other processes while a ``with`` block runs (docs/spec/served-store.md).

        Raises:
            UsageError: the store is not in a directory of this machine, or cannot be offered with these arguments; see
                ``serving_store``.
        """
        from headgate.store.serving.server import serving_store

        if "://" in self.root:
            raise UsageError(
                f"the store at {self.root} is shared already: open it there; one in a directory can be served"
            )
        return serving_store(Path(self.root), self._catalogue, _chunks_in(self.root), options)

    def collect_orphans(self) -> int:  # S89
        """Remove files that nothing refers to, and return their number. Only call it while no process writes.

        A process that writes all the same loses nothing that it was told is durable: its writers write again what is
        removed before it was recorded, and a transaction of which something is removed cannot be prepared.

        Raises:
            CorruptionError: something is damaged, so that nobody knows whose such a file is.
            StorageError: a file cannot be removed. Call it again to go on.
        """
        for problem in self.fsck(verify_events=False):
            if not problem.is_harmless:
                expected = "a sound store, where a file that nothing refers to is nobody's"
                raise CorruptionError(problem.where, 0, expected, f"this: {problem.what}")
        there = self._storage.list("")
        known = self._catalogue.chunk_paths()
        orphans = self._catalogue.condemn([path for path in there if path not in known])  # behind the list of files
        for path in sorted(orphans):
            self._storage.delete(path)
        swept = self._storage.sweep_unfinished()
        return len(orphans) + swept


def _chunks_in(directory: str) -> LocalStorage:
    chunks = Path(directory) / "chunks"
    return LocalStorage(chunks, access_in(chunks))


def _catalogue_file(directory: str) -> Path:
    return Path(directory) / "catalogue.sqlite"


@functools.cache
def _shared(root: str) -> Store:
    return Store.open(root)
