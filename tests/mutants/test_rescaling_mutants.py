"""Mutants of a restore at another parallelism (ST4, KG8): state that is nowhere, or in two subtasks, is missed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.state import test_rescaling_kinds as kinds

from headgate.state import backend


@contextmanager
def a_subtask_keeps_what_others_own() -> Iterator[None]:
    with patched(backend, "owned_rows", lambda batch, *owner: batch):
        yield


@contextmanager
def the_first_row_of_a_part_is_left_out() -> Iterator[None]:
    original = backend.owned_rows

    def owned_rows(batch: Any, *owner: Any) -> Any:
        return original(batch, *owner).slice(1)

    with patched(backend, "owned_rows", owned_rows):
        yield


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.parametrize("mutant", [a_subtask_keeps_what_others_own, the_first_row_of_a_part_is_left_out])
def test_the_mutant_is_caught(mutant: Mutant, kind: str) -> None:
    assert_caught(mutant, kinds.test_every_kind_of_state_of_p_subtasks_goes_on_in_q, kind, "memory", "memory")
