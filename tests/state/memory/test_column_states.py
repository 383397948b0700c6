"""Values by column against plain Python: the last row wins, and one row of each changed key is marked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import UsageError
from headgate.state.memory.column_states import MemoryValues

SLOTS = 5
ROWS = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(-3, 3)), max_size=10)
STEP = st.tuples(st.sampled_from(["put", "clear", "replace", "min", "max", "add"]), ROWS)


def slots_of(rows: list[tuple[int, Any]]) -> Any:
    return np.array([slot for slot, _ in rows], np.int64)


def check_marks(marks: Any, rows: list[tuple[int, Any]], before: dict[int, Any], after: dict[int, Any]) -> list[int]:
    """Exactly one row is marked of each slot whose value is another one now."""
    marked = [rows[at][0] for at in np.flatnonzero(marks)]
    assert sorted(marked) == sorted(slot for slot in after if before.get(slot) != after[slot])
    return [int(at) for at in np.flatnonzero(marks)]


@pytest.mark.parametrize("dtype", [pa.int64(), pa.int8(), pa.float64()])
@given(steps=st.lists(STEP, max_size=12))
def test_any_history_is_that_of_a_dict(dtype: pa.DataType, steps: list[tuple[str, list[tuple[int, int]]]]) -> None:
    values, model = MemoryValues(dtype, lambda: SLOTS), dict[int, int]()
    every = np.arange(SLOTS)
    for what, rows in steps:
        slots, given_ = slots_of(rows), pa.array([value for _, value in rows], dtype)
        before = dict(model)
        match what:
            case "put":
                values.put(slots, given_)
                model.update(rows)
            case "clear":
                values.clear(slots)
                for slot, _ in rows:
                    model.pop(slot, None)
            case "replace":
                marks = values.replace(slots, given_)
                model.update(rows)
                assert all(rows[at][1] == model[rows[at][0]] for at in check_marks(marks, rows, before, model))
            case "min" | "max":
                marks = values.extreme(slots, given_, is_min=what == "min")
                for slot, value in rows:
                    best = min if what == "min" else max
                    model[slot] = best(model.get(slot, value), value)
                assert all(rows[at][1] == model[rows[at][0]] for at in check_marks(marks, rows, before, model))
            case _:
                marks = values.add(slots, given_)
                for slot, value in rows:
                    model[slot] = model.get(slot, 0) + value
                check_marks(marks, rows, before, model)
        assert values.get(every).to_pylist() == [model.get(slot) for slot in range(SLOTS)]
        assert values.contains(every).tolist() == [slot in model for slot in range(SLOTS)]


@pytest.mark.parametrize(("is_min", "best"), [(True, 1.0), (False, 2.0)])
def test_nan_is_never_the_least_nor_the_greatest(is_min: bool, best: float) -> None:
    values = MemoryValues(pa.float64(), lambda: 2)
    rows = [(0, math.nan), (0, 2.0), (0, 1.0), (1, math.nan)]
    marks = values.extreme(slots_of(rows), pa.array([value for _, value in rows]), is_min=is_min)
    assert values.get(np.array([0, 1])).to_pylist() == [best, None]
    assert [rows[at][1] for at in np.flatnonzero(marks)] == [best]


def test_what_was_frozen_shows_no_later_change_and_comes_back() -> None:
    values = MemoryValues(pa.large_string(), lambda: 3)
    values.put(np.array([0, 2]), pa.array(["a", "c"], pa.large_string()))
    frozen = values.freeze()
    values.put(np.array([0, 1]), pa.array(["x", "y"], pa.large_string()))
    values.clear(np.array([2]))
    assert frozen.count() == 2
    slots, columns = frozen.rows()
    assert (slots.tolist(), columns[0].to_pylist()) == ([0, 2], ["a", "c"])
    again = MemoryValues(pa.large_string(), lambda: 3)
    again.restore(slots, columns)
    assert again.get(np.arange(3)).to_pylist() == ["a", None, "c"]


@pytest.mark.parametrize("dtype", [pa.int8(), pa.int64(), pa.uint64(), pa.duration("us")])
def test_a_sum_that_its_type_does_not_hold_fails(dtype: pa.DataType) -> None:
    values = MemoryValues(dtype, lambda: SLOTS)
    most = {pa.int8(): 2**7, pa.uint64(): 2**64}.get(dtype, 2**63) - 1
    values.add(np.array([0, 0]), pa.array([most - 1, 1], dtype))
    with pytest.raises(UsageError, match=r"a sum of integers is larger than u?int"):
        values.add(np.array([1, 0]), pa.array([1, 1], dtype))
    assert values.get(np.array([0])).to_pylist() == pa.array([most], dtype).to_pylist()


def test_a_sum_of_narrow_floating_numbers_is_one() -> None:
    values = MemoryValues(pa.float32(), lambda: SLOTS)
    values.add(np.array([0, 0]), pa.array([0.5, 1.0], pa.float32()))
    assert values.get(np.array([0])).to_pylist() == [1.5]
