"""Start the workers of a pipeline as one barrier stage of a Spark job, and explain why a job failed.

Implements ``Launcher`` of ``runtime.driver``. The job's only purpose is to hold ``parallelism`` tasks at a time; its
failures are reported as one line each, because the workers have reported the details to the driver.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headgate import __version__
from headgate.dataclass import dataclass
from headgate.distribution import DISTRIBUTION
from headgate.errors import PipelineFailed
from headgate.model.failure import Failure, FailureKind
from headgate.model.plan import PipelineDefinition
from headgate.spark.jvm import cause_of
from headgate.spark.worker_main import OTHER_RELEASE, WorkerMain

CHARS_SHOWN = 300

NEEDED = frozenset(
    (
        *(
            "cryptography",
            "headgate",
            "msgspec",
            "numpy",
            "pandas",
            "polars",
            "prometheus_client",
            "psutil",
            "pyarrow",
            "pyspark",
        ),
        *("rich", "sqlalchemy", "typer", "xxhash"),
    )
)
"""What Headgate imports, at the top: a test compares it with what the package requires."""

_WORKER = "RuntimeError: headgate worker"
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_OTHER_VERSION = re.compile(r"different version:?\s*\(?([\d.]+)\)?.{0,40}?driver:?\s*\(?([\d.]+)", re.DOTALL)
_FRAME = re.compile(r'File "([^"\n]+/(\w+)\.py)", line')
_INSTALLED = re.compile(r"/python3\.\d+/|\.zip/\w+/")
"""In the paths of Python's own modules, of packages that were installed, and of those in archives, as PySpark is."""
_NO_PROGRAM = re.compile(r'Cannot run program "([^"]+)"')
_EXECUTOR_LOST = re.compile(r"ExecutorLostFailure \(executor (\S+)[^)]*\)(?: Reason: ([^\n]+))?")
_OF_A_TASK = re.compile(r"barrier task .* finished unsuccessfully\.\s*\n\s*(\S[^\n]*)")
_LOSSES = (
    "Python worker exited unexpectedly",
    "EOFException",
    "SocketException",
    "SocketTimeoutException",
    "ConnectException",
    "ClosedChannelException",
    "RpcTimeoutException",
    "ExecutorDeadException",
    "Executor heartbeat timed out",
    "Answer from Java side is empty",
    "Error while sending or receiving",
    "Cannot call methods on a stopped SparkContext",
    " cancelled ",
)
"""What Spark, its JVM or py4j says when a process or a connection was lost, or a job was cancelled."""

_NO_LOSS = "Error from python worker"
"""How Spark begins what a Python wrote that could not even start: its end is what comes of that."""


def job_failure(text: str) -> Failure:
    """Return why a job failed, with what may be done about it.

    Args:
        text: what Spark says, with the frames of its JVM and of the workers' Python.
    """
    wrong = _setup_error(text)
    if wrong:
        return Failure(FailureKind.DETERMINISTIC, wrong)
    is_loss = any(one in text for one in _LOSSES) and _NO_LOSS not in text
    is_lost = is_loss or _EXECUTOR_LOST.search(text) is not None or _worker_message(text) != ""
    return Failure(FailureKind.LOST if is_lost else FailureKind.UNEXPLAINED, job_error(text) or "Spark gave no reason")


def job_error(text: str) -> str:
    """Return the sentence for an error of Spark's; "" if it says nothing.

    Args:
        text: as for ``job_failure``.
    """
    if reported := _setup_error(text) or _worker_message(text):
        return reported
    if found := _EXECUTOR_LOST.search(text):
        why = f": {found.group(2).strip()}" if found.group(2) else ""
        return f"executor {found.group(1)} was lost{why}"[:CHARS_SHOWN]
    telling = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    if found := _OF_A_TASK.search("\n".join(telling)):
        return cause_of(found.group(1))
    return cause_of("\n".join(telling))


def _setup_error(text: str) -> str:
    """Return an error of the executors or the program that a restart does not mend; "" if there is none."""
    if reported := _worker_message(text):
        return reported if reported.endswith(OTHER_RELEASE) else ""
    if found := _NO_MODULE.search(text):
        return _missing(found.group(1))
    if found := _OTHER_VERSION.search(text):
        return (
            f"the executors' Python is {found.group(1)}, and this one is {found.group(2)}: set PYSPARK_PYTHON to a "
            f"Python {found.group(2)} that is on every executor, with {DISTRIBUTION} installed"
        )
    if found := _NO_PROGRAM.search(text):
        return (
            f"the executors have no Python at {found.group(1)}: set PYSPARK_PYTHON to one that is on every executor, "
            f"with {DISTRIBUTION} installed"
        )
    for line in map(str.strip, text.splitlines()):
        if line.startswith(("ImportError:", "AttributeError:")):
            return _hidden_module(text) or f"a worker's Python reports {line}"[:CHARS_SHOWN]
    return ""


def _hidden_module(text: str) -> str:
    """Return the sentence for a file beside the program that was imported in the place of a module of Python; or ""."""
    for path, name in _FRAME.findall(text):
        is_of_package = _INSTALLED.search(path) or Path(path).with_name("__init__.py").exists()
        if name in sys.stdlib_module_names and not is_of_package:
            return f"{path} hides Python's own module '{name}' from the workers: give the file another name"
    return ""


def _worker_message(text: str) -> str:
    """Return the message of a worker that was stopped or ended itself; "" if there is none."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line.removeprefix("RuntimeError: ")[:CHARS_SHOWN] for line in lines if line.startswith(_WORKER)), "")


def _missing(module: str) -> str:
    top = module.partition(".")[0]
    if top in NEEDED:
        return (
            f"the executors' Python has no '{top}': install {DISTRIBUTION} there, or set PYSPARK_PYTHON to a Python on "
            "every executor that has it"
        )
    return (
        f"the executors cannot import '{module}': install it for their Python, or give its file with headgate run "
        "--py-files; modules and packages right beside the program go there by themselves"
    )


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
    """Submits barrier stages to one SparkContext."""

    context: Any
    definition: PipelineDefinition
    fingerprint: str
    is_local: bool
    log_directory: Path | None = None

    def submit(
        self, submission: int, address: tuple[str, int], secret: bytes, ended: Callable[[Failure | None], None]
    ) -> None:
        """Run the job in a thread of its own; call ``ended`` once when it is over.

        Raises:
            PipelineFailed: Spark's JVM is gone, or its context.
        """
        from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
        from pyspark import InheritableThread

        host, port = address
        what = self.definition, submission, host, port, secret, self.is_local, self.fingerprint
        main = WorkerMain(*what, __version__, self.log_directory)
        thread = InheritableThread(target=self._run, args=(submission, main, ended), name=f"headgate-job-{submission}")
        # a job that Spark never ends must not keep the process alive
        thread.daemon = True
        try:
            # asked here: as the failure of a job it would count as a loss, and be submitted again
            if self._is_stopped():
                raise PipelineFailed(CONTEXT_STOPPED)
            thread.start()  # asks the JVM for the properties that the thread inherits
        except (Py4JNetworkError, OSError) as error:
            raise PipelineFailed(JVM_GONE) from error

    def cancel(self, submission: int) -> None:
        """Have Spark kill the tasks of this submission."""
        from py4j.protocol import Py4JNetworkError

        with suppress(Py4JNetworkError, OSError):  # without a JVM there is no task either
            self.context.cancelJobGroup(self._group(submission))

    def _is_stopped(self) -> bool:
        java = self.context._jsc
        return java is None or bool(java.sc().isStopped())

    def _group(self, submission: int) -> str:
        # of this launcher alone: runs of one name on one context must not cancel each other
        return f"headgate-{self.definition.config.name}-{id(self):x}-{submission}"

    def _run(self, submission: int, main: WorkerMain, ended: Callable[[Failure | None], None]) -> None:
        parallelism = self.definition.plan.parallelism
        try:
            description = f"headgate pipeline '{self.definition.config.name}'"
            self.context.setJobGroup(self._group(submission), description, interruptOnCancel=True)
            barrier_stage(self.context, parallelism, main).collect()
        except BaseException as error:  # whatever it is, the driver waits for this thread
            ended(job_failure(str(error) or type(error).__name__))
        else:
            ended(None)


def warm_up(context: Any, parallelism: int) -> None:
    """Run a job that does nothing, so that Spark has forked Python workers once and the next job need not wait."""
    barrier_stage(context, parallelism, discard_rows).collect()


def warm_up_sql(context: Any) -> None:
    """Run a query that does nothing, so that the JVM has loaded Spark SQL, which DataFrames need."""
    from pyspark.sql import SparkSession

    SparkSession(context).range(2).mapInArrow(discard_rows, "id long").collect()


def barrier_stage(context: Any, parallelism: int, main: Callable[[Iterator[Any]], Iterator[Any]]) -> Any:
    """Return an RDD of so many tasks that run at the same time; each calls ``main`` with no rows.

    An RDD and not a DataFrame: Spark SQL would be loaded, and a query planned, for a function that reads nothing.
    """
    with _worker_environment(context, is_local=context.master.startswith("local")):
        workers = context.parallelize([], parallelism).barrier().mapPartitions(main)
        workers.id()  # Spark's half of it is made now, with this environment
    return workers


def discard_rows(rows: Iterator[Any]) -> Iterator[Any]:
    """Read everything and return nothing."""
    for _ in rows:
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
        # the context may be its user's, who has other jobs
        context.pythonExec = python
        if threads is None:
            del context.environment[POLARS_THREADS]
        else:
            context.environment[POLARS_THREADS] = threads
