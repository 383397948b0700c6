"""A driver that goes on in another one's place is there while Spark does not know yet that a machine is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import headgate as hg
from headgate import testing
from headgate.errors import PipelineFailed
from headgate.model.failure import Failure
from headgate.model.progress import PipelineHandle
from headgate.protocol.supervision.supervisor_events import RegisterTimer, TimerFired
from headgate.testing.in_process import InProcessHandle, ThreadLauncher

WAIT_S = 60.0


def pipeline(directory: Path, parallelism: int = 1) -> hg.Pipeline:
    checkpointing = hg.Checkpointing(interval="1h", dir=directory)
    made = hg.Pipeline("p", parallelism=parallelism, checkpointing=checkpointing)
    made.source(hg.Generator({"n": hg.RowNumber()}, rows=1_000_000, rows_per_second=100)).sink(hg.Discard())
    return made


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def checkpointed(handle: PipelineHandle) -> None:
    """Wait until the pipeline runs, and for a checkpoint of it."""

    def is_taken() -> bool:
        outcome = handle.take_checkpoint(WAIT_S)
        return outcome is not None and outcome.checkpoint is not None

    until(is_taken, "a checkpoint")


def given_up(handle: PipelineHandle) -> None:
    """Let the time in which workers must register be over, once the driver knows what it goes on from."""
    assert isinstance(handle, InProcessHandle)
    supervision = handle.driver.supervision
    until(lambda: supervision.machine.generation is not None, "a claim")
    supervision._timers.post(lambda: supervision.handle(TimerFired(RegisterTimer(1), 0, 0.5)))


@pytest.fixture
def on_a_lost_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, the workers of each first job never come."""
    submit, cancel = ThreadLauncher.submit, ThreadLauncher.cancel

    def lose() -> None:
        waiting: list[Callable[[Failure | None], None]] = []

        def lost(self: ThreadLauncher, number: int, address: object, secret: object, ended: Callable) -> None:  # type: ignore[type-arg]
            if number > 1:
                submit(self, number, address, secret, ended)  # type: ignore[arg-type]
            else:
                waiting.append(ended)

        def cancelled(self: ThreadLauncher, number: int) -> None:
            while waiting:
                waiting.pop()("cancelled")
            cancel(self, number)

        monkeypatch.setattr(ThreadLauncher, "submit", lost)
        monkeypatch.setattr(ThreadLauncher, "cancel", cancelled)

    return lose


def test_an_heir_whose_first_workers_are_on_a_lost_machine_tries_again(
    tmp_path: Path, on_a_lost_machine: Callable[[], None]
) -> None:  # G12, F7
    check_an_heir_tries_again(tmp_path, on_a_lost_machine)


def check_an_heir_tries_again(root: Path, on_a_lost_machine: Callable[[], None]) -> None:
    with testing.running(pipeline(root)) as handle:
        checkpointed(handle)
    on_a_lost_machine()
    with testing.running(pipeline(root)) as handle:
        given_up(handle)
        checkpointed(handle)
        assert isinstance(handle, InProcessHandle)
        assert handle.driver.supervision.machine.restarts_count == 1


@pytest.mark.parametrize("before", [None, 1])
def test_who_never_had_so_many_workers_hears_at_once_that_there_are_too_few(
    tmp_path: Path, on_a_lost_machine: Callable[[], None], before: int | None
) -> None:  # G12
    if before is not None:
        with testing.running(pipeline(tmp_path, before)) as handle:
            checkpointed(handle)
    on_a_lost_machine()
    with testing.running(pipeline(tmp_path, 2)) as handle:
        given_up(handle)
        with pytest.raises(PipelineFailed, match="0 of 2 workers registered"):
            handle.wait(WAIT_S)
