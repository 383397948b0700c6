"""SIGKILL of workers, of the driver, and just behind the final manifest: what is published on completion (HL7)."""

# Rules: F3, F23

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.processes import STEP_S, Life
from crash.results import assert_clean, assert_equal, expected_standard, read_rows
from crash.standing import SPARK_IN_DEEP

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]
Launch = Callable[..., Life]
ROWS = 16_000


def assert_published(root: Path, rows: int) -> None:
    """Every row is public, and committed once."""
    assert sorted(int(path.name) for path in (root / "public").iterdir()) == list(range(rows))
    assert_equal(read_rows(root), expected_standard(rows)["rows"], "rows")


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_a_driver_killed_behind_the_final_manifest_has_everything_published_by_the_next_start(
    spec: Spec, launch: Launch, tmp_path: Path, with_spark: bool
) -> None:
    """All is committed with the final checkpoint, and nobody was told: the next start tells."""
    what = spec("publishing", rows=4_000, rate=8_000, interval="1h", gate=None)
    marker = tmp_path / "killed"
    first = launch(what, with_spark=with_spark, HEADGATE_KILL_AT=f"after-manifest:1:{marker}")
    assert first.child.exit_code(2 * STEP_S) == -9, first.child.tale("it was not killed")
    first.child.assert_gone()
    assert list((tmp_path / "public").iterdir()) == [], "nobody was told"
    life = launch(what, with_spark=with_spark)
    life.note("notified once more")
    result = life.result(2 * STEP_S)
    assert result["is_finished"]
    assert life.child.exit_code() == 0
    assert_published(tmp_path, 4_000)
    assert_clean(tmp_path)
