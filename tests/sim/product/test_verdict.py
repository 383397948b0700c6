"""The verdict over the order of what was committed (SM5)."""

from __future__ import annotations

import pytest

from headgate.sim.product.verdict import Order
from headgate.sim.product.workloads import WORKLOADS, Values
from headgate.sim.world import Violation


def test_each_key_has_an_order_of_its_own() -> None:
    order = Order("out")
    order.follow([(1, 1), (2, 1), (1, 2)])
    order.follow([(2, 2), (1, 3), (2, 5)])


@pytest.mark.parametrize("rows", [[(1, 2), (1, 1)], [(1, 1), (2, 2), (1, 1)]])
def test_a_record_behind_a_later_one_of_its_key_is_a_violation(rows: list[Values]) -> None:
    order = Order("out")
    order.follow(rows[:1])
    with pytest.raises(Violation, match="out has number 1 of key 1 behind"):
        order.follow(rows[1:])


def test_workloads_that_count_are_in_order() -> None:
    assert [workload.name for workload in WORKLOADS if workload.rises] == ["reduced", "numbered"]
