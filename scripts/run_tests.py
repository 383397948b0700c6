"""Runs all tests but those of ``make lint`` in two halves side by side, and sums up at the end.

It says what passed, what failed, and what was skipped and why.

Usage: ``python scripts/run_tests.py WORKERS SPARK_WORKERS``. Tests that were changed are compiled once, before every
worker needs them. The Spark half starts Spark and kills processes, and waits
for a third of its time; the quick half uses that time, at a lower priority, and has its files in memory where there
is much of it. Each half runs to its end, also where the other one failed, so that one run shows everything. Reports
of both are below build/tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "build" / "tests"
NICENESS = 2
"""Of the quick half: what waits for heartbeats and kills is in the other one."""
VERSION = importlib.metadata.version("pytest")
LINE_MAX = 300
"""So much of a failure's message stands in the summary."""
IN_MEMORY = Path(f"/dev/shm/headgate-tests-{os.getpid()}")
"""Where files cost no time to sync, which tests do a hundred thousand times."""
ROOM_BYTES = 8 << 30
"""With so much memory to spare the quick half has its files there; it takes a fraction of this."""
OF_LINT = "tests/test_architecture.py"
"""What ``make lint`` runs."""
HALVES = {"quick": "not deep and not spark and not crash", "spark": "not deep and (spark or crash)"}


@dataclass
class Totals:
    """What the reports of pytest say together."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    """The name of each test that failed, and the first line of what it said."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many tests were skipped, by reason."""


def read_report(path: Path, totals: Totals) -> None:
    """Add what a JUnit report holds."""
    for case in ET.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            lines = (problem.get("message") or "").splitlines() or [""]
            totals.failed.append(f"{name}: {lines[0][:LINE_MAX]}")
        elif skipped is not None:
            totals.skipped[skipped.get("message") or "no reason given"] += 1
        else:
            totals.passed += 1


def is_compiled(module: Path) -> bool:
    """Whether pytest has compiled a test module since it was changed."""
    compiled = module.parent / "__pycache__" / f"{module.stem}.{sys.implementation.cache_tag}-pytest-{VERSION}.pyc"
    return compiled.exists() and compiled.stat().st_mtime >= module.stat().st_mtime


def compile_tests() -> subprocess.Popen[bytes] | None:
    """Begin to compile the tests, unless they are: each worker would compile all of them."""
    if all(is_compiled(module) for module in (ROOT / "tests").rglob("test_*.py")):
        return None
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "not deep"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def class_archive() -> str:
    """Return JVM options that share the classes of Spark between its many starts."""
    command = [sys.executable, "-m", "tests.crash.support.class_archive"]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def has_room(directory: Path) -> bool:
    """Whether files may be in memory, at ``directory``."""
    place = directory.parent
    return place.is_dir() and min(shutil.disk_usage(place).free, psutil.virtual_memory().available) >= ROOM_BYTES


def begin_half(name: str, workers: str, archive: str) -> subprocess.Popen[str]:
    """Start one half. ``archive``: see ``class_archive``."""
    environment = dict(os.environ)
    prefix: list[str] = []
    options: list[str] = []
    if name == "spark":
        environment["SPARK_SUBMIT_OPTS"] = archive
    else:
        prefix = ["nice", "-n", str(NICENESS)]
        if has_room(IN_MEMORY):
            options = [f"--basetemp={IN_MEMORY}"]
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    loudness = "-v" if name == "spark" else "-q"  # a test with Spark may take a minute
    command = [*prefix, sys.executable, "-m", "pytest", loudness, "-n", workers, "-m", HALVES[name]]
    print(f"== tests: {name} half ({HALVES[name]}), {workers} workers", flush=True)
    return subprocess.Popen(
        [*command, *options, f"--ignore={OF_LINT}", f"--junitxml={report}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def show(name: str, half: subprocess.Popen[str]) -> None:
    """Print the lines of a half as they come, each after the name of the half."""
    assert half.stdout is not None
    for line in half.stdout:
        print(f"{name:>5}: {line}", end="", flush=True)


def run_halves(workers: list[str]) -> list[int]:
    """Run both halves with their progress shown; return how pytest ended in each."""
    compiling, archive = compile_tests(), class_archive()
    if compiling is not None:
        compiling.wait()
    halves = [(name, begin_half(name, count, archive)) for name, count in zip(HALVES, workers, strict=True)]
    shown = [threading.Thread(target=show, args=half) for half in halves]
    for thread in shown:
        thread.start()
    for thread in shown:
        thread.join()
    return [half.wait() for _, half in halves]


def summary(totals: Totals) -> str:
    """Return the last lines of the run; the very last one holds the numbers."""
    lines = [f"failed: {name}" for name in totals.failed]
    lines += [f"skipped {count}: {reason}" for reason, count in totals.skipped.most_common()]
    numbers = f"{totals.passed} passed, {len(totals.failed)} failed, {totals.skipped.total()} skipped"
    return "\n".join([*lines, numbers])


def main() -> int:
    """Run both halves; return 0 if every test passed or was skipped."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    codes: list[int] = []
    try:
        codes = run_halves(sys.argv[1:])
    finally:
        if not any(codes):
            shutil.rmtree(IN_MEMORY, ignore_errors=True)
    totals = Totals()
    for name in HALVES:
        report = REPORTS / f"{name}.xml"
        if report.exists():
            read_report(report, totals)
        else:
            totals.failed.append(f"the {name} half, which left no report")
    if IN_MEMORY.exists():
        print(f"the files of tests that failed are in {IN_MEMORY}: remove them")
    print(summary(totals), flush=True)
    return 1 if any(codes) or totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
