"""Recovery: from ``kill -9`` of a worker to the first record that the pipeline's next generation processes.

The windowed count with two workers at a limited rate, checkpoints every second. The workers are killed in turns. A
probe behind the source notes, by the clock of the new worker, when it had loaded the pipeline, when it was deployed
and when its first records came; the counters of the worker's next report bring the times here.
Settings: ``kills``, ``keys``, ``rate`` (events per second of both workers together).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from bench.harness import Options, Result, at_most, median
from bench.headgate_windowed import pipeline
from bench.running import Reports, running, wait_for, wrapped
from headgate.model.failure import Failure
from headgate.model.ids import Generation
from headgate.model.progress import NODE, Samples, SilentObserver
from headgate.operators.base import Operator, OperatorSpec
from headgate.runtime.driver.driver import Driver
from headgate.runtime.driver.supervisor_host import Launcher
from headgate.spark.session import SparkHandle

NAME = "recovery"

RECOVERY_S_MAX = 2.0
STEADY_S = 3.0
"""Between two kills: checkpoints have completed, and the machine has calmed down."""

PROBED = "with-timestamps"
STEPS = ("loaded", "deployed", "first_record")


def run(options: Options) -> Result:
    """Kill workers in turns; return median and maximum, and the median of each step."""
    kills = int(options.number("kills", 7, quick=3))
    keys, rate = int(options.number("keys", 100_000)), int(options.number("rate", 1_000_000))
    recoveries = measure(kills, keys, rate)
    totals = [recovery["total"] for recovery in recoveries]
    figures: dict[str, Any] = {
        "recovery_s_median": median(totals),
        "recovery_s_max": max(totals),
        "workers_cpu_s_median": median([recovery["cpu"] for recovery in recoveries]),
        "steps_s_median": {step: median([r[step] for r in recoveries]) for step in list(recoveries[0])[2:]},
        "recoveries": recoveries,
    }
    return Result(figures, {"recovery_s_median": at_most(RECOVERY_S_MAX)})


def measure(kills: int, keys: int, rate: int) -> list[dict[str, float]]:
    """Return the seconds that each step of each recovery took."""
    directory = tempfile.mkdtemp(prefix="headgate-bench-")
    try:
        definition = pipeline(keys, 1_000, rate, directory, with_age=False).definition()
        definition = wrapped(definition, PROBED, FirstRecord)
        marks = Marks()
        with running(definition, marks) as handle:
            marks.attach(handle.driver)
            return [_recover(handle, kill % 2, marks) for kill in range(kills)]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _recover(handle: SparkHandle, worker: int, marks: Marks) -> dict[str, float]:
    handle.wait(STEADY_S)
    wait_for(handle, _has_first_record, "recover")
    generation = handle.driver.running_generation
    marks.clear()
    killed_s = time.monotonic()
    os.kill(handle.driver.worker_pids()[worker], signal.SIGKILL)
    reports = wait_for(handle, lambda r: _is_new(handle, generation) and _has_first_record(r), "recover")
    times = min((_times(report) for report in reports.values()), key=lambda found: found["first_record"])
    reached = {"noticed": marks.noticed_s, "job_ended": marks.job_ended_s, "submitted": marks.submitted_s} | times
    steps, before_s = {}, killed_s
    for name, at_s in reached.items():
        steps[name] = at_s - before_s
        before_s = at_s
    cpu_s = sum(_counters(report)["cpu_us"] for report in reports.values()) / 1e6
    return {"total": times["first_record"] - killed_s, "cpu": cpu_s} | steps


def _is_new(handle: SparkHandle, generation: Generation | None) -> bool:
    return handle.driver.running_generation not in (None, generation)


def _has_first_record(reports: Reports) -> bool:
    return len(reports) == 2 and all("first_record" in _times(report) for report in reports.values())


def _times(report: Samples) -> dict[str, float]:
    """Return when the worker reached each of ``STEPS``, in seconds of this machine's monotonic clock."""
    counters = _counters(report)
    return {step: counters[step] / 1e6 for step in STEPS if step in counters}


def _counters(report: Samples) -> dict[str, int | float]:
    return report.of(NODE, PROBED)


class Marks(SilentObserver):
    """What the driver's process sees of a recovery, in seconds of this machine's monotonic clock."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the recovery before."""
        self.noticed_s = self.job_ended_s = self.submitted_s = 0.0

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """See ``Observer``."""
        self.noticed_s = self.noticed_s or time.monotonic()

    def attach(self, driver: Driver) -> None:
        """Listen to the driver's traffic with Spark, which no observer is told of."""
        driver.supervision.launcher = TimedLauncher(driver.supervision.launcher, self)


@dataclass(frozen=True, slots=True)
class TimedLauncher:
    """A launcher that notes when a job is submitted, and when it ends."""

    launcher: Launcher
    marks: Marks

    def submit(
        self, submission: int, address: tuple[str, int], secret: bytes, ended: Callable[[Failure | None], None]
    ) -> None:
        """See ``runtime.driver.supervision.Launcher``."""

        def job_ended(failure: Failure | None) -> None:
            self.marks.job_ended_s = time.monotonic()
            ended(failure)

        self.marks.submitted_s = time.monotonic()
        self.launcher.submit(submission, address, secret, job_ended)

    def cancel(self, submission: int) -> None:
        """See ``runtime.driver.supervision.Launcher``."""
        self.launcher.cancel(submission)


class FirstRecord:
    """The spec of an operator with a probe for its first records in front of it."""

    def __init__(self, spec: OperatorSpec, loaded_us: int = 0) -> None:
        self.spec = spec
        self.loaded_us = loaded_us

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.spec,)

    def build(self) -> Operator:
        """Return the operator with its probe."""
        operator = self.spec.build()
        process = operator.process
        times = {
            "loaded": self.loaded_us,
            "deployed": time.monotonic_ns() // 1_000,
        }

        def probed(batch: pa.RecordBatch) -> None:
            if times:
                times["first_record"] = time.monotonic_ns() // 1_000
                for name, at_us in times.items():
                    operator.context.metrics.add(name, at_us)
                operator.context.metrics.add("cpu_us", time.process_time_ns() // 1_000)
                times.clear()
            process(batch)

        operator.process = probed  # type: ignore[method-assign]
        return operator


def _loaded(spec: OperatorSpec) -> FirstRecord:
    """Make the spec in a worker: the pipeline has just been loaded there."""
    return FirstRecord(spec, time.monotonic_ns() // 1_000)
