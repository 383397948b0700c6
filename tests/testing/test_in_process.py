"""``headgate.testing.run``: a pipeline in the process of its test, without Spark."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pyarrow as pa
import pytest
from tests.support.killing import run_killing

import headgate as hg
from headgate import testing
from headgate.model.progress import SilentObserver
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource, in_process
from headgate.testing.in_process import ThreadEnvironment, ThreadLauncher

SCHEMA = {"word": pa.string(), "n": pa.int64()}


class Totals(hg.ProcessFunction):
    """Emits the running total of each word."""

    schema = SCHEMA

    def open(self, state: hg.StateHandle) -> None:
        self.total = state.value("total", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        total = self.total.get(0) + row["n"]
        self.total.put(total)
        return [{"word": context.key, "n": total}]


class Watching(SilentObserver):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.restarts: list[str] = []
        self.checkpoints: list[int] = []

    def on_restart(self, reason: str, delay_ms: int) -> None:
        self.restarts.append(reason)

    def on_checkpoint(self, checkpoint: int, duration_ms: int, size_bytes: int) -> None:
        self.checkpoints.append(checkpoint)


def pipeline(name: str = "p", **options: Any) -> hg.Pipeline:
    options.setdefault("restart", hg.FixedDelay(delay="10ms"))
    options.setdefault("checkpointing", hg.Checkpointing(interval="20ms"))
    return hg.Pipeline(name, parallelism=2, **options)


def ones(count: int) -> list[dict[str, Any]]:
    return [{"word": "abc"[number % 3], "n": 1} for number in range(count)]


def totals_of(items: Any, sink: Any, **options: Any) -> hg.Pipeline:
    """Return a pipeline with a shuffle."""
    made = pipeline(**options)
    made.source(ScriptedSource(items, schema=SCHEMA, pause_ms=30)).key_by("word").process(Totals()).sink(sink)
    return made


def seen(sink: Collect) -> dict[str, list[int]]:
    """Return the totals of each word in order; each is there once if every record counted once."""
    found: dict[str, list[int]] = {}
    for row in sink.rows() if Path(sink.url).exists() else ():
        found.setdefault(row["word"], []).append(row["n"])
    return {word: sorted(totals) for word, totals in found.items()}


ONCE = {word: list(range(1, 41)) for word in "abc"}
HALVES = (ones(60), ones(60))
HELD_UP = [HALVES[0], PAUSE]
GOING_ON = [*HELD_UP, HALVES[1], EOF]
"""What ``HELD_UP`` becomes in the next run: positions count items."""


def held() -> tuple[set[str], set[Any]]:
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("headgate")}
    return threads, {(c.laddr, c.raddr) for c in psutil.Process().net_connections("tcp")}


def has_left_nothing(before: tuple[set[str], set[Any]]) -> bool:
    """Whether every thread and socket was there ``before``; those of other tests may end meanwhile."""
    return all(now <= then for now, then in zip(held(), before, strict=True))


@pytest.fixture
def settings() -> Iterator[Callable[[], tuple[float, int]]]:
    """What a worker would set for its process; others than its own."""
    read = lambda: (sys.getswitchinterval(), pa.cpu_count())  # noqa: E731
    interval, cores = read()
    sys.setswitchinterval(0.004)
    pa.set_cpu_count(3)
    yield read
    sys.setswitchinterval(interval)
    pa.set_cpu_count(cores)


def test_a_pipeline_with_a_shuffle_counts_every_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Callable[[], tuple[float, int]]
) -> None:
    monkeypatch.chdir(tmp_path)
    sink, before, set_before = Collect(tmp_path / "out"), held(), settings()
    made = totals_of([*HALVES, EOF], sink)
    result = testing.run(made)
    assert result.is_finished
    assert seen(sink) == ONCE
    assert has_left_nothing(before)
    assert settings() == set_before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert made.definition().config.checkpoint_root == str(tmp_path / ".headgate" / "checkpoints")


def test_a_function_that_fails_once_is_restarted_from_a_checkpoint(tmp_path: Path) -> None:
    sink, watching, before = Collect(tmp_path / "out"), Watching(), held()
    script = [HALVES[0], PAUSE, PAUSE, FailOnce(tmp_path / "failed"), HALVES[1], EOF]
    assert testing.run(totals_of(script, sink), observer=watching).is_finished
    assert len(watching.restarts) == 1
    assert "ScriptedFailure" in watching.restarts[0]
    assert seen(sink) == ONCE
    assert has_left_nothing(before)


def test_a_lost_worker_is_replaced(tmp_path: Path) -> None:
    sink, watching = Collect(tmp_path / "out"), Watching()
    run_killing(totals_of([*HALVES, EOF], sink), 2, observer=watching)
    assert len(watching.restarts) == 1
    assert "worker 0" in watching.restarts[0]
    assert seen(sink) == ONCE


def test_a_worker_that_is_lost_before_it_registers_fails_its_whole_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ThreadLauncher.submit

    def submit_and_kill(self: ThreadLauncher, submission: int, *arguments: Any) -> None:
        submit(self, submission, *arguments)
        if submission in (1, 3):
            self.kill()

    monkeypatch.setattr(ThreadLauncher, "submit", submit_and_kill)
    sink, watching = Collect(tmp_path / "out"), Watching()
    made = totals_of([*HALVES, EOF], sink, checkpointing=hg.Checkpointing(interval="5ms"))
    run_killing(made, 1, observer=watching)
    assert len(watching.restarts) == 3
    assert seen(sink) == ONCE


def test_a_run_that_ends_before_its_worker_is_lost_is_refused(tmp_path: Path) -> None:
    made = totals_of([HALVES[0], EOF], Collect(tmp_path / "out"), checkpointing=hg.Checkpointing(interval=None))
    with pytest.raises(hg.UsageError, match="with 1 completed checkpoints, before kill_worker_after_checkpoint=9"):
        testing.run(made, kill_worker_after_checkpoint=9)
    with pytest.raises(hg.UsageError, match="must be 1 or more, but is 0"):
        testing.run(made, kill_worker_after_checkpoint=0)


def test_a_run_goes_on_from_the_savepoint_of_another(tmp_path: Path) -> None:
    first, second = Collect(tmp_path / "first"), Collect(tmp_path / "second")
    with testing.running(totals_of(HELD_UP, first)) as handle:
        while sum(map(len, seen(first).values())) < 60:
            time.sleep(0.01)
        stopped = handle.stop(savepoint=tmp_path / "savepoint")
    assert stopped is not None
    assert not stopped.is_finished
    assert testing.run(totals_of(GOING_ON, second), restore=tmp_path / "savepoint").is_finished
    assert {word: sorted(seen(first)[word] + seen(second)[word]) for word in "abc"} == ONCE


def test_a_run_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    checkpointing = hg.Checkpointing(interval="20ms", dir=tmp_path / "checkpoints")
    with testing.running(totals_of(HELD_UP, sink, checkpointing=checkpointing)) as handle:
        handle.take_checkpoint()
        handle.cancel()
    result = testing.run(totals_of(GOING_ON, sink, checkpointing=checkpointing))
    assert result.is_finished
    assert seen(sink) == ONCE


def test_state_in_rocksdb_survives_a_failure(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    script = [HALVES[0], PAUSE, PAUSE, FailOnce(tmp_path / "failed"), HALVES[1], EOF]
    testing.run(totals_of(script, sink, state=hg.RocksDB()))
    assert seen(sink) == ONCE


def halve(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    smaller = loop.select((pl.col("n") // 2).alias("n"))
    return smaller.filter(pl.col("n") > 1), smaller.filter(pl.col("n") <= 1)


def test_loops_run(tmp_path: Path) -> None:
    sink, made = Collect(tmp_path / "out"), pipeline()
    made.source(hg.FromRows([{"n": number} for number in range(1, 65)])).iterate(halve).sink(sink)
    testing.run(made)
    assert sum(row["n"] for row in sink.rows()) == 63
    assert len(sink.rows()) == 64


def test_a_wrong_pipeline_is_refused_as_ever() -> None:
    made = pipeline()
    made.source(hg.FromRows([{"n": 1}]))
    with pytest.raises(hg.UsageError, match="sink"):
        testing.run(made)
    with pytest.raises(hg.UsageError, match=r"a headgate\.Pipeline is needed, not str"):
        testing.run("p")  # type: ignore[arg-type]


def test_what_a_function_keeps_for_itself_is_gone_after_a_restart(tmp_path: Path) -> None:
    sink, calls, made = Collect(tmp_path / "out"), [0], pipeline(checkpointing=hg.Checkpointing(interval=None))

    def count(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(0)
        return {**row, "n": len(calls) - 1}

    script = [ones(4), PAUSE, PAUSE, FailOnce(tmp_path / "failed"), ones(3), EOF]
    made.source(ScriptedSource(script, schema=SCHEMA, pause_ms=30)).map(count).sink(sink)
    testing.run(made)
    assert [row["n"] for row in sink.rows()] == [*range(1, 8)]
    assert calls == [0]


def test_the_end_of_a_worker_is_not_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    around = ThreadEnvironment(lambda: left.append("left"))
    thread = around.thread(lambda: around.exit(75), "headgate-test")
    thread.start()
    thread.join()
    assert left == ["left"]
    assert errors == []


def test_a_worker_is_gone_when_its_last_thread_is() -> None:
    around, release, order = ThreadEnvironment(lambda: None), threading.Event(), list[str]()

    def work() -> None:
        release.wait()
        order.append("worked")

    around.thread(work, "headgate-test").start()
    around.pool(1, "headgate-test").submit(work)
    joining = threading.Thread(target=lambda: (around.join(), order.append("gone")))
    joining.start()
    joining.join(0.1)  # not a wait for anything: time in which it must not be gone
    release.set()
    joining.join()
    assert order == ["worked", "worked", "gone"]


@pytest.mark.parametrize("first_out", [0, 1])
def test_of_runs_side_by_side_the_last_one_sets_back_what_the_first_one_found(
    settings: Callable[[], tuple[float, int]], first_out: int
) -> None:
    before, runs = settings(), [in_process._SETTINGS.kept(), in_process._SETTINGS.kept()]
    for run in runs:
        run.__enter__()
        sys.setswitchinterval(0.001)  # what a worker does
        pa.set_cpu_count(1)
    runs.pop(first_out).__exit__(None, None, None)
    assert settings() == (0.001, 1), "workers still run"
    runs.pop().__exit__(None, None, None)
    assert settings() == before
    with in_process._SETTINGS.kept():
        pa.set_cpu_count(2)
    assert settings() == before


def test_what_cannot_be_copied_is_refused_before_anything_runs(tmp_path: Path) -> None:
    lock, made = threading.Lock(), pipeline()

    def locked(row: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return row

    made.source(hg.FromRows([{"n": 1}])).map(locked).sink(Collect(tmp_path / "out"))
    with pytest.raises(
        hg.UsageError,
        match="'map' cannot be sent to the workers: function locked, variable lock: a _thread",
    ):
        testing.run(made)


def test_a_failure_for_good_is_raised(tmp_path: Path) -> None:
    made, before = pipeline(restart=hg.NoRestart()), held()
    made.source(hg.FromRows([{"n": 0}])).map(lambda row: {"n": 1 // row["n"]}).sink(Collect(tmp_path / "out"))
    with pytest.raises(
        hg.PipelineFailed, match=r"^operator 'map': ZeroDivisionError: .+; its function failed on the record"
    ):
        testing.run(made)
    assert has_left_nothing(before)


def test_a_run_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "LEAVE_S", 300)  # on a slow machine its end takes its time
    before = held()
    expected = (
        "pipeline 'p' had not ended after 0.3 s: it was .*, with .* completed checkpoints?; give it bounded input"
    )
    with pytest.raises(TimeoutError, match=expected):
        testing.run(totals_of(HELD_UP, Collect(tmp_path / "out")), timeout_s=0.3)
    assert has_left_nothing(before)
    with pytest.raises(hg.UsageError, match="timeout_s must be more than zero"):
        testing.run(pipeline(), timeout_s=0)


def stick(row: dict[str, Any]) -> dict[str, Any]:
    """Wait for the test, which holds it up."""
    STUCK.wait()
    return row


STUCK = threading.Event()


def test_a_function_that_does_not_return_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "LEAVE_S", 0.2)
    before = held()
    try:
        for timeout_s in (0.5, 5.0, 50.0):
            made = pipeline()
            made.source(hg.FromRows([{"n": 0}])).map(stick).sink(Collect(tmp_path / f"out-{timeout_s}"))
            with pytest.raises(TimeoutError) as caught:
                testing.run(made, timeout_s=timeout_s)
            is_named = re.search(r"a function did not return, .* stopped: worker 0 in wait \(", str(caught.value))
            if is_named:  # else a slow machine has not come so far
                break
        assert is_named, caught.value
    finally:
        STUCK.set()
    while not has_left_nothing(before):
        time.sleep(0.01)
    assert seen(Collect(tmp_path / f"out-{timeout_s}")) == {}


def fragile(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": 60 // row["n"]}


def test_a_child_that_a_function_forked_and_did_not_end_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fork(row: dict[str, Any]) -> dict[str, Any]:
        child = os.fork()
        if child == 0:
            sys.exit(0)  # instead of os._exit: that goes back into the worker
        return {"n": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}

    pipeline, sink = hg.Pipeline("forks"), Collect(tmp_path / "out")
    pipeline.source(hg.FromRows([{"n": 7}])).map(fork).sink(sink)
    before = psutil.Process().children()  # servers of other tests
    try:
        result = testing.run(pipeline, parallelism=1)
    finally:
        for left in set(psutil.Process().children()) - set(before):
            left.kill()
    assert (sink.rows(), result.restarts) == ([{"n": 1}], 0)
    assert "os._exit()" in capfd.readouterr().err


def test_exceptions_go_to_the_dead_letter_sink_with_the_records_around_them(tmp_path: Path) -> None:
    good, bad = Collect(tmp_path / "good"), Collect(tmp_path / "bad")
    p = hg.Pipeline("fragile", parallelism=2, bad_records=hg.DeadLetter(bad, exceptions=True))
    rows = p.source(hg.FromRows([{"n": n} for n in (3, 0, 2, 0, 1)]))
    rows.map(fragile, name="divide").filter(lambda row: 100 // (row["n"] - 30) > 0, name="choose").sink(good)
    testing.run(p)
    assert [row["n"] for row in good.rows()] == [60]
    assert sorted(row["node"] for row in bad.rows()) == ["choose", "divide", "divide"]
    assert all("ZeroDivisionError" in row["problem"] for row in bad.rows())


def test_without_that_choice_an_exception_fails_the_pipeline(tmp_path: Path) -> None:
    p = hg.Pipeline(
        "fragile", parallelism=1, restart=hg.NoRestart(), bad_records=hg.DeadLetter(Collect(tmp_path / "bad"))
    )
    p.source(hg.FromRows([{"n": 0}])).map(fragile).sink(hg.Discard())
    with pytest.raises(hg.PipelineFailed, match="ZeroDivisionError"):
        testing.run(p)


JOB = """
import headgate as hg
from headgate import testing

class Twice(hg.ProcessFunction):
    schema = {"n": int}

    def process(self, row, context):
        return [{"n": 2 * row["n"]}]

def plus_one(row):
    return {"n": row["n"] + 1}

p, sink = hg.Pipeline("job"), testing.Collect(DIRECTORY)
p.source(hg.FromRows([{"n": 1}, {"n": 2}])).map(plus_one).key_by("n").process(Twice()).sink(sink)
testing.run(p, timeout_s=300)
found = sorted(row["n"] for row in sink.rows())
"""


@pytest.mark.parametrize("name", ["job_of_a_module", "job_of_a_package.job"])
def test_a_module_that_runs_its_pipeline_while_it_is_imported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(JOB.replace("DIRECTORY", repr(str(tmp_path / "out"))), encoding="utf-8")
    if "." in name:
        path.with_name("__init__.py").write_text(f"import {name}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module(name).found == [4, 6]
