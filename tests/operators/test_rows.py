"""Rows become batches without a change of value: what Arrow would cut is refused, all else passes."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.functions import RowWriter

INT = pa.int64()
NESTED = pa.large_list(pa.struct([("n", pa.int32()), ("t", pa.large_string())]))


def written(dtype: pa.DataType, *values: Any) -> tuple[list[Any], list[str]]:
    batch, refused = RowWriter(pa.schema([("x", dtype), ("y", INT)])).batch([{"x": v, "y": 0} for v in values])
    return batch.column("x").to_pylist(), [one.problem for one in refused]


@pytest.mark.parametrize("value", [1.5, Decimal("1.5"), Fraction(3, 2), np.float64(1.5), np.float32(-0.5)])
@pytest.mark.parametrize("others", [(1, 2), (None, 0, 2), (np.int64(1), 1.0), ()])
def test_a_number_that_is_not_whole_is_refused_for_an_integer_and_its_neighbours_pass(
    value: Any, others: tuple[Any, ...]
) -> None:
    kept, problems = written(INT, *others, value, *others)
    assert kept == [*others, *others]
    assert problems == [f"the function returned {type(value).__name__} {value!r} for field 'x', which is int64"]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (INT, [2.0, None, 3]),
        (INT, [None, None]),
        (INT, [Decimal(2), 0.0, Fraction(4, 2)]),
        (INT, [np.int64(2**62), np.int64(2**62), np.int64(2**62)]),
        (pa.uint64(), [2**64 - 1, 2**64 - 1]),
        (pa.int8(), [-128, 127]),
        (pa.float64(), [1.5, 2, None]),
        (pa.large_list(INT), [[1, None], [], None, [2.0]]),
        (NESTED, [[{"n": 1, "t": "a"}, None, {"n": None, "t": None}], None, []]),
    ],
    ids=str,
)
def test_whole_numbers_and_nulls_pass_whatever_their_type(dtype: pa.DataType, values: list[Any]) -> None:
    assert written(dtype, *values) == (values, [])


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        (pa.large_list(INT), [1, 2], [1, 2.5]),
        (pa.large_list(INT), [1], np.array([0.5])),
        (NESTED, [{"n": 1, "t": "a"}], [None, {"n": 1.5, "t": "a"}]),
        (pa.struct([("a", pa.large_list(pa.uint8()))]), {"a": [1]}, {"a": [1.5]}),
    ],
    ids=str,
)
def test_integers_inside_lists_and_structs_are_looked_at_too(dtype: pa.DataType, good: Any, bad: Any) -> None:
    kept, problems = written(dtype, good, bad, good)
    assert kept == [good, good]
    assert len(problems) == 1
