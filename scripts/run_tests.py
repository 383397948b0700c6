"""Runs all tests in two halves and says at the end what passed, what failed, and what was skipped and why.

Usage: ``python scripts/run_tests.py WORKERS SPARK_WORKERS``. The second half starts Spark and kills processes; it also
runs where the first one failed, so that one run shows everything. Reports of both are below build/tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "build" / "tests"
HALVES = {"quick": "not deep and not spark and not crash", "spark": "not deep and (spark or crash)"}


@dataclass
class Totals:
    """What the reports of pytest say together."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """How many tests were skipped, by reason."""


def read_report(path: Path, totals: Totals) -> None:
    """Add what a JUnit report holds."""
    for case in ET.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            totals.failed.append(name)
        elif skipped is not None:
            totals.skipped[skipped.get("message") or "no reason given"] += 1
        else:
            totals.passed += 1


def class_archive() -> str:
    """Return JVM options that share the classes of Spark between its many starts."""
    command = [sys.executable, "-m", "tests.crash.class_archive"]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def run_half(name: str, workers: str) -> int:
    """Run one half with its progress shown; return how pytest ended."""
    environment = dict(os.environ)
    if name == "spark":
        environment["SPARK_SUBMIT_OPTS"] = class_archive()
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-m", HALVES[name], f"--junitxml={report}"]
    print(f"== tests: {name} half ({HALVES[name]}), {workers} workers", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def summary(totals: Totals) -> str:
    """Return the last lines of the run; the very last one holds the numbers."""
    lines = [f"failed: {name}" for name in totals.failed]
    lines += [f"skipped {count}: {reason}" for reason, count in totals.skipped.most_common()]
    numbers = f"{totals.passed} passed, {len(totals.failed)} failed, {totals.skipped.total()} skipped"
    return "\n".join([*lines, numbers])


def main() -> int:
    """Run both halves; return 0 if every test passed or was skipped."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    codes = [run_half(name, workers) for name, workers in zip(HALVES, sys.argv[1:], strict=True)]
    totals = Totals()
    for name in HALVES:
        report = REPORTS / f"{name}.xml"
        if report.exists():
            read_report(report, totals)
        else:
            totals.failed.append(f"the {name} half, which left no report")
    print(summary(totals), flush=True)
    return 1 if any(codes) or totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
