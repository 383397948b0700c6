"""What each guarantee allows when real workers are killed, and nothing else: the anomalies are made to happen."""

# Rules: F1

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.holding import held
from tests.runtime.running import WAIT_S, Run, definition_of

import headgate as hg
from headgate.connectors.files.file_committer import read_committed
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints import coordinator_events

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
ROWS = 4_000
GATED = 1_000
"""The record at which one of the two workers waits in the user's function."""
BEHIND = 1_000
"""Records that each source keeps back until a barrier has passed it: whatever the machine does, some come behind it."""


def until(condition: Callable[[], bool], what: str) -> None:
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
    until(lambda: sum(gate.seen.values()) > before + 300, "the other worker reads on")
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
    until(lambda: sum(gate.seen.values()) > 0, "what the checkpoint covers is processed")
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
