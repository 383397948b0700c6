from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field

import pytest
from tests.support.clocks import HandClock

import headgate as hg
from headgate.api.foreground import REPEATED_SIGNAL_MS, RunRequested, loading_only, refuse_while_loading, run_to_end
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId
from headgate.model.progress import (
    CheckpointOutcome,
    CheckpointProgress,
    Location,
    PipelineState,
    Progress,
    RunResult,
    SubtaskAlignment,
)


@dataclass
class FakeHandle:
    """Ends when it is stopped, and sends this process ``signals`` when it is first waited for."""

    signals: list[int] = field(default_factory=list)
    stops: bool = True
    calls: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def progress(self) -> Progress:
        return Progress(PipelineState.RUNNING)

    def wait(self, timeout_s: float | None = None) -> RunResult | None:
        for number in self.signals:
            os.kill(os.getpid(), number)
        self.signals.clear()
        if self.ended.wait(timeout_s):
            return RunResult(is_finished=not self.calls)
        return None

    def stop(
        self, timeout_s: float | None = None, *, drain: bool = False, savepoint: Location | None = None
    ) -> RunResult | None:
        self.calls.append("drain" if drain else "stop")
        if self.stops:
            self.ended.set()
        return None

    def cancel(self, *, retain: bool = False) -> None:
        self.calls.append("cancel, and retain" if retain else "cancel")
        self.ended.set()

    def take_checkpoint(self, timeout_s: float | None = None) -> CheckpointOutcome | None:
        return None

    def take_savepoint(self, path: Location, timeout_s: float | None = None) -> CheckpointOutcome | None:
        return None

    def answer_requests(self) -> None:
        self.calls.append("answer")
        self.ended.set()

    def checkpoints(self) -> tuple[CheckpointProgress, ...]:
        return ()

    def alignments(self) -> dict[CheckpointId, tuple[SubtaskAlignment, ...]]:
        return {}

    def metrics(self) -> dict[str, dict[str, int | float]]:
        return {}


def until_called(handle: FakeHandle, call: str) -> None:
    deadline = time.monotonic() + 300
    while call not in handle.calls:
        assert time.monotonic() < deadline, f"nobody called {call}"
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_a_last_checkpoint(number: int) -> None:
    handle = FakeHandle([number])
    assert run_to_end(lambda: handle) == RunResult(is_finished=False)
    assert handle.calls == ["stop"]


def test_a_second_signal_waits_for_no_checkpoint_and_removes_none() -> None:  # C70
    handle = FakeHandle([signal.SIGINT, signal.SIGINT], stops=False)
    run_to_end(lambda: handle)
    until_called(handle, "stop")  # from a thread of its own, perhaps behind the other
    assert sorted(handle.calls) == ["cancel, and retain", "stop"]


def test_sigterm_twice_in_one_moment_is_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    monkeypatch.setattr("headgate.api.foreground.SYSTEM_CLOCK", clock)
    handle = FakeHandle([signal.SIGTERM, signal.SIGTERM])
    run_to_end(lambda: handle)
    assert handle.calls == ["stop"]

    class Later(FakeHandle):
        def stop(self, *arguments: object, **options: object) -> None:
            super().stop()
            clock.advance(REPEATED_SIGNAL_MS)
            os.kill(os.getpid(), signal.SIGTERM)

    later = Later([signal.SIGTERM], stops=False)
    run_to_end(lambda: later)
    assert later.calls == ["stop", "cancel, and retain"], "a second one that is meant"


def test_sigusr1_drains() -> None:
    handle = FakeHandle([signal.SIGUSR1, signal.SIGUSR1])
    run_to_end(lambda: handle)
    assert handle.calls == ["drain"]


def test_sigusr2_answers_requests_and_stops_nothing() -> None:
    handle = FakeHandle([signal.SIGUSR2])
    run_to_end(lambda: handle)
    assert handle.calls == ["answer"]


def test_a_stop_while_it_drains_is_no_cancel() -> None:
    handle = FakeHandle([signal.SIGUSR1, signal.SIGTERM])
    run_to_end(lambda: handle)
    until_called(handle, "drain")  # each from a thread of its own
    until_called(handle, "stop")
    assert sorted(handle.calls) == ["drain", "stop"]


def test_a_signal_during_the_start_is_remembered() -> None:
    handle = FakeHandle()

    def start() -> FakeHandle:
        os.kill(os.getpid(), signal.SIGUSR1)
        return handle

    run_to_end(start)
    assert handle.calls == ["drain"]


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


def test_the_signal_handlers_are_put_back_when_the_start_fails() -> None:
    before = handlers()

    def start() -> FakeHandle:
        raise UsageError("no such master")

    with pytest.raises(UsageError):
        run_to_end(start)
    assert handlers() == before


def test_the_signal_handlers_are_put_back() -> None:
    before = handlers()
    handle = FakeHandle()
    handle.ended.set()
    assert run_to_end(lambda: handle) == RunResult(is_finished=True)
    assert handlers() == before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    handle = FakeHandle()
    handle.ended.set()
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(run_to_end(lambda: handle)))
    thread.start()
    thread.join()
    assert results == [RunResult(is_finished=True)]


def test_a_program_that_is_only_loaded_does_not_run() -> None:
    pipeline = hg.Pipeline("loaded")
    with loading_only(), pytest.raises(RunRequested) as caught:
        pipeline.run()
    assert caught.value.pipeline is pipeline
    refuse_while_loading(pipeline)  # outside it does nothing
