"""Real drivers and workers that are killed, stopped, and fed what they cannot digest: nothing lost, nothing twice."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.mutants.harness import patched
from tests.runtime.held_writes import DyingInARow, HeldWrites, awaited, under_way, until
from tests.runtime.holding import held
from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.runtime.runs.test_options import check, counting
from tests.runtime.runs.test_results import generator, recounted, same, windowed
from tests.support.sqlite_sinks import SqliteSink

import headgate as hg
from headgate import testing
from headgate.connectors.base import CoordinatorHook
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import BadRecord, FencedError, PipelineFailed
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints import coordinator_events
from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.protocol.checkpoints.recovery import candidates
from headgate.protocol.supervision import supervisor_events
from headgate.protocol.supervision.supervisor import Supervisor
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

# Rules: F1


cloudpickle.register_pickle_by_value(sys.modules[__name__])

Start = Any
FENCED = 75


@pytest.mark.parametrize("stage_attempts", [1, 4], ids=["resubmitted", "retried by the stage"])
def test_workers_killed_one_after_the_other_lose_and_repeat_nothing(
    start: Start, tmp_path: Path, stage_attempts: int
) -> None:
    dice = random.Random(stage_attempts)
    source = generator(4_000, 4_000, batch=50)
    run = start(definition_of(windowed(tmp_path, source)), stage_attempts=stage_attempts)
    for kill in range(2):
        if dice.random() < 0.7:
            run.wait_checkpoints(dice.randint(1, 3))
        run.kill(dice.randrange(2))
        run.wait_restarts(kill + 1)
    result = run.result()
    assert result.is_finished
    assert result.restarts == 2
    assert run.launcher.submissions == (1 if stage_attempts == 4 else 3)
    same(read_committed(str(tmp_path / "out")), recounted(source))


def test_a_stopped_worker_that_wakes_beside_its_successor_changes_nothing(start: Start, tmp_path: Path) -> None:
    source = generator(5_000, 3_000, batch=50)
    run = start(definition_of(windowed(tmp_path, source)))
    run.wait_checkpoints(2)
    zombie = run.freeze(1)
    run.wait_restarts(1)
    run.wait_checkpoints(2)
    os.kill(zombie, signal.SIGCONT)
    run.wait(lambda: zombie in run.launcher.codes, "the zombie notices that it is over")
    assert run.launcher.codes[zombie] in (1, FENCED)
    result = run.result()
    assert result.is_finished
    assert result.restarts == 1, "the zombie must not disturb its successor"
    same(read_committed(str(tmp_path / "out")), recounted(source))


def divide(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "value": 1_000 // (row["id"] - 700)}


def test_a_failing_function_is_tried_twice_and_told_with_operator_record_and_own_frames(
    start: Start, tmp_path: Path
) -> None:
    pipeline = pipeline_at(tmp_path)
    stream = pipeline.source(generator(1_000, splits=1)).map(divide, name="divide")
    stream.sink(hg.FileSink(tmp_path / "out"), name="out")
    run = start(definition_of(pipeline))
    with pytest.raises(PipelineFailed) as failed:
        run.result()
    assert "'divide'" in failed.value.reason
    assert "'id': 700" in failed.value.reason
    assert failed.value.detail.endswith("ZeroDivisionError: integer division or modulo by zero")
    assert "headgate/runtime" not in failed.value.detail
    assert len(failed.value.detail.splitlines()) <= 8
    assert len(run.restarts) == 1


def test_a_bad_record_fails_at_once(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    nulls = pl.when(pl.col("id") == 333).then(None).otherwise(pl.col("key"))
    stream = pipeline.source(generator(1_000)).with_columns(key=nulls).with_timestamps("ts")
    counts = stream.key_by("key").window(hg.Tumbling("1s")).agg(n=pl.len())
    counts.sink(hg.FileSink(tmp_path / "out"), name="out")
    run = start(definition_of(pipeline))
    with pytest.raises((PipelineFailed, BadRecord), match=r"operator 'key-by' refused a record.*333"):
        run.result()
    assert run.restarts == []


def stopped_half_way(start: Start, root: Path, source: hg.Generator, **options: Any) -> None:
    run = start(definition_of(windowed(root, source), inline_bytes_max=0), **options)
    run.wait_checkpoints(3)
    run.driver.cancel()
    assert not run.result().is_finished


def windows_of_the_newest(root: Path) -> Path:
    """Return a file of the newest checkpoint that was completed: another may have been under way at the end."""
    log = CheckpointLog(open_storage(str(root / "checkpoints")), "p")
    files = sorted(path for path in candidates(log.observe())[0].files if "/window" in path)
    return root / "checkpoints" / "p" / files[-1]


def test_a_damaged_checkpoint_that_is_restored_from_a_copy_has_lost_nothing(start: Start, tmp_path: Path) -> None:
    source = generator(4_000, 6_000, batch=50)
    stopped_half_way(start, tmp_path, source)
    newest = windows_of_the_newest(tmp_path)
    sound = newest.read_bytes()
    newest.unlink()
    with pytest.raises(PipelineFailed, match="would produce again"):
        start(definition_of(windowed(tmp_path, source), inline_bytes_max=0)).result()
    newest.write_bytes(sound)
    assert start(definition_of(windowed(tmp_path, source), inline_bytes_max=0)).result().is_finished
    same(read_committed(str(tmp_path / "out")), recounted(source))


@pytest.mark.parametrize("damage", few(["flipped", "missing"], 1))
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    start: Start, tmp_path: Path, damage: str
) -> None:
    source = generator(4_000, 6_000, batch=50)
    stopped_half_way(start, tmp_path, source)
    newest = windows_of_the_newest(tmp_path)
    before = read_committed(str(tmp_path / "out"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "missing":
        newest.unlink()
    else:
        newest.write_bytes(data)
    with pytest.raises(PipelineFailed, match=f"{newest.name}.* would produce again the output that checkpoint"):
        start(definition_of(windowed(tmp_path, source), inline_bytes_max=0)).result()
    assert read_committed(str(tmp_path / "out")).equals(before)
    going_back = windowed(tmp_path, source, on_damaged_checkpoint="previous")
    run = start(definition_of(going_back, inline_bytes_max=0))
    assert run.result().is_finished
    told = [note for note in run.notes if "cannot be used" in note]
    assert newest.name in "".join(told)
    out = read_committed(str(tmp_path / "out")).unique()
    same(out, recounted(source))


def test_of_two_drivers_that_no_lock_keeps_apart_the_newer_wins(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "headgate.runtime.driver.pipeline_lock.local_directory", lambda root: None
    )  # as on an object store
    source = generator(6_000, 3_000, batch=50)
    older = start(definition_of(windowed(tmp_path, source)))
    older.wait_checkpoints(2)
    newer = start(definition_of(windowed(tmp_path, source)))
    older.wait(older.driver.result.done, "the end, while there is input")
    with pytest.raises(FencedError):
        older.result()
    assert newer.result().is_finished
    assert newer.driver.progress.restarts == 0
    same(read_committed(str(tmp_path / "out")), recounted(source))


def test_the_user_may_cancel_before_anything_runs(start: Start, tmp_path: Path) -> None:
    run = start(definition_of(windowed(tmp_path, generator(1_000_000, 1_000))))
    run.driver.cancel()
    assert not run.result().is_finished


def test_a_stop_that_comes_before_the_workers_still_ends_with_a_checkpoint(start: Start, tmp_path: Path) -> None:
    source = generator(1_000_000, 1_000)
    run = start(definition_of(windowed(tmp_path, source, interval=None)))  # if it comes late, there is no other one
    run.driver.stop()
    result = run.result()
    assert not result.is_finished
    assert run.checkpoints == [result.last_checkpoint]


def test_a_worker_dies_in_its_first_epoch_when_the_others_have_acknowledged(
    start: Start, tmp_path: Path
) -> None:  # F22
    """Its output is prepared, that of the others is acknowledged: nobody is to see either (C8, C37)."""
    run = start(counting(tmp_path), prepare=HeldWrites(tmp_path / "never", index=1))
    until(run, lambda: under_way(run) == (1,) and awaited(run, 1) == {1}, "all but one worker have acknowledged")
    assert list(tmp_path.glob("*/_staging/*/*")), "there is prepared output"
    run.kill(1)
    run.wait_restarts(1)
    assert 1 not in run.checkpoints
    run.wait_checkpoints(1)
    assert run.checkpoints[0] > 1
    assert run.result().restarts == 1
    assert list(tmp_path.glob("*/_staging/*/*")) == [], "what they had prepared is gone"
    check(tmp_path)


def test_workers_die_in_two_restores_in_a_row(start: Start, tmp_path: Path) -> None:  # F22, KP5
    dying = DyingInARow(tmp_path, "in-restore", 2)
    run = start(counting(tmp_path), prepare=dying)
    run.wait_checkpoints(2)
    assert dying.deaths() == [], "a first start restores nothing"
    run.kill(0)
    run.wait_restarts(3)
    assert len(dying.deaths()) == 2
    run.wait_checkpoints(1)
    assert run.result().restarts == 3
    assert run.checkpoints == sorted(set(run.checkpoints))
    check(tmp_path)


SECONDS = 300.0
HOOK_TIMEOUT = "60s"


class PanicException(BaseException):
    """What native libraries in Rust call theirs, which is no ``Exception``."""


UNUSUAL = [SystemExit("by a client that ends its process"), PanicException("index out of bounds")]


def run(root: Path, sink: Any = None, hook: CoordinatorHook | None = None) -> hg.RunResult:
    checkpointing = hg.Checkpointing(interval="20ms", dir=root / "checkpoints")
    pipeline = hg.Pipeline("p", checkpointing=checkpointing, restart=hg.FixedDelay(attempts=1, delay="1ms"))
    rows = [{"number": n, "text": str(n)} for n in range(40)]
    pipeline.source(hg.FromRows(rows, splits=2, batch_rows=5)).key_by("number").reduce(lambda a, b: b).sink(
        hg.Discard() if sink is None else sink, name="out"
    )
    if hook is not None:
        pipeline.add_hook("outside", hook, timeout=HOOK_TIMEOUT)
    return testing.run(pipeline, timeout_s=SECONDS)


@contextmanager
def raising(owner: type, method: str, error: BaseException) -> Iterator[None]:
    def fails(*arguments: Any) -> None:
        raise error

    with patched(owner, method, fails):
        yield


def check_sink_method(root: Path, method: str, error: BaseException) -> None:
    with (
        raising(SqliteSink, method, error),
        pytest.raises(hg.PipelineFailed, match=f"{type(error).__name__}: {error}"),
    ):
        run(root, SqliteSink(str(root / "target.db")))


@pytest.mark.parametrize(
    ("method", "error"), few(list(product(["claimed", "claim", "prepared", "commit", "prepare"], UNUSUAL)), 5)
)
def test_whatever_a_method_of_a_sink_raises_ends_the_run(tmp_path: Path, method: str, error: BaseException) -> None:
    check_sink_method(tmp_path, method, error)


class Outside(CoordinatorHook):
    """An external system whose client fails."""

    def trigger(self, checkpoint_id: int) -> bytes | None:
        return None

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        return

    def reset(self) -> None:
        return


def check_hook_method(root: Path, method: str, error: BaseException) -> None:
    told = rf"cannot call reset\(\) of hook 'outside': {type(error).__name__}: {error}"
    with raising(Outside, method, error), pytest.raises(hg.PipelineFailed, match=told):
        run(root, hook=Outside())


@pytest.mark.parametrize("error", UNUSUAL, ids=["exit", "panic"])
def test_whatever_a_hook_raises_ends_the_run(tmp_path: Path, error: BaseException) -> None:
    check_hook_method(tmp_path, "reset", error)


class Listening(hg.CheckpointListener):
    """Passes records on, and hears of checkpoints."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        raise self._error

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        return


def failure_of_function(root: Path, function: Any) -> str:
    """Return how a pipeline fails."""
    checkpointing = hg.Checkpointing(interval="20ms", dir=root / "checkpoints")
    pipeline = hg.Pipeline("p", checkpointing=checkpointing, restart=hg.FixedDelay(attempts=3, delay="1ms"))
    pipeline.source(hg.FromRows([{"number": n} for n in range(40)])).map(function, name="mine").sink(hg.Discard())
    with pytest.raises(hg.PipelineFailed) as failed:
        testing.run(pipeline, timeout_s=SECONDS)
    return str(failed.value)


@pytest.mark.parametrize("error", UNUSUAL, ids=["exit", "panic"])
def test_whatever_a_listener_raises_is_its_own_and_may_pass(tmp_path: Path, error: BaseException) -> None:
    said = failure_of_function(tmp_path, Listening(error))
    assert said.startswith("operator 'mine': ")
    assert "failed; it failed 4 times, and 3 restarts were allowed" in said
    assert f"{type(error).__name__}: {error}" in said


@pytest.mark.parametrize("error", UNUSUAL, ids=["exit", "panic"])
def test_whatever_a_function_raises_the_operator_is_named(tmp_path: Path, error: BaseException) -> None:
    def function(row: dict[str, Any]) -> dict[str, Any]:
        raise error

    assert failure_of_function(tmp_path, function).startswith(f"operator 'mine': {type(error).__name__}: {error}")


BUGS: list[tuple[type, type]] = [
    (Supervisor, supervisor_events.GenerationReady),
    (Supervisor, supervisor_events.WorkerRegistered),
    (Supervisor, supervisor_events.WorkerReady),
    (Supervisor, supervisor_events.GenerationDone),
    (Supervisor, supervisor_events.JobEnded),
    (Coordinator, coordinator_events.Started),
    (Coordinator, coordinator_events.IdReserved),
    (Coordinator, coordinator_events.ManifestWritten),
    (Coordinator, coordinator_events.CommitSucceeded),
]


@pytest.mark.parametrize(("machine", "kind"), few(BUGS, 2))
def test_a_bug_in_the_thread_that_decides_ends_the_run(tmp_path: Path, machine: Any, kind: type) -> None:
    check_bug(tmp_path, machine, kind)


def check_bug(root: Path, machine: Any, kind: type) -> None:
    handle = machine.handle

    def broken(self: Any, event: Any) -> Any:
        if isinstance(event, kind):
            raise AssertionError("a bug")
        return handle(self, event)

    with patched(machine, "handle", broken), pytest.raises(AssertionError, match="a bug"):
        run(root, SqliteSink(str(root / "target.db")))
    assert run(root, SqliteSink(str(root / "target.db"))).is_finished, "nobody holds the pipeline"


# Rules: F1


ROWS = 4_000
GATED = 1_000
"""The record at which one of the two workers waits in the user's function."""
BEHIND = 1_000
"""Records that each source keeps back until a barrier has passed it: whatever the machine does, some come behind it."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Gate:
    """A function of a user: it notes what it is given, and waits at one record until a file is there."""

    def __init__(self, directory: Path, at: int = GATED) -> None:
        self._directory, self._at = directory, at
        directory.mkdir(exist_ok=True)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        with (self._directory / "seen").open("a") as seen:
            seen.write(f"{row['id']}\n")
        if row["id"] == self._at:
            (self._directory / f"entered-{os.getpid()}").touch()
            deadline = time.monotonic() + 300
            while not (self._directory / "open").exists():
                assert time.monotonic() < deadline
                time.sleep(0.005)
        return row

    @property
    def seen(self) -> Counter[int]:
        path = self._directory / "seen"
        return Counter(int(line) for line in path.read_text().split()) if path.exists() else Counter()

    def entered(self) -> list[int]:
        return [int(path.name.split("-")[1]) for path in self._directory.glob("entered-*")]

    def let_through(self) -> None:
        (self._directory / "open").touch()


def pipeline_of(
    root: Path, gate: Gate, mode: str, *, shuffle: bool = True, loop: bool = False, interval: str | None = None
) -> hg.Pipeline:
    pipeline = hg.Pipeline(
        "p",
        parallelism=2,
        checkpointing=hg.Checkpointing(interval=interval, dir=root / "checkpoints", mode=mode),
        restart=hg.FixedDelay(delay="20ms"),
    )
    numbers = hg.Generator(
        columns={"id": hg.RowNumber()}, rows=ROWS, rows_per_second=1_000, time="deterministic", splits=2, batch_rows=20
    )
    stream = pipeline.source(numbers).select("id", left=2).map(gate, name="gate")
    stream = stream.rebalance() if shuffle else stream
    if loop:
        stream = stream.iterate(once_more, name="trips")
    stream.sink(hg.FileSink(root / "out", roll_interval=0), name="out")
    return pipeline


def once_more(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    step = loop.map(lambda row: {**row, "left": row["left"] - 1}).rebalance()
    return step.filter(lambda row: row["left"] > 0), step.filter(lambda row: row["left"] == 0)


def request(run: Run) -> None:
    """Have a checkpoint begin now, unless the run has just ended; there is no other."""

    def ask() -> None:
        live = run.driver.supervision.live
        if live is not None:
            live.coordination.handle(coordinator_events.CheckpointRequested())

    run.driver.post(ask)


def missing(run: Run) -> tuple[str, ...]:
    """Return who is missing, as the driver's own thread said last."""
    pending = run.driver.progress.pending_checkpoint
    return () if pending is None else pending.missing


def overtaking(root: Path, gate: Gate, mode: str, **options: Any) -> PipelineDefinition:
    return held(definition_of(pipeline_of(root, gate, mode, **options)), root / "behind", BEHIND)


def overtake_and_kill(run: Run, root: Path, gate: Gate) -> None:
    """Complete a checkpoint while records behind the barrier of one source pass the missing one of the other."""
    run.wait(lambda: bool(gate.entered()), "one worker waits in the user's function")
    taken = len(run.checkpoints)
    request(run)
    run.wait(lambda: len([s for s in missing(run) if s.startswith("source")]) == 1, "one source has its snapshot")
    before = sum(gate.seen.values())
    (root / "behind").touch()
    wait_until(lambda: sum(gate.seen.values()) > before + 300, "the other worker reads on")
    gate.let_through()
    run.wait(lambda: len(run.checkpoints) > taken, "the checkpoint")
    os.kill(gate.entered()[0], 9)
    run.wait_restarts(1)


def committed(root: Path) -> Counter[int]:
    found = read_committed(str(root / "out"))
    return Counter(found["id"].to_list() if found.height else [])


EVERY = Counter(range(ROWS))


def test_exactly_once_repeats_and_loses_nothing_though_records_could_overtake(start: Start, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    run = start(overtaking(tmp_path, gate, "exactly_once"))
    overtake_and_kill(run, tmp_path, gate)
    assert run.result().is_finished
    assert committed(tmp_path) == EVERY


def test_at_least_once_repeats_what_overtook_a_barrier_and_loses_nothing(start: Start, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    run = start(overtaking(tmp_path, gate, "at_least_once"))
    overtake_and_kill(run, tmp_path, gate)
    assert run.result().is_finished
    found = committed(tmp_path)
    assert not EVERY - found, "nothing is lost"
    assert found.keys() == EVERY.keys(), "and nothing is made up"
    repeated = found - EVERY
    assert repeated, "records overtook the barrier, so they came twice"
    assert max(found.values()) == 2, "there was one failure"
    assert all(gate.seen[one] > 1 for one in repeated), "only what was replayed"


def test_at_least_once_without_a_shuffle_is_exactly_once(start: Start, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    run = start(overtaking(tmp_path, gate, "at_least_once", shuffle=False))
    overtake_and_kill(run, tmp_path, gate)
    assert run.result().is_finished
    assert committed(tmp_path) == EVERY


def test_at_least_once_in_a_loop_loses_nothing(start: Start, tmp_path: Path) -> None:  # GM22
    gate = Gate(tmp_path / "gate")
    run = start(overtaking(tmp_path, gate, "at_least_once", loop=True))
    overtake_and_kill(run, tmp_path, gate)
    assert run.result().is_finished
    found = committed(tmp_path)
    assert not EVERY - found
    assert found.keys() == EVERY.keys()
    assert found - EVERY, "records overtook the barrier, so they came twice"


def checkpoints_until_the_end(run: Run) -> None:
    """Let the input end, and take checkpoints one after the other: each lets more be processed."""
    run.release()
    while not run.driver.result.done():
        taken = len(run.checkpoints)
        request(run)
        run.wait(lambda taken=taken: len(run.checkpoints) > taken or run.driver.result.done(), "a checkpoint")


def test_at_most_once_loses_what_was_under_way_and_repeats_nothing(start: Start, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", at=-1)
    run = start(definition_of(pipeline_of(tmp_path, gate, "at_most_once", interval="1h")))
    run.pids()
    request(run)
    run.wait(lambda: bool(run.checkpoints), "a checkpoint")  # it may be complete before this line
    assert not committed(tmp_path), "nothing was processed before it"
    wait_until(lambda: sum(gate.seen.values()) > 0, "what the checkpoint covers is processed")
    victim = gate.seen
    run.kill(0)
    run.wait_restarts(1)
    checkpoints_until_the_end(run)
    assert run.result().is_finished
    found = committed(tmp_path)
    assert not found - EVERY, "nothing is repeated or made up"
    lost = EVERY - found
    assert lost, "what was processed behind the restored checkpoint is gone"
    assert victim <= lost
    assert set(gate.seen.values()) == {1}, "no record was given to a user's function twice"


@pytest.mark.parametrize("drains", [False, True], ids=["to its end", "drained"])
def test_at_most_once_loses_nothing_when_nothing_fails(start: Start, tmp_path: Path, drains: bool) -> None:
    gate = Gate(tmp_path / "gate", at=-1)
    run = start(definition_of(pipeline_of(tmp_path, gate, "at_most_once", interval="40ms")))
    if drains:
        run.wait_checkpoints(3)
        run.driver.drain()
    assert run.result().is_finished
    found = committed(tmp_path)
    assert set(found.values()) == {1}
    assert found == gate.seen
    assert drains or found == EVERY


MODES = ("exactly_once", "at_least_once", "at_most_once")


@pytest.mark.parametrize(("before", "after"), few([(a, b) for a in MODES for b in MODES if a != b], 1))
def test_a_pipeline_that_stops_goes_on_in_any_other_mode(
    start: Start, tmp_path: Path, before: str, after: str
) -> None:  # GM3
    gate = Gate(tmp_path / "gate", at=-1)
    first = start(definition_of(pipeline_of(tmp_path, gate, before, interval="40ms")))
    first.wait_checkpoints(3)
    first.driver.stop()
    assert not first.result().is_finished
    assert sum(committed(tmp_path).values()) < ROWS, "the rest is for the next mode"
    second = start(definition_of(pipeline_of(tmp_path, gate, after, interval="40ms")))
    assert second.result().is_finished
    assert committed(tmp_path) == EVERY
