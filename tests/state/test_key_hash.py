"""The hash is frozen: these literal numbers must never change, and many short texts have the hash that each has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.text_words import MARGIN, WordText
from headgate.model.ids import key_groups_of_subtask
from headgate.operators.keys import partition
from headgate.state.key_hash import (
    BYTES_MAX,
    hash_column,
    hash_columns,
    hash_short_texts,
    is_key_type,
    key_groups,
    owned_rows,
    value_hash,
)

ZERO, ONE = 16294208416658607535, 10451216379200822465
NULL = 7959387129361299745


def hashes(column: pa.Array) -> list[int]:
    return [int(value) for value in hash_column(column)]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (
            pa.array([0, 1, -1, 2**63 - 1, -(2**63)], pa.int64()),
            [ZERO, ONE, 16490336266968443936, 3055647633038352039, 5196802822362493915],
        ),
        (pa.array([0.0, -0.0, 1.5, float("nan")]), [ZERO, ZERO, 15481881892811333770, 14351126860892846918]),
        (pa.array([False, True]), [ZERO, ONE]),
        (
            pa.array(["", "a", "service-1", "ü"], pa.large_string()),
            [3244421341483603138, 16629034431890738719, 9700308196550913307, 6748675957732712302],
        ),
        (pa.array([0, 1_700_000_000_000_000]).view(pa.timestamp("us")), [ZERO, 13238526803727093263]),
        (pa.array([0, 1_700_000_000_000_000]).view(pa.timestamp("us", "UTC")), [ZERO, 13238526803727093263]),
        (pa.array([1, None]).view(pa.timestamp("ns")), [ONE, NULL]),
        (pa.array([1, None]).view(pa.duration("us")), [ONE, NULL]),
        (pa.array([1, None], pa.int32()).view(pa.date32()), [ONE, NULL]),
        (pa.array([True, None]), [ONE, NULL]),
        (pa.array([1, None], pa.int64()), [ONE, NULL]),
        (pa.array(["a", None], pa.large_string()), [16629034431890738719, NULL]),
    ],
)
def test_the_test_vectors_hold(column: pa.Array, expected: list[int]) -> None:
    assert hashes(column) == expected


def test_several_columns_combine_in_their_order() -> None:
    batch = pa.record_batch({"a": pa.array([1, 2]), "b": pa.array(["x", None], pa.large_string())})
    assert hash_columns(batch, ["a", "b"]).tolist() == [5413852867195540751, 8629754344660641080]
    assert hash_columns(batch, ["b", "a"]).tolist() == [16753526313277791708, 15319502397696244310]


@pytest.mark.parametrize("dtype", [pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint64(), pa.date32()])
def test_equal_numbers_hash_equal_in_every_width(dtype: pa.DataType) -> None:
    assert hashes(pa.array([0, 1], pa.int32()).cast(dtype)) == [ZERO, ONE]


def test_strings_and_binaries_of_equal_bytes_and_any_slice_hash_equal() -> None:
    text = pa.array(["x", "a", None, "a"], pa.large_string())
    assert hashes(text.cast(pa.large_binary())) == hashes(text)
    assert hashes(text.slice(1, 2)) == hashes(text)[1:3]
    numbers = pa.array([5, 1, None, 0])
    assert hashes(numbers.slice(1)) == [ONE, NULL, ZERO]


def test_every_nan_hashes_equal() -> None:
    negative = np.array([0xFFF8000000000001], np.uint64).view(np.float64)
    assert hashes(pa.array(negative)) == hashes(pa.array([float("nan")]))


def test_key_groups_are_frozen_for_powers_of_two_and_others() -> None:
    eight = hash_column(pa.array(range(8)))
    assert key_groups(eight, 128).tolist() == [47, 65, 78, 109, 74, 90, 0, 87]
    assert key_groups(eight, 100).tolist() == [35, 65, 10, 53, 78, 18, 92, 87]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 4, 7, 128])
def test_partition_sends_every_row_to_the_owner_of_its_key_group_in_order(parallelism: int) -> None:  # KG8
    batch = pa.record_batch({"key": pa.array(range(500)), "row": pa.array(range(500))})
    parts = partition(batch, ["key"], 128, parallelism)
    groups = key_groups(hash_columns(batch, ["key"]), 128).tolist()
    expected: list[list[int]] = [[] for _ in range(parallelism)]
    for row, group in enumerate(groups):
        expected[group * parallelism // 128].append(row)
    assert [[] if p is None else p.column("row").to_pylist() for p in parts] == expected
    for i, rows in enumerate(expected):
        owned = owned_rows(batch, ["key"], 128, parallelism, i)
        assert owned.column("row").to_pylist() == rows
        assert all(groups[row] in key_groups_of_subtask(i, 128, parallelism) for row in rows)


@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_a_batch_with_one_destination_is_not_copied(parallelism: int) -> None:
    batch = pa.record_batch({"key": pa.array([7, 7, 7])})
    assert [p for p in partition(batch, ["key"], 128, parallelism) if p is not None] == [batch]
    assert any(p is batch for p in partition(batch, ["key"], 128, parallelism))
    assert partition(batch.slice(0, 0), ["key"], 128, parallelism) == [None] * parallelism


def test_lists_and_structs_are_no_keys() -> None:
    assert is_key_type(pa.duration("us"))
    assert not is_key_type(pa.large_list(pa.int64()))


@given(st.sampled_from([pa.int64(), pa.uint64(), pa.int8()]), st.data())
def test_one_number_hashes_as_a_column_of_it(dtype: pa.DataType, data: st.DataObject) -> None:
    limits = np.iinfo(dtype.to_pandas_dtype())
    value = data.draw(st.integers(int(limits.min), int(limits.max)))
    found = value_hash(dtype)
    assert found is not None
    assert found(value) == int(hash_column(pa.array([value], dtype))[0])


@given(st.text())
def test_one_text_hashes_as_a_column_of_it(value: str) -> None:
    found = value_hash(pa.large_string())
    assert found is not None
    assert found(value) == int(hash_column(pa.array([value], pa.large_string()))[0])
    assert value_hash(pa.float64()) is None


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
