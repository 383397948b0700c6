"""Who reaches whom in a graph that changes, on Spark, equal to a search of the final graph whatever is killed (A6)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few

from crash.loop_kills import TIMES, kill_and_finish
from crash.loop_results import assert_reachability
from crash.processes import Life

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]


@pytest.mark.parametrize("deletes", few([True, False], 1), ids=["insertions-and-deletions", "insertions"])
def test_what_is_reached_is_what_a_search_finds_whatever_is_killed(
    spec: Callable[..., dict[str, Any]],
    run: Callable[[dict[str, Any]], Life],
    tmp_path: Path,
    dice: random.Random,
    told: Callable[[Life], None],
    deletes: bool,
) -> None:
    rows = 400 * (TIMES + 2)
    what = spec("reachability", rows=rows, rate=350, deletes=deletes, events_seed=dice.randrange(1 << 30))
    life = run(what)
    kill_and_finish(life, dice, what)
    told(life)
    assert_reachability(tmp_path, what)
