"""Loop data beyond the memory share goes to disk: the budget of one worker and the anonymous files.

Used by ``runtime.wire.channels`` and ``runtime.worker.loop_head``. docs/spec/loops.md: memory first and then disk, a
clear error at a hard limit, and nothing that a later generation could find, because a spill file has no name from the
start. A record is one Arrow IPC message and its xxh3-64. Never decides what is spilled.
"""

from __future__ import annotations

import errno
import os
import struct
import tempfile
import threading
from pathlib import Path
from typing import IO, NamedTuple

import pyarrow as pa
import xxhash

from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, StorageError

PIECE_BYTES_MIN = 32 << 20
"""A spill file is cut into pieces of this size: a piece is closed, and its space free, when all in it was read."""
PIECES_MAX = 128
"""Larger pieces rather than more: each costs a file descriptor, and 1024 per process is a usual limit."""
PINNED_FACTOR_MAX = 4
"""A batch in memory may keep this many times its own bytes alive: a slice of a larger one counts only itself."""

_CHECKSUM = struct.Struct("<Q")


class SpillBudget:
    """What all feedback channels and loop logs of one worker may use together. Thread-safe.

    Args:
        memory_bytes: their batches in memory; more goes to disk.
        disk_bytes_max: their spill files; more is an error.
        directory: of the spill files; the system's directory for temporary files by default. Should be a disk, not
            a file system in memory.
        piece_bytes: size of one piece of a file; for tests.
    """

    def __init__(
        self, memory_bytes: int, disk_bytes_max: int, directory: Path | None = None, piece_bytes: int | None = None
    ) -> None:
        assert memory_bytes >= 0, "a share of memory is not negative"
        assert disk_bytes_max >= 0, "a share of the disk is not negative"
        self.memory_bytes = memory_bytes
        self.disk_bytes_max = disk_bytes_max
        self.directory = directory
        self.piece_bytes = piece_bytes or max(PIECE_BYTES_MIN, disk_bytes_max // PIECES_MAX)
        self._lock = threading.Lock()
        self._memory_used_bytes = 0
        self._disk_used_bytes = 0

    @property
    def memory_used_bytes(self) -> int:
        """Bytes of batches in memory now."""
        return self._memory_used_bytes

    @property
    def disk_used_bytes(self) -> int:
        """Bytes of all spill files now, including what was read in pieces that still hold something."""
        return self._disk_used_bytes

    def take_memory(self, size_bytes: int) -> bool:
        """Claim memory for a batch; False when the share is used up and the batch belongs on disk."""
        with self._lock:
            if self._memory_used_bytes + size_bytes > self.memory_bytes:
                return False
            self._memory_used_bytes += size_bytes
            return True

    def release_memory(self, size_bytes: int) -> None:
        """Give claimed memory back."""
        with self._lock:
            self._memory_used_bytes -= size_bytes
            assert self._memory_used_bytes >= 0, "memory was given back twice"

    def take_disk(self, size_bytes: int) -> bool:
        """Claim space on disk; False at the limit."""
        with self._lock:
            if self._disk_used_bytes + size_bytes > self.disk_bytes_max:
                return False
            self._disk_used_bytes += size_bytes
            return True

    def release_disk(self, size_bytes: int) -> None:
        """Give claimed space back."""
        with self._lock:
            self._disk_used_bytes -= size_bytes
            assert self._disk_used_bytes >= 0, "disk space was given back twice"


@dataclass(slots=True, eq=False)
class Piece:
    """One anonymous file: ``records_count`` uses of its records are left."""

    file: IO[bytes]
    size_bytes: int = 0
    records_count: int = 0


class Extent(NamedTuple):
    """Where a spilled batch of ``rows`` is. ``size_bytes`` is its IPC message, without the checksum."""

    piece: Piece
    offset: int
    size_bytes: int
    rows: int

    @property
    def end(self) -> int:
        """Offset after the record."""
        return self.offset + self.size_bytes + _CHECKSUM.size


class SpillFile:
    """An append-only sequence of batches on disk, in pieces. Thread-safe: its I/O runs one call at a time.

    Args:
        name: of the owner of these batches, for messages.
        schema: of all batches.
        budget: of the worker.
    """

    def __init__(self, name: str, schema: pa.Schema, budget: SpillBudget) -> None:
        self.name = name
        self._schema = schema
        self._budget = budget
        self._lock = threading.Lock()
        self._pieces: set[Piece] = set()
        self._current: Piece | None = None
        self._is_closed = False

    def write(self, batch: pa.RecordBatch) -> Extent:
        """Append ``batch``; afterwards it is wanted until ``free``.

        Raises:
            StorageError: the disk share is used up, or the disk is full.
        """
        message = batch.serialize()
        checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(message))
        with self._lock:
            extent = self._reserve(message.size, batch.num_rows)
            try:
                _write_all(extent.piece.file.fileno(), (message, checksum), extent.offset)
            except OSError as error:
                # its bytes stay as a hole until the piece goes: the next record begins after it
                self._drop_record(extent.piece)
                raise self._failed("spill", error) from error
        return extent

    def read(self, extent: Extent) -> pa.RecordBatch:
        """Return the batch at ``extent``, which must still be wanted.

        Raises:
            StorageError: the disk cannot be read, or the file was closed.
            CorruptionError: the disk returned other bytes than were written.
        """
        record = pa.allocate_buffer(extent.size_bytes + _CHECKSUM.size)
        with self._lock:
            if self._is_closed:
                raise StorageError("read spilled records of", self.name, "they are closed already", False)
            try:
                read_bytes = _read_all(extent.piece.file.fileno(), memoryview(record), extent.offset)
            except OSError as error:
                raise self._failed("read spilled records of", error) from error
        message = record.slice(0, extent.size_bytes)
        (expected,) = _CHECKSUM.unpack(memoryview(record)[extent.size_bytes :])
        found = xxhash.xxh3_64_intdigest(message)
        if read_bytes != record.size or found != expected:
            where = f"spill file of {self.name}"
            raise CorruptionError(where, extent.offset, f"checksum {expected:016x}", f"{found:016x}")
        return pa.ipc.read_record_batch(message, self._schema)

    def keep(self, extent: Extent) -> None:
        """Have the record at ``extent``, which is still wanted, stay until it is freed once more."""
        with self._lock:
            if not self._is_closed:
                assert extent.piece.records_count > 0, "the piece of a record was freed"
                extent.piece.records_count += 1

    def free(self, extent: Extent) -> None:
        """The record at ``extent`` is not wanted any more; its piece goes when that holds for all in it."""
        with self._lock:
            if not self._is_closed:
                self._drop_record(extent.piece)

    def close(self) -> None:
        """Free everything. Idempotent."""
        with self._lock:
            self._is_closed = True
            for piece in list(self._pieces):
                self._close_piece(piece)

    def _reserve(self, size_bytes: int, rows: int) -> Extent:
        if self._is_closed:
            raise StorageError("spill", self.name, "its spill file is closed already", False)
        record_bytes = size_bytes + _CHECKSUM.size
        # claimed before it is written: several files of this worker share the limit
        if not self._budget.take_disk(record_bytes):
            raise StorageError("spill", self.name, self._limit_text(), False)
        try:
            piece = self._open_piece()
        except OSError as error:
            self._budget.release_disk(record_bytes)
            raise self._failed("spill", error) from error
        extent = Extent(piece, piece.size_bytes, size_bytes, rows)
        piece.size_bytes += record_bytes
        piece.records_count += 1
        return extent

    def _open_piece(self) -> Piece:
        """Return the piece that takes the next record."""
        if self._current is None or self._current.size_bytes >= self._budget.piece_bytes:
            # no name, so that no other generation can find it and the kernel frees it after any death
            file = tempfile.TemporaryFile(dir=self._budget.directory, buffering=0)  # noqa: SIM115 (closed when read)
            self._current = Piece(file)
            self._pieces.add(self._current)
        return self._current

    def _drop_record(self, piece: Piece) -> None:
        piece.records_count -= 1
        assert piece.records_count >= 0, "a record was freed twice"
        if piece.records_count == 0:
            self._close_piece(piece)

    def _close_piece(self, piece: Piece) -> None:
        assert piece.records_count == 0 or self._is_closed, "a piece with records in use goes only with the whole file"
        assert piece in self._pieces, "a piece is closed once"
        piece.file.close()
        self._pieces.discard(piece)
        self._budget.release_disk(piece.size_bytes)
        if self._current is piece:
            self._current = None

    def _limit_text(self) -> str:
        budget = self._budget
        here_bytes = sum(piece.size_bytes for piece in self._pieces)
        return (
            f"the loops of this worker hold {_text(budget.memory_used_bytes)} in memory and "
            f"{_text(budget.disk_used_bytes)} on disk ({_text(here_bytes)} of it here), and the limit on disk is "
            f"{_text(budget.disk_bytes_max)}: let the loop's body emit fewer records, limit its rounds, "
            "or raise the limit with Pipeline(loop_disk_bytes_max=…)"
        )

    def _failed(self, operation: str, error: OSError) -> StorageError:
        directory = self._budget.directory or tempfile.gettempdir()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            used = _text(self._budget.disk_used_bytes)
            cause = (
                f"the disk of {directory} is full ({error.strerror}) with {used} of loop records on it: "
                "free space, or let loops spill to another directory"
            )
            return StorageError(operation, self.name, cause, True)
        return StorageError(operation, self.name, f"{error.strerror or error} in {directory}", True)


def compacted(batch: pa.RecordBatch, size_bytes: int) -> pa.RecordBatch:
    """Return ``batch``, or a copy if it is a slice that keeps far more memory alive than its ``size_bytes``."""
    if batch.get_total_buffer_size() <= PINNED_FACTOR_MAX * size_bytes:
        return batch
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def _write_all(descriptor: int, parts: tuple[pa.Buffer, bytes], offset: int) -> None:
    for part in parts:
        view = memoryview(part)
        while view.nbytes:
            written_bytes = os.pwrite(descriptor, view, offset)
            view = view[written_bytes:]
            offset += written_bytes


def _read_all(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill ``view``; return how many bytes there were."""
    read_bytes = 0
    while read_bytes < view.nbytes:
        got_bytes = os.preadv(descriptor, [view[read_bytes:]], offset + read_bytes)
        # the file is shorter than it was: the caller sees it by the number, and says so
        if got_bytes == 0:
            break
        read_bytes += got_bytes
    return read_bytes


def _text(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
