"""The bytes of a sealed loop log: the records that circulated between a barrier and its sentinels.

Counterpart: ``runtime.worker.loop_head``, which collects and partitions them. A keyed
log is cut by key group, so that it restores at any parallelism, and every owned key group is written, empty ones too.
Channels do not appear: their identity changes with parallelism. Never hashes a key, never does I/O.

Container: ``codec.snapshot``. Its sections, integers little-endian:

* ``header``: msgpack of ``LogHeader``;
* ``schema``: the records' schema, an Arrow IPC message;
* ``groups``: u64 rows in the whole log for each owned key group, in their order (nothing without a key);
* ``chunks``: for each chunk u64 bytes, u64 rows, and u32 rows for each owned key group;
* ``batches``: one Arrow IPC record-batch message per chunk. The rows of a chunk are ordered by key group; within a
  key group, and from chunk to chunk, they are in the order of arrival (L21).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.codec.arrow import read_batch
from headgate.codec.decodable import decodable
from headgate.codec.json_files import MALFORMED
from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, UnknownFormat

FORMAT = "headgate-looplog"
VERSION = 1

LOG_ROWS = "log"
"""What the records of a log are called where rows of state are counted."""

Counts: TypeAlias = npt.NDArray[np.uint32]

_CHUNK = struct.Struct("<QQ")


class LogOwner(msgspec.Struct, frozen=True):
    """Owner of a loop log: one loop head.

    Attributes:
        subtask_index, parallelism: of the loop head.
        max_parallelism: number of key groups; 0 without a key.
        keys: columns of the loop's key; () for a loop without one.
        first_group, groups_count: the key groups that the head owned; 0 and 0 without a key.
    """

    subtask_index: int
    parallelism: int
    max_parallelism: int
    keys: tuple[str, ...]
    first_group: int
    groups_count: int


class LogHeader(msgspec.Struct, frozen=True):
    """First section of a log."""

    format: str
    version: int
    owner: LogOwner
    chunks_count: int


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Some records that follow each other in the log.

    ``group_rows`` has one number per owned key group; nothing without a key. ``message`` holds the batch.
    """

    message: Buffer
    rows: int
    group_rows: Counts

    def batch(self, schema: pa.Schema, path: str) -> pa.RecordBatch:
        """Return the records, in memory of their own: a chunk does not keep the whole log alive.

        Raises:
            CorruptionError: it is not a batch of ``schema`` with as many rows as the log says.
        """
        aligned = pa.allocate_buffer(memoryview(self.message).nbytes)
        memoryview(aligned).cast("B")[:] = memoryview(self.message).cast("B")
        try:
            batch = read_batch(aligned, schema)
        except (pa.ArrowException, OSError) as error:
            raise CorruptionError(path, 0, "a record batch", str(error)) from error
        if batch.num_rows != self.rows:
            raise CorruptionError(path, 0, f"a chunk of {self.rows} rows", f"{batch.num_rows} rows")
        return batch


@dataclass(frozen=True, slots=True)
class DecodedLog:
    """A log with verified bytes; its chunks are views into them.

    ``group_rows`` has the rows of the whole log for each key group that ``owner`` owned.
    """

    owner: LogOwner
    group_rows: npt.NDArray[np.uint64]
    chunks: tuple[LogChunk, ...]

    @property
    def rows(self) -> int:
        """Number of records."""
        return sum(chunk.rows for chunk in self.chunks)


def encode_log(owner: LogOwner, schema: pa.Schema, chunks: Sequence[LogChunk]) -> list[Buffer]:
    """Return the log as buffers to be written one after another; the chunks' messages are not copied."""
    totals = np.zeros(owner.groups_count, dtype="<u8")  # empty key groups are written too
    table = bytearray()
    for chunk in chunks:
        assert len(chunk.group_rows) == owner.groups_count, "a chunk counts the rows of each key group"
        totals += chunk.group_rows
        table += _CHUNK.pack(memoryview(chunk.message).nbytes, chunk.rows)
        table += chunk.group_rows.astype("<u4").tobytes()
    header = LogHeader(FORMAT, VERSION, owner, len(chunks))
    return encode_sections(
        {
            "header": [msgspec.msgpack.encode(header)],
            "schema": [schema.serialize()],
            "groups": [totals.tobytes()],
            "chunks": [bytes(table)],
            "batches": [chunk.message for chunk in chunks],
        }
    )


def decode_log(data: bytes | bytearray | memoryview, schema: pa.Schema, path: str) -> DecodedLog:
    """Return the log in ``data``; everything but the batches' insides is verified first.

    Args:
        data: a whole log.
        schema: that its records must have.
        path: where it came from, for messages.

    Raises:
        CorruptionError: any byte is wrong or missing, or the records have another schema.
    """
    sections = decode_sections(data, path)
    missing = {"header", "schema", "groups", "chunks", "batches"} - sections.keys()
    if missing:
        raise CorruptionError(path, 0, f"the sections {sorted(missing)} of a loop log", f"only {sorted(sections)}")
    header = _decode_header(sections["header"], path)
    _check_schema(sections["schema"], schema, path)
    chunks = _decode_chunks(sections, header, path)
    groups = sections["groups"]
    if groups.nbytes != 8 * header.owner.groups_count:
        expected = f"row counts of {header.owner.groups_count} key groups"
        raise CorruptionError(path, 0, expected, f"{groups.nbytes} bytes")
    totals = np.frombuffer(groups, dtype="<u8")
    added = sum((chunk.group_rows.astype(np.uint64) for chunk in chunks), np.zeros(len(totals), dtype=np.uint64))
    if not np.array_equal(totals, added):
        raise CorruptionError(
            path, 0, f"chunks with {totals.sum()} rows as their key groups say", f"{added.sum()} rows"
        )
    return DecodedLog(header.owner, totals, chunks)


def log_rows(sections: Mapping[str, memoryview]) -> int | None:
    """Return the number of records of a log with these sections, or None if they are not those of a log."""
    try:
        header = msgspec.msgpack.decode(sections.get("header", b""), type=decodable(LogHeader))
    except MALFORMED:
        return None
    if header.format != FORMAT or "chunks" not in sections:
        return None
    entry_bytes = _CHUNK.size + 4 * header.owner.groups_count
    table = sections["chunks"]
    rows = (_CHUNK.unpack_from(table, at)[1] for at in range(0, table.nbytes - _CHUNK.size + 1, entry_bytes))
    return int(sum(rows))


def _decode_header(data: memoryview, path: str) -> LogHeader:
    try:
        header = msgspec.msgpack.decode(data, type=decodable(LogHeader))
    except MALFORMED as error:
        raise CorruptionError(path, 0, "the header of a loop log", str(error)) from error
    if (header.format, header.version) != (FORMAT, VERSION):
        found = f"{header.format} version {header.version}"
        raise UnknownFormat(path, 0, f"{FORMAT} version {VERSION}", found)
    return header


def _check_schema(data: memoryview, schema: pa.Schema, path: str) -> None:
    try:
        found = pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(path, 0, "a schema", str(error)) from error
    if not found.equals(schema):
        raise CorruptionError(path, 0, f"columns {schema.names}", f"columns {found.names} or other types")


def _decode_chunks(sections: Mapping[str, memoryview], header: LogHeader, path: str) -> tuple[LogChunk, ...]:
    table, batches = sections["chunks"], sections["batches"]
    entry_bytes = _CHUNK.size + 4 * header.owner.groups_count
    if table.nbytes != entry_bytes * header.chunks_count:
        expected = f"{header.chunks_count} chunks of {entry_bytes} bytes"
        raise CorruptionError(path, 0, expected, f"{table.nbytes} bytes")
    chunks, start = [], 0
    for at in range(0, table.nbytes, entry_bytes):
        size_bytes, rows = _CHUNK.unpack_from(table, at)
        counts: Counts = np.frombuffer(table[at + _CHUNK.size : at + entry_bytes], dtype="<u4")
        if header.owner.keys and int(counts.sum(dtype=np.uint64)) != rows:
            raise CorruptionError(
                path, at, f"{rows} rows in a chunk", f"{counts.sum(dtype=np.uint64)} in its key groups"
            )
        chunks.append(LogChunk(batches[start : start + size_bytes], rows, counts))
        start += size_bytes
    if start != batches.nbytes:
        raise CorruptionError(path, 0, f"{start} bytes of batches", f"{batches.nbytes} bytes")
    return tuple(chunks)
