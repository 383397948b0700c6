"""Folders that ``-m`` leaves out are not even imported; no test that it chooses is lost by that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.conftest import MARKED, is_left_out

UNIT = re.search(r"^UNIT := (.*)$", (Path(__file__).parents[1] / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("marker", MARKED.values())
def test_make_check_leaves_whole_folders_out(marker: str) -> None:
    assert UNIT is not None
    assert is_left_out(marker, UNIT[1])


@pytest.mark.parametrize(
    "expression", ["", "run", "not spark and not crash", "not runner", "not run or spark", "not (run and long)"]
)
def test_what_may_be_chosen_is_looked_at(expression: str) -> None:
    assert not is_left_out("run", expression)
