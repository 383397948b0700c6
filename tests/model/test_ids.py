"""Key groups are partitioned among the subtasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.model.ids import key_groups_of_subtask


@given(st.integers(1, 512), st.data())
def test_every_key_group_belongs_to_exactly_one_subtask(max_parallelism: int, data: st.DataObject) -> None:
    parallelism = data.draw(st.integers(1, max_parallelism))
    ranges = [key_groups_of_subtask(i, max_parallelism, parallelism) for i in range(parallelism)]
    assert [g for r in ranges for g in r] == list(range(max_parallelism)), "contiguous, complete, without overlap"
    for index, groups in enumerate(ranges):
        assert all(g * parallelism // max_parallelism == index for g in groups)
    sizes = {len(r) for r in ranges}
    assert max(sizes) - min(sizes) <= 1, "as even as possible"


def test_ranges_of_the_default() -> None:
    assert [key_groups_of_subtask(i, 128, 3) for i in range(3)] == [range(43), range(43, 86), range(86, 128)]


@pytest.mark.parametrize(("index", "parallelism"), [(-1, 2), (2, 2), (0, 0), (0, 129)])
def test_a_subtask_that_does_not_exist_owns_nothing(index: int, parallelism: int) -> None:
    with pytest.raises(AssertionError):
        key_groups_of_subtask(index, 128, parallelism)
