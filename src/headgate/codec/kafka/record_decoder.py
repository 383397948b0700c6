"""Record batches as ``Fetch`` brings them, decoded into Arrow columns without Python code per field or per record.

A record begins with its length, so that the begin of each one follows only from the one in front. That chain is
followed by the Avro reader of Polars, in compiled code: a record is an Avro value of type ``bytes``, and the batches of
a fetch are the blocks of an Avro file. Where long runs of records are equally long, it is enough to look whether they
are (``_equally_long``). Everything else is arithmetic on whole columns (``_Cursor``), and values are copied out by one
``take`` of Arrow. ``_follow`` follows the same chain in Python: for few records, and to say what is wrong where the
other ones refuse.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from headgate.codec.kafka.messages import AbortedTransaction
from headgate.codec.kafka.record_batch import (
    ABORT,
    APPEND_TIME,
    CODEC_MASK,
    CONTROL,
    CRC_BEGIN,
    HEADER,
    HEADERS_TYPE,
    LENGTH_BEGIN,
    MAGIC,
    MAGIC_BEGIN,
    NO_EPOCH,
    NO_TIMESTAMP,
    RECORD_BYTES_MIN,
    RECORDS,
    RECORDS_WITH_HEADERS,
    TRANSACTIONAL,
    BatchHeader,
    Compression,
    UnreadableError,
    checksum,
    decompress,
)
from headgate.codec.kafka.wire import Buffer
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError

GROUP_BYTES = 4 << 20
"""Batches are decoded together until they have this many bytes: the columns of a group stay in the caches."""

FEW_RECORDS = 256
"""So many are followed in Python: a call of Polars costs as much."""

RUN_RECORDS_MIN, SHORT_RUNS_MAX = 256, 4
"""A batch has at most so many runs of fewer records of equal length, or its lengths are followed one by one."""

RUN_GROWTH = 8
"""So many times more records are looked at while they are equally long: what follows a run is looked at in vain."""

BATCH_RECORDS_MIN = 2_000
"""In smaller batches, a step for each run takes as long as following the lengths."""

HEADERS_MAX = 10_000
"""Headers of one record that are read: each takes a step of its own."""

_Ints: TypeAlias = npt.NDArray[np.int64]
_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Words: TypeAlias = npt.NDArray[np.uint64]

_HIGH_BITS = np.uint64(0x8080808080808080)
"""Set in each byte of a number but the last one."""

_SYNC = bytes(16)
_SCHEMA = b'{"type":"record","name":"r","fields":[{"name":"b","type":"bytes"}]}'
_AVRO = b"".join(
    (b"Obj\x01", b"\x02\x16avro.schema", bytes((len(_SCHEMA) << 1 & 0x7F | 0x80, 1)), _SCHEMA, b"\0", _SYNC)
)
"""The begin of an Avro file of records with one field of bytes. Its blocks follow: count, length, bytes, ``_SYNC``."""

_CONTROL_KEY = struct.Struct(">hh")
_TIMESTAMP_MS_MAX = (1 << 63) // 1000 - 1


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """Records of some batches that follow each other.

    Attributes:
        records: with columns ``RECORDS``, or ``RECORDS_WITH_HEADERS``, in the order of their offsets.
        epoch: of the leader that wrote the last of them.
    """

    records: pa.RecordBatch
    epoch: int


@dataclass(frozen=True, slots=True)
class _Section:
    """The records of one batch, decompressed."""

    data: Buffer
    header: BatchHeader


def decode_records(
    data: Buffer,
    begin: int,
    place: str,
    aborted: Sequence[AbortedTransaction] | None = None,
    *,
    with_headers: bool = False,
) -> Iterator[DecodedBatch]:
    """Decode the record batches of one partition, some at a time, as the caller takes them.

    So what is decoded is still in the caches when it is used, and its memory is there again for what follows. A last
    batch that is not whole is left out: a broker cuts an answer off where the client's limit is.

    Args:
        begin: the offset that was asked for; batches may begin before it.
        place: topic and partition, for errors.
        aborted: the aborted transactions of the answer; None reads records of open and aborted transactions, too.
        with_headers: whether to have the column ``headers``.

    Raises:
        CorruptionError: a checksum is wrong, or records contradict themselves.
    """
    last = -1
    for group in _groups(memoryview(data), place, None if aborted is None else _Isolation(aborted)):
        header = group[-1].header
        records = _columns(group, place, with_headers)
        # the columns have copies of it: freed before the caller works
        group.clear()
        offsets = records.column("offset").to_numpy()
        if offsets[0] <= last or (offsets[1:] <= offsets[:-1]).any() or offsets[-1] > _last_offset(header):
            _refuse(place, 0, "offsets that grow within their batches", f"offset {offsets[0]:,} and others")
        last = int(offsets[-1])
        if offsets[0] < begin:  # records in front of it share a batch with later ones
            records = records.slice(int(np.searchsorted(offsets, begin)))
        # a generator keeps its variables while the caller works
        del offsets
        if records.num_rows:
            yield DecodedBatch(records, header.partition_leader_epoch)
        del records


def _groups(data: memoryview, place: str, isolation: _Isolation | None) -> Iterator[list[_Section]]:
    """Yield batches with records that are to be read, as many as are decoded together."""
    group: list[_Section] = []
    size = 0
    for header, records in _whole_batches(data, place):
        is_left_out = isolation is not None and isolation.leaves_out(header, records)
        # compaction leaves batches without records, for their offsets
        if is_left_out or header.attributes & CONTROL or header.records_count == 0:
            continue
        group.append(_Section(_decompressed(header, records, place), header))
        size += len(group[-1].data)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def end_of(data: Buffer, begin: int) -> tuple[int, int]:
    """Return where to fetch on, after the last whole batch, and its epoch, without a look at the records.

    It is after that batch also if all of its records are left out. ``NO_EPOCH``: there is none.
    """
    view, position, epoch = memoryview(data), 0, NO_EPOCH
    while len(view) - position >= HEADER.size:
        header = BatchHeader._make(HEADER.unpack_from(view, position))
        position += LENGTH_BEGIN + header.batch_length
        if position > len(view) or header.batch_length <= 0:
            break
        begin, epoch = max(begin, _last_offset(header) + 1), header.partition_leader_epoch
    return begin, epoch


def _last_offset(header: BatchHeader) -> int:
    return header.base_offset + header.last_offset_delta


class _Isolation:
    """Which batches belong to aborted transactions, in the order of the log."""

    def __init__(self, aborted: Sequence[AbortedTransaction]) -> None:
        self._coming = sorted(aborted, key=lambda one: one.first_offset, reverse=True)
        self._aborted: set[int] = set()
        """Producers whose open transaction is one of the aborted ones."""

    def leaves_out(self, header: BatchHeader, records: memoryview) -> bool:
        last = _last_offset(header)
        while self._coming and self._coming[-1].first_offset <= last:
            self._aborted.add(self._coming.pop().producer_id)
        # the marker ends the transaction: what its producer writes next belongs to another one
        if header.attributes & CONTROL and _control_type(records) == ABORT:
            self._aborted.discard(header.producer_id)
        return bool(header.attributes & TRANSACTIONAL) and header.producer_id in self._aborted


def _control_type(records: memoryview) -> int | None:
    """Return the type of the only record of a control batch: version and type are its key."""
    raw = bytes(records) + _SYNC
    starts, ends = _follow(raw, [0], [len(records)], [1], "a control batch")
    cursor = _Cursor(np.frombuffer(raw, np.uint8), starts + 1, ends, "a control batch")
    cursor.numbers()
    cursor.numbers()
    (begin,), (size,), _ = cursor.skip_bytes()
    return int(_CONTROL_KEY.unpack_from(raw, int(begin))[1]) if size >= _CONTROL_KEY.size else None


def _whole_batches(data: memoryview, place: str) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Yield header and records of each batch that is there as a whole, with the right checksum."""
    position = 0
    while len(data) - position > MAGIC_BEGIN:
        if (magic := data[position + MAGIC_BEGIN]) != MAGIC:
            expected = f"a record batch of format {MAGIC}, which is that of Kafka 0.11 and later"
            _refuse(place, position, expected, f"format {magic}")
        if len(data) - position < HEADER.size:
            return
        header = BatchHeader._make(HEADER.unpack_from(data, position))
        end = position + LENGTH_BEGIN + header.batch_length
        if end > len(data):
            return
        if end < position + HEADER.size or header.last_offset_delta < 0:
            _refuse(place, position, "a record batch", f"one of {header.batch_length} bytes")
        where = f"{place}, the batch at offset {header.base_offset:,}"
        found = checksum(data[position + CRC_BEGIN : end])
        if found != header.crc:
            _refuse(where, position, f"checksum {header.crc:08x}", f"{found:08x}")
        records = data[position + HEADER.size : end]
        if header.records_count < 0:
            _refuse(where, position, "records", f"{header.records_count} records")
        yield header, records
        position = end


def _decompressed(header: BatchHeader, records: memoryview, place: str) -> Buffer:
    where = f"{place}, the batch at offset {header.base_offset:,}"
    codec = header.attributes & CODEC_MASK
    if codec not in Compression.__members__.values():
        _refuse(where, CRC_BEGIN, "a compression that is known", f"number {codec}")
    try:
        found = decompress(Compression(codec), records)
    except UnreadableError as error:
        _refuse(where, HEADER.size, "compressed records", str(error))
    if header.records_count > len(found) // RECORD_BYTES_MIN:
        _refuse(where, HEADER.size, f"{header.records_count} records", f"{len(found)} bytes")
    return found


def _columns(group: Sequence[_Section], place: str, with_headers: bool) -> pa.RecordBatch:
    """Return the records of some batches as columns."""
    counts = [section.header.records_count for section in group]
    parts: list[Buffer] = [_AVRO]
    begins, ends, position = [], [], len(_AVRO)
    for section, count in zip(group, counts, strict=True):
        # an Avro file of bytes: its records have their lengths in front as Kafka's have, so Polars can find them
        block = _avro_long(count) + _avro_long(len(section.data))
        parts += [block, section.data, _SYNC]
        begins.append(position + len(block))
        ends.append(begins[-1] + len(section.data))
        position = ends[-1] + len(_SYNC)
    raw = b"".join(parts)
    data = np.frombuffer(raw, np.uint8)
    position_of, end_of = _record_bounds(raw, begins, ends, counts, place)
    assert len(position_of) == len(end_of) == sum(counts), "each record has a begin and an end"
    cursor = _Cursor(data, position_of + 1, end_of, place)
    times, offsets = cursor.numbers(), cursor.numbers()
    # a record has its key in front of its value, and the columns have the value first
    columns = [None, cursor.bytes_column(raw), None, None]
    columns[0] = cursor.bytes_column(raw)
    headers = [section.header for section in group]
    offsets += np.repeat([header.base_offset for header in headers], counts)
    times += np.repeat([header.base_timestamp for header in headers], counts)
    if any(header.attributes & APPEND_TIME for header in headers):
        by_broker = np.repeat([bool(header.attributes & APPEND_TIME) for header in headers], counts)
        times = np.where(by_broker, np.repeat([header.max_timestamp for header in headers], counts), times)
    columns[2] = pa.array(offsets)
    columns[3] = _moments(times)
    if not with_headers:
        return pa.RecordBatch.from_arrays(columns, schema=RECORDS)
    return pa.RecordBatch.from_arrays([*columns, cursor.headers_column(raw)], schema=RECORDS_WITH_HEADERS)


def _moments(times_ms: _Ints) -> pa.Array:
    """Return timestamps, null where there is none, or one that is no date."""
    no_time = None
    if times_ms.min() < 0 or times_ms.max() > _TIMESTAMP_MS_MAX:
        no_time = (times_ms == NO_TIMESTAMP) | (times_ms > _TIMESTAMP_MS_MAX) | (times_ms < -_TIMESTAMP_MS_MAX)
    return pa.array(times_ms * 1000, mask=no_time).cast(RECORDS.field("timestamp").type)


def _record_bounds(
    raw: bytes, begins: Sequence[int], ends: Sequence[int], counts: Sequence[int], place: str
) -> tuple[_Ints, _Ints]:
    """Return where each record begins, after its length, and where it ends."""
    if sum(counts) <= FEW_RECORDS:
        return _follow(raw, begins, ends, counts, place)
    if sum(counts) >= BATCH_RECORDS_MIN * len(counts):
        found = _equally_long(raw, begins, ends, counts)
        if found is not None:
            return found
    try:
        sizes = pl.read_avro(io.BytesIO(raw))["b"].bin.size().to_numpy().astype(np.int64)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
        return _follow(raw, begins, ends, counts, place)
    if len(sizes) != sum(counts):
        return _follow(raw, begins, ends, counts, place)
    end_of = np.cumsum(sizes + _bytes_of_length(sizes))
    lasts = np.cumsum(counts) - 1
    # between two batches there are bytes of Avro's
    gaps = np.array(begins) - np.concatenate(([0], end_of[lasts[:-1]]))
    end_of += np.repeat(gaps, counts)
    if (end_of[lasts] != np.array(ends)).any():
        return _follow(raw, begins, ends, counts, place)
    return end_of - sizes, end_of


def _equally_long(
    raw: bytes, begins: Sequence[int], ends: Sequence[int], counts: Sequence[int]
) -> tuple[_Ints, _Ints] | None:
    """Return the same as ``_record_bounds`` where long runs of records have equal lengths; None: they have not.

    Numbers within records grow, so that even records with values of one size come in a few runs.
    """
    data = np.frombuffer(raw, np.uint8)
    bodies: list[_Ints] = []
    stops: list[_Ints] = []
    for begin, end, count in zip(begins, ends, counts, strict=True):
        position, left, short_runs = begin, count, 0
        while left:
            width = 1
            while raw[position + width - 1] > 0x7F and width < 5:
                width += 1
            bits = sum((raw[position + at] & 0x7F) << 7 * at for at in range(width))
            size = (bits >> 1) ^ -(bits & 1)
            most = min(left, (end - position) // (width + size)) if size > 0 else 0
            looked_at = min(most, RUN_RECORDS_MIN)
            run = _run(data, position, width, size, looked_at)
            while run == looked_at < most:
                looked_at = min(most, looked_at * RUN_GROWTH)
                run = _run(data, position, width, size, looked_at)
            short_runs += run < RUN_RECORDS_MIN
            if run == 0 or short_runs > SHORT_RUNS_MAX:
                return None
            body = (position + width) + (width + size) * np.arange(run)
            bodies.append(body)
            stops.append(body + size)
            position += (width + size) * run
            left -= run
        if position != end:
            return None
    return np.concatenate(bodies), np.concatenate(stops)


def _run(data: _Bytes, position: int, width: int, size: int, most: int) -> int:
    """Return how many records from ``position`` on, at most ``most``, begin with the same ``width`` bytes of length."""
    if most < 1:
        return 0
    each = width + size
    records = data[position : position + most * each].reshape(most, each)
    is_other = records[:, 0] != records[0, 0]
    for at in range(1, width):
        is_other |= records[:, at] != records[0, at]
    first = int(is_other.argmax())
    return first if is_other[first] else most


def _bytes_of_length(sizes: _Ints) -> _Ints:
    """Return how many bytes these lengths take where they are written as short as possible."""
    found = np.ones(len(sizes), np.int64)
    limit, longest = 1 << 6, int(sizes.max(initial=0))
    while limit <= longest:
        found += sizes >= limit
        limit <<= 7
    return found


def _follow(
    raw: bytes, begins: Sequence[int], ends: Sequence[int], counts: Sequence[int], place: str
) -> tuple[_Ints, _Ints]:
    """Return the same as ``_record_bounds``, one record after the other.

    Raises:
        CorruptionError: the records are not as many, or do not fill their batch.
    """
    bodies, stops = [], []
    for begin, end, count in zip(begins, ends, counts, strict=True):
        position = begin
        for number in range(count):
            size = shift = 0
            while True:
                if position >= end or shift > 28:
                    _refuse(place, position - begin, f"record {number} of {count} of a batch", "no length")
                byte = raw[position]
                position += 1
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            size = (size >> 1) ^ -(size & 1)
            if not 0 <= size <= end - position:
                _refuse(place, position - begin, f"record {number} of {count} of a batch", f"a length of {size}")
            bodies.append(position)
            position += size
            stops.append(position)
        if position != end:
            _refuse(place, position - begin, f"{count} records in {end - begin} bytes", f"{end - position} bytes more")
    return np.array(bodies, np.int64), np.array(stops, np.int64)


class _Cursor:
    """A place in each of many records, which all move on together from field to field.

    Bytes may be read after the end of a record, never after the end of ``data``, which must go on for ten bytes: what
    leads out of a record is refused.
    """

    def __init__(self, data: _Bytes, position: _Ints, end: _Ints, place: str) -> None:
        self._data, self._end, self._place = data, end, place
        self._words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
        """At each place the eight bytes from there on. To index it copies only what is asked for."""
        self.position = position
        self._word, self._bytes_left = np.empty(0, np.uint64), 0
        """What stands at ``position`` of each record, the first byte lowest, and how many bytes of it are there."""
        self._check()

    def numbers(self) -> _Ints:
        """Return the next number of each record, and advance past it."""
        value = self._short_numbers() if self._bytes_left else None
        if value is None:
            self._word, self._bytes_left = self._words[self.position], 8
            value = self._short_numbers()
        if value is None:
            self._bytes_left = 0
            value = self._long_numbers()
        self._check()
        return (value >> np.uint64(1)).view(np.int64) ^ -(value & np.uint64(1)).view(np.int64)

    def _short_numbers(self) -> _Words | None:
        """Return the next numbers, read from the bytes at hand; None: some go on after these."""
        word = self._word
        byte = word & np.uint64(0xFF)
        if int(byte.max(initial=0)) <= 0x7F:
            self._advance(np.uint64(8), 1, 1)
            return byte
        last = ~word & _HIGH_BITS
        last &= ~last + np.uint64(1)  # the bit that is not set in the last byte of the number
        least, most = int(last.min()), int(last.max())
        if least == 0 or most >= 1 << 8 * self._bytes_left:
            return None
        bytes_max = most.bit_length() // 8
        bits = word & (last - np.uint64(1))
        value = bits & np.uint64(0x7F)
        for at in range(1, bytes_max):
            value |= (bits >> np.uint64(at)) & np.uint64(0x7F << 7 * at)
        if least == most:
            self._advance(np.uint64(8 * bytes_max), bytes_max, bytes_max)
            return value
        size = np.ones(len(word), np.int64)
        for at in range(1, bytes_max):
            size += last > np.uint64(1 << 8 * at)
        self._advance((size << 3).view(np.uint64), size, bytes_max)
        return value

    def _advance(self, bits: np.uint64 | _Words, size: int | _Ints, bytes_max: int) -> None:
        """Advance by ``size`` bytes, which are ``bits``: at most ``bytes_max`` bytes."""
        self.position = self.position + size
        self._bytes_left -= bytes_max
        if self._bytes_left:
            self._word = self._word >> bits

    def _long_numbers(self) -> _Words:
        """Return the next numbers, of which some may have ten bytes."""
        byte = self._data[self.position]
        self.position = self.position + 1
        value = (byte & 0x7F).astype(np.uint64)
        rows = np.arange(len(byte))
        shift = 7
        while (goes_on := byte > 0x7F).any():
            if shift > 63:
                _refuse(self._place, 0, "numbers of at most ten bytes", "a longer one")
            rows = rows[goes_on]
            at = self.position[rows]
            byte = self._data[at]
            value[rows] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
            self.position[rows] = at + 1
            shift += 7
        return value

    def bytes_column(self, raw: bytes) -> pa.Array:
        """Return the next bytes of each record, null where their length is -1, and advance past them."""
        begin, size, is_null = self.skip_bytes()
        if is_null.all():
            return pa.nulls(len(begin), pa.large_binary())
        return _cut_out(raw, begin, size, is_null)

    def skip_bytes(self) -> tuple[_Ints, _Ints, npt.NDArray[np.bool_]]:
        """Return begin and size of the next bytes of each record, and whether they are null; advance past them."""
        size = self.numbers()
        is_null = size == -1
        if is_null.all():
            return self.position, np.zeros(len(size), np.int64), is_null
        if (size < -1).any():
            _refuse(self._place, 0, "a length of bytes", f"{size.min()}")
        size[is_null] = 0
        begin = self.position
        if (size > self._end - begin).any():
            _refuse(self._place, 0, "bytes within their record", f"a length of {size.max()}")
        self.position, self._bytes_left = begin + size, 0
        return begin, size, is_null

    def headers_column(self, raw: bytes) -> pa.Array:
        """Return the headers of each record. Each step takes the next header of every record that has one more."""
        counts = self.numbers()
        if (counts < 0).any() or counts.max(initial=0) > HEADERS_MAX:
            _refuse(self._place, 0, f"at most {HEADERS_MAX} headers", f"{counts.max()} or {counts.min()}")
        found: list[tuple[Any, ...]] = []
        rows = np.flatnonzero(counts)
        steps = _Cursor(self._data, self.position[rows], self._end[rows], self._place)
        while len(rows):
            key, value = steps.skip_bytes(), steps.skip_bytes()
            found.append((rows, *key, *value))
            more = counts[rows] > len(found)
            rows = rows[more]
            steps = _Cursor(self._data, steps.position[more], steps._end[more], self._place)
        offsets = pa.array(np.concatenate(([0], np.cumsum(counts))))
        if not found:
            entries = pa.nulls(0, HEADERS_TYPE.value_type)
            return pa.LargeListArray.from_arrays(offsets, entries, type=HEADERS_TYPE)
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        _, key_begin, key_size, key_null, begin, size, is_null = (column[order] for column in columns)
        if key_null.any():
            _refuse(self._place, 0, "a name for each header", "null")
        keys = _texts(_cut_out(raw, key_begin, key_size, key_null))
        entries = pa.StructArray.from_arrays([keys, _cut_out(raw, begin, size, is_null)], ["key", "value"])
        return pa.LargeListArray.from_arrays(offsets, entries, type=HEADERS_TYPE)

    def _check(self) -> None:
        if (self.position > self._end).any():
            _refuse(self._place, 0, "fields within their record", "one that goes on after it")


def _cut_out(raw: bytes, begin: _Ints, size: _Ints, is_null: npt.NDArray[np.bool_]) -> pa.Array:
    """Return these bytes of ``raw``, which follow each other and do not overlap, as a column.

    Seen as one column, ``raw`` is what is wanted and what is between it in turn; of that every other value is taken.
    """
    count = len(begin)
    bounds = np.empty(2 * count + 1, np.int64)
    bounds[0:-1:2] = begin
    np.add(begin, size, out=bounds[1::2])
    bounds[-1] = bounds[-2]
    everything = pa.Array.from_buffers(pa.large_binary(), 2 * count, [None, pa.py_buffer(bounds), pa.py_buffer(raw)])
    wanted = pa.array(np.arange(0, 2 * count, 2), mask=is_null if is_null.any() else None)
    return everything.take(wanted)


def _texts(column: pa.Array) -> pa.Array:
    """Return the texts in ``column``; bytes that are no UTF-8 become replacement characters."""
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        return pa.array([one.decode(errors="replace") for one in column.to_pylist()], pa.large_string())


def _avro_long(value: int) -> bytes:
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _refuse(place: str, position: int, expected: str, found: str) -> NoReturn:
    raise CorruptionError(place, position, expected, found)
