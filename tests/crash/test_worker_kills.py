"""Workers on local Spark that are killed, that a function of a user fails, or storage (F1, F2, F9, F16, F17, F24)."""

from __future__ import annotations

import errno
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
from tests.conftest import few

from crash.support.cluster import Cluster
from crash.support.pipelines import MANY_KEYS, STOPPED_MS, expected_event_time, generated
from crash.support.processes import STARTED_S, Life, kill, until
from crash.support.processor_pipeline import FIRST, expected_steps
from crash.support.results import assert_clean, assert_equal, assert_standard, read_stream
from headgate.connectors.files.file_committer import read_committed
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

# Rules: F4, F22


pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]
Told = Callable[[Life], None]


def test_workers_killed_at_random_lose_and_double_nothing(
    spec: Spec, run: Run, tmp_path: Path, dice: random.Random, told: Told
) -> None:
    life = run(spec("standard", rows=40_000))
    generation = 0
    for kills, is_checkpointed in ((1, False), (2, True)):
        running = life.running(after=generation)
        generation = running["generation"]
        if is_checkpointed:
            life.checkpoint()
        threading.Event().wait(dice.uniform(0.0, 1.0))  # the fault's time, not a wait for anything
        victims = list(running["workers"].values())
        dice.shuffle(victims)
        for pid in victims[:kills]:
            kill(pid)
        life.restart()
    result = life.result()
    told(life)
    assert result["restarts"] == 2
    assert_standard(tmp_path, 40_000)
    assert_clean(tmp_path)


WORKER_POINTS = {
    "before-snapshot": 7,
    "in-put": 5,
    "after-prepare": 9,
    "after-snapshot-before-ack": 11,
    "in-restore": 3,
}


def test_workers_killed_at_each_named_point(spec: Spec, run: Run, tmp_path: Path, told: Told) -> None:
    markers = {point: tmp_path / f"killed-{point}" for point in WORKER_POINTS}
    points = ";".join(f"{point}:{count}:{markers[point]}" for point, count in WORKER_POINTS.items())
    life = run(spec("standard", rows=40_000, rate=4_000, kill_at=points, inline_bytes_max=0))
    until(lambda: all(marker.exists() for marker in markers.values()), "a kill at each point", STARTED_S)
    result = life.result()
    told(life)
    assert [point for point, marker in markers.items() if not marker.exists()] == []
    assert result["restarts"] >= len(WORKER_POINTS) - 1  # two workers may fall in one generation
    assert_standard(tmp_path, 40_000)
    assert_clean(tmp_path)


def test_a_worker_lost_before_the_first_checkpoint_starts_from_the_beginning(
    spec: Spec, run: Run, tmp_path: Path
) -> None:
    life = run(spec("standard", interval="1h"))
    kill(next(iter(life.running()["workers"].values())))
    life.restart()
    life.result()
    assert_standard(tmp_path, 20_000)
    assert_clean(tmp_path)


def test_a_worker_that_wakes_beside_its_replacement_changes_nothing(
    spec: Spec, launch: Callable[..., Life], tmp_path: Path, told: Told
) -> None:
    """Spark kills a lingering worker after two seconds; here it may linger, and there are slots for all (I8)."""
    linger = "--conf spark.python.task.killTimeout=10m pyspark-shell"
    what = spec("standard", rows=60_000, heartbeat_timeout_ms=STOPPED_MS, master="local[4]")
    life = launch(what, PYSPARK_SUBMIT_ARGS=linger)
    running = life.running()
    life.checkpoint(2)
    zombie = psutil.Process(running["workers"]["0"])
    zombie.suspend()
    assert "silent" in life.restart()["reason"]
    following = life.running(after=running["generation"])
    assert zombie.pid not in following["workers"].values()
    life.checkpoint()
    assert zombie.status() == psutil.STATUS_STOPPED
    zombie.resume()
    until(lambda: not zombie.is_running() or zombie.status() == psutil.STATUS_ZOMBIE, "the zombie's end")
    life.checkpoint()
    result = life.result()
    told(life)
    assert result["restarts"] == 1
    assert life.child.exit_code() == 0
    life.child.assert_gone()
    assert_standard(tmp_path, 60_000)
    assert_clean(tmp_path)


STARTING_S = 1.5
"""About so long after its first Python process a start is over."""


@pytest.mark.xdist_group("cluster")
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
    for moment in (0, dice.random()):
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


EVENT_TIME_ROWS = 20_000


def test_killed_workers_and_drivers_change_no_result(
    spec: Callable[..., dict[str, Any]], launch: Callable[..., Life], tmp_path: Path
) -> None:
    what = spec("event_time", rows=EVENT_TIME_ROWS, rate=2_000)
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
    for name, expected in expected_event_time(EVENT_TIME_ROWS).items():
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


# Rules: F9


STATE_ROWS = 80_000


def assert_counted(root: Path) -> int:
    """Every record was counted once, in both ways; return how many keys there are."""
    keys = 0
    for name in ("reduced", "processed"):
        counts = read_committed(str(root / name))
        by_key = counts.group_by("key").agg(most=pl.col("n").max(), distinct=pl.col("n").n_unique(), rows=pl.len())
        total = by_key["most"].sum()
        assert total == STATE_ROWS, f"the counts of '{name}' add up to {total} of {STATE_ROWS} records"
        assert by_key.filter((pl.col("most") != pl.col("rows")) | (pl.col("distinct") != pl.col("rows"))).is_empty()
        keys = by_key.height
    return keys


def last_manifest(root: Path, name: str) -> Manifest:
    log = CheckpointLog(open_storage(str(root / "checkpoints")), name).observe()
    return [entry.content for entry in log.entries if isinstance(entry.content, Manifest)][-1]


def rows_of(manifest: Manifest, node: str, state: str) -> int:
    return sum((entry.rows or {}).get(node, {}).get(state, 0) for entry in manifest.entries)


def test_state_written_at_the_second_try_is_whole_when_workers_die(
    spec: Spec, run: Run, tmp_path: Path, storage_fault: Path
) -> None:
    """First every snapshot file fails once; then the disk is full for a while. After each a worker is killed."""
    what = spec("many_keys", rows=STATE_ROWS, rate=5_000, inline_bytes_max=0, tolerable_failures=1_000)
    told = tmp_path / "told"
    fault = {"errno": errno.ENOSPC, "part": f"{tmp_path}/checkpoints/{what['name']}/chk-", "operations": ["put"]}
    storage_fault.write_text(json.dumps({**fault, "told": str(told)}))
    life = run(what)
    running = life.running()
    life.checkpoint(4)
    assert len(told.read_text().splitlines()) >= 2 * 4, "every snapshot was written twice"
    kill(next(iter(running["workers"].values())))
    life.restart()
    running = life.running(after=running["generation"])
    life.checkpoint(2)
    storage_fault.write_text(json.dumps(fault))
    life.note("No space left on device")
    storage_fault.unlink()
    life.checkpoint(2)
    kill(list(running["workers"].values())[-1])
    life.restart()
    result = life.result()
    assert (result["is_finished"], result["restarts"]) == (True, 2)
    keys = assert_counted(tmp_path)
    assert 0 < keys <= MANY_KEYS
    manifest = last_manifest(tmp_path, what["name"])
    assert rows_of(manifest, "reduced", "accumulators") == keys
    assert rows_of(manifest, "processed", "count") == keys
    assert_clean(tmp_path)


# Rules: F24


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
