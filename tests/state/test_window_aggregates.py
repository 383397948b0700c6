"""Columnar accumulators against plain Python, whatever is frozen and cleared in between."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.errors import UsageError
from headgate.state.window_aggregates import (
    TEXT,
    Accumulator,
    AggTable,
    FrozenTable,
    Kind,
    Values,
    accumulated_column,
    add_values,
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
@example([[(0, 1, 1, 1.0, True)], "clear", [(0, 1, 1, 1.0, False)]])
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


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_what_has_a_negative_sign_is_taken_away(dtype: str) -> None:
    sums, slots, signs = np.zeros(2, dtype), np.array([0, 1, 1, 0]), np.array([1, 1, -1, -1])
    add_values(sums, slots, np.array([5, 2, 3, 1], dtype), signs)
    assert sums.tolist() == [4, -1]
    add_values(sums, slots, 7, np.array([1, 1, 1, -1]))
    assert sums.tolist() == [4, 13]


@pytest.mark.parametrize(
    ("dtype", "values", "signs", "expected"),
    [
        ("int64", [2**62, -(2**62), 2**62], None, 2**62),
        ("int64", [2**62, 2**62, 2**62], [1, -1, 1], 2**62),
        ("int64", [2**62, 2**62], None, None),
        ("int64", [2**62, 2**62, 2], [-1, -1, -1], None),
        ("uint64", [5, 3], [1, -1], 2),
        ("uint64", [3, 5], [1, -1], None),
    ],
)
def test_only_a_sum_that_is_too_large_is_refused(
    dtype: str, values: list[int], signs: list[int] | None, expected: int | None
) -> None:
    sums, slots = np.zeros(2, dtype), np.ones(len(values), np.int64)
    given_signs = None if signs is None else np.array(signs, np.int64)
    if expected is None:
        with pytest.raises(UsageError, match=f"a sum of integers is larger than {dtype} holds"):
            add_values(sums, slots, np.array(values, dtype), given_signs)
        return
    add_values(sums, slots, np.array(values, dtype), given_signs)
    assert sums.tolist() == [0, expected]


PICKS = [
    Accumulator(Kind.RANK, "int64"),
    Accumulator(Kind.PICK, "int64", of=0),
    Accumulator(Kind.RANK, "int64", is_last=True, nulls_win=True),
    Accumulator(Kind.PICK, TEXT, of=2),
    Accumulator(Kind.PICK, "int64"),
    Accumulator(Kind.PICK, TEXT, is_last=True),
]
RANKED = st.tuples(st.integers(0, 2), st.none() | st.integers(-2, 2), st.none() | st.integers(0, 9))


def picked(seen: list[tuple[int | None, int | None]]) -> list[Any]:
    """Return what ``PICKS`` come to after these ranks and values."""

    def best(rows: list[tuple[int | None, int | None]], nulls_win: bool) -> tuple[int | None, int | None]:
        return max(rows, key=lambda row: ((row[0] is None) == nulls_win, row[0] or 0))  # the first of equal ones

    low, high = best(seen, False), best(seen[::-1], True)
    texts = [None if value is None else str(value) for _, value in (high, seen[-1])]
    return [*low, high[0], texts[0], seen[0][1], texts[1]]


@given(st.lists(st.lists(RANKED, min_size=1, max_size=6), min_size=1, max_size=4))
@example([[(0, 1, 1), (0, 1, 2)], [(0, 1, 3)]])
@example([[(0, None, 1), (0, -1, 2), (1, 2, 3)], [(0, None, 4), (1, None, 5)]])
def test_the_record_of_the_highest_rank_is_picked_and_the_first_and_the_last_one(batches: list[list[Any]]) -> None:
    table, seen = AggTable(PICKS), dict[int, list[Any]]()
    for batch in batches:
        slots, ranks, values = (list(column) for column in zip(*batch, strict=True))
        for slot, rank, value in batch:
            seen.setdefault(slot, []).append((rank, value))
        texts = [None if value is None else str(value) for value in values]
        inputs = [
            Values(
                np.array(column if dtype == "O" else [one or 0 for one in column], dtype),
                np.array([one is not None for one in column]) if None in column else None,
            )
            for column, dtype in (
                (ranks, "i8"),
                (values, "i8"),
                (ranks, "i8"),
                (texts, "O"),
                (values, "i8"),
                (texts, "O"),
            )
        ]
        table.update(3, np.array(slots), 1, inputs)
    frozen = table.freeze(3)
    for slot, rows in seen.items():
        found = [
            values[slot] if present is not None and present[slot] else None
            for values, present in zip(frozen.values, frozen.seen, strict=True)
        ]
        assert found == picked(rows)


@pytest.mark.parametrize("accumulator", [*ACCUMULATORS, *PICKS])
def test_the_values_of_an_accumulator_are_a_column_of_its_type(accumulator: Accumulator) -> None:
    table = AggTable([accumulator]).freeze(3)
    column = accumulated_column(table.values[0], table.seen[0])
    assert column.type == accumulator.type
    assert column.to_pylist() == [None if accumulator.can_be_null else 0] * 3


MOMENTS = [
    Accumulator(Kind.ADD, "int64"),
    Accumulator(Kind.MEAN, "float64", 0),
    Accumulator(Kind.SQUARES, "float64", 1),
]


@given(st.lists(st.lists(st.integers(-9, 9) | st.none(), min_size=1, max_size=5), min_size=1, max_size=4))
def test_means_and_the_squares_around_them_combine_weighted_by_their_counts(batches: list[list[int | None]]) -> None:
    table = AggTable(MOMENTS)
    for batch in batches:
        valid = np.array([one is not None for one in batch])
        numbers = np.array([one or 0 for one in batch], np.float64)
        inputs = [Values(1, valid), Values(numbers, valid), Values(np.zeros(len(batch)), valid)]
        table.update(1, np.zeros(len(batch), np.int64), 1, inputs)
    every = [one for batch in batches for one in batch if one is not None]
    mean = sum(every) / max(1, len(every))
    found = [values[0] for values in table.freeze(1).values]
    assert found == pytest.approx([len(every), mean, sum((one - mean) ** 2 for one in every)])


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
