"""What changes while a notebook shows it, with a stand-in for IPython, and interrupted waiting."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import headgate as hg
from headgate import environment
from headgate.api import collect
from headgate.api.collect import SCRATCH
from headgate.display.progress import DISPLAYS_MAX, LiveDisplay, in_notebook
from headgate.model.progress import PipelineState, Progress, RunResult
from headgate.runtime.driver import driver as handles
from headgate.runtime.driver.driver import DriverHandle


class Shown:
    """A cell: keeps what it showed."""

    def __init__(self, first: dict[str, str]) -> None:
        self.all = [first["text/html"]]
        self.problem: Exception | None = None

    def update(self, now: dict[str, str], *, raw: bool) -> None:
        if self.problem is not None:
            raise self.problem
        self.all.append(now["text/html"])


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[Shown]:
    """The cells that something was shown in."""
    shown: list[Shown] = []

    def display(now: dict[str, str], *, raw: bool, display_id: bool) -> Shown:
        assert raw
        assert display_id
        shown.append(Shown(now))
        return shown[-1]

    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


class Run:
    """Something that goes on step by step."""

    def __init__(self) -> None:
        self.steps = threading.Semaphore(0)
        self.seen = threading.Semaphore(0)
        self.now = "begun"
        self.is_over = False

    def ended(self, timeout_s: float) -> bool:
        self.seen.release()
        self.steps.acquire()
        return self.is_over

    def look(self) -> dict[str, str]:
        return {"text/html": self.now}

    def go_on(self, now: str, *, is_over: bool = False) -> None:
        self.seen.acquire()
        self.now, self.is_over = now, is_over
        self.steps.release()


def test_what_is_shown_is_shown_anew_until_it_has_ended(cells: list[Shown]) -> None:
    run = Run()
    live = LiveDisplay(run.look, run.ended)
    live.show()
    for now in ("runs", "runs", "stops"):
        run.go_on(now)
    run.go_on("over", is_over=True)
    live.close()
    assert cells[0].all == ["begun", "runs", "stops", "over"], "only what changed"
    assert [thread.name for thread in threading.enumerate() if thread.name == "headgate-display"] == []
    live.show()
    run.steps.release()
    live.close()
    assert cells[1].all == ["over"]


def test_only_the_last_displays_go_on(cells: list[Shown]) -> None:
    run = Run()
    live = LiveDisplay(run.look, run.ended)
    for _ in range(DISPLAYS_MAX + 1):
        live.show()
    assert sum(thread.name == "headgate-display" for thread in threading.enumerate()) == 1
    run.go_on("over", is_over=True)
    live.close()
    assert [cell.all for cell in cells] == [["begun"], *[["begun", "over"]] * DISPLAYS_MAX]


def test_what_goes_wrong_while_showing_is_nobodys_failure(cells: list[Shown]) -> None:
    run = Run()
    live = LiveDisplay(run.look, run.ended)
    live.show()
    cells[0].problem = OSError("the front end is gone")
    run.go_on("runs")
    run.go_on("over", is_over=True)
    live.close()
    assert cells[0].all == ["begun"]


def test_outside_a_notebook_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    assert not in_notebook(), "IPython on a terminal, which does not take updates"


class StandIn:
    """A driver whose run goes on."""

    name = "p"
    progress = Progress(PipelineState.RUNNING)

    def __init__(self) -> None:
        self.result: Future[RunResult] = Future()
        self.has_joined = False

    def join(self) -> None:
        assert self.result.done(), "joining a run that goes on waits for its end"
        self.has_joined = True


def test_whoever_is_interrupted_while_waiting_leaves_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    driver = StandIn()
    handle = DriverHandle(driver)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(handles, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    assert not driver.has_joined
    assert repr(handle) == "PipelineHandle('p', running)"
    assert "all input" not in handle._repr_html_()
    driver.result.set_result(RunResult(True))
    assert handle.wait() == RunResult(True)
    assert driver.has_joined
    assert "all input has been processed" in handle._repr_html_()


def test_an_interrupt_that_comes_just_before_a_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, waits, wait = StandIn(), list[float](), environment.wait

    def waited(futures: Any, timeout_s: float) -> Any:
        waits.append(timeout_s)
        if len(waits) == 3:
            driver.result.set_result(RunResult(True))
        return wait(futures, 0)

    monkeypatch.setattr(environment, "wait", waited)
    assert DriverHandle(driver).wait() == RunResult(True)  # type: ignore[arg-type]
    assert max(waits) <= 1, "Python looks for signals between two waits"
    handle = DriverHandle(StandIn())  # type: ignore[arg-type]
    assert handle.wait(0) is None  # not a wait for anything


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RunResult(False)])
def test_a_look_that_is_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: RunResult | KeyboardInterrupt
) -> None:
    def interrupted(start: Callable[[], object]) -> RunResult:
        assert list((tmp_path / SCRATCH).iterdir()), "the run has a directory"
        if isinstance(end, RunResult):
            return end
        raise end

    monkeypatch.setattr(collect, "run_to_end", interrupted)
    p = hg.Pipeline("p", checkpointing=hg.Checkpointing(dir=tmp_path))
    with pytest.raises((KeyboardInterrupt, hg.HeadgateError)):
        p.source(hg.FromRows([{"n": 1}])).collect()
    assert [path.name for path in tmp_path.rglob("*") if path.name not in (SCRATCH, "lock")] == []
