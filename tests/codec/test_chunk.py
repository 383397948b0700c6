"""The bytes of a chunk: frozen, and checked in every place."""

from __future__ import annotations

import pytest
import xxhash

from headgate.codec.chunk import ALIGNMENT, Footer, Part, PartEntry, decode_footer, encode_chunk, verify_part
from headgate.errors import CorruptionError

PARTS = [Part(0, 2, (b"first", b" part")), Part(3, 1, (b"x" * ALIGNMENT,))]
GOLDEN_DIGEST = "54bcc23024797796"


def whole() -> bytes:
    return b"".join(encode_chunk(7, PARTS).buffers)


def test_a_chunk_is_the_bytes_it_was_in_version_1() -> None:
    data = whole()
    assert data[:16] == b"HGCHUNK\n\x01\0\0\0\0\0\0\0"
    assert data.endswith(b"HGCEND\n\0")
    assert xxhash.xxh3_64_hexdigest(data) == GOLDEN_DIGEST


def test_footer_and_parts_come_back() -> None:
    encoded, data = encode_chunk(7, PARTS), whole()
    assert encoded.size_bytes == len(data)
    assert decode_footer("f", data) == Footer(7, encoded.entries)
    for part, entry in zip(PARTS, encoded.entries, strict=True):
        assert entry.offset % ALIGNMENT == 0
        payload = data[entry.offset : entry.offset + entry.size_bytes]
        assert payload == b"".join(part.payload)
        verify_part("f", entry, payload)


def test_every_cut_is_noticed() -> None:
    data = whole()
    for size in range(len(data)):
        with pytest.raises(CorruptionError):
            decode_footer("f", data[:size])


def test_every_flipped_bit_is_noticed_by_footer_or_part() -> None:
    entries, data = encode_chunk(7, PARTS).entries, whole()
    padding = set(range(16, ALIGNMENT)) | set(range(10, 16)) | set(range(ALIGNMENT + 10, 2 * ALIGNMENT))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 4
        try:
            assert decode_footer("f", bytes(damaged)) == Footer(7, entries)
            for entry in entries:
                verify_part("f", entry, bytes(damaged[entry.offset : entry.offset + entry.size_bytes]))
        except CorruptionError:
            continue
        assert at in padding


def test_another_version_is_refused() -> None:
    data = bytearray(whole())
    data[8] = 2
    with pytest.raises(CorruptionError, match="version 2"):
        decode_footer("f", bytes(data))


def test_a_part_of_other_bytes_is_refused_with_its_offset() -> None:
    entry = PartEntry(0, 1, 640, 3, 99)
    with pytest.raises(CorruptionError) as caught:
        verify_part("f", entry, b"abc")
    assert (caught.value.path, caught.value.offset) == ("f", 640)
