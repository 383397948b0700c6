"""Columnar accumulators against plain Python, whatever is frozen and cleared in between."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.state.window_aggregates import (
    Accumulator,
    AggTable,
    FrozenTable,
    Kind,
    Values,
    only_window,
    split_by_window,
)

ACCUMULATORS = [
    Accumulator(Kind.ADD, "int64"),
    Accumulator(Kind.MIN, "int64"),
    Accumulator(Kind.MAX, "uint64"),
    Accumulator(Kind.MIN, "float64"),
    Accumulator(Kind.MAX, "float64"),
]
ROW = st.tuples(
    st.integers(0, 5),  # slot
    st.integers(-(2**55), 2**55),  # no sum of them is too large
    st.integers(0, 2**64 - 1),
    st.floats(-9, 9) | st.just(math.nan),
    st.booleans(),  # counts
)


class Model:
    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.seen: dict[int, list[tuple[int, int, float]]] = {}

    def add(self, row: tuple[int, int, int, float, bool]) -> None:
        slot, signed, unsigned, real, counts = row
        self.rows[slot] = self.rows.get(slot, 0) + 1
        if counts:
            self.seen.setdefault(slot, []).append((signed, unsigned, real))

    def expected(self, slot: int) -> list[Any]:
        seen = self.seen.get(slot)
        if not seen:
            return [0, None, None, None, None]
        reals = [real for _, _, real in seen if not math.isnan(real)] or [math.nan]
        total = sum(signed for signed, _, _ in seen)
        return [total, min(s for s, _, _ in seen), max(u for _, u, _ in seen), min(reals) + 0, max(reals) + 0]


def rows_of(table: FrozenTable) -> dict[int, list[Any]]:
    found = {}
    for slot in np.flatnonzero(table.rows).tolist():
        values = [
            None if seen is not None and not seen[slot] else values[slot].item() + 0  # -0.0 and 0.0 are equal
            for values, seen in zip(table.values, table.seen, strict=True)
        ]
        found[slot] = [int(table.rows[slot]), *values]
    return found


def same(found: dict[int, list[Any]], model: Model) -> None:
    expected = {slot: [rows, *model.expected(slot)] for slot, rows in model.rows.items()}
    assert str(found) == str(dict(sorted(expected.items())))  # as text, NaN equals NaN


@example([[(0, 0, 0, 0.0, True), (0, 0, 0, -0.0, True)]])
@given(st.lists(st.lists(ROW, max_size=12) | st.sampled_from(["freeze", "clear"]), max_size=12))
def test_any_history_combines_as_plain_python_and_what_was_frozen_stays(steps: list[Any]) -> None:
    table, model = AggTable(ACCUMULATORS), Model()
    kept: list[tuple[FrozenTable, str]] = []
    for step in steps:
        if step == "freeze":
            frozen = table.freeze(6)
            same(rows_of(frozen), model)
            kept.append((frozen, str(rows_of(frozen))))
        elif step == "clear":
            table.clear()
            model = Model()
        else:
            for row in step:
                model.add(row)
            valid = np.array([row[4] for row in step], np.bool_)
            columns = [np.array([row[i] for row in step], dtype) for i, dtype in ((1, "i8"), (2, "u8"), (3, "f8"))]
            inputs = [Values(columns[i], valid) for i in (0, 0, 1, 2, 2)]
            table.update(6, np.array([row[0] for row in step], np.int64), 1, inputs)
    same(rows_of(table.freeze(6)), model)
    assert table.used().tolist() == sorted(model.rows)
    for frozen, before in kept:
        assert str(rows_of(frozen)) == before


def test_a_table_grows_over_its_first_slots_and_new_ones_have_seen_nothing() -> None:
    table = AggTable(ACCUMULATORS[:2])
    every = [Values(np.array([5], np.int64))] * 2
    table.update(1, np.array([0]), 1, every)
    frozen = table.freeze(1)
    table.update(100_000, np.array([99_999]), 2, every)
    assert rows_of(table.freeze(100_000)) == {0: [1, 5, 5], 99_999: [2, 5, 5]}
    assert rows_of(frozen) == {0: [1, 5, 5]}
    taken = table.take(np.array([99_999, 3]))
    assert (taken.rows.tolist(), taken.values[0].tolist()) == ([2, 0], [5, 0])
    taken.rows[:] = 9
    assert rows_of(table.freeze(100_000))[99_999] == [2, 5, 5], "what was taken is a copy"


@pytest.mark.parametrize("number", [1, 7])
def test_one_number_for_every_row_counts_as_often_as_there_are_rows(number: int) -> None:
    table = AggTable(ACCUMULATORS[:1])
    table.update(2, np.array([0, 1, 1]), 1, [Values(number, np.array([True, True, False]))])
    table.update(2, np.array([1]), 1, [Values(number)])
    assert table.freeze(2).values[0].tolist() == [number, 2 * number]


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
