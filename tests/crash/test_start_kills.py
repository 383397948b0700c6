"""Executors of a standalone cluster die while a pipeline starts, the first time and later (F2)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.cluster import Cluster
from crash.processes import Life, kill, until
from crash.results import assert_clean, assert_standard

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

STARTING_S = 1.5
"""About so long after its first Python process a start is over."""


def test_executors_that_die_during_the_first_start_are_replaced(  # G9
    cluster: Cluster,
    spec: Callable[..., dict[str, Any]],
    launch: Callable[..., Life],
    tmp_path: Path,
    dice: random.Random,
    told: Callable[[Life], None],
) -> None:
    life = launch(spec("standard", rows=20_000, master=cluster.url))
    before: set[int] = set()
    for moment in (0, dice.random(), 0):
        found = until(lambda before=before: cluster.pythons(before), "a Python process of the next start")
        time.sleep(moment * STARTING_S)  # the moment of the kill: not a wait for anything
        before |= cluster.pythons().keys()
        for executor in found.values():
            kill(executor)
    told(life)
    assert life.result()["is_finished"]
    assert life.seen("restart")
    assert life.child.exit_code() == 0
    life.child.assert_gone()
    cluster.assert_idle()
    assert_standard(tmp_path, 20_000)
    assert_clean(tmp_path)
