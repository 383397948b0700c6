"""Layouts: every key has one segment, the one that events were always routed to; whoever knows another one is told."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.storing import STREAM, database_of

from headgate.protocol.store.layouts import KEY_SPACE, SEGMENTS_MAX, Layout, Segment, first_layout
from headgate.store.catalogue import tables as t
from headgate.store.routing import hash_column, segments_of
from headgate.store.store import Store


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
