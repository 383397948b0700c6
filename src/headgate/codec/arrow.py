"""Decode Arrow batches from another process or a file, and validate them before use.

A checksum says that bytes are those that were written, not who wrote them. A batch with wild offsets would end the
process that reads it, and a compressed one may need a thousand times its size in memory. So everything is validated,
once, and compressed batches are refused except where our writers compress. Never does I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pyarrow as pa

COMPRESSED_BYTES_MAX = 1 << 30
"""What the batches of a compressed stream may become together: our writers compress pieces of a few MiB."""

_HEADER_TYPE, _HEADER = 1, 2
_DICTIONARY, _RECORD_BATCH = 2, 3
_VALUES = 1
_ROWS, _BUFFERS, _COMPRESSION = 0, 2, 3
"""Numbers of fields, and of types of a message, in Arrow's Message.fbs."""

_LENGTH = struct.Struct("<q")
"""In front of a compressed buffer: its bytes when it is not any more; -1: it is not compressed."""


def read_batch(data: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch in ``data``, an Arrow message, as a view into it.

    Raises:
        pyarrow.ArrowException, OSError: it is none, is compressed, or its columns contradict themselves.
    """
    try:
        message = pa.ipc.read_message(data)
    except EOFError as error:
        raise pa.ArrowInvalid("nothing") from error
    _check(message, 0)
    return _sound(pa.ipc.read_record_batch(message, schema))


def read_stream(data: memoryview | pa.Buffer, *, is_compressed: bool = False) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Return schema and batches of an Arrow stream, as views into ``data``. ``is_compressed``: they may be.

    Raises:
        pyarrow.ArrowException, OSError: it is none, is compressed, or its columns contradict themselves.
    """
    buffer = pa.py_buffer(data)
    left = COMPRESSED_BYTES_MAX if is_compressed else 0
    for message in _messages(buffer):
        left -= _check(message, left)[1]
    with pa.ipc.open_stream(buffer) as reader:
        return reader.schema, [_sound(batch) for batch in reader]


def stream_rows(data: memoryview) -> int:
    """Return how many rows the batches of an Arrow stream say that they have; none is read.

    Raises:
        pyarrow.ArrowException, OSError: it is none.
    """
    return sum(_check(message, 0)[0] for message in _messages(pa.py_buffer(data)))


def _messages(buffer: pa.Buffer) -> Iterable[pa.Message]:
    reader = pa.MessageReader.open_stream(buffer)
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


def _sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch.validate(full=True)
    return batch


def _check(message: pa.Message, bytes_max: int) -> tuple[int, int]:
    """Return how many rows a batch has, and how many bytes it becomes if it is compressed.

    Raises:
        pyarrow.ArrowInvalid: these are more than ``bytes_max``; 0: it is compressed. No memory was taken for it.
    """
    metadata = memoryview(message.metadata)
    try:
        root = _Table(metadata, *struct.unpack_from("<I", metadata))
        kind = root.byte(_HEADER_TYPE)
        if kind not in (_RECORD_BATCH, _DICTIONARY):
            return 0, 0
        batch = root.table(_HEADER)
        if kind == _DICTIONARY:
            batch = batch.table(_VALUES)
        rows = batch.number(_ROWS) if kind == _RECORD_BATCH else 0
        if not batch.has(_COMPRESSION):
            return rows, 0
        if bytes_max <= 0:
            raise pa.ArrowInvalid("a compressed batch where none is written")
        body = memoryview(message.body)
        found = (_LENGTH.unpack_from(body, offset)[0] for offset, length in batch.pairs(_BUFFERS) if length)
        size_bytes = sum(one for one in found if one > 0)
        if size_bytes > bytes_max:
            raise pa.ArrowInvalid(f"compressed batches of more than {COMPRESSED_BYTES_MAX:,} bytes")
        return rows, size_bytes
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, pa.ArrowException):
            raise
        raise pa.ArrowInvalid(f"not a message of Arrow: {error}") from error


class _Table:
    """A table of FlatBuffers, the format of Arrow's messages: the offset of each field is in a table of its own."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at
        (back,) = struct.unpack_from("<i", data, at)
        self._fields = at - back
        (self._size,) = struct.unpack_from("<H", data, self._fields)

    def has(self, number: int) -> bool:
        return self._offset(number) != 0

    def byte(self, number: int) -> int:
        offset = self._offset(number)
        return self._data[self._at + offset] if offset else 0

    def number(self, number: int) -> int:
        """Return a number of 64 bits."""
        offset = self._offset(number)
        return int(struct.unpack_from("<q", self._data, self._at + offset)[0]) if offset else 0

    def table(self, number: int) -> _Table:
        return _Table(self._data, self._target(number))

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """Return a vector of pairs of numbers of 64 bits."""
        if not self.has(number):
            return []
        at = self._target(number)
        (count,) = struct.unpack_from("<I", self._data, at)
        return [struct.unpack_from("<qq", self._data, at + 4 + 16 * index) for index in range(count)]

    def _target(self, number: int) -> int:
        at = self._at + self._offset(number)
        (offset,) = struct.unpack_from("<I", self._data, at)
        return int(at + offset)

    def _offset(self, number: int) -> int:
        at = 4 + 2 * number
        return 0 if at >= self._size else int(struct.unpack_from("<H", self._data, self._fields + at)[0])


LOCAL_TIME = pa.timestamp("us")
"""A date and time as a clock on the wall shows it. Which moment that is, the type does not say."""

MOMENT = pa.timestamp("us", tz="UTC")
"""A moment, in whatever zone it was given."""


def unzoned(dtype: pa.DataType) -> pa.DataType:
    """Return a canonical type with local times for moments, at any depth."""
    if pa.types.is_struct(dtype):
        return pa.struct([pa.field(field.name, unzoned(field.type)) for field in dtype])
    if pa.types.is_large_list(dtype):
        return pa.large_list(unzoned(dtype.value_type))
    return LOCAL_TIME if dtype == MOMENT else dtype


def unzoned_schema(schema: pa.Schema) -> pa.Schema:
    """Return a canonical schema with local times instead of moments."""
    return pa.schema([pa.field(field.name, unzoned(field.type), field.nullable) for field in schema])
