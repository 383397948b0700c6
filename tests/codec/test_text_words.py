"""Places of a text, eight bytes at a time, beside Python's own bytes."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.text_words import MARGIN, WordText, plain_numbers

ANY = st.binary(max_size=60)
PLAIN = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?")


def word_text(data: bytes) -> WordText:
    return WordText(np.frombuffer(data, np.uint8))


@given(ANY, st.integers(-8, 70))
def test_a_word_is_the_next_eight_bytes(data: bytes, at: int) -> None:
    at = min(at, len(data) + 8)
    found = word_text(data).words(np.array([MARGIN + at]))
    around = bytes(8) + data + bytes(80)
    assert int(found[0]) == int.from_bytes(around[8 + at : 16 + at], "little")


@given(ANY, st.binary(min_size=1, max_size=20), st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_a_text_is_compared_at_each_place(data: bytes, other: bytes, places: list[int]) -> None:
    around = data + bytes(100)
    for wanted in (other, around[places[0] :][: len(other)]):
        last = len(data) + MARGIN - len(wanted)  # nothing stands behind the margin
        expected = all(around[at : at + len(wanted)] == wanted and at <= last for at in places)
        assert word_text(data).has(wanted, np.array(places) + MARGIN) == expected
        assert not word_text(data).has(wanted, np.array([*places, -1]))


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=5), st.sampled_from(b'"\x01\xff\x00'))
def test_a_byte_is_found_where_it_comes_next_in_front_of_the_end(texts: list[bytes], byte: int) -> None:
    ends = np.cumsum([len(text) for text in texts]) + MARGIN
    begins = np.concatenate(([MARGIN], ends[:-1]))
    found = word_text(b"".join(texts)).find(byte, begins, ends)
    expected = [text.find(bytes([byte])) for text in texts]
    if min(expected) >= 0:
        assert found is not None
        assert (found - begins).tolist() == expected
    elif found is not None:  # within the eight bytes in which one was looked for, it may be after the end
        inside = found < ends
        assert [at for at, is_in in zip(expected, inside.tolist(), strict=True) if is_in] == (found - begins)[
            inside
        ].tolist()
        assert all(at == -1 for at, is_in in zip(expected, inside.tolist(), strict=True) if not is_in)


NUMBER = st.one_of(
    st.integers(0, 10**17).map(str),
    st.integers(0, 10**5).map(str),
    st.floats(0, 10**5).map(lambda one: f"{one:.2f}"),
    st.text("0123456789.-e", max_size=9),
)


@given(st.lists(NUMBER, min_size=1, max_size=6), st.booleans())
def test_plain_numbers_are_read_and_no_others(texts: list[str], may_have_point: bool) -> None:
    data = ",".join(texts).encode()
    sizes = [len(text) for text in texts]
    begins = np.array([MARGIN + sum(sizes[:at]) + at for at in range(len(sizes))])
    found = plain_numbers(word_text(data), begins, begins + np.array(sizes), may_have_point=may_have_point)
    longest = max(sizes)
    has_point = any("." in text for text in texts)
    are_plain = all(PLAIN.fullmatch(text) for text in texts) and longest <= 16
    if not are_plain or (has_point and (not may_have_point or longest > 8)):
        assert found is None
        return
    assert found is not None
    assert found.size_max == longest
    decimals = found.decimals if found.decimals is not None else np.zeros(len(texts), np.int64)
    assert [int(text.replace(".", "")) for text in texts] == found.digits.tolist()
    assert [len(text.partition(".")[2]) for text in texts] == decimals.tolist()
