"""Compressed records: as Kafka's clients frame them, bounded, and with one error for what is damaged."""

from __future__ import annotations

import contextlib
import gzip
import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.kafka import compression
from headgate.codec.kafka.compression import Compression, UnreadableError, compress, decompress

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
    monkeypatch.setattr(compression, "DECOMPRESSED_BYTES_MAX", 3_000_000)
    with pytest.raises(UnreadableError, match="3000000 are read at most"):
        decompress(codec, packed)
    monkeypatch.setattr(compression, "DECOMPRESSED_BYTES_MAX", 3_000_001)
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
