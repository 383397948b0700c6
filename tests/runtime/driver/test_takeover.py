"""Takeover: an idle driver notices its replacement, and a new driver waits for workers of lost machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate import testing
from headgate.errors import PipelineFailed, StorageError
from headgate.model.failure import Failure
from headgate.model.ids import Generation
from headgate.model.progress import PipelineHandle
from headgate.protocol.supervision.supervisor_events import RegisterTimer, TimerFired
from headgate.runtime.driver.takeover import HANGS_MS, LOOKS_MAX, ReplacementWatch
from headgate.testing.in_process import InProcessHandle, ThreadLauncher


class Looked:
    """A log that answers as told, and a storage thread that runs when it is let."""

    def __init__(self, *answers: Generation | StorageError | None) -> None:
        self._answers = list(answers)
        self.waiting: list[Callable[[], object]] = []
        self.replaced: list[Generation] = []
        self.now_ms = 0
        self.pools = 0
        self.watch = ReplacementWatch(self, self, self, self.replaced.append, self)  # type: ignore[arg-type]

    def monotonic_ms(self) -> int:
        return self.now_ms

    def pool(self, size: int, name: str, *, is_daemon: bool) -> Looked:
        assert is_daemon, "a look that hangs does not keep the process alive"
        self.pools += 1
        return self

    def shutdown(self, *, wait: bool) -> None:
        assert not wait

    def newer_generation(self) -> Generation | None:
        answer = self._answers.pop(0)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    def submit(self, call: Callable[..., object], /, *arguments: Any) -> None:
        self.waiting.append(lambda: call(*arguments))

    def post(self, call: Callable[[], None]) -> None:
        call()

    def look(self) -> None:
        self.watch.look()
        while self.waiting:
            self.waiting.pop(0)()


def test_an_idle_driver_hears_of_the_one_that_replaced_it() -> None:  # C38
    looked = Looked(None, Generation(5))
    looked.look()
    assert looked.replaced == []
    looked.look()
    assert looked.replaced == [5]


def test_storage_that_does_not_answer_replaces_nobody_and_is_asked_again() -> None:
    looked = Looked(StorageError("list", "p/log", "gone for a while", is_transient=True), Generation(5))
    looked.look()
    assert looked.replaced == []
    looked.look()
    assert looked.replaced == [5]


def test_there_is_one_look_at_a_time() -> None:
    looked = Looked(None)
    looked.watch.look()
    looked.watch.look()
    assert len(looked.waiting) == 1


def test_a_look_that_hangs_is_not_waited_for() -> None:  # C38
    """On a connection that is dead a request may take minutes; one on another connection does not."""
    looked = Looked(Generation(5))
    looked.watch.look()
    looked.now_ms += HANGS_MS - 1
    looked.watch.look()
    assert len(looked.waiting) == 1
    looked.now_ms += 1
    looked.watch.look()
    _, beside = looked.waiting
    beside()
    assert looked.replaced == [5]
    assert looked.pools == 1


def test_only_so_many_looks_hang() -> None:  # C38
    looked = Looked(*[None] * (LOOKS_MAX + 1))
    for _ in range(3 * LOOKS_MAX):
        looked.watch.look()
        looked.now_ms += HANGS_MS
    assert len(looked.waiting) == LOOKS_MAX
    looked.waiting.pop(0)()
    looked.watch.look()
    assert len(looked.waiting) == LOOKS_MAX


# -- a driver that goes on in another one's place is there while spark does not know yet that a machine i -----


WAIT_S = 300.0


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
