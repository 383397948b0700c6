"""Routing: its vectors may never change (S2), and in every layout a key has one segment, the one it always had."""

from __future__ import annotations

import struct
from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.storing import STREAM, database_of

from headgate.errors import UsageError
from headgate.protocol.store.layouts import KEY_SPACE, SEGMENTS_MAX, Layout, Segment, first_layout
from headgate.store.catalogue import tables as t
from headgate.store.routing import NULL_HASH, check_key_type, hash_column, hash_text, places_of, ranges_of, segments_of
from headgate.store.store import Store


def hashes(values: list[object], dtype: pa.DataType) -> list[str]:
    return [f"{h:016x}" for h in hash_column(pa.array(values, dtype)).tolist()]


TEXT = ["2d06800538d394c2", "e6c632b61e964e1f", "2d29f1336b0229f9", "03c124efb9a9b5b7", "9ae16a3b2f90404f"]
INTEGERS = [
    "e220a8397b1dcdaf",
    "910a2dec89025cc1",
    "e4d971771b652c20",
    "bdd732262feb6e95",
    "2a67d7552e039ea7",
    "481ec0a212a9f3db",
    "9ae16a3b2f90404f",
]
FLOATS = ["e220a8397b1dcdaf", "d6dab18e1392608a", "249e5410c2f97d99", "c72971d82e15bb46", "9ae16a3b2f90404f"]
SEGMENTS_4 = [2, 2, 3, 0, 3, 2, 2, 3, 3, 1, 3, 1, 3, 3, 2, 1]
SEGMENTS_7 = [5, 3, 5, 1, 6, 3, 4, 6, 5, 2, 5, 3, 5, 6, 5, 3]


def test_frozen_vectors_of_text() -> None:  # S2
    assert hashes(["", "a", "key-1", "zürich", None], pa.large_string()) == TEXT


def test_frozen_vectors_of_integers() -> None:  # S2
    assert hashes([0, 1, -1, 42, 2**63 - 1, -(2**63), None], pa.int64()) == INTEGERS


def test_frozen_vectors_of_floats() -> None:  # S2
    assert hashes([0.0, 1.5, float("inf"), float("nan"), None], pa.float64()) == FLOATS


def test_frozen_segments() -> None:  # S2
    column = pa.array([f"k{i}" for i in range(16)], pa.large_string())
    assert segments_of(column, 1).tolist() == [0] * 16
    assert segments_of(column, 4).tolist() == SEGMENTS_4
    assert segments_of(column, 7).tolist() == SEGMENTS_7


@pytest.mark.parametrize("dtype", [pa.int8(), pa.int32(), pa.uint16(), pa.uint64(), pa.duration("us")])
def test_a_number_hashes_alike_in_every_width(dtype: pa.DataType) -> None:
    assert hashes([0, 7, 100, None], dtype) == hashes([0, 7, 100, None], pa.int64())


def test_text_hashes_alike_in_every_encoding() -> None:
    values: list[object] = ["a", None, "b", "a"]
    expected = hashes(values, pa.large_string())
    assert hashes(values, pa.string()) == expected
    assert hashes([b"a", None, b"b", b"a"], pa.large_binary()) == expected
    assert hash_text("a") == int(expected[0], 16)


def test_zeros_and_nans_are_each_one_value() -> None:
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    assert len(set(hashes([0.0, -0.0], pa.float64()))) == 1
    assert len(set(hashes([float("nan"), odd_nan], pa.float64()))) == 1
    assert hashes([1.5], pa.float32()) == hashes([1.5], pa.float64())


def test_nulls_and_slices() -> None:  # S2
    column = pa.array(["x", None, "y", "z", None, "y"], pa.large_string())
    assert hash_column(column.slice(2, 3)).tolist() == hash_column(column).tolist()[2:5]
    assert hash_column(pa.array([None, None], pa.int64())).tolist() == [NULL_HASH] * 2
    assert hash_column(pa.array([True, None, False])).tolist()[1] == NULL_HASH
    assert hash_column(pa.array([], pa.large_string())).tolist() == []
    times = pa.array([datetime(2020, 1, 1), None], pa.timestamp("us"))
    assert hash_column(times).tolist()[1] == NULL_HASH


def test_keys_spread_evenly() -> None:
    column = pa.array([f"user-{i}" for i in range(20_000)], pa.large_string())
    counts = [segments_of(column, 8).tolist().count(s) for s in range(8)]
    assert min(counts) > 2_300
    assert max(counts) < 2_700


def test_the_places_of_keys_lie_in_the_ranges_of_their_segments() -> None:
    column = pa.array([f"k{i}" for i in range(16)], pa.large_string())
    lows = [segment.key_low for segment in first_layout(7).segments]
    assert ranges_of(column, lows).tolist() == SEGMENTS_7
    place = int(places_of(column)[0])
    assert ranges_of(column.slice(0, 1), [0, place, place + 1]).tolist() == [1], "a range begins with its first place"


def test_types_without_a_frozen_hash_are_refused() -> None:
    for dtype in (pa.string(), pa.large_binary(), pa.int8(), pa.bool_(), pa.date32(), pa.timestamp("us"), pa.float32()):
        check_key_type(dtype, "key")
    with pytest.raises(UsageError, match="cannot be a routing key"):
        check_key_type(pa.large_list(pa.int64()), "tags")


@given(st.integers(1, SEGMENTS_MAX), st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=50))
def test_the_first_layout_says_where_events_are_routed_to(count: int, keys: list[int]) -> None:  # S2, CT6
    layout = first_layout(count)
    assert layout.problems() == []
    column = pa.array(keys, pa.int64())
    lows = [segment.key_low for segment in layout.present]
    by_layout = np.searchsorted(lows, (hash_column(column) >> np.uint64(32)).astype(np.int64), side="right") - 1
    assert by_layout.tolist() == segments_of(column, count).tolist()


HALF = KEY_SPACE // 2


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (Layout(0, ()), "up to 0"),
        (Layout(0, (Segment(0, 0, HALF),)), f"up to {HALF}"),
        (Layout(0, (Segment(0, 0, HALF), Segment(1, HALF + 1, KEY_SPACE))), f"where {HALF} was to follow"),
        (Layout(0, (Segment(0, 0, HALF), Segment(1, 0, KEY_SPACE))), f"where {HALF} was to follow"),
        (Layout(0, (Segment(0, 0, KEY_SPACE, created_epoch=1),)), "layouts that cannot be"),
        (Layout(1, (Segment(0, 0, HALF, 0, 0), Segment(1, 0, KEY_SPACE))), "layouts that cannot be"),
        (Layout(1, (Segment(0, 0, HALF, 0, 2), Segment(1, 0, KEY_SPACE))), "layouts that cannot be"),
    ],
)
def test_a_layout_that_cannot_be_says_why(layout: Layout, problem: str) -> None:  # CT6
    assert problem in "; ".join(layout.problems())


def test_a_layout_with_closed_segments_is_whole() -> None:  # CT6: room for segments that scale
    halves = (Segment(1, 0, HALF, 1), Segment(2, HALF, KEY_SPACE, 1))
    layout = Layout(1, (Segment(0, 0, KEY_SPACE, 0, 1), *halves))
    assert layout.problems() == []
    assert layout.present == halves


def test_a_new_stream_has_the_first_layout(store: Store) -> None:  # CT6
    info = store.describe(STREAM)
    assert (info.layout_epoch, store.layout(STREAM)) == (0, first_layout(3))


def damaged(store: Store, **values: int) -> list[str]:
    with database_of(store).write() as connection:
        connection.execute(t.segments.update().where(t.segments.c.segment_id == 1).values(**values))
    return [problem.what for problem in store.fsck()]


@pytest.mark.parametrize("values", [{"key_low": 0}, {"key_high": 17}, {"created_epoch": 4}, {"closed_epoch": 0}])
def test_a_damaged_layout_is_found(store: Store, values: dict[str, int]) -> None:  # CT6
    assert damaged(store, **values)


def test_a_segment_too_few_is_found(store: Store) -> None:  # CT6
    with database_of(store).write() as connection:
        connection.execute(t.segments.delete().where(t.segments.c.segment_id == 2))
    assert "it has 2 segments, not 3" in [problem.what for problem in store.fsck()]
