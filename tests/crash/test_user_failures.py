"""Failures that starting again cannot mend, and bad records: one clear sentence, counted exactly once (F16, F17)."""

# Rules: F24

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from crash.processes import Life, kill
from crash.results import assert_clean, assert_equal, read_stream

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]


def test_a_failing_function_is_told_with_operator_and_record_and_no_frame_of_ours(
    spec: Spec, launch: Callable[..., Life]
) -> None:
    life = launch(spec("failing", rows=20_000, rate=None, fails_at=1_234))
    error = life.failed()["error"]
    assert life.child.exit_code() == 3
    life.child.assert_gone()
    assert error.startswith("operator 'divide': ValueError: cannot divide 1234; its function failed on the record {")
    assert "'id': 1234" in error
    assert 'raise ValueError(f"cannot divide' in error
    shown = life.child.stderr()
    assert "cannot divide 1234" in shown
    for foreign in ("org.apache", "py4j", "\tat ", "headgate/runtime", "pyspark"):
        assert foreign not in shown, shown
    assert len(shown.splitlines()) < 30, shown


def test_more_subtasks_than_slots_are_refused_before_anything_runs(spec: Spec, run: Run) -> None:
    error = run(spec("standard", parallelism=3)).failed()
    assert error["is_usage"]
    assert error["error"].startswith("parallelism 3 needs as many slots, but local[2] has 2; ")


def test_state_that_no_longer_fits_is_refused_and_stays_usable(spec: Spec, run: Run, tmp_path: Path) -> None:
    what = spec("standard", rows=40_000)
    life = run(what)
    life.running()
    life.checkpoint()
    life.child.send({"stop": what["name"]})
    assert not life.result()["is_finished"]
    error = run({**what, "pipeline": "other_state"}).failed()
    assert error["is_usage"] or "the state of operator 'window'" in error["error"]
    assert "the state of operator 'window'" in error["error"]
    life = run(what)
    life.note("continues from checkpoint")
    assert life.result()["is_finished"]
    assert_clean(tmp_path)


def test_bad_records_are_diverted_exactly_once_although_workers_die(spec: Spec, run: Run, tmp_path: Path) -> None:
    rows = 30_000
    life = run(spec("dead_letters", rows=rows))
    generation = 0
    for _ in range(2):
        running = life.running(after=generation)
        generation = running["generation"]
        life.checkpoint()
        kill(running["workers"][sorted(running["workers"])[-1]])
        life.restart()
    life.result()
    ids = pl.DataFrame({"id": range(rows)})
    unfit = pl.col("id") % 7 == 0
    keyless = (pl.col("id") % 11 == 0) & ~unfit
    good = read_stream(tmp_path / "store", "good")
    assert_equal(good, ids.filter(~unfit & ~keyless), "good records")
    totals = good.group_by("key").agg(n=pl.len(), last=pl.col("n").max())
    assert totals.filter(pl.col("n") != pl.col("last")).is_empty()
    bad = read_stream(tmp_path / "store", "bad").with_columns(
        id=pl.col("record").str.extract(r"'id': '?(?:seventh )?(\d+)").cast(pl.Int64)
    )
    assert_equal(bad.filter(pl.col("node") == "seventh"), ids.filter(unfit), "records that do not fit")
    assert_equal(bad.filter(pl.col("node") != "seventh"), ids.filter(keyless), "records without key")
    assert_clean(tmp_path)
