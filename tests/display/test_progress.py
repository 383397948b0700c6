"""A real notebook, executed: what cells show, what runs again, and what an interrupted cell leaves."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

import headgate as hg
from headgate import environment
from headgate.api import collect
from headgate.api.collect import SCRATCH
from headgate.display.progress import DISPLAYS_MAX, LiveDisplay, in_notebook
from headgate.model.progress import PipelineState, Progress, RunResult
from headgate.runtime.driver import driver as handles
from headgate.runtime.driver.driver import DriverHandle

BEGIN = """
import os, tempfile, threading, time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from IPython.display import display

import headgate as hg
from headgate.testing import PAUSE, ScriptedSource, run, running

os.environ |= {"MARKER": os.path.abspath("marker"), "KERNEL": str(os.getpid())}  # for workers, too

def mark(row):
    Path(os.environ["MARKER"]).write_text(os.environ["KERNEL"])
    return row

def bounded():
    p = hg.Pipeline("words", parallelism=1, checkpointing=hg.Checkpointing(interval="50ms"))
    words = p.source(hg.FromRows([{"<b>word</b>": "<script>"}] * 3))
    words.map(lambda row: row).sink(hg.Discard())
    return p, words

def endless():
    p = hg.Pipeline("endless", parallelism=2, checkpointing=hg.Checkpointing(interval="50ms"))
    p.source(ScriptedSource([[{"n": 1}], PAUSE], schema={"n": int})).map(mark).sink(hg.Discard())
    return p

def left():
    threads = {t.name for t in threading.enumerate() if t.name.startswith("headgate")}
    files = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("headgate")]
    return sorted(threads), files, len(psutil.Process().children(recursive=True))

def is_clean():
    for _ in range(9_000):  # threads that are told to end take a moment
        if left() == before:
            return True
        time.sleep(0.01)
    return left()

def processes():
    found = []
    for _ in range(9_000):  # workers that are told to end take a moment, and so does what the JVM starts in between
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process().children(recursive=True)
            # the script that becomes the JVM leaves it one that has ended, which it does not know of
            found = [f"{c.pid} {c.name()}" for c in children if c.status() != psutil.STATUS_ZOMBIE]
        if len(found) == 1:
            break
        time.sleep(0.01)
    return found

p, words = bounded()
before = left()
"""


class Notebook:
    """A notebook that is run cell by cell."""

    def __init__(self, client: NotebookClient, directory: Path) -> None:
        self._client, self._directory = client, directory

    def run(self, code: str) -> Any:
        """Run a cell that must succeed; return the cell with its outputs."""
        cell = nbformat.v4.new_code_cell(code)
        self._client.nb.cells.append(cell)
        return self._client.execute_cell(cell, len(self._client.nb.cells) - 1)

    def interrupted(self, code: str, marked: str = "marker") -> Any:
        """Run a cell that is interrupted when ``marked`` is there, with the kernel's process id in it; return it."""
        marker = self._directory / marked
        marker.unlink(missing_ok=True)
        interrupting = threading.Thread(target=self._interrupt, args=(marker,), daemon=True)
        interrupting.start()
        cell = nbformat.v4.new_code_cell(code, metadata={"tags": ["raises-exception"]})
        self._client.nb.cells.append(cell)
        ran = self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        interrupting.join()
        return ran

    def _interrupt(self, marker: Path) -> None:
        pace = threading.Event()
        while not marker.exists() or not (pid := marker.read_text()):
            pace.wait(0.01)  # not a wait for anything: between two looks
        os.kill(int(pid), signal.SIGINT)


@contextmanager
def opened(directory: Path) -> Iterator[Notebook]:
    with pytest.MonkeyPatch.context() as patch:
        (directory / "tmp").mkdir()
        patch.setenv("TMPDIR", str(directory / "tmp"))
        for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
            patch.setenv(variable, str(directory / "jupyter"))
        client = NotebookClient(
            nbformat.v4.new_notebook(), kernel_name="python3", resources={"metadata": {"path": str(directory)}}
        )
        with client.setup_kernel():
            yield Notebook(client, directory)


def html_of(cell: Any) -> str:
    """Return what a cell shows, as it stands now."""
    return "".join(output["data"]["text/html"] for output in cell.outputs if "text/html" in output.get("data", {}))


def text_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.filterwarnings("default")
@pytest.mark.run
def test_a_notebook_shows_runs_again_and_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as notebook:
        notebook.run(BEGIN)
        shown = html_of(notebook.run("words"))
        assert "&lt;b&gt;word&lt;/b&gt;" in shown
        assert "&lt;script&gt;" in shown
        assert "<svg" in html_of(notebook.run("p"))

        run = "with running(bounded()[0]) as handle:\n    display(handle)\n    result = handle.wait()"
        for _ in range(2):  # the same cell again, with the same name
            shown = html_of(notebook.run(run))
            assert "all input has been processed" in shown, "the cell shows the end when it is over"
            assert "finished" in shown
        assert "PipelineHandle('words', finished)" in notebook.run("handle").outputs[0]["data"]["text/plain"]
        assert text_of(notebook.run("print(is_clean())")) == "True\n"

        call = "p.source(hg.FromRows([{'n': 1}]), name='source')"
        twice = f"try:\n    {call}\nexcept hg.UsageError as error:\n    print(error)"
        assert "begin again with the cell that makes the Pipeline" in text_of(notebook.run(twice))

        cell = notebook.interrupted("run(endless())")
        assert cell.outputs[-1]["ename"] == "KeyboardInterrupt"
        assert text_of(notebook.run("print(is_clean())")) == "True\n"

        notebook.run("runs = ExitStack(); handle = runs.enter_context(running(endless()))")
        cell = notebook.interrupted("Path('waits').write_text(str(os.getpid())); handle.wait()", "waits")
        assert cell.outputs[-1]["ename"] == "KeyboardInterrupt"
        assert text_of(notebook.run("print(handle.progress.state.has_ended)")) == "False\n"
        assert html_of(notebook.run("handle.stop(); handle"))
        notebook.run("runs.close()")
        assert text_of(notebook.run("print(is_clean())")) == "True\n"


@pytest.mark.filterwarnings("default")
@pytest.mark.spark
def test_a_run_on_spark_is_shown_and_an_interrupt_stops_it(tmp_path: Path) -> None:
    with opened(tmp_path) as notebook:
        notebook.run(BEGIN)
        for said in ("all input has been processed", "it had finished before"):  # the same cell again
            cell = notebook.run("p, words = bounded()\np.run('local[1]')")
            assert said in html_of(cell)
        cell = notebook.interrupted("endless().run('local[2]')")
        assert "stopped; the next run continues from checkpoint" in html_of(cell)
        assert "is_finished=False" in cell.outputs[-1]["data"]["text/plain"]
        (jvm,) = text_of(notebook.run("print(*processes(), sep=chr(10))")).splitlines()
        assert jvm.endswith(" java"), "the JVM stays for the next cell, and nothing else does"
        pid = int(jvm.split()[0])
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
    assert not psutil.pid_exists(pid)


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
