"""Row functions: ``map`` and keyed ``reduce`` in plain Python on dicts, through the whole runtime on Spark.

Generated records of three columns → the function → discarded, with parallelism 1 and 2, checkpoints every second.
A worker computes in one thread, its mailbox, so parallelism 1 gives the rate per core; ``per_cpu_s`` is the rate per
second of CPU time of the worker process (all its threads), which does not depend on what else the machine does.
Settings: ``seconds`` (per run), ``keys`` (of the reduce).
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import psutil

import headgate as hg
from bench.harness import Options, Result, at_least
from bench.running import Reports, rates, records_out, reports_after, running, wait_for
from headgate.spark.session import SparkHandle

NAME = "row_functions"

RATE_MIN = 150_000.0
WARM_UP_S = 2.0
VERBS = ("map", "reduce")


def run(options: Options) -> Result:
    """Measure both functions with one worker and with two."""
    seconds, keys = options.number("seconds", 10, quick=4), int(options.number("keys", 1_000))
    figures: dict[str, Any] = {}
    for verb in VERBS:
        for parallelism in (1, 2):
            measured = measure(verb, parallelism, keys, seconds)
            figures |= {f"{verb}_{name}_{parallelism}_workers": value for name, value in measured.items()}
        figures[f"{verb}_records_per_s_per_core"] = figures[f"{verb}_records_per_s_1_workers"]
    return Result(figures, {f"{verb}_records_per_s_per_core": at_least(RATE_MIN) for verb in VERBS})


def measure(verb: str, parallelism: int, keys: int, seconds: float) -> dict[str, float]:
    """Return the records per second that went through the function, of all workers and per CPU second."""
    directory = tempfile.mkdtemp(prefix="headgate-bench-")
    try:
        with running(pipeline(verb, parallelism, keys, directory).definition()) as handle:
            wait_for(handle, lambda reports: all(records_out(r, verb) > 0 for r in reports.values()), "start")
            handle.wait(WARM_UP_S)
            before, cpu_before = _look(handle)
            handle.wait(seconds)
            reports_after(handle, before)
            after, cpu_after = _look(handle)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    records = sum(records_out(after[worker], verb) - records_out(before[worker], verb) for worker in before)
    return {
        "records_per_s": sum(rates(verb, before, after).values()),
        "records_per_cpu_s": records / (cpu_after - cpu_before),
    }


def pipeline(verb: str, parallelism: int, keys: int, directory: str) -> hg.Pipeline:
    """Return the pipeline under test."""
    p = hg.Pipeline(
        "row-functions", parallelism=parallelism, checkpointing=hg.Checkpointing(interval="1s", dir=directory)
    )
    stream = p.source(hg.Generator(columns={"key": hg.Uniform(0, keys), "value": hg.Uniform(0, 1_000)}))
    if verb == "map":
        stream.map(doubled, name=verb).sink(hg.Discard())
    else:
        stream.key_by("key").reduce(added, name=verb).sink(hg.Discard())
    return p


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    """Return the record with twice its value."""
    return {**row, "value": row["value"] * 2}


def added(accumulator: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of the values so far, at the time of the latest record."""
    return {**row, "value": accumulator["value"] + row["value"]}


def _look(handle: SparkHandle) -> tuple[Reports, float]:
    cpu_s = 0.0
    for pid in handle.driver.worker_pids().values():
        times = psutil.Process(pid).cpu_times()
        cpu_s += times.user + times.system
    return handle.driver.run_progress.reports(), cpu_s
