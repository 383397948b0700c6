"""Rows taken apart by window: each row once, in order, whatever the numbers are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headgate.state.window_aggregates import only_window, split_by_window

NEAR = st.lists(st.integers(-3, 3), min_size=1, max_size=30)
FAR = st.lists(st.integers(-(2**62), 2**62) | st.integers(-20, 20), min_size=1, max_size=30)


@given(NEAR | FAR)
def test_every_row_is_in_its_window_once_and_in_order(numbers: list[int]) -> None:
    windows = np.array(numbers, np.int64)
    found = [(window, rows.tolist()) for window, rows in split_by_window(windows)]
    assert found == [(one, [i for i, n in enumerate(numbers) if n == one]) for one in sorted(set(numbers))]
    assert only_window(windows) == (numbers[0] if len(found) == 1 else None)


def test_a_batch_that_begins_and_ends_in_one_window_may_have_rows_of_another() -> None:
    assert only_window(np.array([3, 4, 3])) is None
