"""What a benchmark runs on and how it is measured: machine, CPU seconds of whole process trees, medians.

Used by ``bench/harness.py``, by every benchmark and by the peers, which run in environments of their own; so it
needs psutil and the standard library, nothing else.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("headgate", "pyspark", "pyarrow", "polars", "numpy", "apache-flink")
"""Packages whose versions stand beside the figures."""


def machine() -> dict[str, object]:
    """Return cores, processor, memory, load and versions; part of every benchmark's figures."""
    return {
        "cores": os.cpu_count(),
        "cpu": cpu_model(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def cpu_model() -> str:
    """Return the processor's name, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_seconds_of_tree(pid: int | None = None) -> float:
    """Return user and system CPU seconds of all processes of the tree under ``pid`` (default: this process).

    The JVM of a Spark driver and its Python workers are children and therefore included. Children that ended and
    were waited for count through their parent.
    """
    root = psutil.Process(pid)
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total += times.user + times.system
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


class CpuMeter:
    """CPU and wall seconds of a process tree since the meter was made."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._before = cpu_seconds_of_tree(pid)
        self._idle_before = _idle_seconds()
        self._started = time.monotonic()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds the tree has used since then.

        The difference of the sums, not process by process: what a child used moves to its parent when it ends.
        """
        return cpu_seconds_of_tree(self._pid) - self._before

    def idle_seconds(self) -> float:
        """Return for how long cores of the machine had nothing to do since then, added up: all of them waited."""
        return _idle_seconds() - self._idle_before

    def seconds(self) -> float:
        """Return the wall seconds since the meter was made."""
        return time.monotonic() - self._started


def _idle_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least ``share`` (0 to 1) of ``values`` do not exceed.

    Raises:
        ValueError: ``values`` is empty or ``share`` is outside 0 to 1.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= share <= 1:
        raise ValueError(f"share of a percentile must lie between 0 and 1, found {share}")
    # ceil(n * share) without the rounding error that makes 0.07 * 100 come out above 7.
    rank = -int(-round(len(ordered) * share, 9) // 1)
    return ordered[max(rank, 1) - 1]


def spread(values: Sequence[float]) -> float:
    """Return (largest - smallest) / median of ``values``: how much repeated runs differ; 0 for a median of 0."""
    middle = percentile(values, 0.5)
    return (max(values) - min(values)) / middle if middle else 0.0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
