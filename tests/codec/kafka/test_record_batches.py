"""Record batches in both directions: every shape of record, damage, and a reading in plain Python as the judge."""

from __future__ import annotations

import contextlib
import gzip
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.codec.kafka import record_batch, record_decoder
from headgate.codec.kafka.messages import AbortedTransaction
from headgate.codec.kafka.record_batch import (
    ABORT,
    APPEND_TIME,
    COMMIT,
    CONTROL,
    HEADER,
    HEADERS_TYPE,
    RECORDS,
    RECORDS_WITH_HEADERS,
    TRANSACTIONAL,
    BatchHeader,
    Compression,
    UnreadableError,
    compress,
    decompress,
)
from headgate.codec.kafka.record_decoder import decode_records, end_of
from headgate.codec.kafka.record_encoder import ProducerState, RecordTooLargeError, encode_records
from headgate.errors import CorruptionError, UsageError

START_MS = 1_764_000_000_000
PLACE = "partition 0 of topic 't'"


@dataclass(frozen=True)
class Record:
    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = field(default=())
    timestamp_ms: int = START_MS
    offset_delta: int | None = None


# -- a writer in plain Python, record by record ------------------------------------------------------------------------


def varint(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63) if value >= 0 else ((-value) << 1) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def plain_record(record: Record, delta: int, base_ms: int) -> bytes:
    body = b"\0" + varint(record.timestamp_ms - base_ms) + varint(delta) + sized(record.key) + sized(record.value)
    body += varint(len(record.headers))
    body += b"".join(sized(name.encode()) + sized(value) for name, value in record.headers)
    return varint(len(body)) + body


def sealed(base_offset: int, attributes: int, last_delta: int, count: int, records: bytes, **other: int) -> bytes:
    base_ms, last_ms = other.get("base_ms", START_MS), other.get("last_ms", START_MS)
    producer = other.get("producer_id", -1), other.get("producer_epoch", -1), other.get("sequence", -1)
    rest = struct.pack(">hiqqqhii", attributes, last_delta, base_ms, last_ms, *producer, count) + records
    return struct.pack(">qiibI", base_offset, len(rest) + 9, -1, 2, crc32c(rest)) + rest


def plain_batch(records: Sequence[Record], base_offset: int = 0, attributes: int = 0, **other: int) -> bytes:
    deltas = [index if one.offset_delta is None else one.offset_delta for index, one in enumerate(records)]
    base_ms = other.setdefault("base_ms", records[0].timestamp_ms)
    data = b"".join(plain_record(one, delta, base_ms) for one, delta in zip(records, deltas, strict=True))
    return sealed(base_offset, attributes, deltas[-1], len(records), data, **other)


def marker(kind: int, offset: int, producer_id: int) -> bytes:
    record = Record(b"\0\0\0\0\0\0", struct.pack(">hh", 0, kind))
    return plain_batch([record], offset, TRANSACTIONAL | CONTROL, producer_id=producer_id)


# -- our side ----------------------------------------------------------------------------------------------------------


def encoded(records: Sequence[Record], **options: Any) -> bytes:
    """Return the batches of our encoder, with the offsets that a broker would give them."""
    headers = [[{"key": name, "value": value} for name, value in one.headers] for one in records]
    batches = encode_records(
        pa.array([one.value for one in records], pa.large_binary()),
        np.array([one.timestamp_ms for one in records], np.int64),
        pa.array([one.key for one in records], pa.large_binary()),
        pa.array(headers, HEADERS_TYPE) if any(headers) else None,
        **options,
    )
    offset, found = 0, b""
    for batch in batches:
        found += struct.pack(">q", offset) + b"".join(batch.parts)[8:]
        offset += batch.records_count
    return found


def batches_of(data: bytes, begin: int = 0, **options: Any) -> list[pa.RecordBatch]:
    found = [one.records for one in decode_records(data, begin, PLACE, **options)]
    assert not found or end_of(data, begin)[0] > found[-1].column("offset")[-1].as_py()
    return found


def decoded(data: bytes, begin: int = 0, **options: Any) -> list[tuple[int, Record]]:
    rows = []
    for batch in batches_of(data, begin, with_headers=True, **options):
        batch.validate(full=True)
        assert batch.schema == RECORDS_WITH_HEADERS
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        for row, time in zip(batch.to_pylist(), times, strict=True):
            headers = tuple((one["key"], one["value"]) for one in row["headers"])
            millis = -1 if time is None else time // 1000
            rows.append((row["offset"], Record(row["value"], row["key"], headers, millis)))
    return rows


def values(rows: Sequence[tuple[int, Record]]) -> list[bytes | None]:
    return [record.value for _, record in rows]


DATA = st.none() | st.binary(max_size=200) | st.integers(0, 20_000).map(bytes)
HEADERS = st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=70)), max_size=4).map(tuple)
TIMES = st.integers(START_MS - 10**12, START_MS + 10**12)
RECORD_LISTS = st.lists(st.builds(Record, DATA, DATA, HEADERS, TIMES), min_size=1, max_size=60)


@given(RECORD_LISTS, st.sampled_from(list(Compression)))
def test_what_is_encoded_comes_back(records: list[Record], codec: Compression) -> None:
    found = decoded(encoded(records, compression=codec, batch_bytes_max=100_000))
    assert found == list(enumerate(records))


@given(RECORD_LISTS)
@example([Record(bytes(63)), Record(bytes(64)), Record(bytes(8191)), Record(bytes(8192))])
@example([Record(b"a", timestamp_ms=at_ms) for at_ms in (0, 1 << 60, -(1 << 60), 1 << 54, 5)])
def test_plain_python_writes_the_same_bytes(records: list[Record]) -> None:
    deltas = range(len(records))
    base_ms = records[0].timestamp_ms
    expected = b"".join(plain_record(one, delta, base_ms) for delta, one in zip(deltas, records, strict=True))
    data = encoded(records, batch_bytes_max=1 << 30)
    assert data[HEADER.size :] == expected
    last_ms = max(one.timestamp_ms for one in records)
    assert data[:17] == plain_batch(records)[:17]
    assert data == plain_batch(records, last_ms=last_ms)


@given(RECORD_LISTS, st.integers(1, 30), st.booleans())
def test_what_plain_python_writes_is_read(records: list[Record], times: int, is_fast: bool) -> None:
    """Both ways of following the lengths of records find the same."""
    many = records * times
    data = plain_batch(many[: len(many) // 2 + 1]) + plain_batch(many, len(many))
    few = record_decoder.FEW_RECORDS
    record_decoder.FEW_RECORDS = 0 if is_fast else 1 << 30
    try:
        found = decoded(data, len(many))
    finally:
        record_decoder.FEW_RECORDS = few
    assert found == [(len(many) + index, one) for index, one in enumerate(many)]


def test_many_records_are_followed_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("followed in Python")

    monkeypatch.setattr(record_decoder, "_follow", never)
    records = [Record(bytes(size)) for size in range(0, 10_000, 7)]
    found = batches_of(encoded(records) + plain_batch(records, len(records)))
    assert sum(batch.num_rows for batch in found) == 2 * len(records)
    assert found[0].schema == RECORDS


@given(RECORD_LISTS, st.integers(0, 100))
@example([Record(None)], 68)
def test_a_last_batch_that_is_cut_off_waits_for_the_next_answer(records: list[Record], cut: int) -> None:
    first, second = plain_batch(records), plain_batch(records, len(records))
    cut %= len(second)
    data = (first + second)[: -cut - 1]
    assert end_of(data, 0)[0] == len(records)
    assert sum(batch.num_rows for batch in batches_of(data)) == len(records)
    assert batches_of(first[: -cut - 1], 5) == []
    assert end_of(first[: -cut - 1], 5) == (5, -1)


def test_records_in_front_of_what_was_asked_for_are_left_out() -> None:
    data = plain_batch([Record(b"%d" % number) for number in range(10)], 100)
    assert [offset for offset, _ in decoded(data, 104)] == list(range(104, 110))
    assert decoded(data, 110) == []
    assert end_of(data, 110)[0] == 110


def test_records_are_decoded_as_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_decoder, "GROUP_BYTES", 1)
    sound = plain_batch([Record(b"a")])
    found = decode_records(sound + plain_batch([Record(b"b")], 1)[:-1] + b"\1", 0, PLACE)
    assert next(found).records.column("value").to_pylist() == [b"a"]
    with pytest.raises(CorruptionError, match="checksum"):
        next(found)


def test_gaps_are_read_over() -> None:
    data = plain_batch([Record(b"a", offset_delta=3), Record(b"b", offset_delta=900)], 50)
    data += sealed(951, 0, 48, 0, b"")  # compaction leaves headers of batches without records
    assert batches_of(data, 50)[0].column("offset").to_pylist() == [53, 950]
    assert end_of(data, 50)[0] == 1_000


# -- transactions ------------------------------------------------------------------------------------------------------


def test_aborted_transactions_are_left_out_up_to_their_markers() -> None:
    def of(producer_id: int, offset: int) -> bytes:
        return plain_batch([Record(b"%d" % offset)], offset, TRANSACTIONAL, producer_id=producer_id)

    data = of(1, 0) + of(2, 1) + of(1, 2) + plain_batch([Record(b"3")], 3) + marker(ABORT, 4, 1) + of(1, 5)
    data += marker(COMMIT, 6, 2) + marker(COMMIT, 7, 1) + of(2, 8) + marker(ABORT, 9, 2) + of(2, 10)
    aborted = (AbortedTransaction(2, 8), AbortedTransaction(1, 0))
    assert values(decoded(data, aborted=aborted)) == [b"1", b"3", b"5", b"10"]
    assert values(decoded(data)) == [b"0", b"1", b"2", b"3", b"5", b"8", b"10"]
    assert end_of(data, 0)[0] == 11
    # a fetch in the middle of an aborted transaction names the transaction, which began before
    assert values(decoded(of(1, 2) + marker(ABORT, 4, 1), 2, aborted=(AbortedTransaction(1, 0),))) == []


def test_a_producer_outside_of_a_transaction_is_never_left_out() -> None:
    data = plain_batch([Record(b"a")], 0, 0, producer_id=1)
    assert values(decoded(data, aborted=(AbortedTransaction(1, 0),))) == [b"a"]


def test_producers_have_sequences_that_go_on_over_batches() -> None:
    state = ProducerState(7, 3, (1 << 31) - 2, True)
    data = encoded([Record(bytes(100))] * 6, producer=state, batch_bytes_max=400)
    sequences = []
    while data:
        header = BatchHeader._make(HEADER.unpack_from(data))
        assert (header.producer_id, header.producer_epoch, header.attributes) == (7, 3, TRANSACTIONAL)
        sequences.append((header.base_sequence, header.records_count))
        data = data[12 + header.batch_length :]
    assert sequences == [((1 << 31) - 2, 3), (1, 3)]


# -- times -------------------------------------------------------------------------------------------------------------


def test_times_of_the_broker_replace_those_of_records() -> None:
    data = plain_batch([Record(b"a"), Record(b"b", timestamp_ms=START_MS + 5)], attributes=APPEND_TIME, last_ms=77)
    assert [one.timestamp_ms for _, one in decoded(data)] == [77, 77]


def test_records_without_a_time_have_none() -> None:
    data = plain_batch([Record(b"a", timestamp_ms=-1), Record(b"b", timestamp_ms=5)])
    assert [one.timestamp_ms for _, one in decoded(data)] == [-1, 5]
    far = plain_batch([Record(b"a", timestamp_ms=(1 << 62)), Record(b"b", timestamp_ms=5)], base_ms=5)
    assert [one.timestamp_ms for _, one in decoded(far)] == [-1, 5]


# -- damage ------------------------------------------------------------------------------------------------------------


def outcome(data: bytes) -> list[pa.RecordBatch] | CorruptionError:
    """Return the records, or how they are refused."""
    try:
        return batches_of(data, with_headers=True)
    except CorruptionError as error:
        return error


@given(RECORD_LISTS, st.data())
def test_a_changed_byte_is_found(records: list[Record], data: st.DataObject) -> None:
    raw = bytearray(encoded(records))
    where = data.draw(st.integers(16, len(raw) - 1))
    raw[where] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptionError, match="is damaged at byte 0"):
        batches_of(bytes(raw))


@given(st.integers(0, 400), st.binary(max_size=2_000), st.integers(0, 7))
def test_any_bytes_under_a_right_checksum_are_read_or_refused(count: int, records: bytes, attributes: int) -> None:
    raw = sealed(0, attributes, max(0, count - 1), count, records)
    found = outcome(raw)
    if isinstance(found, CorruptionError):
        assert found.path.startswith(PLACE)
    else:
        assert sum(batch.num_rows for batch in found) == count


@given(RECORD_LISTS, st.integers(1, 20), st.data())
def test_damaged_records_under_a_right_checksum_are_read_or_refused(
    records: list[Record], times: int, data: st.DataObject
) -> None:
    many = records * times
    raw = bytearray(encoded(many, batch_bytes_max=1 << 30)[HEADER.size :])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    whole = sealed(0, 0, len(many) - 1, len(many), bytes(raw))
    found = outcome(whole)
    if not isinstance(found, CorruptionError):
        for batch in found:
            batch.validate(full=True)


RUNS = st.lists(
    st.tuples(st.integers(1, 90) | st.sampled_from([256, 600]), st.integers(0, 150)), min_size=1, max_size=8
)


@given(RUNS, st.data())
def test_runs_of_equal_lengths_are_read_or_refused_as_record_by_record(
    runs: list[tuple[int, int]], data: st.DataObject
) -> None:
    records = [Record(bytes([size % 7]) * size) for count, size in runs for _ in range(count)]
    raw = bytearray(encoded(records, batch_bytes_max=1 << 30)[HEADER.size :])
    for _ in range(data.draw(st.integers(0, 2))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    whole = sealed(0, 0, len(records) - 1, len(records), bytes(raw))
    found = []
    few, many = record_decoder.FEW_RECORDS, record_decoder.BATCH_RECORDS_MIN
    try:
        for record_decoder.FEW_RECORDS, record_decoder.BATCH_RECORDS_MIN in ((0, 0), (1 << 30, 1 << 30)):
            found.append(outcome(whole))
    finally:
        record_decoder.FEW_RECORDS, record_decoder.BATCH_RECORDS_MIN = few, many
    by_run, one_by_one = found
    if isinstance(by_run, CorruptionError) or isinstance(one_by_one, CorruptionError):
        assert str(by_run) == str(one_by_one)
    else:
        assert by_run == one_by_one


def test_long_runs_of_equal_lengths_are_not_followed_record_by_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("followed")

    monkeypatch.setattr(record_decoder, "_follow", never)
    monkeypatch.setattr(pl, "read_avro", never)
    records = [Record(b"%05d" % number * (20 if number < 5_000 else 11)) for number in range(10_000)]
    found = decoded(encoded(records) + plain_batch(records, len(records)))
    assert found == [(index, records[index % len(records)]) for index in range(2 * len(records))]


def test_many_short_runs_of_equal_lengths_are_not_looked_through_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given, read_avro = [], pl.read_avro

    def read(source: Any) -> pl.DataFrame:
        given.append(len(source.getvalue()))
        return read_avro(source)

    monkeypatch.setattr(pl, "read_avro", read)
    records = [Record(b"x" * (20 + number // 100 % 2)) for number in range(20_000)]
    assert [record for _, record in decoded(encoded(records))] == records
    assert given, "to look at each run of a hundred costs more than to follow the lengths"


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"\0" * 16 + b"\1" + b"\0" * 60, "of format 2, which is that of Kafka 0.11 and later, found format 1"),
        (b"\0" * 16 + b"\1" + b"\0" * 17, "found format 1"),
        (sealed(0, 0, -1, 1, b""), "a record batch"),
        (sealed(0, 0, 0, -1, b""), "-1 records"),
        (sealed(0, 5, 0, 1, bytes(7)), "a compression that is known, found number 5"),
        (sealed(0, 1, 0, 1, b"no gzip"), "gzip cannot decompress it"),
        (sealed(0, 0, 0, 2_000_000_000, bytes(14)), "2000000000 records, found 14 bytes"),
        (sealed(0, 0, 1, 1, plain_record(Record(b"a"), 0, START_MS) + bytes(3)), "3 bytes more"),
        (plain_batch([Record(b"a", offset_delta=1), Record(b"b", offset_delta=1)]), "offsets that grow"),
    ],
)
def test_what_is_wrong_is_said(raw: bytes, problem: str) -> None:
    with pytest.raises(CorruptionError) as caught:
        batches_of(raw)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(PLACE)


def test_names_of_headers_that_are_no_text_are_readable() -> None:
    body = b"\0\0\0" + varint(-1) + varint(0) + varint(1) + sized(b"a\xff") + sized(b"1")
    data = sealed(0, 0, 0, 1, varint(len(body)) + body)
    assert decoded(data)[0][1].headers == (("a\ufffd", b"1"),)


@pytest.mark.parametrize("header", [{"key": None, "value": b"v"}, None])
def test_a_header_without_a_name_is_refused(header: dict[str, Any] | None) -> None:
    headers = pa.array([[header]], HEADERS_TYPE)
    with pytest.raises(UsageError, match="a header for Kafka has no name"):
        encode_records(pa.array([b"a"], pa.large_binary()), np.array([0]), headers=headers)


def test_a_record_that_no_batch_can_have_is_refused() -> None:
    with pytest.raises(RecordTooLargeError) as found:
        encoded([Record(b"a"), Record(bytes(1_100_000)), Record(bytes(1_200_000))])
    assert found.value.row == 1
    assert 1_100_000 < found.value.size_bytes < 1_100_100


def test_no_batch_is_larger_than_it_may_be() -> None:
    batches = encode_records(
        pa.array([bytes(90)] * 1_000, pa.binary()), np.zeros(1_000, np.int64), batch_bytes_max=5_000
    )
    assert all(batch.size_bytes <= 5_000 for batch in batches)
    assert max(batch.size_bytes for batch in batches) > 4_700
    assert sum(batch.records_count for batch in batches) == 1_000


def test_texts_and_slices_are_values_and_keys() -> None:
    column = pa.array(["x", "a", None, "ä"])[1:]
    batches = encode_records(column, np.full(3, START_MS), column)
    found = decoded(b"".join(batches[0].parts))
    assert [(one.key, one.value) for _, one in found] == [(b"a", b"a"), (None, None), ("ä".encode(), "ä".encode())]
    assert encode_records(pa.array([], pa.binary()), np.zeros(0, np.int64)) == []


PACKED = [codec for codec in Compression if codec is not Compression.NONE]


@given(st.sampled_from(list(Compression)), st.binary(max_size=3_000), st.integers(1, 2_000))
def test_what_is_compressed_comes_back(codec: Compression, data: bytes, times: int) -> None:
    assert bytes(decompress(codec, compress(codec, data * times))) == data * times


@given(st.sampled_from(PACKED), st.binary(min_size=1, max_size=200), st.data())
def test_damaged_bytes_are_refused_or_read(codec: Compression, data: bytes, draw: st.DataObject) -> None:
    packed = bytearray(compress(codec, data))
    packed[draw.draw(st.integers(0, len(packed) - 1))] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(UnreadableError):
        decompress(codec, bytes(packed[: draw.draw(st.integers(0, len(packed)))]))


@pytest.mark.parametrize("codec", PACKED)
def test_what_becomes_too_large_is_refused(codec: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = compress(codec, bytes(3_000_001))
    monkeypatch.setattr(record_batch, "DECOMPRESSED_BYTES_MAX", 3_000_000)
    with pytest.raises(UnreadableError, match="3000000 are read at most"):
        decompress(codec, packed)
    monkeypatch.setattr(record_batch, "DECOMPRESSED_BYTES_MAX", 3_000_001)
    assert len(decompress(codec, packed)) == 3_000_001


def test_snappy_in_blocks_as_clients_in_java_write_it() -> None:
    blocks = [pa.compress(part, "snappy", asbytes=True) for part in (b"a" * 40_000, b"b" * 7)]
    framed = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
    framed += b"".join(struct.pack(">i", len(block)) + block for block in blocks)
    assert bytes(decompress(Compression.SNAPPY, framed)) == b"a" * 40_000 + b"b" * 7
    with pytest.raises(UnreadableError, match="a block of"):
        decompress(Compression.SNAPPY, framed[:-1])


def test_blocks_of_lz4_are_independent() -> None:
    """Brokers refuse blocks that refer to former ones."""
    packed = compress(Compression.LZ4, bytes(5_000_000))
    assert bytes(packed[:4]) == b"\x04\x22\x4d\x18"
    assert packed[4] & 0x20
    assert pa.CompressedInputStream(pa.BufferReader(packed), "lz4").read() == bytes(5_000_000)


def test_gzip_that_ends_early_is_refused() -> None:
    with pytest.raises(UnreadableError, match="cut off"):
        decompress(Compression.GZIP, gzip.compress(b"abc" * 1_000)[:-9])
