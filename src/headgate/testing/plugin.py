"""What pytest gives to tests of pipelines: a runner, a store, sinks to read, all in directories of the test's own.

Pytest imports this module at every start (entry point ``pytest11``), also where no test has to do with Headgate:
nothing is imported here but pytest, until a fixture is asked for. What a fixture began ends with its test.
Rules: docs/spec/in-process.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headgate.model.progress import PipelineHandle, RunResult
    from headgate.store.store import Store
    from headgate.testing.connectors import Collect

TIMEOUT_OPTION = "headgate_timeout_s"
STORE_VARIABLE = "HEADGATE_STORE"


@pytest.hookimpl
def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what a project may set for all its tests."""
    parser.addini(TIMEOUT_OPTION, "seconds that a pipeline may take in headgate_run (default: 30)", default="30")


@pytest.fixture
def headgate_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the test's own; streams for which no store is named are in its ``store``."""
    directory = tmp_path / "headgate"
    directory.mkdir()
    monkeypatch.setenv(STORE_VARIABLE, str(directory / "store"))
    return directory


@pytest.fixture
def headgate_run(headgate_directory: Path, pytestconfig: pytest.Config) -> Callable[..., RunResult]:
    """Runs a pipeline in this process until its input ends: ``headgate.testing.run``, with all its arguments.

    Runs of one test know nothing of each other, unless they are given one ``checkpoint_dir``.
    """
    default_s = _timeout_s(pytestconfig)
    from headgate.testing.in_process import run

    def run_here(pipeline: Any, **options: Any) -> RunResult:
        options.setdefault("timeout_s", default_s)
        return run(pipeline, **options)

    return run_here


@pytest.fixture
def headgate_start(headgate_directory: Path) -> Iterator[Callable[..., PipelineHandle]]:
    """Starts a pipeline and returns its handle: ``headgate.testing.running``. It is cancelled when the test ends."""
    from headgate.testing.in_process import running

    with ExitStack() as runs:
        yield lambda pipeline, **options: runs.enter_context(running(pipeline, **options))


@pytest.fixture
def headgate_collect(headgate_directory: Path) -> Callable[[], Collect]:
    """Makes sinks with readable committed records: ``sink = headgate_collect()``, then ``sink.rows()``."""
    from headgate.testing.connectors import Collect

    made: list[Collect] = []

    def collect() -> Collect:
        made.append(Collect(headgate_directory / f"collected-{len(made) + 1}"))
        return made[-1]

    return collect


@pytest.fixture
def headgate_store(headgate_directory: Path) -> Iterator[Store]:
    """An empty stream store, open; ``StreamSource`` and ``StreamSink`` of this test use it unless they name another."""
    from headgate.store.store import Store

    with Store.open() as store:
        yield store


def _timeout_s(config: pytest.Config) -> float:
    text = config.getini(TIMEOUT_OPTION)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise pytest.UsageError(f"{TIMEOUT_OPTION} must be a number of seconds above zero, but is {text!r}")
    return seconds
