"""A pipeline on Spark that reads by a reader group: its workers are killed, and its stream is scaled meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from crash.processes import STEP_S, Life, kill
from crash.results import assert_equal
from headgate.connectors.files.file_committer import read_committed
from headgate.store.store import Store
from spark.test_induced_on_spark import FIRST, ROWS, Producer

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]


def test_killed_workers_lose_and_repeat_nothing_of_a_group(
    spec: Spec, run: Run, tmp_path: Path
) -> None:  # GS2, GS5, GS13
    what = spec("group_source", rows=ROWS, rate=1_000, tolerable_failures=20)
    producer = Producer(tmp_path / "store")
    try:
        life = run(what)
        kill(life.running()["workers"]["1"])
        again = life.running()
        life.checkpoint()
        with Store.open(tmp_path / "store") as store:
            store.split("in", 0)
            store.merge("in", [1, 2])
        life.checkpoint()
        kill(again["workers"]["0"])
        life.running()
        life.checkpoint()
    finally:
        producer.stop()
    assert life.result(2 * STEP_S)["is_finished"]
    expected = pl.DataFrame({"id": [*range(ROWS), *range(FIRST, FIRST + producer.count)]})
    assert_equal(read_committed(str(tmp_path / "copied")), expected, "records")
    with Store.open(tmp_path / "store") as store:
        assert store.reader_group("group").unread_bytes() == 0
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []
