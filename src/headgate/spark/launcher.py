"""Starts the workers of a pipeline as one barrier stage of a Spark job.

Interprets ``runtime.driver.supervision.Launcher``. The job's only purpose is to hold ``parallelism`` tasks at a time;
its failures are reported as one line each, because the workers have told the driver the story already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate import __version__
from headgate.errors import PipelineFailed
from headgate.model.definition import PipelineDefinition
from headgate.model.failure import Failure
from headgate.spark.job_errors import job_failure
from headgate.spark.workers import RESULT_SCHEMA, WorkerMain

POLARS_THREADS = "POLARS_MAX_THREADS"

JVM_GONE = (
    "Spark's JVM has ended, and with it every worker; start the same program again: it continues from the latest "
    "completed checkpoint"
)
CONTEXT_STOPPED = (
    "the SparkContext was stopped, and with it every worker; start the same program again: it continues from the "
    "latest completed checkpoint"
)


@dataclass(slots=True)
class SparkLauncher:
    """Submits barrier stages to one SparkSession."""

    spark: Any
    definition: PipelineDefinition
    fingerprint: str
    is_local: bool
    log_directory: Path | None = None

    def submit(
        self, submission: int, address: tuple[str, int], secret: bytes, ended: Callable[[Failure | None], None]
    ) -> None:
        """Run the job in a thread of its own; call ``ended`` once when it is over.

        Raises:
            PipelineFailed: Spark's JVM is gone, or its context, and with it this session.
        """
        from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
        from pyspark import InheritableThread

        host, port = address
        what = self.definition, submission, host, port, secret, self.is_local, self.fingerprint
        main = WorkerMain(*what, __version__, self.log_directory)
        thread = InheritableThread(target=self._run, args=(submission, main, ended), name=f"headgate-job-{submission}")
        thread.daemon = True
        try:
            if self._is_stopped():
                raise PipelineFailed(CONTEXT_STOPPED)
            thread.start()  # asks the JVM for the properties that the thread inherits
        except (Py4JNetworkError, OSError) as error:
            raise PipelineFailed(JVM_GONE) from error

    def cancel(self, submission: int) -> None:
        """Have Spark kill the tasks of this submission."""
        from py4j.protocol import Py4JNetworkError

        with suppress(Py4JNetworkError, OSError):  # without a JVM there is no task either
            self.spark.sparkContext.cancelJobGroup(self._group(submission))

    def _is_stopped(self) -> bool:
        java = self.spark.sparkContext._jsc
        return java is None or bool(java.sc().isStopped())

    def _group(self, submission: int) -> str:
        return f"headgate-{self.definition.config.name}-{id(self):x}-{submission}"

    def _run(self, submission: int, main: WorkerMain, ended: Callable[[Failure | None], None]) -> None:
        parallelism = self.definition.plan.parallelism
        context = self.spark.sparkContext
        try:
            description = f"headgate pipeline '{self.definition.config.name}'"
            context.setJobGroup(self._group(submission), description, interruptOnCancel=True)
            frame = self.spark.range(0, parallelism, 1, parallelism)
            with _worker_environment(context, self.is_local):
                workers = frame.mapInArrow(main, RESULT_SCHEMA, barrier=True)
            workers.collect()
        except BaseException as error:  # whatever it is, the driver waits for this thread
            ended(job_failure(str(error) or type(error).__name__))
        else:
            ended(None)


def warm_up(spark: Any, parallelism: int) -> None:
    """Run a job that does nothing, so that Spark has forked Python workers once and the next job need not wait."""
    context = spark.sparkContext
    with _worker_environment(context, context.master.startswith("local")):
        spark.range(0, parallelism, 1, parallelism).mapInArrow(nothing, RESULT_SCHEMA).collect()


def nothing(batches: Iterator[Any]) -> Iterator[Any]:
    """Read everything and return nothing."""
    for _ in batches:
        pass
    return iter(())


@contextmanager
def _worker_environment(context: Any, is_local: bool) -> Iterator[None]:
    """Let workers run this Python when they run on this machine, with one Polars thread each.

    The mailbox is one thread, and more would only fight over cores. Polars reads the variable when it is imported,
    which is before any code of ours runs in the worker.
    """
    threads, python = context.environment.get(POLARS_THREADS), context.pythonExec
    context.environment[POLARS_THREADS] = "1"
    if is_local:
        context.pythonExec = sys.executable
    try:
        yield
    finally:
        context.pythonExec = python
        if threads is None:
            del context.environment[POLARS_THREADS]
        else:
            context.environment[POLARS_THREADS] = threads
