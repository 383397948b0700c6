"""Many short texts have the hash that each has by itself."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.text_words import MARGIN, WordText
from headgate.state.key_hash import hash_column
from headgate.state.text_hash import BYTES_MAX, hash_short_texts

SHORT = st.binary(max_size=BYTES_MAX)


def hashed(texts: list[bytes]) -> list[int]:
    places = MARGIN + np.cumsum([0, *map(len, texts)])
    found = hash_short_texts(WordText(np.frombuffer(b"".join(texts), np.uint8)), places[:-1], places[1:])
    return [int(one) for one in found]


@pytest.mark.parametrize("size", range(BYTES_MAX + 1))
def test_texts_of_every_size_alone_and_beside_others_have_their_hash(size: int) -> None:
    random = np.random.default_rng(size)
    texts = [random.bytes(size) for _ in range(50)]
    assert hashed(texts) == [xxhash.xxh3_64_intdigest(text) for text in texts]
    mixed = [*texts, b"", b"a", b"abcdef", b"0123456789abcdef"]
    assert hashed(mixed) == [xxhash.xxh3_64_intdigest(text) for text in mixed]


@given(st.lists(SHORT, min_size=1, max_size=80))
def test_any_short_texts_have_their_hash(texts: list[bytes]) -> None:
    assert hashed(texts) == [xxhash.xxh3_64_intdigest(text) for text in texts]


@given(st.lists(st.one_of(st.none(), st.text(max_size=6), st.text(max_size=20)), max_size=8), st.integers(0, 9))
def test_a_column_has_the_hash_of_its_texts_wherever_it_begins(some: list[str | None], first: int) -> None:
    texts = (some or [""]) * 60
    column = pa.array(texts, pa.large_string())
    alone = [None if text is None else xxhash.xxh3_64_intdigest(text.encode()) for text in texts]
    for dtype in (pa.large_string(), pa.large_binary(), pa.string(), pa.binary()):
        found = hash_column(column.cast(dtype).slice(first)).tolist()
        assert [a for a, b in zip(found, alone[first:], strict=True) if b is not None] == [
            b for b in alone[first:] if b is not None
        ]
