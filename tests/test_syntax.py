"""A tree is whole also where something else is parsed while it is made."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.syntax import parsed


@pytest.fixture
def collections_that_parse() -> Iterator[None]:
    """Have each collection parse something, deeper in the stack than its test."""

    def parse(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            _deeper(5)

    before = gc.get_threshold()
    gc.set_threshold(50)
    gc.callbacks.append(parse)
    yield
    gc.callbacks.remove(parse)
    gc.set_threshold(*before)


def _deeper(calls: int) -> None:
    if calls:
        _deeper(calls - 1)
    else:
        ast.parse("a + b * (c)")


@pytest.mark.usefixtures("collections_that_parse")
def test_what_a_collection_parses_does_not_come_in_between() -> None:
    text = Path(__file__).read_text()
    for _ in range(20):
        assert len(parsed(text).body) > 5
    assert gc.isenabled()
