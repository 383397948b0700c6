"""A transactional sink of JSON-lines, CSV or Parquet files: readers see only files of completed checkpoints.

Counterparts: ``file_writer`` prepares files in the workers, ``file_committer`` publishes them in the driver. Source:
the D rules of docs/spec/connectors.md.

Which pipeline owns the sink's output in a directory is like the checkpoint log a sequence of write-once objects, so
that of two pipelines that come at once one gets the directory (docs/spec/lives.md)::

    <url>/_owners/<pipeline>.<sink>/0000000001      an owner, or that the one before is forgotten; the last counts

A reset deletes only what the sink's own manifests list (docs/spec/starting-over.md); other files stay.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from headgate.codec.json_files import decode_life, encode_life
from headgate.connectors.base import Committer, Holding, Sink, SinkContext, SinkWriter
from headgate.connectors.encode import FORMATS, FileFormat, check_format
from headgate.connectors.files.file_committer import FileCommitter, refuse_if_fenced
from headgate.connectors.files.file_writer import FileNames, FileWriter, Limits
from headgate.connectors.files.publish_log import CLAIMS, OWNERS, STAGING, Ledger, SinkIdentity, check_partitions
from headgate.errors import StorageError, UsageError
from headgate.model.config import Access, Duration, check_switches, duration_ms
from headgate.model.ids import Generation
from headgate.model.lineage import Location
from headgate.model.pipeline_identity import NO_GENERATION, Mine, OtherSink, Owner, PipelineIdentity, Target, TargetKind
from headgate.protocol.supervision import ownership
from headgate.storage.base import (
    AlreadyExists,
    Storage,
    list_numbered,
    list_numbered_below,
    number_name,
    read_with_retries,
)
from headgate.storage.local_files import access_in, checked_access, why_not_writable
from headgate.storage.urls import absolute_location, is_missing, local_directory, open_storage

BUFFER_BYTES = 16 << 20
"""Arrow bytes held in memory per subtask; more go to a temporary file of this machine."""

FILE_BYTES = 64 << 20
"""Arrow bytes that make one file: encoding needs about twice as much memory."""

ROLL_BYTES = 16 << 20
"""Arrow bytes that are not held back any more: every checkpoint contains what is."""

ROLL_INTERVAL: Duration = "1m"
"""A day has 1,440 files of each subtask at most, however short the checkpoint interval."""

TRIES_MAX = 16
"""Each lost race means that another process wrote an ownership record; more in a row have another cause."""

_PROBE = f"{STAGING}/probe"
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class FileSink(Sink):
    """Writes each record to files exactly once. A file appears when the checkpoint that wrote it completes.

    A checkpoint writes a file when there are enough records for one, or when the oldest record has waited long enough.
    Until then the records are held back as state of the pipeline, so that none is lost. With ``roll_interval=0``, every
    checkpoint writes all records that it has.

    Spark, DuckDB and pyarrow skip the sink's own directories: their names begin with "_". Polars does not: give it
    ``<url>/*.parquet`` or ``committed_files(url)``. Several sinks and pipelines may share a directory.
    """

    has_owner = True
    can_be_reset = True

    def __init__(
        self,
        url: str | Path,
        format: FileFormat = "jsonl",
        *,
        partition_by: str | Sequence[str] = (),
        prefix: str = "part",
        buffer_bytes: int = BUFFER_BYTES,
        file_bytes: int = FILE_BYTES,
        roll_bytes: int = ROLL_BYTES,
        roll_interval: Duration = ROLL_INTERVAL,
        multipart: bool = True,
        access: str = Access.UMASK.value,
    ) -> None:
        """Configure.

        Args:
            url: a directory, or the URL of one in an object store or in HDFS.
            format: "jsonl", "csv" or "parquet"; also the extension of the files. Files of CSV begin with a header;
                texts are quoted, nulls are empty. A single column that is null is a blank line, which readers skip.
            partition_by: names of columns of texts, whole numbers, dates or booleans, whose values name directories,
                such as ``day=2015-07-15``, with files of their own. The files do not have these columns. A null and an
                empty text are ``__HIVE_DEFAULT_PARTITION__``, as in Hive and Spark.
            prefix: the names of the files begin with it.
            buffer_bytes: how many bytes a subtask keeps in memory before it moves records to a temporary file.
            file_bytes: after this many Arrow bytes, a transaction continues in another file. Amazon S3 takes no file of
                more than 5 GB without ``multipart``.
            roll_bytes: when a subtask holds this many Arrow bytes, the next checkpoint writes its file.
            roll_interval: how long the oldest record may be held back; the first checkpoint after that writes all held
                records. The end of the input and a drain write everything. A stop does not, but the first checkpoint
                of the next start does. 0: hold nothing back.
            multipart: in S3, upload each file in parts under its final name, where it appears when the commit completes
                the upload. That needs the right to list uploads, and a bucket whose rules keep uploads for longer than
                the pipeline may stand still. If False, or in other stores, a file is uploaded under another name and
                copied by the commit.
            access: who may read the files in a local directory. "umask": as for files of any program; "owner": only
                this user; "group": also the directory's group.

        Raises:
            UsageError: ``url`` is no path or empty, the format or the access is unknown, the prefix would hide the
                files, or a limit is impossible.
        """
        check_switches("FileSink: ", multipart=multipart)
        self._multipart = multipart
        if format not in FORMATS:
            raise UsageError(f"FileSink(format={format!r}) must be one of {', '.join(FORMATS)}")
        if _PREFIX.fullmatch(prefix) is None:
            raise UsageError(f"FileSink(prefix={prefix!r}) must begin with a letter or digit, then also '_' and '-'")
        if not isinstance(url, str | os.PathLike) or not os.fspath(url):
            raise UsageError(f"FileSink: a path or a URL of a directory is needed, such as '.', not {url!r}")
        self.url = absolute_location(url)
        self._format, self._prefix = format, prefix
        self._partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        if len(set(self._partition_by)) != len(self._partition_by):
            raise UsageError(f"FileSink(partition_by={partition_by!r}) names a column twice")
        for name, size_bytes in (("buffer", buffer_bytes), ("file", file_bytes), ("roll", roll_bytes)):
            if size_bytes < 1:
                raise UsageError(f"FileSink({name}_bytes={size_bytes!r}) must be at least 1")
        interval_ms = duration_ms(roll_interval, "FileSink(roll_interval=)")
        self._limits = Limits(buffer_bytes, file_bytes, roll_bytes, interval_ms)
        self._access: Access | None = checked_access(access, "FileSink(access=)", *Access)

    @classmethod
    def within(cls, directory: str, format: FileFormat, roll_interval: Duration | None = None) -> FileSink:
        """Return a sink below a directory of Headgate's own, which determines the access to the files."""
        sink = cls(directory, format, roll_interval=ROLL_INTERVAL if roll_interval is None else roll_interval)
        sink._access = None
        return sink

    def __repr__(self) -> str:
        return f"FileSink({self.url!r}, {self._format!r})"

    def check(self, schema: pa.Schema) -> None:
        """Check the schema, and that a local directory may be written to as it is now. Writes nothing.

        Raises:
            UsageError: the format cannot hold a column, or the directory may not be written to.
        """
        check_partitions(self._partition_by, schema)
        kept = [field for field in schema if field.name not in self._partition_by]
        check_format(self._format, pa.schema(kept))
        directory = local_directory(self.url)
        if directory is not None:
            problem = why_not_writable(directory)
            if problem:
                raise self._unwritable(problem)

    def make_target(self, schema: pa.Schema) -> None:
        """See ``Sink``: make the directory when it is missing, and see that it takes a file."""
        with self._writing():
            storage = self._storage()
            storage.put(_PROBE, [b""])
            storage.delete(_PROBE)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Say what to do where the target refuses to be written to for good."""
        try:
            yield
        except StorageError as error:
            if error.is_transient:
                raise
            raise self._unwritable(error.cause) from error

    def _unwritable(self, why: str) -> UsageError:
        return UsageError(f"FileSink cannot write to {self.url}: {why}; choose a writable place")

    def open(self, context: SinkContext) -> SinkWriter:
        """Return a live writer."""
        identity = SinkIdentity(context.pipeline, context.node)
        names = FileNames(identity, self._prefix, context.subtask_index, context.generation, self._format)
        storage = self._storage()
        uploads = storage.uploads if self._multipart else None
        return FileWriter(storage, names, context, self._limits, self._partition_by, uploads)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        """Return the committer of one generation."""
        identity = SinkIdentity(pipeline, node)
        return FileCommitter(self._storage(), identity, generation, has_uploads=self._multipart)

    def _storage(self) -> Storage:
        return open_storage(self.url, self._access or access_in(Path(self.url)))

    def target(self, pipeline: str, node: str) -> FileOwner:
        """Return what the directory remembers of its writers."""
        return FileOwner(self._storage(), SinkIdentity(pipeline, node))

    def owner(self, pipeline: str, node: str) -> Owner:
        """See ``Sink``. A missing directory has no owner, and is not made by the question."""
        directory = local_directory(self.url)
        is_missing = directory is not None and not directory.exists()
        return Owner() if is_missing else self.target(pipeline, node).owner()

    @property
    def shared_target(self) -> str:
        return self.url

    def own(self, pipeline: str, node: str, life: PipelineIdentity) -> Owner:
        with self._writing():
            return self.target(pipeline, node).own(life)

    def locations(self) -> tuple[Location, ...]:
        url = self.url.partition("?")[0]
        return (Location(url, url if "://" in url else os.path.realpath(url)),)

    def recorded(self, node: str) -> Target:
        return Target(node, TargetKind.FILES, self.url)

    def holding(self, pipeline: str, node: str, mine: Mine) -> Holding:
        """See ``Sink``. A directory that is not there holds nothing, and is not made by being asked."""
        return Holding("", self.url) if is_missing(self.url) else self._published(pipeline, node).holding()

    def start_over(self, pipeline: str, node: str, generation: Generation, life: PipelineIdentity, mine: Mine) -> None:
        if not is_missing(self.url):
            with self._writing():
                self._published(pipeline, node).start_over(generation, life)

    def _published(self, pipeline: str, node: str) -> PublishedFiles:
        return PublishedFiles(self._storage(), SinkIdentity(pipeline, node))

    def how_to_forget(self, pipeline: str, node: str) -> str:
        return f"headgate sinks forget '{pipeline}/{node}' '{self.url}'"


class FileOwner:
    """The recorded owner of one sink in one directory."""

    def __init__(self, storage: Storage, identity: SinkIdentity) -> None:
        self._storage, self._identity = storage, identity

    def owner(self) -> Owner:
        """Return the owner, and which other sinks of a pipeline of that name write to the directory.

        Raises:
            CorruptionError, StorageError
        """
        look = _Look(self._storage)
        found = {sink: look.owner(sink) for sink in self._sinks(*look.sinks)}
        others = tuple(OtherSink(sink.node, owner) for sink, owner in found.items() if sink != self._identity)
        return replace(found[self._identity], others=others)

    def _sinks(self, *known: SinkIdentity) -> list[SinkIdentity]:
        """Return this sink and all of its pipeline that are ``known``, in the same order each time."""
        return sorted({self._identity, *(sink for sink in known if sink.pipeline == self._identity.pipeline)})

    def own(self, life: PipelineIdentity) -> Owner:
        """Let ``life`` own it, unless another one does; return the owner then."""
        for _ in range(TRIES_MAX):
            number, owner = self._read()
            if owner.life is not None or not ownership.may_own(life, owner):
                return owner
            self._put(number + 1, life)
        raise self._too_busy()

    def forget(self) -> Owner:
        """Let the next life have it; return the former owner. Nothing is removed, and older generations stay fenced."""
        for _ in range(TRIES_MAX):
            number, owner = self._read()
            if owner.is_forgotten or self._put(number + 1, None):
                return owner
        raise self._too_busy()

    def hand_over(self, life: PipelineIdentity, check: Callable[[], None]) -> None:
        """Let ``life`` own it, whatever the former owner. ``check`` raises when there is a newer generation.

        Raises:
            FencedError: ``check`` said so.
        """
        for _ in range(TRIES_MAX):
            number, owner = self._read()
            check()  # after the look: a later claim writes its record after this number
            if (owner.life is not None and owner.life.id == life.id) or self._put(number + 1, life):
                return
        raise self._too_busy()

    def _put(self, number: int, life: PipelineIdentity | None) -> bool:
        try:
            self._storage.put_if_absent(f"{self._identity.owners}/{number_name(number)}", [encode_life(life)])
        except AlreadyExists:
            return False
        return True

    def _too_busy(self) -> StorageError:
        return StorageError("own", f"{self._storage.url}/{self._identity.owners}", "others change it all the time")

    def _read(self) -> tuple[int, Owner]:
        claims = list_numbered(self._storage, self._identity.claims)
        recorded = list_numbered(self._storage, self._identity.owners)
        return max(recorded, default=0), _owner_by(self._storage, claims, recorded)


def owners_in(storage: Storage) -> dict[SinkIdentity, Owner]:
    """Return all sinks that have written to a directory, sorted, with their owners, without ``others``.

    Raises:
        CorruptionError, StorageError
    """
    look = _Look(storage)
    return {sink: look.owner(sink) for sink in look.sinks}


class _Look:
    """What a directory remembers of all sinks: two listings, however many there are; a life when asked for."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._claims, self._told = list_numbered_below(storage, CLAIMS), list_numbered_below(storage, OWNERS)
        found = {name: SinkIdentity.parse(name) for name in (*self._claims, *self._told)}
        self.sinks = sorted({sink for name, sink in found.items() if str(sink) == name})

    def owner(self, sink: SinkIdentity) -> Owner:
        """Return the owner of ``sink``."""
        return _owner_by(self._storage, self._claims.get(str(sink), {}), self._told.get(str(sink), {}))


def _owner_by(storage: Storage, claims: Iterable[int], recorded: Mapping[int, str]) -> Owner:
    """Return the owner of a sink. ``claims``: its generations; ``recorded``: its recorded owners, paths by number."""
    generation = max(map(Generation, claims), default=NO_GENERATION)
    life = None
    if recorded:
        path = recorded[max(recorded)]
        life = read_with_retries(lambda: decode_life(storage.get(path), f"{storage.url}/{path}"))
    return Owner(life, generation, is_forgotten=bool(recorded) and life is None)


class PublishedFiles:
    """What one sink has published in one directory."""

    def __init__(self, storage: Storage, identity: SinkIdentity) -> None:
        self._storage, self._identity = storage, identity
        self._ledger = Ledger(storage, identity)

    def holding(self) -> Holding:
        """Return how much it is, and what is in the directory beside it. Changes nothing.

        Raises:
            CorruptionError, StorageError
        """
        published = {file.name: file for file in self._ledger.published()}
        paths = [path for path in self._storage.list("") if not path.startswith("_")]
        mine = [published[path] for path in paths if path in published]
        rows = sum(file.rows for file in mine)
        what = f"{len(mine):,} file{'s' * (len(mine) != 1)} with {rows:,} record{'s' * (rows != 1)}" if mine else ""
        return Holding(what, self._storage.url, tuple(path for path in paths if path not in published))

    def start_over(self, generation: Generation, life: PipelineIdentity) -> None:
        owner = FileOwner(self._storage, self._identity)
        known = owner.owner().life
        if known is not None and known.id == life.id:
            return
        FileCommitter(self._storage, self._identity, generation).recover(())  # fences first: SO5
        self._ledger.empty(self._refuse_if_fenced(generation))
        owner.hand_over(life, self._refuse_if_fenced(generation))

    def _refuse_if_fenced(self, generation: Generation) -> Callable[[], None]:
        return lambda: refuse_if_fenced(self._storage, self._identity, generation)
