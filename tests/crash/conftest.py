"""What the tests with real processes share: one host process for pipelines whose driver survives, and clean-up."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crash.support.cluster import Cluster
from crash.support.processes import PROGRAM, STARTED_S, Child, Life, quick_jvm, without_spark
from crash.support.standing import Place

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """One process with one SparkSession, for pipelines whose driver is not harmed."""
    yield from hosting(tmp_path_factory.mktemp("host"), 2)


@pytest.fixture(scope="session")
def wide_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """As ``host``, for pipelines of up to five subtasks."""
    yield from hosting(tmp_path_factory.mktemp("wide"), 5)


def hosting(directory: Path, slots: int) -> Iterator[Child]:
    fault = {"HEADGATE_TEST_STORAGE_FAULT": str(directory / "fault.json"), **quick_jvm()}
    child = Child([sys.executable, "-u", str(PROGRAM), str(slots)], directory, fault)
    try:
        child.wait_event(lambda e: e["event"] == "host", 0, STARTED_S, "the SparkSession")
        yield child
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.exit_code() == 0
        child.assert_gone()
    finally:
        child.close()


@pytest.fixture
def storage_fault(host: Child) -> Iterator[Path]:
    """The control file that makes the host's local storage fail (see ``hook/sitecustomize.py``)."""
    control = host.log.parent / "fault.json"
    try:
        yield control
    finally:
        control.unlink(missing_ok=True)


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Make the description of a pipeline with a name of its own."""

    def make(pipeline: str, **options: Any) -> dict[str, Any]:
        name = f"{pipeline}-{os.getpid()}-{next(_numbers)}"
        return {"pipeline": pipeline, "name": name, "root": str(tmp_path), "rows": 20_000, "rate": 8_000, **options}

    return make


def gated(spec: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Give a pipeline a gate that its input waits for until its test wants the result (``gate=None``: it has none).

    Whoever kills, stops or watches a pipeline needs it to run still, however slow the machine is.
    """
    gate = spec.get("gate", f"{spec['root']}/{spec['name']}.gate")
    return {**spec, "gate": gate}, None if gate is None else Path(gate)


@pytest.fixture
def run(host: Child) -> Iterator[Callable[[dict[str, Any]], Life]]:
    """Run a pipeline in the host."""
    yield from running_in(host)


@pytest.fixture
def run_wide(wide_host: Child) -> Iterator[Callable[[dict[str, Any]], Life]]:
    """Run a pipeline in the host with more slots."""
    yield from running_in(wide_host)


def running_in(host: Child) -> Iterator[Callable[[dict[str, Any]], Life]]:
    lives: list[Life] = []

    def begin(spec: dict[str, Any]) -> Life:
        spec, gate = gated(spec)
        host.asked_to_end.discard(spec["name"])
        life = Life(host, spec["name"], gate)
        lives.append(life)
        host.send(spec)
        return life

    yield begin
    for life in lives:
        if not life.seen("result") and not life.seen("failed"):
            host.send({"stop": life.name})


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    """Run a pipeline in a process of its own, whose driver may be harmed. The same spec continues where it was."""
    children: list[Child] = []

    def begin(spec: dict[str, Any], *, with_spark: bool = True, **env: str) -> Life:
        spec, gate = gated(spec)
        around = quick_jvm() if with_spark else without_spark()
        child = Child([sys.executable, "-u", str(PROGRAM), json.dumps(spec)], tmp_path / "driver", {**around, **env})
        children.append(child)
        return Life(child, spec["name"], gate)

    yield begin
    for child in children:
        child.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Make a place for one pipeline and the commands that run it, and end them."""
    places: list[Place] = []

    def make(with_spark: bool, *, is_object_store: bool = False) -> Place:
        where = f"obstore+file://{tmp_path}/checkpoints" if is_object_store else None
        places.append(Place(tmp_path, with_spark=with_spark, checkpoints=where))
        return places[-1]

    yield make
    for one in places:
        one.close()


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    """Random kill times. HEADGATE_TEST_SEED repeats those of a failed run."""
    seed = int(os.environ.get("HEADGATE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
    print(f"HEADGATE_TEST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(autouse=True)
def told(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Callable[[Life], None]:
    """Record how long recoveries took, for those who read the report."""

    def tell(life: Life) -> None:
        for took_ms in life.recoveries_ms():
            record_property("recovery_ms", took_ms)
            print(f"recovery: {took_ms} ms")

    return tell


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A standalone cluster for the tests of one group, ``cluster``; none leaves anything running on it."""
    found: list[Cluster] = []
    try:
        found.append(Cluster(tmp_path_factory.mktemp("cluster")))
        yield found[0]
        found[0].assert_idle()
    finally:
        for one in found:
            one.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how long takeovers took, also where pytest is quiet and nobody judges."""
    for report in [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]:
        for name, value in report.user_properties:
            if name == "takeovers":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")
