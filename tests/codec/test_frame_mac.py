"""The tag of a block depends on all its bytes, on its number and on the key, and on nothing else."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from headgate.codec.handshake import TAG_BYTES, FrameMac

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
