"""Mutants of aggregating state by batch (ST20)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.operators.process import test_batch_aggregating as tests
from tests.sim.product.patching import around

from headgate.operators.process import batch_aggregating
from headgate.operators.process.batch_aggregating import BatchAggregatingState, _Shape
from headgate.operators.process.batch_states import BatchValueState


def what_there_was_is_forgotten() -> AbstractContextManager[None]:
    return around(BatchValueState, "at", lambda call, self, slots: call(self, slots).clear(len(slots)))


def rows_without_a_value_count() -> AbstractContextManager[None]:
    def chosen(call: Any, self: Any, values: Any, where: Any, keys: Any) -> Any:
        filled = values.fill_null(1) if isinstance(values, pl.Series) else values
        return call(self, filled, where, keys)

    return around(BatchValueState, "chosen", chosen)


def rows_that_are_not_meant_count() -> AbstractContextManager[None]:
    return around(BatchValueState, "chosen", lambda call, self, values, where, keys: call(self, values, None, keys))


def what_is_new_counts_as_what_there_was() -> AbstractContextManager[None]:
    def accumulator(call: Any, self: Any, side: str) -> Any:
        return call(self, {"a": "b", "b": "a"}[side])

    return around(_Shape, "accumulator", accumulator)


def fields_come_in_the_order_in_which_they_are_returned() -> AbstractContextManager[None]:
    def expressions(call: Any, self: Any, what: str, found: Any) -> Any:
        return list(found.values()) if isinstance(found, dict) else call(self, what, found)

    return around(_Shape, "expressions", expressions)


def every_key_counts_as_changed() -> AbstractContextManager[None]:
    def replace_at(call: Any, self: Any, slots: Any, values: Any) -> Any:
        return np.ones_like(call(self, slots, values))

    return around(BatchValueState, "replace_at", replace_at)


def null_clears() -> AbstractContextManager[None]:
    def replace_at(self: Any, slots: Any, values: pl.Series) -> Any:
        kept = values.is_not_null().to_numpy()
        self._columns.clear(slots[~kept])
        self._columns.put(slots[kept], self._values(values.filter(kept), int(kept.sum())))
        return kept

    return patched(BatchValueState, "replace_at", replace_at)


def results_may_look_at_other_keys() -> AbstractContextManager[None]:
    return patched(batch_aggregating, "not_of_one_record", lambda expression, query: "")


def results_are_there_without_anything_added() -> AbstractContextManager[None]:
    def get(self: Any, *, keys: Any = None) -> pl.Series:
        so_far = self._value.get(keys=keys)
        return pl.DataFrame(self._shape.columns(so_far, "a")).select(self._result.fill_null(0)).to_series()

    return patched(BatchAggregatingState, "get", get)


MEMORY = "memory"
OF_ONE = "result must look at one accumulator of each side only"

CAUGHT: list[tuple[Mutant, Callable[..., object], tuple[Any, ...]]] = [
    (what_there_was_is_forgotten, tests.test_what_expired_is_merged_with_nothing, (MEMORY,)),
    (rows_without_a_value_count, tests.test_both_forms_add_up_to_the_same, (MEMORY,)),
    (rows_that_are_not_meant_count, tests.test_both_forms_add_up_to_the_same, (MEMORY,)),
    (what_is_new_counts_as_what_there_was, tests.test_both_forms_add_up_to_the_same, (MEMORY,)),
    (fields_come_in_the_order_in_which_they_are_returned, tests.test_what_expired_is_merged_with_nothing, (MEMORY,)),
    (every_key_counts_as_changed, tests.test_the_last_row_of_each_key_that_changed_is_told, ()),
    (null_clears, tests.test_null_is_no_accumulator, ()),
    (results_may_look_at_other_keys, tests.test_what_cannot_be_merged_is_told_when_the_pipeline_is_built, (OF_ONE,)),
    (results_are_there_without_anything_added, tests.test_both_forms_add_up_to_the_same, (MEMORY,)),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=[mutant.__name__ for mutant, _, _ in CAUGHT])
def test_a_mutant_of_aggregating_by_batch_is_caught(
    mutant: Mutant, test: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    assert_caught(mutant, test, *arguments)
