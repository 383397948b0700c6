"""Arrow columns as record batches for ``Produce``, without Python code per field or per record.

The fields in front of a value are written into one column of bytes, by arithmetic on whole columns; one join of Arrow
puts them in front of the values, and the bytes of the joined column are the records.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.kafka.record_batch import (
    CRC_BEGIN,
    HEADER,
    HEADERS_TYPE,
    LENGTH_BEGIN,
    MAGIC,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    SEQUENCES,
    TRANSACTIONAL,
    BatchHeader,
    Compression,
    checksum,
    compress,
)
from headgate.codec.kafka.wire import Parts
from headgate.dataclass import dataclass
from headgate.errors import UsageError

BATCH_BYTES_MAX = 1_048_588
"""What brokers and topics take by default (``max.message.bytes``)."""

WORD_BYTES = 8
_MARKS = np.uint64(0x8080808080808080)

_Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ProducerState:
    """Who writes, so that brokers refuse what is repeated, out of order, or of a producer that was replaced.

    Attributes:
        sequence: the number of the next record of the partition.
        is_transactional: the records belong to the open transaction.
    """

    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = -1
    sequence: int = NO_SEQUENCE
    is_transactional: bool = False


NO_PRODUCER = ProducerState()


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A record batch in pieces, and how many records it has."""

    parts: Parts
    records_count: int
    size_bytes: int


class RecordTooLargeError(Exception):
    """A record does not fit into a batch of its own.

    Attributes:
        row: of the first such record.
        size_bytes: of a batch with it alone.
    """

    def __init__(self, row: int, size_bytes: int) -> None:
        super().__init__(row, size_bytes)
        self.row, self.size_bytes = row, size_bytes


def encode_records(
    value: pa.Array,
    timestamps_ms: npt.NDArray[np.int64],
    key: pa.Array | None = None,
    headers: pa.Array | None = None,
    *,
    producer: ProducerState = NO_PRODUCER,
    compression: Compression = Compression.NONE,
    batch_bytes_max: int = BATCH_BYTES_MAX,
) -> list[EncodedBatch]:
    """Return the record batches for one partition.

    Args:
        value, key: binary or text; null is null.
        headers: lists of structs with ``key`` and ``value``; null is no headers.
        batch_bytes_max: no batch is larger before it is compressed.

    Raises:
        RecordTooLargeError: a record is larger than a batch may be.
    """
    count = len(value)
    assert len(timestamps_ms) == count, "each record has a timestamp"
    assert key is None or len(key) == count, "each record has a key, or null"
    assert headers is None or len(headers) == count, "each record has headers, or null"
    if count == 0:
        return []
    values = _binary(value)
    keys = None if key is None or key.null_count == count else _binary(key)
    tails = None if headers is None else _headers(headers)
    value_size, key_size = _sizes(values), np.full(count, -1, np.int64) if keys is None else _sizes(keys)
    content: _Ints = np.maximum(value_size, 0) + np.maximum(key_size, 0)
    content += 1 if tails is None else _sizes(tails)
    key_length, value_length = _Number(key_size), _Number(value_size)
    # what differs by batch is taken as large as it may be: the differences of times and offsets, and the length
    span = np.array([int(timestamps_ms.max()) - int(timestamps_ms.min()), count])
    fields_max = content + key_length.width + value_length.width + (1 + int(_Number(span).width.sum()))
    firsts = _first_rows(fields_max + _Number(fields_max).width, batch_bytes_max - HEADER.size)
    counts = np.diff([*firsts, count])
    first_times = timestamps_ms[firsts]
    deltas = np.arange(count) - np.repeat(firsts, counts)
    time_deltas = timestamps_ms - np.repeat(first_times, counts)

    fields = [_Number(time_deltas), _Number(deltas), key_length]
    body = content + value_length.width + 1
    for field in fields:
        body += field.width
    length = _Number(body)
    if keys is None:
        columns = [_written([length, None, *fields, value_length]), values]
    else:
        columns = [_written([length, None, *fields]), keys, _written([value_length]), values]
    columns.append(pa.scalar(b"\0", pa.large_binary()) if tails is None else tails)
    empty = pa.scalar(b"", pa.large_binary())
    joined = pc.binary_join_element_wise(*columns, empty, null_handling="replace", null_replacement="")
    data = memoryview(joined.buffers()[2])
    begins = np.concatenate(([0], np.cumsum(length.width + body)))
    assert int(begins[-1]) == int(np.frombuffer(joined.buffers()[1], np.int64)[count]), "records as long as computed"
    last_times = np.maximum.reduceat(timestamps_ms, firsts)

    batches = []
    sequence = producer.sequence
    for first, number, first_time, last_time in zip(firsts, counts, first_times, last_times, strict=True):
        records = compress(compression, data[int(begins[first]) : int(begins[first + number])])
        header = BatchHeader(
            base_offset=0,
            batch_length=HEADER.size - LENGTH_BEGIN + len(records),
            partition_leader_epoch=-1,
            magic=MAGIC,
            crc=0,
            attributes=compression | (TRANSACTIONAL if producer.is_transactional else 0),
            last_offset_delta=int(number) - 1,
            base_timestamp=int(first_time),
            max_timestamp=int(last_time),
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            base_sequence=sequence,
            records_count=int(number),
        )
        head = bytearray(HEADER.pack(*header))
        # last, because it covers what follows it in the header
        crc = checksum(records, checksum(head[CRC_BEGIN:]))
        head[CRC_BEGIN - 4 : CRC_BEGIN] = crc.to_bytes(4, "big")
        batches.append(EncodedBatch([head, records], int(number), HEADER.size + len(records)))
        if sequence >= 0:
            sequence = (sequence + int(number)) % SEQUENCES
    return batches


class _Number:
    """A column of numbers as Kafka writes them: small ones in few bytes, whatever their sign.

    Attributes:
        width: how many bytes each takes.
        width_max: at least one, at most ten.
    """

    def __init__(self, values: _Ints) -> None:
        self._bits = ((values << 1) ^ (values >> 63)).view(np.uint64)
        self.width = np.ones(len(values), np.int64)
        largest = int(self._bits.max(initial=0))
        self.width_max = max(1, -(-largest.bit_length() // 7))
        for at in range(1, self.width_max):
            self.width += self._bits >= np.uint64(1 << 7 * at)

    def words(self) -> list[_Word]:
        """Return the bytes of each number, eight at a time."""
        if self.width_max <= WORD_BYTES:
            return [_Word(_spread(self._bits, self.width, self.width_max), self.width, self.width_max)]
        first = np.minimum(self.width, WORD_BYTES)
        rest = self.width - first
        last = self._bits >> np.uint64(7 * WORD_BYTES)
        goes_on = (rest > 0).astype(np.uint64) << np.uint64(63)
        return [
            _Word(_spread(self._bits, first, WORD_BYTES) | goes_on, first, WORD_BYTES),
            _Word(_spread(last, rest, self.width_max - WORD_BYTES), rest, self.width_max - WORD_BYTES),
        ]


@dataclass(slots=True)
class _Word:
    """At most eight bytes of each record, the first one lowest: zeros follow the ``width`` bytes that count."""

    bits: _Words
    width: _Ints
    width_max: int


def _spread(bits: _Words, width: _Ints, width_max: int) -> _Words:
    """Return seven bits of each number in a byte, with the mark of those that another one follows."""
    found = bits & np.uint64(0x7F)
    for at in range(1, width_max):
        found |= (bits << np.uint64(at)) & np.uint64(0x7F << 8 * at)
    if width_max > 1:
        found |= _MARKS >> ((9 - width) << 3).view(np.uint64)
    return found


def _written(fields: Sequence[_Number | None]) -> pa.Array:
    """Return the bytes of all numbers, joined, as a column; None is a byte 0, the attributes of a record.

    Words are written in the order of their places, each over the zeros that the one in front of it has too many.
    """
    words: list[_Word] = []
    count = len(next(field for field in fields if field is not None).width)
    for field in fields:
        if field is None:  # a zero follows every word
            words[-1].width, words[-1].width_max = words[-1].width + 1, words[-1].width_max + 1
            continue
        for word in field.words():
            if words and words[-1].width_max + word.width_max <= WORD_BYTES:
                last = words[-1]
                last.bits |= word.bits << (last.width << 3).view(np.uint64)
                last.width, last.width_max = last.width + word.width, last.width_max + word.width_max
            else:
                words.append(word)
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(sum(word.width for word in words), out=offsets[1:])
    places, bits = np.empty((count, len(words)), np.int64), np.empty((count, len(words)), np.uint64)
    place = offsets[:-1]
    for number, word in enumerate(words):
        places[:, number], bits[:, number] = place, word.bits
        place = place + word.width
    data = np.zeros(int(offsets[-1]) + 2 * WORD_BYTES, np.uint8)
    at_any_place = np.ndarray((len(data) - WORD_BYTES + 1,), "<u8", data.data, strides=(1,))
    at_any_place[places.reshape(-1)] = bits.reshape(-1)
    return pa.Array.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _headers(headers: pa.Array) -> pa.Array:
    """Return for each record the bytes of its headers, with their number in front."""
    headers = headers.cast(HEADERS_TYPE)
    number = pc.fill_null(pc.list_value_length(headers), 0).to_numpy()
    entries = headers.flatten()
    keys, values = _binary(entries.field("key")), _binary(entries.field("value"))
    if keys.null_count or entries.null_count:
        raise UsageError("a header for Kafka has no name (null); give every header a name")
    empty = pa.scalar(b"", pa.large_binary())
    columns = [_written([_Number(_sizes(keys))]), keys, _written([_Number(_sizes(values))]), values]
    each = pc.binary_join_element_wise(*columns, empty, null_handling="replace", null_replacement="")
    # the headers of one record follow each other: the same bytes, with other bounds
    bounds = np.frombuffer(each.buffers()[1], np.int64)[: len(each) + 1]
    own = bounds[np.concatenate(([0], np.cumsum(number)))]
    of_records = pa.Array.from_buffers(
        pa.large_binary(), len(headers), [None, pa.py_buffer(own), each.buffers()[2] or pa.py_buffer(b"")]
    )
    return pc.binary_join_element_wise(_written([_Number(number.astype(np.int64))]), of_records, empty)


def _binary(column: pa.Array) -> pa.Array:
    return column.cast(pa.large_binary())


def _sizes(column: pa.Array) -> _Ints:
    """Return the length of each value in bytes; -1 for null."""
    sizes: _Ints = pc.fill_null(pc.binary_length(column), -1).to_numpy()
    return sizes


def _first_rows(sizes: _Ints, limit: int) -> _Ints:
    """Return the first row of each batch, so that no batch has more than ``limit`` bytes."""
    if int(sizes.max()) > limit:
        row = int(np.argmax(sizes > limit))
        raise RecordTooLargeError(row, int(sizes[row]) + HEADER.size)
    ends = np.cumsum(sizes)
    firsts, first, before = [], 0, 0
    while first < len(sizes):
        firsts.append(first)
        first = int(np.searchsorted(ends, before + limit, side="right"))
        before = int(ends[first - 1])
    return np.array(firsts, np.int64)
