"""The writer of a file sink in one subtask: collects records, and prepares them as staged files or as open uploads.

Records wait in memory, in a temporary file, or as state of the pipeline while they are held back. An upload takes the
parts of a file while it is written; the file appears when ``file_committer`` completes it in the driver, by the id in
the committable. A file belongs to one checkpoint and one generation: no process goes on with another's upload. Source:
rules D15 and D17 of docs/spec/connectors.md. Never writes a file where a reader looks.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from headgate.codec.arrow import read_stream
from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.connectors.base import EmptyTransaction, SealedTransaction, SinkContext, SinkWriter
from headgate.connectors.encode import FileEncoder, FileFormat
from headgate.connectors.files.file_committer import refuse_if_fenced
from headgate.connectors.files.publish_log import (
    UPLOADED,
    OpenUpload,
    SinkIdentity,
    StagedFile,
    digest,
    divided,
    encode_files,
)
from headgate.connectors.spill_buffer import GrowingRecords, SpillBuffer
from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, Thread
from headgate.errors import CorruptionError, StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.operators.base import RestoredState
from headgate.state.snapshot import FrozenState, encode_batches
from headgate.storage.base import PART_BYTES_MIN, Bytes, Storage, Uploads

PART_BYTES = 8 << 20
PART_BYTES_MAX = 5 << 30
PARTS_OF_FILE = 200
"""Of ``file_bytes`` of Arrow. Text has more bytes than Arrow: 10,000 parts are enough for 50 times as many."""


def part_bytes(file_bytes: int) -> int:
    """Return the size of the parts of files with so many Arrow bytes."""
    return min(max(PART_BYTES, PART_BYTES_MIN, file_bytes // PARTS_OF_FILE), PART_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class UploadedContent:
    """The content of a file whose upload is not completed. ``checksum``: see ``StagedFile``."""

    size_bytes: int
    checksum: str
    upload: OpenUpload


def upload_content(uploads: Uploads, name: str, content: Iterable[Bytes], size_of_part: int) -> UploadedContent:
    """Upload a file in parts as its content comes.

    An upload that fails is aborted, if the storage can be reached.

    Raises:
        StorageError
    """
    upload = uploads.begin(name)
    try:
        etags: list[str] = []
        size_bytes, waiting = 0, bytearray()
        for data in content:
            waiting += data
            size_bytes += len(data)
            whole = len(waiting) - len(waiting) % size_of_part
            for start in range(0, whole, size_of_part):
                # copied, because ``waiting`` cannot shrink while a view of it is held
                part = bytes(memoryview(waiting)[start : start + size_of_part])
                etags.append(uploads.put_part(name, upload.id, len(etags) + 1, part))
            del waiting[:whole]
        # an upload without any part cannot be completed
        if waiting or not etags:
            etags.append(uploads.put_part(name, upload.id, len(etags) + 1, waiting))
    except BaseException:
        # what is left is in no committable: the recovery of the next generation aborts it
        with contextlib.suppress(StorageError):
            uploads.abort(name, upload.id)
        raise
    return UploadedContent(size_bytes, UPLOADED + upload.mark, OpenUpload(upload.id, tuple(etags)))


_SECTION = "records"

ENCODED_BYTES = 64 << 20
"""Arrow bytes of a larger file that are encoded at a time."""


class HeldRecords(FrozenState):
    """Records that were held back at a barrier. Batches never change, so later ones cannot show."""

    def __init__(self, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> None:
        super().__init__()
        self._schema, self._batches = schema, tuple(batches)

    def _rows(self) -> Mapping[str, int]:
        return {_SECTION: sum(batch.num_rows for batch in self._batches)}

    def _encode(self) -> Sequence[Buffer]:
        return encode_sections({_SECTION: encode_batches(self._schema, self._batches)})

    def _forget(self) -> None:
        self._batches = ()


def decode_held_records(state: RestoredState, node: str) -> list[pa.RecordBatch]:
    """Return what ``HeldRecords`` encoded, with the columns that it had then.

    Raises:
        CorruptionError: it is none.
    """
    path = f"records held back by '{node}', subtask {state.subtask_index}"
    sections = decode_sections(state.payload, path)
    if _SECTION not in sections:
        raise CorruptionError(path, 0, f"a section '{_SECTION}'", ", ".join(sections) or "nothing")
    try:
        return read_stream(sections[_SECTION])[1]
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(path, 0, "an Arrow stream", str(error)) from error


@dataclass(frozen=True, slots=True)
class Limits:
    """When records go to a temporary file, to another file of the transaction, and to a file at all."""

    buffer_bytes: int
    file_bytes: int
    roll_bytes: int
    roll_interval_ms: int


class FileNames:
    """Names of the files of one subtask."""

    def __init__(
        self, identity: SinkIdentity, prefix: str, subtask_index: int, generation: Generation, file_format: FileFormat
    ) -> None:
        self.identity, self.generation, self.format = identity, generation, file_format
        self._prefix, self._subtask_index = prefix, subtask_index

    def name(self, checkpoint: CheckpointId, number: int, partition: str = "") -> str:
        """Return the final name of file ``number`` of a transaction, in the directory of its partition."""
        name = self.identity.file_name(
            self._prefix, checkpoint, self._subtask_index, self.generation, number, self.format
        )
        return f"{partition}/{name}" if partition else name


class FileWriter(SinkWriter):
    """Collects the output of one subtask: a transaction per checkpoint that does not hold its records back."""

    can_hold_back = True

    def __init__(
        self,
        storage: Storage,
        names: FileNames,
        context: SinkContext,
        limits: Limits,
        partition_by: Sequence[str] = (),
        uploads: Uploads | None = None,
    ) -> None:
        """``uploads``: how the storage takes files in parts that the commit completes; None: they are staged."""
        self._storage, self._names, self._context, self._limits = storage, names, context, limits
        self._uploads = uploads
        self._sealed: CheckpointId | None = None
        self._begun: tuple[SealedFiles, GrowingRecords] | None = None
        self._partition_by = tuple(partition_by)
        self._current = SpillBuffer(context.schema, limits.buffer_bytes)
        self._restored: list[pa.RecordBatch] = []
        self._held: tuple[pa.RecordBatch, ...] = ()
        self._first_ms: int | None = None
        self._is_finishing = False

    def write(self, batch: pa.RecordBatch) -> None:
        """Add records to the current transaction."""
        # the age of what is held back counts from its first record, whatever barriers pass meanwhile
        if self._first_ms is None:
            self._first_ms = self._context.clock_ms()
        spilled_count = self._current.spilled_count
        self._current.add(batch)
        if self._current.spilled_count > spilled_count and self._uploads is not None and not self._partition_by:
            self._upload_early()

    def _upload_early(self) -> None:
        """Begin with the upload of files while records flow, or go on with it.

        Their names have a checkpoint that no records before these are in, and they have none before the first one.
        """
        if self._begun is not None:
            self._begun[1].tell()
        elif self._sealed is not None:
            rows = GrowingRecords(self._current, SYSTEM_ENVIRONMENT.condition())
            files = self._sealed_files(CheckpointId(self._sealed + 1), rows)
            files.begin()
            self._begun = files, rows

    def _sealed_files(self, checkpoint: CheckpointId, rows: SpillBuffer | GrowingRecords) -> SealedFiles:
        limits, restored = self._limits, self._restored
        return SealedFiles(
            self._storage, self._names, checkpoint, restored, rows, limits, self._partition_by, self._uploads
        )

    def seal(self, checkpoint: CheckpointId) -> SealedTransaction:
        """Close the current transaction as the output of ``checkpoint``, or go on holding its records back."""
        self._sealed = checkpoint
        if not self._is_due():
            assert self._begun is None, "records that are being uploaded are held back"
            # copied: these records may stay for many checkpoints, and would keep whole batches of the input alive
            self._held = self._current.compact()
            return EmptyTransaction()
        if self._begun is not None:
            sealed, rows = self._begun
            # the thread goes on with what is in memory; ``prepare`` waits for it
            rows.tell(is_whole=True)
            self._begun = None
        else:
            sealed = self._sealed_files(checkpoint, self._current)
        self._current = SpillBuffer(self._context.schema, self._limits.buffer_bytes)
        self._restored, self._held, self._first_ms = [], (), None
        return sealed

    def freeze(self) -> FrozenState | None:
        """Return the records that the last ``seal`` held back."""
        return HeldRecords(self._context.schema, self._held) if self._held else None

    def restore(self, states: Sequence[RestoredState]) -> None:
        """Take over what former subtasks held back, each of them by one subtask: the next ``seal`` writes it."""
        for state in states:
            # each former subtask has one heir, whether there are more subtasks now or fewer
            if state.subtask_index % self._context.parallelism == self._context.subtask_index:
                self._restored += decode_held_records(state, self._context.node)

    def finish(self) -> None:
        """Hold nothing back any more."""
        self._is_finishing = True

    def close(self) -> None:
        """Abandon the current transaction."""
        if self._begun is not None:
            # its thread waits for records: it raises, and aborts its uploads
            self._begun[1].tell(is_abandoned=True)
        self._current.close()

    def _is_due(self) -> bool:
        """Whether what is there becomes a file now; it is at most once if there is nothing."""
        limits, rows = self._limits, self._current
        if self._is_finishing or self._restored or rows.has_spilled or rows.open_bytes >= limits.roll_bytes:
            return True
        if self._first_ms is None:
            return False
        return self._context.clock_ms() - self._first_ms >= limits.roll_interval_ms


class SealedFiles(SealedTransaction):
    """One transaction on its way to staged files."""

    def __init__(
        self,
        storage: Storage,
        names: FileNames,
        checkpoint: CheckpointId,
        restored: Sequence[pa.RecordBatch],
        rows: SpillBuffer | GrowingRecords,
        limits: Limits,
        partition_by: Sequence[str] = (),
        uploads: Uploads | None = None,
    ) -> None:
        self._storage, self._names, self._checkpoint = storage, names, checkpoint
        self._uploads = uploads
        self._restored, self._rows, self._file_bytes = restored, rows, limits.file_bytes
        self._partition_by = partition_by
        self._thread: Thread | None = None
        self._is_done = False
        self._prepared: list[StagedFile] | None = None
        self._open_uploads: dict[str, OpenUpload] = {}

    def begin(self) -> None:
        """Upload files in a thread while their records come; if that fails, ``prepare`` does it."""
        assert self._thread is None, "a transaction is uploaded by one thread"
        assert not self._is_done, "a transaction that was prepared is uploaded again"
        self._thread = SYSTEM_ENVIRONMENT.thread(self._write_early, "file-upload")
        self._thread.start()

    def _write_early(self) -> None:
        with contextlib.suppress(Exception):
            self._prepared = self._write_all()

    def prepare(self) -> bytes | None:
        """Write the staged files; return their list, or None when there are no records (K4).

        Repeating it writes the same files again; once it has succeeded, it writes none.

        Raises:
            StorageError: a file cannot be written.
            FencedError: a newer generation owns the sink.
        """
        if not self._is_done:
            # before anything is written: the newer generation has swept what older ones prepared, and does so once
            refuse_if_fenced(self._storage, self._names.identity, self._names.generation)
            if self._thread is not None:
                self._thread.join()
            if self._prepared is None:
                self._prepared = self._write_all()
            self._is_done = True
            self._rows.close()
            self._restored = ()
        return encode_files(self._prepared, self._open_uploads) if self._prepared else None

    def _write_all(self) -> list[StagedFile]:
        # those of a try that failed; it has aborted them
        self._open_uploads.clear()
        try:
            return [self._write(number, *file) for number, file in enumerate(self._files())]
        except BaseException:
            for name, upload in self._open_uploads.items():
                assert self._uploads is not None, "only uploads are open"
                with contextlib.suppress(StorageError):
                    self._uploads.abort(name, upload.id)
            raise

    def _write(self, number: int, partition: str, tables: Iterable[pa.Table]) -> StagedFile:
        name = self._names.name(self._checkpoint, number, partition)
        content = _Content(self._names.format, tables)
        if self._uploads is not None:
            uploaded = upload_content(self._uploads, name, content, part_bytes(self._file_bytes))
            self._open_uploads[name] = uploaded.upload
            return StagedFile(name, content.rows, uploaded.size_bytes, uploaded.checksum)
        parts = list(content)
        self._storage.put(self._names.identity.staged(name), parts)
        return StagedFile(name, content.rows, sum(map(len, parts)), digest(parts))

    def _files(self) -> Iterator[tuple[str, Iterable[pa.Table]]]:
        """Yield the files: partition and records. Those of one file are taken before the next one is asked for."""
        for _, numbered in itertools.groupby(self._numbered(), key=operator.itemgetter(0)):
            batches = (batch for _, batch in numbered)
            if self._partition_by:
                for partition, table in divided(pa.Table.from_batches(list(batches)), self._partition_by):
                    yield partition, [table]
            else:
                yield "", _tables(batches)

    def _numbered(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the records with the numbers of files of about ``file_bytes``; other columns begin another file."""
        number, size_bytes, schema = 0, 0, None
        for batch in itertools.chain(self._restored, self._rows.batches()):
            if batch.num_rows:
                if schema is not None and (size_bytes >= self._file_bytes or batch.schema != schema):
                    number, size_bytes = number + 1, 0
                schema = batch.schema
                size_bytes += batch.nbytes
                yield number, batch


class _Content:
    """The bytes of a file, encoded when they are asked for; then ``rows`` is how many records it has."""

    def __init__(self, file_format: FileFormat, tables: Iterable[pa.Table]) -> None:
        self._format, self._tables = file_format, tables
        self.rows = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        encoder = FileEncoder(self._format)
        for table in self._tables:
            self.rows += table.num_rows
            yield encoder.add(table)
        yield encoder.finish()


def _tables(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Group the records of a file into tables that are encoded at once."""
    group: list[pa.RecordBatch] = []
    size_bytes = 0
    for batch in batches:
        group.append(batch)
        size_bytes += batch.nbytes
        if size_bytes >= ENCODED_BYTES:
            yield pa.Table.from_batches(group)
            group, size_bytes = [], 0
    if group:
        yield pa.Table.from_batches(group)
