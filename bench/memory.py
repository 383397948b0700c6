"""Memory over ten minutes of the windowed count at half of the maximum rate, with checkpoints every second.

The resident memory of the workers, of the driver's Python and of the JVM is sampled once per second. Judged are the
workers, after the first fifth of the run: the slope of a straight line through the samples, and how much the last
fifth of them (its median) is above the first. Beside them stands what the workers do not share with the daemon that
they are forked from (unique set size); copying such a page when it is first written is no leak, but looks like one.
So does what allocators take in the first minute: a quick run, whose first fifth is shorter than that, waits before it
samples, and the slope of the second half tells it from a leak, which goes on.
Settings: ``minutes``, ``keys``, ``warm_up`` (seconds before the first sample), ``rate`` (events per second of both
workers together; default: half of what a short run without a limit reaches).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from bench.harness import Options, Result, at_most, median
from bench.headgate_windowed import measure_headgate, pipeline
from bench.running import rates, reports_after, running
from headgate.spark.session import SparkHandle

NAME = "memory"

SLOPE_MB_PER_MIN_MAX = 5.0
GROWTH_MAX = 0.10
WARM_UP_SHARE = 0.2
WARM_UP_S_QUICK = 45.0
"""Workers of the windowed count reach their level after about 40 s; the first fifth of ten minutes is longer."""
PERIOD_S = 1.0
MB = 1e6

Array = np.ndarray[Any, np.dtype[np.float64]]


def run(options: Options) -> Result:
    """Run, sample, fit."""
    minutes = options.number("minutes", 10, quick=1)
    keys = int(options.number("keys", 100_000))
    rate = int(options.number("rate", 0)) or int(measure_headgate(keys, 3, 1_000)["events_per_s"] / 2)
    samples, reached = sample(keys, rate, minutes * 60, options.number("warm_up", 0, quick=WARM_UP_S_QUICK))
    workers = judge(samples.seconds, samples.workers)
    figures: dict[str, Any] = {
        "events_per_s": reached,
        "minutes": minutes,
        "workers_slope_mb_per_min": workers["slope_mb_per_min"],
        "workers_growth": workers["growth"],
        "workers": workers,
        "workers_unshared": judge(samples.seconds, samples.workers_unshared),
        "driver": judge(samples.seconds, samples.driver),
        "jvm": judge(samples.seconds, samples.jvm),
    }
    targets = {"workers_slope_mb_per_min": at_most(SLOPE_MB_PER_MIN_MAX), "workers_growth": at_most(GROWTH_MAX)}
    return Result(figures, targets)


@dataclass(slots=True)
class Samples:
    """Bytes by time; workers added up."""

    seconds: list[float] = field(default_factory=list)
    workers: list[float] = field(default_factory=list)
    workers_unshared: list[float] = field(default_factory=list)
    driver: list[float] = field(default_factory=list)
    jvm: list[float] = field(default_factory=list)

    def add(self, seconds: float, workers: Sequence[psutil.Process], jvm: psutil.Process) -> None:
        """Sample every process."""
        found = [worker.memory_full_info() for worker in workers]
        self.seconds.append(seconds)
        self.workers.append(sum(float(memory.rss) for memory in found))
        self.workers_unshared.append(sum(float(memory.uss) for memory in found))
        self.driver.append(float(psutil.Process().memory_info().rss))
        self.jvm.append(float(jvm.memory_info().rss))


def sample(keys: int, rate: int, seconds: float, warm_up_s: float) -> tuple[Samples, float]:
    """Run for ``seconds`` after the warm-up; return the samples and the events per second over all of them."""
    directory = tempfile.mkdtemp(prefix="headgate-bench-")
    samples = Samples()
    try:
        with running(pipeline(keys, 1_000, rate, directory, with_age=False).definition()) as handle:
            workers = [psutil.Process(pid) for pid in handle.driver.worker_pids().values()]
            handle.wait(warm_up_s)
            jvm, before, begun = _jvm(), handle.driver.run_progress.reports(), time.monotonic()
            while time.monotonic() - begun < seconds:
                handle.wait(PERIOD_S)
                samples.add(time.monotonic() - begun, workers, jvm)
            reached = sum(rates("source", before, reports_after(handle, before)).values())
            _check_generation(handle)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return samples, reached


def judge(seconds: Sequence[float], bytes_used: Sequence[float]) -> dict[str, float]:
    """Return slope, growth and level of what was sampled after the warm-up.

    Raises:
        ValueError: fewer than ten samples are left.
    """
    first = int(len(seconds) * WARM_UP_SHARE)
    times, used = np.array(seconds[first:]), np.array(bytes_used[first:])
    if len(times) < 10:
        raise ValueError(f"a slope needs at least ten samples, found {len(times)}")
    part = max(len(used) // 5, 1)
    begin, end = median(list(used[:part])), median(list(used[-part:]))
    half = len(times) // 2
    return {
        "slope_mb_per_min": _slope_mb_per_min(times, used),
        "slope_of_second_half_mb_per_min": _slope_mb_per_min(times[half:], used[half:]),
        "growth": end / begin - 1,
        "median_mb": median(list(used)) / MB,
        "max_mb": float(used.max()) / MB,
    }


def _slope_mb_per_min(seconds: Array, bytes_used: Array) -> float:
    return float(np.polyfit(seconds, bytes_used, 1)[0]) * 60 / MB


def _jvm() -> psutil.Process:
    return next(child for child in psutil.Process().children(recursive=True) if child.name() == "java")


def _check_generation(handle: SparkHandle) -> None:
    if handle.progress.restarts:
        raise RuntimeError("the pipeline restarted meanwhile; its memory says nothing")
