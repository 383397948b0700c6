"""What benchmarks of whole pipelines share: starting one, waiting for its workers, wrapping one of its operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from headgate.model.plan import PipelineDefinition
from headgate.model.progress import CLOCK_S, NODE, RECORDS_OUT, Observer, PipelineState, Samples, SilentObserver
from headgate.operators.base import OperatorSpec
from headgate.spark.session import SparkHandle, start_pipeline

START_TIMEOUT_S = 120.0
LOOK_PERIOD_S = 0.05

Reports = Mapping[int, Samples]
"""The latest report of each worker."""


@contextmanager
def running(definition: PipelineDefinition, observer: Observer | None = None) -> Iterator[SparkHandle]:
    """Run ``definition`` on a Spark of its own until the block ends, then cancel it.

    Raises:
        RuntimeError: it does not start in time.
    """
    from pyspark import cloudpickle

    import bench

    cloudpickle.register_pickle_by_value(bench)  # workers need not find this directory
    handle = start_pipeline(definition, observer=observer or SilentObserver())
    try:
        wait_for(handle, lambda reports: len(reports) == definition.plan.parallelism, "start")
        yield handle
    finally:
        handle.cancel()
        handle.wait()


def wait_for(handle: SparkHandle, is_there: Callable[[Reports], bool], what: str) -> Reports:
    """Wait until the pipeline runs and ``is_there`` of its workers' reports; return them.

    Raises:
        RuntimeError: that does not happen in time; ``what`` names it.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        reports = handle.driver.run_progress.reports()
        if handle.progress.state is PipelineState.RUNNING and is_there(reports):
            return reports
        handle.wait(LOOK_PERIOD_S)
    raise RuntimeError(f"the pipeline did not {what} within {START_TIMEOUT_S:g} s")


def reports_after(handle: SparkHandle, before: Reports) -> Reports:
    """Return the latest reports once every worker has reported again; on a busy machine that may take a while.

    Raises:
        RuntimeError: a worker does not report in time.
    """
    return wait_for(
        handle, lambda reports: all(clock_s(reports[worker]) > clock_s(before[worker]) for worker in before), "report"
    )


def rates(node: str, before: Reports, after: Reports) -> dict[int, float]:
    """Return the records per second that ``node`` let out in each worker, by the worker's own clock."""
    return {
        worker: (records_out(after[worker], node) - records_out(before[worker], node))
        / (clock_s(after[worker]) - clock_s(before[worker]))
        for worker in sorted(before)
    }


def records_out(report: Samples, node: str) -> int:
    """Return how many records ``node`` let out since its generation began."""
    return int(report.of(NODE, node)[RECORDS_OUT])


def clock_s(report: Samples) -> float:
    """Return what the worker's clock said when it reported."""
    return float(report.value(CLOCK_S) or 0.0)


def wrapped(definition: PipelineDefinition, node: str, wrap: Callable[[OperatorSpec], Any]) -> PipelineDefinition:
    """Return ``definition`` with ``wrap(spec)`` in the place of the spec of ``node``."""
    vertices = tuple(
        replace(v, nodes=tuple(replace(n, spec=wrap(n.spec)) if str(n.name) == node else n for n in v.nodes))  # type: ignore[arg-type]
        for v in definition.plan.vertices
    )
    return replace(definition, plan=replace(definition.plan, vertices=vertices))
