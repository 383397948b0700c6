"""A buffer of records: in memory, and beyond a limit in an unnamed temporary file, piece by piece.

Sinks collect the records of a transaction in one. A piece is an Arrow stream.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.environment import Condition
from headgate.errors import StorageError

_PLAIN = pa.ipc.IpcWriteOptions()
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


@dataclass(frozen=True, slots=True)
class _Range:
    offset: int
    size_bytes: int


class SpillBuffer:
    """Takes records, then gives them back as batches or as pieces; none is added after ``piece`` or ``count``."""

    def __init__(self, schema: pa.Schema, piece_bytes: int) -> None:
        """A piece is closed and goes to the file when its records, not compressed, have ``piece_bytes``."""
        self._schema, self._piece_bytes = schema, piece_bytes
        self._open: list[pa.RecordBatch] = []
        self._compacted_count = 0
        self._last: bytes | None = None
        self._file: IO[bytes] | None = None
        self._closed: list[_Range] = []
        self.open_bytes = 0
        """Arrow bytes in memory."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no record."""
        return not self._open and not self._closed

    @property
    def in_memory(self) -> Sequence[pa.RecordBatch]:
        """The records that are not in the temporary file."""
        return self._open

    @property
    def spilled_count(self) -> int:
        """How many pieces are in the temporary file."""
        return len(self._closed)

    @property
    def has_spilled(self) -> bool:
        """Whether some records are in the temporary file."""
        return bool(self._closed)

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return len(self._closed) + bool(self._open)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add records.

        Raises:
            StorageError: the temporary file cannot be written; the records are in memory still.
        """
        assert self._last is None, "no record is added after the pieces were read"
        if batch.num_rows == 0:
            return
        self._open.append(batch)
        self.open_bytes += batch.nbytes  # of the slice: the whole of its buffers may be shared
        if self.open_bytes >= self._piece_bytes:
            self._close_piece()

    def compact(self) -> tuple[pa.RecordBatch, ...]:
        """Return all records, which are in memory; what was added since the last call is one batch of its own now.

        They may stay for long: copied, they keep no larger buffers alive that they are slices of.
        """
        assert not self.has_spilled, "records in the temporary file are not held back"
        added = self._open[self._compacted_count :]
        if added:
            self._open[self._compacted_count :] = [pa.concat_batches(added)]
            self._compacted_count = len(self._open)
        return tuple(self._open)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all records in order; can be called again.

        Raises:
            StorageError: the temporary file cannot be read.
        """
        for number in range(len(self._closed)):
            yield from self.spilled(number)
        yield from self._open

    def spilled(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the records of piece ``number``, which is in the temporary file.

        Raises:
            StorageError: the temporary file cannot be read.
        """
        with pa.ipc.open_stream(self._read(self._closed[number])) as stored:
            yield from stored

    def piece(self, number: int) -> bytes:
        """Return the compressed bytes of piece ``number``, which begin with 0.

        Raises:
            StorageError: the temporary file cannot be read.
        """
        if number < len(self._closed):
            with pa.ipc.open_stream(self._read(self._closed[number])) as stored:
                return self._encoded(stored, _COMPRESSED)
        assert number < self.count, f"there are {self.count} pieces, not {number + 1}"
        if self._last is None:
            self._last = self._encoded(self._open, _COMPRESSED)
        return self._last

    def close(self) -> None:
        """Drop the records."""
        self._open, self._closed, self._last = [], [], None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _close_piece(self) -> None:
        data = self._encoded(self._open, _PLAIN)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="headgate-")  # noqa: SIM115 - closed with the buffer
            offset = self._file.seek(0, 2)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise StorageError("write", tempfile.gettempdir(), str(error)) from error
        self._closed.append(_Range(offset, len(data)))
        self._open, self._compacted_count, self.open_bytes = [], 0, 0

    def _read(self, found: _Range) -> bytes:
        assert self._file is not None, "the buffer is closed"
        try:
            data = os.pread(self._file.fileno(), found.size_bytes, found.offset)  # while another thread may write
        except OSError as error:
            raise StorageError("read", tempfile.gettempdir(), str(error)) from error
        if len(data) != found.size_bytes:
            problem = f"a temporary file lost {found.size_bytes - len(data)} bytes"
            raise StorageError("read", tempfile.gettempdir(), problem, is_transient=False)
        return data

    def _encoded(self, batches: Iterable[pa.RecordBatch], options: pa.ipc.IpcWriteOptions) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return memoryview(sink.getvalue()).tobytes()


class Abandoned(Exception):  # noqa: N818 - expected outcome, not a fault
    """The records that are being read are not wanted any more."""


class GrowingRecords:
    """The records of a buffer, read by one thread while another one adds to it."""

    def __init__(self, buffer: SpillBuffer, changed: Condition) -> None:
        self._buffer = buffer
        self._is_whole, self._is_abandoned = False, False
        self._changed = changed

    def tell(self, *, is_whole: bool = False, is_abandoned: bool = False) -> None:
        """Say that there is another piece, that no more records come, or that they are not wanted."""
        with self._changed:
            self._is_whole |= is_whole
            self._is_abandoned |= is_abandoned
            self._changed.notify_all()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all records in order, and wait for those that are to come; can be called again.

        Raises:
            Abandoned
            StorageError: the temporary file cannot be read.
        """
        for number in itertools.count():
            with self._changed:
                self._changed.wait_for(lambda: self._is_ready(number))  # noqa: B023 - called at once
                if self._is_abandoned:
                    raise Abandoned
            if number == self._buffer.spilled_count:
                break
            yield from self._buffer.spilled(number)
        yield from self._buffer.in_memory

    def close(self) -> None:
        """Drop the records."""
        self._buffer.close()

    def _is_ready(self, number: int) -> bool:
        return self._is_abandoned or self._is_whole or number < self._buffer.spilled_count
