"""A transactional sink of JSON-lines or Parquet files: readers see only files of completed checkpoints.

Counterpart: ``filecommit`` publishes what is prepared here. Source: rules D1–D7 of docs/spec/connectors.md.
Never writes a file where a reader looks.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pyarrow as pa

from headgate.connectors.base import Committer, SealedTransaction, SinkContext, SinkWriter
from headgate.connectors.encode import FORMATS, FileFormat, check_format, encode
from headgate.connectors.filecommit import FileCommitter, refuse_if_fenced
from headgate.connectors.filelayout import STAGING, SinkIdentity, StagedFile, digest, encode_files
from headgate.connectors.fileowner import FileOwner
from headgate.errors import StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.life import Life, Owner
from headgate.model.security import Access
from headgate.store.access import access_in
from headgate.store.roots import checked_access
from headgate.store.storage import Storage, open_storage

BUFFER_BYTES = 16 << 20
"""Arrow bytes held in memory per subtask; more go to a temporary file of this machine (D2)."""

FILE_BYTES = 64 << 20
"""Arrow bytes that make one file: encoding needs about twice as much memory."""

_PROBE = f"{STAGING}/probe"
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class FileSink:
    """Writes files that appear when their checkpoint completes, each exactly once.

    Spark, DuckDB and pyarrow skip the sink's own directories, which begin with "_". Polars does not (D6): give it
    ``<url>/*.parquet`` or ``committed_files(url)``. A directory may be shared by several sinks and pipelines.
    """

    def __init__(
        self,
        url: str | Path,
        format: FileFormat = "jsonl",
        *,
        prefix: str = "part",
        buffer_bytes: int = BUFFER_BYTES,
        file_bytes: int = FILE_BYTES,
        access: str = Access.UMASK.value,
    ) -> None:
        """Configure.

        Args:
            url: a directory, or the URL of one in an object store.
            format: "jsonl" or "parquet"; also the files' extension.
            prefix: what the files' names begin with.
            buffer_bytes: memory per subtask before records go to a temporary file.
            file_bytes: Arrow bytes after which a transaction continues in another file.
            access: who may read the files in a local directory: "umask", like those of any program; "owner", only
                this user; "group", also the directory's group.

        Raises:
            UsageError: the format or the access is unknown, or the prefix would hide the files.
        """
        if format not in FORMATS:
            raise UsageError(f"FileSink(format={format!r}) must be one of {', '.join(FORMATS)}")
        if _PREFIX.fullmatch(prefix) is None:
            raise UsageError(f"FileSink(prefix={prefix!r}) must begin with a letter or digit, then also '_' and '-'")
        text = str(url)
        self.url = text if "://" in text else str(Path(text).expanduser().absolute())
        self._format, self._prefix = format, prefix
        self._buffer_bytes, self._file_bytes = buffer_bytes, file_bytes
        self._access: Access | None = checked_access(access, "FileSink(access=)", *Access)

    @classmethod
    def within(cls, directory: str, format: FileFormat) -> FileSink:
        """Return a sink below a directory of Headgate's own, which says who may read the files (SE2)."""
        sink = cls(directory, format)
        sink._access = None
        return sink

    def __repr__(self) -> str:
        return f"FileSink({self.url!r}, {self._format!r})"

    def check(self, schema: pa.Schema) -> None:
        """Check the schema, and that the directory can be written to.

        Raises:
            UsageError
        """
        check_format(self._format, schema)
        storage = self._storage()
        try:
            storage.put(_PROBE, [b""])
            storage.delete(_PROBE)
        except StorageError as error:
            raise UsageError(f"FileSink cannot write to {self.url}: {error.cause}; choose a writable place") from error

    def open(self, context: SinkContext) -> SinkWriter:
        """Return a live writer."""
        identity = SinkIdentity(context.pipeline, context.node)
        names = FileNames(identity, self._prefix, context.subtask_index, context.generation, self._format)
        return FileWriter(self._storage(), names, context.schema, self._buffer_bytes, self._file_bytes)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        """Return the committer of one generation."""
        return FileCommitter(self._storage(), SinkIdentity(pipeline, node), generation)

    def _storage(self) -> Storage:
        return open_storage(self.url, self._access or access_in(Path(self.url)))

    def target(self, pipeline: str, node: str) -> FileOwner:
        """Return what the directory remembers of who writes to it."""
        return FileOwner(self._storage(), SinkIdentity(pipeline, node))

    def owner(self, pipeline: str, node: str) -> Owner:
        """See ``OwnedSink``."""
        return self.target(pipeline, node).owner()

    def own(self, pipeline: str, node: str, life: Life) -> Owner:
        """See ``OwnedSink``."""
        return self.target(pipeline, node).own(life)

    def how_to_forget(self, pipeline: str, node: str) -> str:
        """See ``OwnedSink``."""
        return f"headgate sinks forget '{pipeline}/{node}' '{self.url}'"


class FileNames:
    """Names of the files of one subtask."""

    def __init__(
        self, identity: SinkIdentity, prefix: str, subtask_index: int, generation: Generation, file_format: FileFormat
    ) -> None:
        self.identity, self.generation, self.format = identity, generation, file_format
        self._prefix, self._subtask_index = prefix, subtask_index

    def name(self, checkpoint: CheckpointId, number: int) -> str:
        """Return the final name of file ``number`` of a transaction."""
        return self.identity.file_name(
            self._prefix, checkpoint, self._subtask_index, self.generation, number, self.format
        )


class RowBuffer:
    """Records of one transaction, in memory and beyond ``buffer_bytes`` in an unnamed temporary file."""

    def __init__(self, schema: pa.Schema, buffer_bytes: int) -> None:
        self._schema, self._buffer_bytes = schema, buffer_bytes
        self._batches: list[pa.RecordBatch] = []
        self._size_bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Add records.

        Raises:
            StorageError: the temporary file cannot be written.
        """
        self._batches.append(batch)
        self._size_bytes += batch.nbytes  # of the slice: the whole of its buffers may be shared
        if self._size_bytes >= self._buffer_bytes:
            self._spill()

    def _spill(self) -> None:
        try:
            if self._writer is None:
                self._file = tempfile.TemporaryFile(prefix="headgate-")  # noqa: SIM115 - closed with the buffer
                self._writer = pa.ipc.new_file(self._file, self._schema)
            self._writer.write_table(pa.Table.from_batches(self._batches, self._schema))
        except OSError as error:
            raise StorageError("write", tempfile.gettempdir(), str(error)) from error
        self._batches, self._size_bytes = [], 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Return all records in order; can be called again. No record can be added afterwards."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._file is not None:
            reader = pa.ipc.open_file(self._file)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
        yield from self._batches

    def close(self) -> None:
        """Drop the records."""
        self._batches = []
        if self._file is not None:
            self._file.close()


class FileWriter:
    """Collects the output of one subtask, a transaction per checkpoint."""

    def __init__(
        self, storage: Storage, names: FileNames, schema: pa.Schema, buffer_bytes: int, file_bytes: int
    ) -> None:
        self._storage, self._names, self._schema = storage, names, schema
        self._buffer_bytes, self._file_bytes = buffer_bytes, file_bytes
        self._current = RowBuffer(schema, buffer_bytes)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add records to the current transaction."""
        self._current.add(batch)

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        """Close the current transaction as the output of ``checkpoint``."""
        sealed = SealedFiles(self._storage, self._names, checkpoint, self._current, self._schema, self._file_bytes)
        self._current = RowBuffer(self._schema, self._buffer_bytes)
        return sealed

    def close(self) -> None:
        """Abandon the current transaction."""
        self._current.close()


class SealedFiles:
    """One transaction on its way to staged files."""

    def __init__(
        self,
        storage: Storage,
        names: FileNames,
        checkpoint: CheckpointId,
        rows: RowBuffer,
        schema: pa.Schema,
        file_bytes: int,
    ) -> None:
        self._storage, self._names, self._checkpoint = storage, names, checkpoint
        self._rows, self._schema, self._file_bytes = rows, schema, file_bytes

    def prepare(self) -> bytes | None:
        """Write the staged files; return their list, or None when there are no records (K4).

        Repeating it writes the same files again.

        Raises:
            StorageError: a file cannot be written.
            FencedError: a newer generation owns the sink.
        """
        refuse_if_fenced(self._storage, self._names.identity, self._names.generation)
        files = [self._write(number, table) for number, table in enumerate(self._tables())]
        self._rows.close()
        return encode_files(files) if files else None

    def _write(self, number: int, table: pa.Table) -> StagedFile:
        data = encode(self._names.format, table)
        name = self._names.name(self._checkpoint, number)
        self._storage.put(self._names.identity.staged(name), [data])
        return StagedFile(name, table.num_rows, len(data), digest([data]))

    def _tables(self) -> Iterator[pa.Table]:
        """Group the records into files of about ``file_bytes``."""
        group: list[pa.RecordBatch] = []
        size_bytes = 0
        for batch in self._rows.batches():
            group.append(batch)
            size_bytes += batch.nbytes
            if size_bytes >= self._file_bytes:
                yield pa.Table.from_batches(group, self._schema)
                group, size_bytes = [], 0
        if sum(batch.num_rows for batch in group):
            yield pa.Table.from_batches(group, self._schema)
