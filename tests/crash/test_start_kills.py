"""Executors of a standalone cluster die while a pipeline starts, the first time and later (F2)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from crash.cluster import Cluster
from crash.processes import Life, kill, until
from crash.results import assert_clean, assert_standard

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

STARTING_S = 1.5
"""About so long after its first Python process a start is over."""


def pythons(cluster: Cluster) -> set[int]:
    """Return the processes in which Spark's executors run Python."""
    found = set()
    for process in cluster.strangers():
        try:
            if "headgate.spark.daemon" in process.cmdline():
                found.add(process.pid)
        except psutil.Error:  # it has ended
            continue
    return found


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
    for moment in (0, dice.random(), dice.random(), 0):
        until(lambda before=before: pythons(cluster) - before, "a Python process of the next start")
        time.sleep(moment * STARTING_S)  # the moment of the kill: not a wait for anything
        before |= pythons(cluster)
        kill(cluster.executors()[0].pid)
        life.restart()
    told(life)
    assert life.result()["is_finished"]
    assert life.child.exit_code() == 0
    life.child.assert_gone()
    cluster.assert_idle()
    assert_standard(tmp_path, 20_000)
    assert_clean(tmp_path)
