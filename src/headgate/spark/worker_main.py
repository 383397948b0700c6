"""The function that runs inside a Spark task and becomes a worker.

It travels in Spark's own closure (never over our sockets); everything else is ``runtime.worker.worker``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from headgate import __version__
from headgate.model.ids import WorkerIndex
from headgate.model.plan import PipelineDefinition
from headgate.spark.worker_exits import WATCH

RESULT_SCHEMA = "worker long"

OTHER_RELEASE = "install the same release for both"
"""How a worker ends what it says when its Headgate is another one."""


@dataclass(frozen=True, slots=True)
class WorkerMain:
    """The function of ``mapInArrow``: one call per Spark task, that is per worker."""

    definition: PipelineDefinition
    submission: int
    driver_host: str
    driver_port: int
    secret: bytes
    is_local: bool
    fingerprint: str
    release: str
    """Of the driver's Headgate."""
    log_directory: Path | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run a worker until its pipeline ends; yields nothing.

        Raises:
            RuntimeError: the worker was stopped or failed. One sentence: the driver has the details.
        """
        from pyspark import BarrierTaskContext

        from headgate.runtime.worker.worker import Worker, WorkerStopped, WorkerTask
        from headgate.spark.worker_logs import WorkerLog

        context = BarrierTaskContext.get()
        check_release(context.partitionId(), self.release)
        info = context.getTaskInfos()[context.partitionId()]
        host = "127.0.0.1" if self.is_local else info.address.rsplit(":", 1)[0]
        task = WorkerTask(
            self.definition,
            WorkerIndex(context.partitionId()),
            self.submission,
            context.taskAttemptId(),
            self.driver_host,
            self.driver_port,
            self.secret,
            host,
            self.fingerprint,
            spill_directory(),
            tuple(WATCH.known),
        )
        for _ in batches:  # the one row that made this partition
            pass
        ignore_sigterm()
        worker = Worker(task)
        if self.log_directory is not None:
            log = WorkerLog(self.log_directory, self.definition.config.name, context.partitionId())
            with suppress(OSError):  # no directory, no log
                log.begin(lambda: worker.running_operator)
        try:
            worker.run()
        except WorkerStopped as stopped:
            raise RuntimeError(f"headgate worker {task.worker} stopped: {stopped}") from None
        yield from ()


def ignore_sigterm() -> None:
    """Ignore SIGTERM: the end of a service sends it to all of its processes, and the last checkpoint needs them.

    A function, not ``SIG_IGN``: what a user's function starts must not inherit it. The worker ends with its connection
    to the driver.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)


def check_release(worker: int, release: str) -> None:
    """Refuse to run beside a driver of another release: their messages may mean different things.

    Raises:
        RuntimeError: one sentence, for the driver.
    """
    if release != __version__:
        raise RuntimeError(
            f"headgate worker {worker} stopped: the executors have headgate {__version__} and the driver has "
            f"{release}; {OTHER_RELEASE}"
        )


def spill_directory() -> str | None:
    """Return the first of the directories that Spark was given for its own temporary files, if there is one."""
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0].strip()
    return first if first and os.path.isdir(first) else None
