"""Partitions of keys: hashes that Kafka's clients in Java give, and the plain algorithm as the judge."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.kafka.partitioner import murmur2, partitions_of_keys

OF_JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
"""From the tests of Kafka (``UtilsTest.testMurmur2``)."""


def plain(data: bytes) -> int:
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    found = 0x9747B28C ^ len(data)
    whole = len(data) // 4 * 4
    for begin in range(0, whole, 4):
        word = int.from_bytes(data[begin : begin + 4], "little") * m & mask
        word = (word ^ word >> 24) * m & mask
        found = found * m & mask ^ word
    if rest := data[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * m & mask
    found = (found ^ found >> 13) * m & mask
    return found ^ found >> 15


def test_hashes_are_those_of_java() -> None:
    found = murmur2(pa.array(list(OF_JAVA), pa.binary())).view("int32").tolist()
    assert found == list(OF_JAVA.values())


@given(st.lists(st.none() | st.binary(max_size=40), max_size=30), st.integers(0, 5), st.integers(1, 100))
def test_plain_python_finds_the_same(keys: list[bytes | None], skipped: int, count: int) -> None:
    column = pa.array(keys, pa.large_binary())[skipped:]
    expected = [plain(key or b"") for key in keys[skipped:]]
    assert murmur2(column).tolist() == expected
    assert partitions_of_keys(column, count).tolist() == [(one & 0x7FFFFFFF) % count for one in expected]


def test_texts_are_keys() -> None:
    assert murmur2(pa.array(["foobar"])).view("int32").tolist() == [-790332482]
