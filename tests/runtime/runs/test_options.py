"""What the options of checkpoints promise, with the real driver and real workers."""

from __future__ import annotations

import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests.api.test_metrics import Noting, fetched, samples, values
from tests.conftest import few
from tests.runtime.held_writes import HeldWrites, under_way, until
from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed
from headgate.model.config import StartConfig
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import CheckpointOutcome
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
SOURCE = generator(1_200, 6_000, batch=20)
SLOW = 100
"""Records each second of a run whose checkpoints are to differ, however late they are taken."""


def added(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "n": total["n"] + row["n"]}


def counting(root: Path, *, rate: float | None = SOURCE.rows_per_second, **options: Any) -> PipelineDefinition:
    """Every record, and beside them numbers for each key, from state."""
    pipeline = pipeline_at(root, **options)
    rows = pipeline.source(replace(SOURCE, rows_per_second=rate), name="in")
    rows.sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    sums = rows.select("key", n=pl.lit(1)).key_by("key").reduce(added, name="sum")
    sums.sink(hg.FileSink(root / "sums", "parquet", roll_interval=0), name="sums")
    return definition_of(pipeline, inline_bytes_max=0)


def check(root: Path) -> None:
    """Everything was written, once."""
    made = events(SOURCE)
    same(read_committed(str(root / "rows")), made.select("id", "key", "value"))
    numbers = made.group_by("key").agg(n=pl.int_range(1, pl.len() + 1)).explode("n")
    same(read_committed(str(root / "sums")), numbers.with_columns(pl.col("n").cast(pl.Int32)))


def kept(root: Path) -> list[int]:
    """Return the checkpoints that can be restored, oldest first; nothing of any other is there."""
    log = CheckpointLog(open_storage(str(root / "checkpoints")), "p")
    found = sorted(int(manifest.checkpoint) for manifest in candidates(log.observe()))
    directory = root / "checkpoints" / "p"
    with_files = {path.name for path in directory.glob("chk-*") if any(path.iterdir())}
    assert with_files <= {f"chk-{checkpoint:010d}" for checkpoint in found}
    return found


def stopped(run: Run) -> None:
    run.driver.stop()
    assert not run.result().is_finished


# -- the minimum pause ----------------------------------------------------------------------------------------------


def test_a_pause_holds_back_every_periodic_checkpoint_and_no_other(start: Start, tmp_path: Path) -> None:  # C4
    run = start(counting(tmp_path, interval="1ms", min_pause="1h"))
    run.wait_checkpoints(1)
    asked = []
    for _ in range(5):
        threading.Event().wait(0.03)  # what must not happen has its time: not a wait for anything
        asked.append(run.driver.take_checkpoint().result(WAIT_S))
    assert asked == [CheckpointOutcome(checkpoint) for checkpoint in range(2, 7)]  # type: ignore[arg-type]
    run.result()
    assert run.checkpoints == list(range(1, 8)), "the last one of the run waits for no pause"
    check(tmp_path)


def test_periodic_checkpoints_go_on_behind_a_pause(start: Start, tmp_path: Path) -> None:  # C4
    run = start(counting(tmp_path, interval="1ms", min_pause="30ms"))
    run.wait_checkpoints(3)
    run.result()
    check(tmp_path)


# -- several at once ------------------------------------------------------------------------------------------------


def test_two_checkpoints_are_under_way_at_once_and_no_third(start: Start, tmp_path: Path) -> None:  # C3
    gate = tmp_path / "gate"
    run = start(counting(tmp_path, interval="5ms", max_concurrent=2), prepare=HeldWrites(gate))
    until(run, lambda: under_way(run) == (1, 2), "two checkpoints at once")
    asked = run.driver.take_checkpoint()
    until(run, lambda: bool(run.driver.supervision._asked), "the request has arrived")
    assert (under_way(run), asked.done(), run.checkpoints) == ((1, 2), False, [])
    gate.touch()
    found = asked.result(WAIT_S)
    assert found.checkpoint is not None
    assert found.checkpoint >= 3
    assert run.checkpoints[:2] == [1, 2], "both are completed, none is given up for the other"
    assert run.result().restarts == 0
    check(tmp_path)


@pytest.mark.parametrize("index", few([0, 1], 1))
def test_a_worker_dies_while_two_checkpoints_are_under_way(start: Start, tmp_path: Path, index: int) -> None:  # C3
    """Neither counts, whoever has written what."""
    gate = tmp_path / "gate"
    run = start(counting(tmp_path, interval="5ms", max_concurrent=2), prepare=HeldWrites(gate, 2, index=1))
    until(run, lambda: under_way(run) == (2, 3), "two checkpoints behind the first one")
    run.kill(index)
    run.wait_restarts(1)
    assert run.checkpoints[0] == 1
    run.wait_checkpoints(1)
    assert not {2, 3} & set(run.checkpoints)
    assert run.result().restarts == 1
    check(tmp_path)


# -- slow storage ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_written_too_slowly_expires_and_leaves_nothing(
    start: Start, tmp_path: Path
) -> None:  # F8, C10, C23
    gate = tmp_path / "gate"
    definition = counting(tmp_path, timeout="150ms", tolerable_failures=1_000, retained=1)
    run = start(definition, prepare=HeldWrites(gate, 3, index=1))
    run.wait(lambda: any("checkpoint 3 was aborted: it did not complete within" in n for n in run.notes), "its end")
    gate.touch()
    run.wait_checkpoints(1)
    assert run.result().restarts == 0
    assert 3 not in run.checkpoints
    assert kept(tmp_path) == run.checkpoints[-1:], "what came late is removed, too"
    check(tmp_path)


# -- how many are kept ----------------------------------------------------------------------------------------------


def test_fewer_checkpoints_are_kept_from_the_first_completion_on(start: Start, tmp_path: Path) -> None:  # C31
    run = start(counting(tmp_path, retained=4))
    run.wait_checkpoints(4)
    stopped(run)
    assert len(before := kept(tmp_path)) == 4
    run = start(counting(tmp_path, retained=2, interval=None))
    run.pids()
    assert kept(tmp_path) == before, "a start alone removes nothing"
    stopped(run)
    (last,) = run.checkpoints
    assert kept(tmp_path) == [before[-1], last]
    assert start(counting(tmp_path, retained=2)).result().is_finished
    check(tmp_path)


def test_fewer_checkpoints_are_kept_of_a_pipeline_that_has_finished(start: Start, tmp_path: Path) -> None:  # C31
    run = start(counting(tmp_path, retained=3))
    run.wait_checkpoints(2)
    assert run.result().is_finished
    assert len(before := kept(tmp_path)) == 3
    assert start(counting(tmp_path, retained=1)).result().is_finished
    assert kept(tmp_path) == before[-1:]
    check(tmp_path)


def test_more_checkpoints_are_kept_than_before(start: Start, tmp_path: Path) -> None:  # C31, C35
    run = start(counting(tmp_path, retained=1))
    run.wait_checkpoints(2)
    stopped(run)
    (restored,) = kept(tmp_path)
    run = start(counting(tmp_path, retained=4, interval=None))
    run.pids()
    taken = [run.driver.take_checkpoint().result(WAIT_S).checkpoint for _ in range(3)]
    assert kept(tmp_path) == [restored, *taken], "the one that was restored is one of them"
    assert run.result().is_finished
    assert kept(tmp_path) == run.checkpoints[-4:]
    check(tmp_path)


# -- an older checkpoint --------------------------------------------------------------------------------------------


def test_an_older_checkpoint_chosen_by_hand_is_gone_back_to_once(start: Start, tmp_path: Path) -> None:  # SV25
    """What was committed behind it comes again, record for record, and nothing else."""
    written = lambda: read_committed(str(tmp_path / "rows")).height  # noqa: E731
    run = start(counting(tmp_path, rate=SLOW, retained=100))
    run.wait_checkpoints(1)
    first = written()
    until(run, lambda: written() > first, "checkpoints that differ")
    stopped(run)
    own = tmp_path / "checkpoints" / "p"
    before = Counter(read_committed(str(tmp_path / "rows"))["id"])
    found = {checkpoint: rows_read(own, checkpoint) for checkpoint in kept(tmp_path)}
    newest = max(found)
    chosen = max(checkpoint for checkpoint, rows in found.items() if rows < found[newest])
    assert before.total() == found[newest]
    older = own / f"chk-{chosen}"
    with pytest.raises(PipelineFailed, match=f"its newest checkpoint is {newest}"):
        start(restoring(counting(tmp_path), older)).result()
    run = start(restoring(counting(tmp_path), older, newest))
    run.wait_checkpoints(1)
    assert run.checkpoints[0] > newest
    run.kill(0)  # from now on it goes on from its own checkpoints
    assert run.result().is_finished
    assert any(f"going back past checkpoint {newest}" in note for note in run.notes)
    assert start(restoring(counting(tmp_path), older, newest)).result().is_finished
    again = Counter(read_committed(str(tmp_path / "rows"))["id"])
    once = Counter(events(SOURCE)["id"])
    assert (again - once).total() == found[newest] - found[chosen]
    assert again - once <= before
    assert again >= once
    sums = read_committed(str(tmp_path / "sums"))
    wanted = events(SOURCE).group_by("key").agg(n=pl.len().cast(pl.Int32))
    same(sums.group_by("key").agg(pl.col("n").max()), wanted)


def restoring(definition: PipelineDefinition, place: Path, behind: int | None = None) -> PipelineDefinition:
    return replace(definition, config=replace(definition.config, start=StartConfig(str(place), behind)))


def rows_read(own: Path, checkpoint: int) -> int:
    """Return how many records the sources had read at a checkpoint."""
    positions = hg.read_state(own, "in", "positions", id=checkpoint)["position"]
    return sum(int.from_bytes(position, "little") for position in positions)


def arrived_at_the_sink(text: str) -> float:
    arrived = samples(text).get("headgate_records_in_total", ())
    return sum(sample.value for sample in arrived if sample.labels["operator"] == "out")


def test_prometheus_sees_a_run_until_it_has_ended(started: list[PipelineDefinition], tmp_path: Path) -> None:
    source = hg.Generator(columns={"n": hg.RowNumber()}, rows_per_second=2_000, batch_rows=20)
    pipeline = pipeline_at(tmp_path)
    pipeline.source(source).rebalance().sink(hg.Discard(), name="out")
    observer = Noting()
    handle = pipeline.start(observer=observer, metrics_port=0)
    (url,) = [note.removeprefix("metrics at ") for note in observer.notes if note.startswith("metrics at ")]
    deadline = time.monotonic() + WAIT_S
    while not (handle.checkpoints() and arrived_at_the_sink(fetched(url)) and handle.metrics()["source"]["idle_ms"]):
        assert handle.wait(0) is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    arrived = values(fetched(url), "headgate_records_in_total", "pipeline", "operator", "subtask")
    assert {labels for labels in arrived if labels[1] == "out"} == {("p", "out", "0"), ("p", "out", "1")}
    result = handle.stop()
    assert result is not None
    assert handle.metrics()["source"]["records_out"] == result.records_in
    with pytest.raises(urllib.error.URLError):
        fetched(url)


Starts = Callable[..., Run]


@pytest.mark.parametrize("tls", [True, None])
def test_a_pipeline_runs_over_tls_when_its_user_says_so(start: Starts, tmp_path: Path, tls: bool | None) -> None:
    pipeline = pipeline_at(tmp_path, parallelism=2, security=hg.Security(tls=tls))
    rows = pipeline.source(hg.FromRows([{"id": number, "key": number % 7} for number in range(500)]))
    rows.rebalance().sink(hg.FileSink(tmp_path / "out"))
    run = start(definition_of(pipeline))
    assert (run.driver.workers._server._listener._tls is not None) is bool(tls)
    assert run.result().is_finished
    assert read_committed(str(tmp_path / "out"))["id"].sort().to_list() == list(range(500))
