"""Mutants of reducing and aggregating state (ST19)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.operators.process import test_combining

from headgate.operators.process.batch_states import BatchValueState
from headgate.operators.process.combining import AggregatingState, ReducingState, _Combined


@contextmanager
def none_clears() -> Iterator[None]:
    with patched(_Combined, "_put", lambda self, combined: self._value.put(combined)):
        yield


@contextmanager
def none_is_added() -> Iterator[None]:
    with patched(_Combined, "_refuse_none", lambda self, value: None):
        yield


@contextmanager
def clearing_does_nothing() -> Iterator[None]:
    with patched(_Combined, "clear", lambda self: None):
        yield


@contextmanager
def the_first_value_is_added_twice() -> Iterator[None]:
    def add(self: Any, value: Any) -> None:
        found = self._value.get()
        self._put(self._combine(value if found is None else found, value))

    with patched(ReducingState, "add", add):
        yield


@contextmanager
def what_was_added_before_is_forgotten() -> Iterator[None]:
    def add(self: Any, value: Any) -> None:
        self._put(self._function.add(self._function.initial(), value))

    with patched(AggregatingState, "add", add):
        yield


@contextmanager
def nobody_looks_at_how_before_the_first_record() -> Iterator[None]:
    with patched(BatchValueState, "check_how", lambda self, how: None):
        yield


HISTORY = (test_combining.test_what_was_added_is_combined_as_plain_python_does_it, "memory")
CAUGHT: list[tuple[Mutant, Any, tuple[Any, ...]]] = [
    (none_clears, test_combining.test_nothing_becomes_none, ()),
    (none_is_added, test_combining.test_nothing_becomes_none, ()),
    (clearing_does_nothing, HISTORY[0], HISTORY[1:]),
    (the_first_value_is_added_twice, HISTORY[0], HISTORY[1:]),
    (what_was_added_before_is_forgotten, HISTORY[0], HISTORY[1:]),
    (
        nobody_looks_at_how_before_the_first_record,
        test_combining.test_what_cannot_combine_is_told_when_the_pipeline_is_built,
        ('by "add" needs numbers',),
    ),
]


@pytest.mark.parametrize(("mutant", "test", "arguments"), CAUGHT, ids=[mutant.__name__ for mutant, *_ in CAUGHT])
def test_the_mutant_is_caught(mutant: Mutant, test: Any, arguments: tuple[Any, ...]) -> None:
    assert_caught(mutant, test, *arguments)
