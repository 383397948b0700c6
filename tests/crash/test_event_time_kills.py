"""Windows, joins, tables that change and calls of a service, of which workers and the driver are killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from crash.pipelines import expected_event_time
from crash.processes import STARTED_S, Life, kill
from crash.results import assert_clean, assert_equal
from headgate.connectors.files.file_committer import read_committed

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

ROWS = 20_000


def test_killed_workers_and_drivers_change_no_result(
    spec: Callable[..., dict[str, Any]], launch: Callable[..., Life], tmp_path: Path
) -> None:
    what = spec("event_time", rows=ROWS, rate=2_000)
    life = launch(what)
    running = life.running()
    life.checkpoint(2)
    kill(next(iter(running["workers"].values())))
    life.restart()
    life.running(after=running["generation"])
    life.checkpoint(2)
    life.child.kill()
    life.child.assert_gone()
    life = launch({**what, "parallelism": 3}, with_spark=False)
    life.running()
    life.checkpoint(2)
    assert life.result(STARTED_S)["is_finished"]
    assert life.child.exit_code() == 0
    for name, expected in expected_event_time(ROWS).items():
        found = read_committed(str(tmp_path / name))
        assert_equal(last_rows(found) if name == "table" else found, expected, name)
    assert_clean(tmp_path)


def last_rows(changes: pl.DataFrame) -> pl.DataFrame:
    """Return the table at its end: what came and did not go."""
    comes = pl.col("op").is_in(["insert", "update_after"]).cast(pl.Int64) * 2 - 1
    rows = changes.with_columns(comes=comes)
    table = rows.group_by("key", "n", "total").agg(pl.col("comes").sum()).filter(pl.col("comes") != 0)
    assert table["comes"].to_list() == [1] * table.height
    return table.drop("comes")
