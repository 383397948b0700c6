"""Data frames: every element survives the wire; every damage is noticed; nothing else gets through."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec import frames
from headgate.codec.frames import (
    CONTROL_PAYLOAD_BYTES_MAX,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    Barrier,
    BatchEncoder,
    Buffer,
    Cancel,
    Element,
    EndOfData,
    FrameKind,
    Idle,
    Watermark,
    batch_element,
    control_element,
    control_frame,
    decode_batch,
    decode_header,
    encode_header,
    schema_fingerprint,
)
from headgate.codec.handshake import TAG_BYTES, FrameMac
from headgate.errors import CorruptionError, ProtocolViolation
from headgate.model.config import CheckpointKind, CheckpointOptions
from headgate.model.ids import CheckpointId
from headgate.protocol.loop_prober import Probe

SCHEMA = pa.schema([("key", pa.large_string()), ("value", pa.int64())])
SAVEPOINT = CheckpointOptions(CheckpointKind.SAVEPOINT, target="s3://bucket/before the change")
CONTROL = [
    Barrier(CheckpointId(7)),
    Barrier(CheckpointId(8), SAVEPOINT),
    Cancel(CheckpointId(1)),
    Watermark(-5),
    Idle(True),
    Idle(False),
    EndOfData(),
    Probe(1),
    Probe(1 << 40, 7, is_closing=True, is_last_watermark=True),
]


def batch_of(rows: int) -> pa.RecordBatch:
    return pa.record_batch([[f"k{i}" for i in range(rows)], list(range(rows))], schema=SCHEMA)


def frame_of(batch: pa.RecordBatch) -> tuple[bytes, list[Buffer]]:
    parts = BatchEncoder(batch.schema).encode(batch)
    return encode_header(FrameKind.BATCH, 3, 2, 9, batch.num_rows, parts), parts


def joined(parts: list[Buffer]) -> bytes:
    return b"".join(bytes(part) for part in parts)


@pytest.mark.parametrize("element", CONTROL, ids=str)
def test_a_control_element_survives_the_wire(element: Element) -> None:
    kind, value, parts = control_frame(element)
    header = decode_header(encode_header(kind, 4, 1, 0, value, parts))
    assert header[:5] == (kind, 4, 1, 0, value)
    assert control_element(header, joined(parts)) == element


def test_a_control_frame_carries_a_message_not_packed_bits() -> None:
    _, value, parts = control_frame(Barrier(CheckpointId(7), SAVEPOINT))
    options = {"kind": "savepoint", "alignment": "aligned", "target": "s3://bucket/before the change", "is_last": False}
    assert (value, msgspec.msgpack.decode(joined(parts))) == (0, {"checkpoint": 7, "options": options})


@given(st.integers(0, 300), st.integers(0, 50), st.integers(0, 300))
def test_a_batch_or_slice_survives_the_wire_at_the_cost_its_sender_paid(rows: int, offset: int, length: int) -> None:
    batch = batch_of(rows).slice(offset, length)
    raw, parts = frame_of(batch)
    header = decode_header(raw)
    payload = pa.py_buffer(joined(parts))
    element = decode_batch(header, payload, SCHEMA)
    assert element.batch.equals(batch)
    assert element.size_bytes == len(payload) == batch_element(batch).size_bytes


def test_one_encoder_encodes_many_batches_and_a_slice_sends_only_what_it_shows() -> None:
    encoder = BatchEncoder(SCHEMA)
    whole, part = encoder.encode(batch_of(10_000)), encoder.encode(batch_of(10_000).slice(5, 10))
    assert len(joined(whole)) > 100_000
    assert len(joined(part)) < 1_000
    assert len(joined(encoder.encode(batch_of(10_000)))) == len(joined(whole))


def test_neither_encoding_nor_decoding_copies_the_columns() -> None:
    batch = pa.record_batch({"value": np.arange(50_000)})
    raw, parts = frame_of(batch)
    column = batch.column(0).buffers()[1]
    assert column.address in [part.address for part in parts if isinstance(part, pa.Buffer)]
    payload = pa.allocate_buffer(len(joined(parts)))
    memoryview(payload).cast("B")[:] = joined(parts)
    received = decode_batch(decode_header(raw), payload, batch.schema).batch.column(0).buffers()[1]
    assert payload.address <= received.address < payload.address + payload.size


@given(st.data())
def test_any_flipped_bit_in_a_frame_is_noticed(data: st.DataObject) -> None:
    raw, parts = frame_of(batch_of(20))
    frame = bytearray(raw + joined(parts))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises((CorruptionError, ProtocolViolation)):
        decode_batch(decode_header(frame), pa.py_buffer(bytes(frame[HEADER_BYTES:])), SCHEMA)


@given(st.data())
def test_any_flipped_bit_in_a_control_frame_is_noticed(data: st.DataObject) -> None:
    kind, value, parts = control_frame(Barrier(CheckpointId(3), SAVEPOINT))
    frame = bytearray(encode_header(kind, 0, 1, 5, value, parts) + joined(parts))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises((CorruptionError, ProtocolViolation)):
        control_element(decode_header(frame), frame[HEADER_BYTES:])


@given(st.binary(max_size=200))
def test_random_bytes_are_no_header(raw: bytes) -> None:
    with pytest.raises((CorruptionError, ProtocolViolation)):
        decode_header(raw)


@given(st.binary(max_size=400), st.integers(0, 40))
def test_random_payloads_with_a_right_checksum_are_refused_without_harm(junk: bytes, at: int) -> None:
    payload = bytearray(joined(frame_of(batch_of(20))[1]))
    payload[at : at + len(junk)] = junk
    header = decode_header(encode_header(FrameKind.BATCH, 0, 1, 0, 20, [bytes(payload)]))
    try:
        element = decode_batch(header, pa.py_buffer(bytes(payload)), SCHEMA)
    except ProtocolViolation:
        return
    assert element.batch.num_rows == 20


@pytest.mark.parametrize("size", [PAYLOAD_BYTES_MAX + 1, 1 << 63, (1 << 64) - 1])
def test_an_oversized_length_is_refused_before_anything_is_allocated(size: int) -> None:
    raw = bytearray(encode_header(FrameKind.BATCH, 0, 1, 0, 1, [b"x"]))
    raw[32:40] = size.to_bytes(8, "little")
    raw[48:56] = xxhash.xxh3_64_intdigest(bytes(raw[:48])).to_bytes(8, "little")
    with pytest.raises(ProtocolViolation, match=f"announced {size} payload bytes"):
        decode_header(raw)


def test_another_version_and_an_unknown_kind_are_refused_by_name() -> None:
    raw = bytearray(encode_header(FrameKind.END, 0, 1, 0, 0))
    raw[2] = 9
    with pytest.raises(ProtocolViolation, match="version 9"):
        decode_header(raw)
    with pytest.raises(ProtocolViolation, match="unknown kind 99"):
        decode_header(encode_header(99, 0, 1, 0, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "value"),
    [(FrameKind.CANCEL, -1), (FrameKind.IDLE, 2), (FrameKind.END, 1)],
)
def test_an_impossible_value_is_refused(kind: FrameKind, value: int) -> None:
    with pytest.raises(ProtocolViolation, match=f"impossible value {value}"):
        control_element(decode_header(encode_header(kind, 0, 1, 0, value)))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(FrameKind.END, b"x"), (FrameKind.BARRIER, b""), (FrameKind.PROBE, bytes(CONTROL_PAYLOAD_BYTES_MAX + 1))],
)
def test_a_payload_that_its_kind_cannot_have_is_refused(kind: FrameKind, payload: bytes) -> None:
    with pytest.raises(ProtocolViolation, match=f"announced {len(payload)} payload bytes for kind {int(kind)}"):
        decode_header(encode_header(kind, 0, 1, 0, 0, [payload] if payload else []))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (FrameKind.BARRIER, {"checkpoint": 0}),
        (FrameKind.BARRIER, {"checkpoint": "7"}),
        (FrameKind.BARRIER, {"checkpoint": 7, "options": {"kind": "another"}}),
        (FrameKind.BARRIER, {}),
        (FrameKind.PROBE, {"number": 0}),
        (FrameKind.PROBE, {"number": 1, "round_": -2}),
        (FrameKind.PROBE, [1]),
    ],
)
def test_a_message_that_its_kind_cannot_have_is_refused(kind: FrameKind, message: object) -> None:
    payload = msgspec.msgpack.encode(message)
    header = decode_header(encode_header(kind, 0, 1, 0, 0, [payload]))
    with pytest.raises(ProtocolViolation, match=f"{kind.name}|impossible"):
        control_element(header, payload)


@given(st.binary(min_size=1, max_size=60))
def test_random_messages_with_a_right_checksum_are_refused_without_harm(junk: bytes) -> None:
    for kind in (FrameKind.BARRIER, FrameKind.PROBE):
        with contextlib.suppress(ProtocolViolation):
            control_element(decode_header(encode_header(kind, 0, 1, 0, 0, [junk])), junk)


def test_a_row_count_that_differs_from_the_header_is_refused() -> None:
    _, parts = frame_of(batch_of(5))
    header = decode_header(encode_header(FrameKind.BATCH, 0, 1, 0, 6, parts))
    with pytest.raises(ProtocolViolation, match="5 rows where its header says 6"):
        decode_batch(header, pa.py_buffer(joined(parts)), SCHEMA)


def test_a_batch_of_another_schema_is_refused_when_it_is_sent() -> None:
    with pytest.raises(ProtocolViolation, match="columns \\['other'\\]"):
        BatchEncoder(SCHEMA).encode(pa.record_batch({"other": [1]}))


def test_fingerprints_differ_by_name_type_and_order() -> None:
    schemas = [
        SCHEMA,
        pa.schema([SCHEMA.field(1), SCHEMA.field(0)]),
        pa.schema([("key", pa.large_string()), ("value", pa.int32())]),
        pa.schema([("key", pa.large_string()), ("amount", pa.int64())]),
    ]
    assert len({schema_fingerprint(schema) for schema in schemas}) == len(schemas)
    assert schema_fingerprint(pa.schema(list(SCHEMA))) == schema_fingerprint(SCHEMA)


def test_a_batch_larger_than_a_frame_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PAYLOAD_BYTES_MAX", 1_000)
    encoder = BatchEncoder(SCHEMA)
    with pytest.raises(ProtocolViolation, match=r"at most 1000: let the operator emit smaller batches"):
        encoder.encode(batch_of(200))
    assert sum(map(len, encoder.encode(batch_of(3)))) <= 1_000


KEY = bytes(range(32))


def parts(data: bytes, count: int) -> list[memoryview]:
    size = max(1, -(-len(data) // count))
    return [memoryview(data)[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [0, 1, 56, 32_768, 32_769, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_tag_is_gmac_however_the_block_is_cut(size: int, count: int) -> None:
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    mac = FrameMac(KEY)
    for number in range(3):
        expected = AESGCM(KEY).encrypt(number.to_bytes(12, "big"), b"", data)
        assert mac.tag(parts(data, count)) == expected
        assert len(expected) == TAG_BYTES


def test_the_same_block_has_another_tag_each_time_and_under_each_key() -> None:
    mac, other = FrameMac(KEY), FrameMac(KEY[::-1])
    block = [memoryview(b"block")]
    assert len({mac.tag(block), mac.tag(block), other.tag(block)}) == 3
