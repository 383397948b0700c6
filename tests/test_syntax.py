"""A tree is whole also where something else is parsed while it is made."""

from __future__ import annotations

import ast
import gc
import inspect
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import syntax


@pytest.fixture
def collections_that_parse() -> Iterator[None]:
    """Have each collection parse something, deeper in the stack than its test."""

    def parse(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            _deeper(5)

    before = gc.get_threshold()
    gc.set_threshold(50)
    gc.enable()  # a thread that another test has left may have paused it, and will not do so for good
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
        assert len(ast.parse(text).body) > 5
        assert "_deeper" in inspect.getsource(_deeper)
    deadline = time.monotonic() + 300
    while not gc.isenabled():  # a thread that another test has left may pause it for a moment
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("version", "is_guarded"),
    [((3, 11, 7), True), ((3, 11, 8), False), ((3, 12, 1), True), ((3, 12, 2), False), ((3, 13, 0), False)],
)
def test_only_releases_that_need_it_are_guarded(
    version: tuple[int, ...], *, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ast, "parse", syntax.plain_parse)
    syntax.guard_parsing(version)
    assert (ast.parse is not syntax.plain_parse) == is_guarded
