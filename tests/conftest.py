"""What holds for every test: no verdict depends on how fast the machine is, and what failed can be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.syntax import guard_parsing

guard_parsing()
settings.register_profile(
    "headgate",
    deadline=None,
    # How fast a test draws, and how much of it fits, differs by machine and by seed; neither is a fault.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)
settings.load_profile("headgate")


TESTS = Path(__file__).parent
MARKED = {
    "sim/product": "simulator",
    "sim/scenarios": "simulator",
    "sim/streams": "simulator",
    "mutants": "mutant",
    "runtime/runs": "run",
    "examples": "run",
}
"""Folders whose tests take minutes together: ``make check`` leaves them to ``make test``."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the modules of folders that ``-m`` leaves out: each worker of pytest would."""
    if not collection_path.is_file() or not collection_path.is_relative_to(TESTS):
        return None
    marker = MARKED.get(collection_path.parent.relative_to(TESTS).as_posix())
    return True if marker is not None and is_left_out(marker, config.getoption("markexpr")) else None


def is_left_out(marker: str, expression: str) -> bool:
    """Whether no test with ``marker`` is chosen by ``expression``, whatever else marks it."""
    return not any(word in expression for word in ("(", " or ")) and f"not {marker}" in expression.split(" and ")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the folders that take long, and those of random histories; begin with the longest."""
    for item in items:
        folder = item.path.parent.relative_to(TESTS).as_posix()
        if folder in MARKED:
            item.add_marker(MARKED[folder])
        if item.path.stem.endswith("_histories"):
            item.add_marker("long")
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


@pytest.fixture(scope="session", autouse=True)
def _no_state_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have pipelines, in other processes too, keep what they know of one another in a directory of this session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the seed of the order also where pytest is quiet, as in ``make check``."""
    seed = config.getoption("randomly_seed", None)
    if seed is not None and terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", []):
        terminalreporter.write_line(f"the same order again: --randomly-seed={seed}")
