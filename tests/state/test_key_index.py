from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.state.key_index import WordIndex, frozen_keys, make_key_index, renumbered

INTS = st.one_of(st.integers(-20, 20), st.integers(0, 5_000), st.integers(-(2**63), 2**63 - 1))


@settings(max_examples=150)
@given(st.lists(st.lists(INTS, max_size=40), max_size=12))
def test_slots_are_dense_stable_and_lead_back_to_the_keys(batches: list[list[int]]) -> None:
    index, model = WordIndex(), dict[int, int]()
    for batch in batches:
        words = np.array(batch, np.int64)
        slots = index.slots(words)
        for word, slot in zip(batch, slots.tolist(), strict=True):
            assert model.setdefault(word, slot) == slot
        assert sorted(model.values()) == list(range(len(index)))
        assert index.words(slots).tolist() == batch


SMALL = st.integers(0, 3)


@given(st.lists(st.lists(st.tuples(INTS, SMALL, SMALL), max_size=40), max_size=8))
def test_slots_of_several_columns_are_dense_stable_and_lead_back(batches: list[list[tuple[int, int, int]]]) -> None:
    index, model = make_key_index([pa.int64()] * 3), dict[tuple[int, ...], int]()
    for batch in batches:
        columns = [pa.array([key[i] for key in batch], pa.int64()) for i in range(3)]
        slots = index.slots(columns)
        for key, slot in zip(batch, slots.tolist(), strict=True):
            assert model.setdefault(key, slot) == slot
        assert sorted(model.values()) == list(range(len(index)))
        assert index.columns(slots) == columns


@pytest.mark.parametrize("spread", [1, 3, 2**40])
def test_many_keys_over_many_batches(spread: int) -> None:
    rng = np.random.default_rng(3)
    index, seen = WordIndex(), set[int]()
    for size in (10, 1_000, 30_000, 5):
        words = rng.integers(-50_000, 50_000, size) * spread
        slots = index.slots(words)
        seen.update(words.tolist())
        assert len(index) == len(seen)
        assert (index.words(slots) == words).all()
    assert set(index.prefix().tolist()) == seen


def test_a_direct_table_stays_small_where_keys_are_few_and_far_apart() -> None:
    index = WordIndex()
    for word in range(0, 2**40, 2**36):
        index.slots(np.array([word]))
    assert len(index._table) <= 4_096
    assert len(index) == 16


COLUMNS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int32(), [3, -1, 3, 0]),
    (pa.uint64(), [2**64 - 1, 0, 2**64 - 1, 7]),
    (pa.float32(), [1.5, 0.0, 1.5, -2.0]),
    (pa.bool_(), [True, False, True, False]),
    (pa.timestamp("us"), [5, 6, 5, 7]),
    (pa.date32(), [5, 6, 5, 7]),
    (pa.duration("us"), [5, 6, 5, 7]),
    (pa.large_string(), ["a", "", "a", "ü"]),
    (pa.large_binary(), [b"a", b"", b"a", b"\xff"]),
]


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("first", range(len(COLUMNS)))
def test_keys_of_every_type_and_number_of_columns_come_back(first: int, width: int) -> None:
    chosen = [COLUMNS[(first + i) % len(COLUMNS)] for i in range(width)]
    columns = [pa.array(values, dtype) for dtype, values in chosen]
    index = make_key_index([dtype for dtype, _ in chosen])
    slots = index.slots(columns)
    assert slots[0] == slots[2]
    assert all(a.equals(b) for a, b in zip(index.columns(slots), columns, strict=True))
    frozen = frozen_keys(index)
    index.slots([column.slice(1).take(pa.array([2, 0])) for column in columns])
    assert all(a.equals(b) for a, b in zip(frozen.columns(slots), columns, strict=True))
    firsts = [column.take(pa.array(np.unique(slots, return_index=True)[1])) for column in columns]
    assert all(a.equals(b) for a, b in zip(frozen.columns(), firsts, strict=True))


def test_frozen_keys_do_not_see_later_keys() -> None:
    for dtype, more in ((pa.int64(), [4, 5]), (pa.large_string(), ["x", "y"])):
        index = make_key_index([dtype])
        index.slots([pa.array(more[:1], dtype)])
        frozen = frozen_keys(index)
        index.slots([pa.array(more, dtype)])
        assert frozen.columns()[0].to_pylist() == more[:1]
        assert frozen_keys(index).columns()[0].to_pylist() == more


def test_keys_of_text_in_many_chunks_come_in_the_order_of_the_slots() -> None:
    index = make_key_index([pa.large_string()])
    names: list[str] = []
    random = np.random.default_rng(7)
    for size in (0, 50, 3, 1, 1, 20, 1, 7):
        more = [f"key {len(names) + i}" for i in range(size)]
        index.slots([pa.array([*names[:2], *more], pa.large_string())])
        names += more
        for count in (0, 1, 200):
            slots = random.integers(0, len(names), count) if names else np.empty(0, np.int64)
            frozen = frozen_keys(index)
            (found,) = index.columns(slots)
            assert (found.type, found.to_pylist()) == (pa.large_string(), [names[slot] for slot in slots])
            assert frozen.columns()[0].to_pylist() == frozen_keys(index).columns()[0].to_pylist() == names


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("apart", [1, 1 << 40])
def test_keys_that_stay_are_found_in_the_order_of_their_new_slots(width: int, apart: int) -> None:
    types = [pa.int64()] * width
    index = make_key_index(types)
    for start in range(0, 4_000, 100):
        numbers = np.arange(start, start + 100)
        index.slots([pa.array(numbers % 1_000), pa.array(numbers * apart)][-width:])
    kept = np.arange(0, 4_000, 3)
    made, order = renumbered(index, types, kept)
    assert sorted(order.tolist()) == kept.tolist()
    assert made.columns(np.arange(len(made))) == index.columns(order)


TEXTS = st.one_of(
    st.sampled_from([b"", b"\0", b"\0\0", b"a", b"a\0", b"a" * 7, b"a" * 8, b"a" * 8 + b"\0", b"a" * 14, b"a" * 15]),
    st.sampled_from([b"a" * 15 + b"\0", b"a" * 16, b"b" * 40, b"\xff" * 15, b"\xff" * 16, b"\xff" * 8]),
    st.binary(max_size=20),
)


@pytest.mark.parametrize("dtype", [pa.large_binary(), pa.binary()])
@given(batches=st.lists(st.lists(TEXTS, max_size=30), max_size=6), first=st.integers(0, 3))
def test_short_and_long_texts_are_told_apart_and_lead_back(
    dtype: pa.DataType, batches: list[list[bytes]], first: int
) -> None:
    index, model = make_key_index([dtype]), dict[bytes, int]()
    for batch in batches:
        column = pa.array([b"before"] * first + batch, dtype).slice(first)
        slots = index.slots([column])
        for key, slot in zip(batch, slots.tolist(), strict=True):
            assert model.setdefault(key, slot) == slot
        assert sorted(model.values()) == list(range(len(index)))
        assert index.columns(slots) == [column]


@pytest.mark.parametrize("dtype", [pa.large_string(), pa.string()])
def test_many_texts_of_several_lengths_keep_their_slots(dtype: pa.DataType) -> None:
    index = make_key_index([dtype])
    texts = [f"{'ü' * (n % 12)}{n}" for n in range(30_000)]
    column = pa.array(texts, dtype)
    slots = index.slots([column])
    assert len(index) == len(set(texts)) == len(set(slots.tolist()))
    assert index.slots([column.take(pa.array(np.arange(29_999, -1, -1)))]).tolist() == slots[::-1].tolist()
    assert index.columns(slots[::7]) == [column.take(pa.array(np.arange(0, 30_000, 7)))]
