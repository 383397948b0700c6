"""What holds for every test: no verdict depends on how fast the machine is, and what failed can be repeated."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import re
import sys
import unittest
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from tests.syntax import guard_parsing

if TYPE_CHECKING:
    from tests.servers.hdfs import HdfsCluster

guard_parsing()
settings.register_profile(
    "headgate",
    deadline=None,
    # How fast a test draws, and how much of it fits, differs by machine and by seed; neither is a fault.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)
settings.load_profile("headgate")

os.environ["HEADGATE_PREPARE"] = "never"
"""Nothing that a test starts outlives it."""

os.environ.setdefault("POLARS_MAX_THREADS", "1")
"""Of each process. More would only get in each other's way: there are more processes than cores."""

IS_DEEP = "HEADGATE_TEST_DEEP" in os.environ
"""Set by ``make test-repeated``: Hypothesis draws all examples, not a part of them."""
RUN_S_MAX = 300.0
"""A run of ``testing.run`` may take so long unless its test says otherwise: its own limit is for a machine at rest."""
PART_DRAWN = 10
"""``make test`` draws one in so many of the examples that a test names, with another seed each time."""
EXAMPLES_MIN = 4
"""A test draws at least so many, unless it names fewer."""

TESTS = Path(__file__).parent
SPARK_HALF = "not deep and (spark or crash)"
"""What ``make test`` runs with Spark and real kills (``scripts/run_tests.py``)."""
MARKED = {
    "sim/product": "simulator",
    "sim/scenarios": "simulator",
    "sim/streams": "simulator",
    "mutants": "mutant",
    "runtime/runs": "run",
    "examples": "run",
}
"""Folders whose tests take minutes together, with those below them: ``make check`` leaves them to ``make test``."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the modules that ``-m`` leaves out: each worker of pytest would."""
    if not collection_path.is_file() or not collection_path.is_relative_to(TESTS):
        return None
    expression = config.getoption("markexpr")
    if expression == SPARK_HALF and collection_path.suffix == ".py":
        return True if is_quick(collection_path) else None
    marker = marker_of(collection_path)
    return True if marker is not None and is_left_out(marker, expression) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no circles among modules and tests, neither while they come nor later: they stay to the end.

    There are some million objects in each worker, and some tests collect garbage often.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def marker_of(module: Path) -> str | None:
    """Return the marker of the folder that ``module`` is in, or of one around it."""
    folders = (folder.as_posix() for folder in module.relative_to(TESTS).parents)
    return next((MARKED[folder] for folder in folders if folder in MARKED), None)


def is_quick(module: Path) -> bool:
    """Whether no test of ``module`` is of the Spark half: it names none of its markers, and repeats no tests."""
    return _OF_THE_SPARK_HALF.search(module.read_text(encoding="utf-8")) is None


_OF_THE_SPARK_HALF = re.compile(r"mark\.(spark|crash)\b|^from \S+\.test_\w+ import \*", re.MULTILINE)


def is_left_out(marker: str, expression: str) -> bool:
    """Whether no test with ``marker`` is chosen by ``expression``, whatever else marks it."""
    return not any(word in expression for word in ("(", " or ")) and f"not {marker}" in expression.split(" and ")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the folders that take long, and those of random histories; begin with the longest.

    Hypothesis marks its own tests with ``hypothesis``; without ``HEADGATE_TEST_DEEP`` they draw fewer examples.
    """
    for item in items:
        marker = marker_of(item.path)
        if marker is not None:
            item.add_marker(marker)
        if item.path.stem.endswith("_histories"):
            item.add_marker("long")
        if not IS_DEEP and isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            draw_fewer(item)
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give runs in this process time, for the whole session."""
    is_loaded = "headgate.testing.in_process" in sys.modules
    if is_loaded or hasattr(getattr(item, "module", None), "testing"):  # whose names are imported when they are used
        from headgate.testing import in_process

        inspect.unwrap(in_process.run).__kwdefaults__["timeout_s"] = RUN_S_MAX


def draw_fewer(item: pytest.Function) -> None:
    """Have a test of Hypothesis draw a part of its examples; tests of one function or machine share its settings."""
    function = getattr(item.obj, "__func__", item.obj)
    is_machine = item.cls is not None and issubclass(item.cls, unittest.TestCase)
    owner, name = (item.cls, "settings") if is_machine else (function, "_hypothesis_internal_use_settings")
    named: settings = getattr(owner, name)
    if named not in _FEWER:
        setattr(owner, name, fewer(named))


def fewer(named: settings) -> settings:
    """Return ``named`` with a part of its examples, but for ``make test-repeated``."""
    if IS_DEEP:
        return named
    examples = min(named.max_examples, max(EXAMPLES_MIN, named.max_examples // PART_DRAWN))
    _FEWER.append(settings(named, max_examples=examples))
    return _FEWER[-1]


def few(values: Iterable[Any], count: int) -> list[Any]:
    """Return parameters of a test; all but ``count`` of them, spread evenly, are left to ``make test-repeated``."""
    given = list(values)
    chosen = {round(i * (len(given) - 1) / max(1, count - 1)) for i in range(count)}
    deep = pytest.mark.deep
    return [
        value if i in chosen else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=deep)
        for i, value in enumerate(given)
    ]


def pairs(*parameters: Iterable[Any]) -> list[Any]:
    """Return all combinations of parameters; those that hold no new pair of values are left to ``make test-repeated``.

    Next comes the combination with most new pairs, so that few hold all of them.
    """
    given = [list(values) for values in parameters]
    left = {places: _pairs_of(places) for places in itertools.product(*(range(len(values)) for values in given))}
    missing, chosen = set[object]().union(*left.values()), set[tuple[int, ...]]()
    while missing:
        best = max(left, key=lambda places: len(left[places] & missing))
        chosen.add(best)
        missing -= left[best]
    found = {places: tuple(values[i] for values, i in zip(given, places, strict=True)) for places in left}
    return [
        values if places in chosen else pytest.param(*values, marks=pytest.mark.deep)
        for places, values in found.items()
    ]


def _pairs_of(places: tuple[int, ...]) -> set[object]:
    return set(itertools.combinations(enumerate(places), 2))


_FEWER: list[settings] = []
"""What :func:`fewer` made."""


@pytest.fixture
def some_interruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kit for sinks fail each call at the target in one or two of its four ways, not in all of them.

    ``make test-repeated`` has all four.
    """
    if IS_DEEP:
        return
    from headgate.testing.sinks import failures

    check = failures.check_interruption

    def check_some(target: Any, number: int, *, is_after: bool, is_killed: bool) -> bool:
        if (number + is_after + 2 * is_killed) % 3:
            return True
        return check(target, number, is_after=is_after, is_killed=is_killed)

    monkeypatch.setattr(failures, "check_interruption", check_some)


@pytest.fixture(scope="session", autouse=True)
def _no_state_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have pipelines, in other processes too, keep what they know of one another in a directory of this session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def shared_hdfs() -> Iterator[HdfsCluster]:
    """A cluster for all tests of one process: they are of one group of pytest-xdist, ``hdfs``."""
    from tests.servers.hdfs import hdfs_cluster

    with hdfs_cluster() as cluster:
        yield cluster


@pytest.fixture
def hdfs(shared_hdfs: HdfsCluster) -> HdfsCluster:
    """The cluster, of which each test has directories of its own. It may kill servers."""
    shared_hdfs.heal()
    return shared_hdfs


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the seed of the order also where pytest is quiet, as in ``make check``."""
    seed = config.getoption("randomly_seed", None)
    if seed is not None and terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", []):
        terminalreporter.write_line(f"the same order again: --randomly-seed={seed}")
