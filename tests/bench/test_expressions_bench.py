"""Expressions: what is compared gives the same rows."""

from __future__ import annotations

import pytest
from bench.expressions import SIZES, batch_of, operator_for, query_for


@pytest.mark.parametrize("rows", SIZES)
def test_operator_and_query_give_the_same_rows(rows: int) -> None:
    batch = batch_of(rows)
    ours, theirs = operator_for()(batch), query_for()(batch)
    assert ours is not None
    assert theirs is not None
    assert ours.to_pylist() == theirs.to_pylist()
    assert 0 < ours.num_rows < rows
