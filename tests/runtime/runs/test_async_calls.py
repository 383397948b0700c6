"""Pipelines with ``map_async``, with the real driver and workers in this process, and a service that the test opens."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.support.killing import run_killing

import headgate as hg
from headgate import testing
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

ROW = {"x": int, "k": int}
ROWS = [{"x": x, "k": x % 7} for x in range(200)]
OPEN = threading.Event()
"""The service answers."""
SEEN = threading.Semaphore(0)
"""Released by every call."""


@pytest.fixture(autouse=True)
def service_open() -> Any:
    OPEN.set()
    yield
    OPEN.set()


async def asked(row: dict[str, Any]) -> Any:
    SEEN.release()
    while not OPEN.is_set():
        await asyncio.sleep(0.001)  # until the test opens the service
    await asyncio.sleep(0.001 if row["x"] % 3 else 0)  # out of order: not a wait for anything
    return {"x": 2 * row["x"], "k": row["k"]}


def pipeline_of(source: Any, out: Any, *, keyed: bool = False, **options: Any) -> hg.Pipeline:
    runtime = {"parallelism": 2, "checkpointing": hg.Checkpointing(interval="20ms")}
    pipeline = hg.Pipeline("p", **{**runtime, "restart": hg.FixedDelay(delay="10ms"), **options})
    stream = pipeline.source(source)
    asking = stream.key_by("k") if keyed else stream
    asking.map_async(asked, limit=10, timeout="10m", ordered=keyed, name="ask").sink(out)
    return pipeline


def found(out: Collect) -> list[int]:
    return sorted(row["x"] for row in out.rows())


EXPECTED = [2 * x for x in range(200)]


@pytest.mark.parametrize("keyed", [False, True])
def test_a_lost_worker_changes_no_results(tmp_path: Path, keyed: bool) -> None:
    script = [ROWS[:80], PAUSE, ROWS[80:120], PAUSE, FailOnce(tmp_path / "failed"), ROWS[120:], PAUSE, EOF]
    out = Collect(tmp_path / "out")
    run_killing(pipeline_of(ScriptedSource(script, schema=ROW), out, keyed=keyed), 1)
    assert found(out) == EXPECTED
    if keyed:
        for key in range(7):
            of_key = [row["x"] for row in out.rows() if row["k"] == key]
            assert of_key == sorted(of_key)


@pytest.mark.parametrize("alignment_timeout", [None, "0ms"])
def test_a_checkpoint_waits_for_no_answer_and_a_savepoint_takes_the_requests_along(
    tmp_path: Path, alignment_timeout: Any
) -> None:
    OPEN.clear()
    out = Collect(tmp_path / "out")
    checkpointing = hg.Checkpointing(interval="20ms", alignment_timeout=alignment_timeout)
    batches = [ROWS[start : start + 20] for start in range(0, 200, 20)]
    source = ScriptedSource([*batches, *[PAUSE] * 10_000], schema=ROW)
    pipeline = pipeline_of(source, out, checkpointing=checkpointing)
    with testing.running(pipeline, checkpoint_dir=tmp_path / "state") as handle:
        for _ in range(10):
            assert SEEN.acquire(timeout=60)
        savepoint = handle.stop(savepoint=tmp_path / "savepoint")
        assert savepoint is not None
        handle.wait(300)
    assert out.rows() == []
    OPEN.set()
    for parallelism in (3, 1):
        out = Collect(tmp_path / f"out-{parallelism}")
        source = ScriptedSource([*batches, EOF], schema=ROW)
        again = pipeline_of(source, out, parallelism=parallelism)
        testing.run(again, timeout_s=300, checkpoint_dir=tmp_path / f"of-{parallelism}", restore=tmp_path / "savepoint")
        assert found(out) == EXPECTED


def test_input_ends_when_every_request_was_answered_and_windows_get_all_of_them(tmp_path: Path) -> None:
    out = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms"))
    stream = pipeline.source(hg.FromRows(ROWS)).with_columns(time=pl.from_epoch(pl.col("x"), time_unit="s"))
    asking = stream.with_timestamps("time").map_async(timed, ordered=False, limit=7)
    asking.key_by("k").window(hg.Tumbling("20s")).agg(n=pl.len()).sink(out)
    testing.run(pipeline, timeout_s=300)
    assert sum(row["n"] for row in out.rows()) == 200


async def timed(row: dict[str, Any]) -> Any:
    await asyncio.sleep(0.001 if row["x"] % 3 else 0)  # out of order: not a wait for anything
    return row


def test_a_service_that_fails_fails_the_pipeline_or_the_record(tmp_path: Path) -> None:
    async def failing(row: dict[str, Any]) -> Any:
        if row["x"] == 7:
            raise ConnectionError("the service is away")
        return row

    for dead in (None, hg.DeadLetter(bad := Collect(tmp_path / "bad"), exceptions=True)):
        out = Collect(tmp_path / f"out-{dead is None}")
        pipeline = hg.Pipeline("p", bad_records=dead or hg.Fail())
        pipeline.source(hg.FromRows(ROWS[:10])).map_async(failing, retries=1, retry_delay="1ms").sink(out)
        if dead is None:
            with pytest.raises(hg.PipelineFailed, match=r"operator 'map-async': .+; its function failed on the record"):
                testing.run(pipeline, timeout_s=300)
        else:
            testing.run(pipeline, timeout_s=300)
            assert [row["x"] for row in out.rows()] == [x for x in range(10) if x != 7]
            assert "the service is away" in bad.rows()[0]["problem"]
