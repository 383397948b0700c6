"""A real notebook, executed: what cells show, what runs again, and what an interrupted cell leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.filterwarnings("default")  # of libraries of notebooks

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
