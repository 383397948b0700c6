"""Two drivers of one pipeline: one wins, the other says so and stops (F6, F15)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few

from crash.processes import Life, kill
from crash.results import assert_clean, assert_nothing_twice, assert_standard
from crash.standing import SPARK_IN_DEEP

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Launch = Callable[..., Life]


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_a_second_driver_names_the_first_one_and_stops(
    spec: Spec, launch: Launch, tmp_path: Path, with_spark: bool
) -> None:
    rows = 2_000_000
    what = spec("standard", rows=rows)  # longer than the second one takes to start; it is stopped then
    first = launch(what, with_spark=with_spark)
    first.running()
    second = launch(what, with_spark=with_spark)
    error = second.failed()["error"]
    assert error.startswith(f"pipeline '{what['name']}' is already run by process {first.child.pid} on ")
    assert second.child.exit_code() == 2
    second.child.assert_gone()
    first.checkpoint()
    first.child.signal(signal.SIGTERM)
    assert not first.result()["is_finished"]
    assert first.child.exit_code() == 0
    assert_nothing_twice(tmp_path, rows)
    assert_clean(tmp_path)


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
@pytest.mark.parametrize("completed", few([6, 1], 1))
def test_a_driver_that_wakes_after_its_replacement_says_so_and_changes_nothing(
    spec: Spec, launch: Launch, tmp_path: Path, completed: int, with_spark: bool
) -> None:  # R40
    """On an object store there is no lock of the machine: only the log and the sinks' fences tell who runs.

    After six checkpoints the heir has pruned its own claim and everything that the sleeper knows.
    """
    where = f"obstore+file://{tmp_path}/checkpoints"
    what = spec("standard", rows=60_000, checkpoints=where, only_files=True)
    zombie = launch(what, with_spark=with_spark)
    zombie.running()
    zombie.checkpoint(2)
    os.kill(zombie.child.pid, signal.SIGSTOP)
    try:
        heir = launch(what, with_spark=with_spark)
        heir.note("continues from checkpoint")
        heir.running()
        heir.checkpoint(completed)
    finally:
        kill(zombie.child.pid, signal.SIGCONT)
    error = zombie.failed()
    assert error["kind"] == "FencedError"
    ways = ("generation 1 was replaced by generation 2", "generation 2 of this pipeline was started elsewhere")
    assert any(way in error["error"] for way in ways), error
    assert zombie.child.exit_code() == 4
    zombie.child.assert_gone()
    assert heir.result()["restarts"] == 0  # the one that wakes takes nothing back
    assert heir.child.exit_code() == 0
    assert_standard(tmp_path, 60_000)
    assert_clean(tmp_path)
