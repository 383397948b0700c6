"""Mutants of the choice of a backend for each operator (RB13)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.state.rocksdb import test_rocksdb_choice as choices

from headgate.api.builder import GraphBuilder
from headgate.state import choice

Patch = AbstractContextManager[None]


def nobody_listens_to_operators() -> Patch:
    return patched(GraphBuilder, "keep_state", lambda self, name, state: None)


def all_operators_have_the_state_of_the_pipeline() -> Patch:
    def of(self: Any, node: str, subtask_index: int, max_parallelism: int) -> Any:
        return self._made[self._config].of(node, subtask_index, max_parallelism)

    return patched(choice._ByOperator, "of", of)


def every_operator_has_a_memory_of_its_own() -> Patch:
    def of(self: Any, node: str, subtask_index: int, max_parallelism: int) -> Any:
        made = choice.worker_states(self._others.get(node, self._config), None)
        return made.of(node, subtask_index, max_parallelism)

    return patched(choice._ByOperator, "of", of)


@pytest.mark.parametrize(
    "mutant",
    [
        nobody_listens_to_operators,
        all_operators_have_the_state_of_the_pipeline,
        every_operator_has_a_memory_of_its_own,
    ],
)
def test_bugs_of_the_choice_are_caught(mutant: Mutant) -> None:
    assert_caught(mutant, choices.test_an_operator_may_say_where_its_own_state_is)
