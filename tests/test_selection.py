"""Folders that ``-m`` leaves out are not even imported; no test that it chooses is lost by that."""

from __future__ import annotations

import gc
import itertools
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from tests.conftest import IS_DEEP, MARKED, SPARK_HALF, TESTS, few, fewer, is_left_out, is_quick, pairs

from headgate.testing.sinks import failures

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


def test_parameters_that_are_left_out_are_marked_and_the_others_spread_evenly() -> None:
    assert [value for value in few(range(9), 3) if isinstance(value, int)] == [0, 4, 8]
    left = [value for value in few([(1, 2), (3, 4)], 1) if not isinstance(value, tuple) or hasattr(value, "marks")]
    assert [(one.values, [mark.name for mark in one.marks]) for one in left] == [((3, 4), ["deep"])]


def test_few_combinations_hold_each_pair_of_parameters() -> None:
    chosen = [values for values in pairs("ab", "xyz", [1, 2]) if not hasattr(values, "marks")]
    assert len(chosen) == 6
    for first, second in itertools.combinations(range(3), 2):
        held = {(values[first], values[second]) for values in chosen}
        assert held == set(itertools.product(*(("ab", "xyz", [1, 2])[i] for i in (first, second))))
    left = [values for values in pairs("ab", "xyz", [1, 2]) if hasattr(values, "marks")]
    assert len(left) == 6
    assert {mark.name for values in left for mark in values.marks} == {"deep"}


@pytest.mark.parametrize(("named", "drawn"), [(100, 10), (20, 4), (3, 3)])
def test_a_part_of_the_examples_is_drawn(named: int, drawn: int) -> None:
    assert fewer(settings(max_examples=named)).max_examples == (named if IS_DEEP else drawn)


def test_each_call_at_a_target_fails_in_some_way_and_some_calls_in_each(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool, bool]] = []

    def check(target: Any, number: int, *, is_after: bool, is_killed: bool) -> bool:
        seen.append((number, is_after, is_killed))
        return number <= 9

    monkeypatch.setattr(failures, "check_interruption", check)
    request.getfixturevalue("some_interruptions")
    assert failures.check_interruptions(lambda: SimpleNamespace(failing=True, crash=None)) is None  # type: ignore
    assert {number for number, *_ in seen} >= set(range(1, 10))
    assert {tuple(way) for _, *way in seen} == set(itertools.product((False, True), repeat=2))


def test_garbage_is_not_looked_for_among_tests() -> None:
    deadline = time.monotonic() + 300
    while not gc.isenabled():  # a thread that another test has left may pause it for a moment
        assert time.monotonic() < deadline
    assert gc.get_freeze_count() > 10_000


def test_the_spark_half_imports_the_modules_that_name_its_markers() -> None:
    assert f'"spark": "{SPARK_HALF}"' in (TESTS.parent / "scripts" / "run_tests.py").read_text()
    assert not is_quick(TESTS / "spark" / "test_session.py")
    assert not is_quick(TESTS / "crash" / "test_chains.py")
    assert not is_quick(TESTS / "store" / "served" / "test_repeated_afar.py"), "it repeats what another module marks"
    assert is_quick(TESTS / "state" / "test_timers.py")


@pytest.mark.xdist_group("selection")
def test_tests_of_a_group_go_to_one_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist tells groups apart by the ends of the ids, which it cannot change under every pytest."""
    is_in_worker = hasattr(request.config, "workerinput")
    assert request.node.nodeid.endswith("@selection") == is_in_worker, "install what constraints.txt pins"
