"""SIGKILL of the driver under sinks that a user wrote, for SQLite: one with two phases, one with a ledger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.sqlite_sinks import connect

from crash.processes import STARTED_S, Life
from crash.results import assert_clean
from crash.standing import SPARK_IN_DEEP

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Launch = Callable[..., Life]
ROWS = 16_000
START_S = 3 * STARTED_S
"""Five JVMs start in a row, beside whatever else runs."""

POINTS = {"before-manifest": 2, "after-manifest": 3, "in-recover": 2, "in-commit": 3, "after-commit": 2}
"""In the order in which a start passes them first; one kills each start."""


def assert_exactly_once(root: Path) -> None:
    """Both sinks together have each number once, and nothing waits for anybody."""
    with connect(str(root / "numbers.db")) as target:
        found = target.execute("select number, text from numbers order by number").fetchall()
        waiting = target.execute("select count(*) from waiting").fetchone()
    assert len(found) == ROWS, f"{len(found)} of {ROWS} records"
    assert found == [(n, str(n)) for n in range(ROWS)]
    assert waiting == (0,)
    assert_clean(root)


@pytest.mark.deep  # as the kit for sinks kills them, and tests/crash/test_driver_kills.py drivers
@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
@pytest.mark.early
def test_own_sinks_have_every_record_once_wherever_in_a_commit_the_driver_is_killed(
    spec: Spec, launch: Launch, tmp_path: Path, with_spark: bool
) -> None:
    what = spec("own_sinks", rows=ROWS, rate=4_000, gate=None)
    markers = {point: tmp_path / f"killed-{point}" for point in POINTS}
    points = ";".join(f"{point}:{count}:{markers[point]}" for point, count in POINTS.items())
    for _ in POINTS:
        life = launch(what, with_spark=with_spark, HEADGATE_KILL_AT=points)
        assert life.child.exit_code(START_S) == -9, life.child.tale("it was not killed")
        life.child.assert_gone()
    life = launch(what, with_spark=with_spark)
    assert life.result(START_S)["is_finished"]
    assert life.child.exit_code() == 0
    assert [point for point, marker in markers.items() if not marker.exists()] == []
    assert_exactly_once(tmp_path)
