"""FLIP-16's own scenario on Spark: add 2, feed back "subtract 1"; whatever is killed, 2n - n = n (loops.md A1)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.loop_kills import TIMES, kill_and_finish
from crash.loop_results import assert_flip16
from crash.processes import Life

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
ROWS = 1_000 * (TIMES + 2)
RATE = 700


@pytest.mark.early
@pytest.mark.xdist_group("wide")
def test_two_n_minus_n_is_n_with_four_heads(
    spec: Spec,
    run_wide: Callable[[dict[str, Any]], Life],
    tmp_path: Path,
    dice: random.Random,
    told: Callable[[Life], None],
) -> None:
    what = spec("flip16", rows=ROWS, rate=RATE, parallelism=4, repartitioned=True)
    life = run_wide(what)
    kill_and_finish(life, dice, what)
    told(life)
    assert_flip16(tmp_path, ROWS)
