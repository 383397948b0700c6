"""What Spark says about a failed job becomes one sentence that says what to do."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

import headgate
from headgate.distribution import DISTRIBUTION
from headgate.model.failure import FailureKind
from headgate.spark.launcher import NEEDED, job_error, job_failure
from headgate.spark.worker_main import check_release

LOST, UNEXPLAINED, DETERMINISTIC = FailureKind.LOST, FailureKind.UNEXPLAINED, FailureKind.DETERMINISTIC

NO_DAEMON = """Job aborted due to stage failure: Could not recover from a failed barrier ResultStage.
Error from python worker:
  /usr/bin/python3: Error while finding module specification (ModuleNotFoundError: No module named 'headgate')
PYTHONPATH was:
\tat org.apache.spark.api.python.PythonWorkerFactory.startDaemon(PythonWorkerFactory.scala:1)
"""
OTHER_VERSION = (
    "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different "
    "version: 3.9 than that in driver: 3.11, PySpark cannot run with different minor versions."
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (NO_DAEMON, "the executors' Python has no 'headgate': install headgate-streams there, or set PYSPARK_PYTHON"),
        (
            "x\nModuleNotFoundError: No module named 'polars'",
            "the executors' Python has no 'polars': install headgate-streams",
        ),
        ("ModuleNotFoundError: No module named 'shop.prices'", "the executors cannot import 'shop.prices': install"),
        (OTHER_VERSION, "the executors' Python is 3.9, and this one is 3.11: set PYSPARK_PYTHON"),
        ('java.io.IOException: Cannot run program "/x/python": error=2', "the executors have no Python at /x/python:"),
        ("Job aborted\nRuntimeError: headgate worker 1 stopped: why", "headgate worker 1 stopped: why"),
        ("\tat a.b.C(D)\nImportError: cannot import name 'x'", "a worker's Python reports ImportError: cannot import"),
        ("Job aborted: no reason\n\tat a.b.C(D)", "Job aborted: no reason"),
        ("", ""),
    ],
)
def test_an_error_of_spark_is_one_sentence(text: str, told: str) -> None:
    sentence = job_error(text)
    assert sentence.startswith(told)
    assert "\n" not in sentence


HIDDEN = """Traceback (most recent call last):
  File "/usr/lib/python3.11/dataclasses.py", line 3, in <module>
    import copy
  File "{program}", line 1, in <module>
    import headgate as hg
ImportError: cannot import name 'dataclass' from partially initialized module 'dataclasses'
"""


def test_a_file_that_hides_a_module_of_python_is_named_by_the_error(tmp_path: Path) -> None:
    program = tmp_path / "copy.py"
    sentence = job_error(HIDDEN.format(program=program))
    assert sentence == f"{program} hides Python's own module 'copy' from the workers: give the file another name"


def test_a_module_of_a_package_hides_none_of_python(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    for program in (tmp_path / "copy.py", "/opt/spark/python/lib/pyspark.zip/pyspark/sql/types.py"):
        sentence = job_error(HIDDEN.format(program=program))
        assert sentence.startswith("a worker's Python reports ImportError: cannot import name 'dataclass'")


EXECUTOR_LOST = """An error occurred while calling o68.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a failed barrier \
ResultStage. Most recent failure reason: Stage failed because barrier task ResultTask(0, 1) finished unsuccessfully.
ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: Command exited with code 137
\tat org.apache.spark.scheduler.DAGScheduler.failJobAndIndependentStages(DAGScheduler.scala:1)
"""
DAEMON_LOST = """An error occurred while calling o72.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a failed barrier \
ResultStage. Most recent failure reason: Stage failed because barrier task ResultTask(0, 1) finished unsuccessfully.
org.apache.spark.SparkException: EOFException occurred while reading the port number from \
headgate.spark.python_daemon's stdout.
\tat org.apache.spark.errors.SparkCoreErrors$.eofExceptionWhileReadPortNumberError(SparkCoreErrors.scala:55)
"""
CRASHED = """An error occurred while calling o1.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 failed 1 times: \
org.apache.spark.SparkException: Python worker exited unexpectedly (crashed): the cause is not known
"""


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        (EXECUTOR_LOST, LOST, "executor 1 was lost: Command exited with code 137"),
        (
            DAEMON_LOST,
            LOST,
            "EOFException occurred while reading the port number from headgate.spark.python_daemon's stdout",
        ),
        (CRASHED, LOST, "Job aborted due to stage failure: Task 0 failed 1 times: org.apache.spark."),
        ("Answer from Java side is empty", LOST, "Answer from Java side is empty"),
        ("Job 3 cancelled because SparkContext was shut down", LOST, "Job 3 cancelled because"),
        (
            "Job aborted\nRuntimeError: headgate worker 1 stopped: why",
            LOST,
            "headgate worker 1 stopped: why",
        ),
        (NO_DAEMON, DETERMINISTIC, "the executors' Python has no 'headgate'"),
        (OTHER_VERSION, DETERMINISTIC, "the executors' Python is 3.9, and this one is 3.11"),
        (
            ": a.b.C: Error from python worker:\n Killed: EOFException",
            UNEXPLAINED,
            "Error from python worker:",
        ),
        ("An error occurred while calling o1.x.\n: a.b.C: a riddle", UNEXPLAINED, "a riddle"),
        ("", UNEXPLAINED, "Spark gave no reason"),
    ],
)
def test_an_error_of_spark_tells_losses_from_what_no_repetition_mends(  # G9
    text: str, kind: FailureKind, told: str
) -> None:
    failure = job_failure(text)
    assert failure.kind is kind
    assert failure.reason.startswith(told)


def test_what_headgate_needs_is_what_it_requires() -> None:
    required = importlib.metadata.requires(DISTRIBUTION) or []
    names = [re.match(r"[\w.-]+", text) for text in required if "extra ==" not in text]
    assert {name.group().replace("-", "_") for name in names if name} | {"headgate"} == NEEDED


def test_a_worker_of_another_release_says_what_is_where() -> None:
    check_release(0, headgate.__version__)
    with pytest.raises(RuntimeError) as raised:
        check_release(1, "0.0.1")
    assert job_failure(f"x\nRuntimeError: {raised.value}").kind is DETERMINISTIC
    assert job_error(f"x\nRuntimeError: {raised.value}") == (
        f"headgate worker 1 stopped: the executors have headgate {headgate.__version__} and the driver has 0.0.1; "
        "install the same release for both"
    )
