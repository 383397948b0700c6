"""A stateful processor of which a worker is killed, and which goes on at another parallelism: all results, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.conftest import few

from crash.pipelines import generated
from crash.processes import Life, kill
from crash.processor_pipeline import FIRST, expected_steps
from crash.results import assert_clean, assert_equal
from headgate.connectors.files.file_committer import read_committed

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

ROWS = 60_000


@pytest.mark.parametrize("state", few(["rocksdb", "memory"], 1))
def test_a_killed_worker_and_another_parallelism_change_no_result(
    state: str, spec: Callable[..., dict[str, Any]], run: Callable[[dict[str, Any]], Life], tmp_path: Path
) -> None:
    what = spec("processors", rows=ROWS, state=state, rate=6_000)
    life = run(what)
    running = life.running()
    life.checkpoint()
    kill(running["workers"]["0"])
    life.restart()
    life.running(after=running["generation"])
    life.checkpoint()
    life.child.send({"stop": what["name"]})
    assert not life.result()["is_finished"]
    last = run({**what, "parallelism": 1})
    last.note("continues from checkpoint")
    assert last.result()["is_finished"]
    found = read_committed(str(tmp_path / "numbered"))
    records = found.filter(pl.col("what") == "record").sort("key", "n")
    assert_equal(records.select("id", "key"), generated(ROWS).select("id", "key"), "records")
    counts = pl.int_range(FIRST + 1, FIRST + pl.len() + 1, dtype=pl.Int64).over("key")
    assert_equal(records.select("key", "n"), records.select("key", n=counts), "numbers")
    steps = found.filter(pl.col("what") == "step").select("key", "id")
    assert_equal(steps, expected_steps(ROWS), "steps")
    assert_clean(tmp_path)
