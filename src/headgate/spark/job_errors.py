"""Why a Spark job failed, as one sentence with a remedy, from the pages that Spark gives; and whether it may pass.

Counterpart: ``spark.launcher``. What a worker itself has told the driver is told by the driver; this is for what
happens before a worker can tell anything. Functions of the text alone.
"""

from __future__ import annotations

import re

from headgate.model.failure import Failure, FailureKind
from headgate.spark.jvm import cause_of
from headgate.spark.workers import OTHER_RELEASE

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
    wrong = _wrong(text)
    if wrong:
        return Failure(FailureKind.DETERMINISTIC, wrong)
    is_loss = any(one in text for one in _LOSSES) and _NO_LOSS not in text
    is_lost = is_loss or _EXECUTOR_LOST.search(text) is not None or _word_of_a_worker(text) != ""
    return Failure(FailureKind.LOST if is_lost else FailureKind.UNEXPLAINED, job_error(text) or "Spark gave no reason")


def job_error(text: str) -> str:
    """Return the sentence for an error of Spark's; "" if it says nothing.

    Args:
        text: as for ``job_failure``.
    """
    if told := _wrong(text) or _word_of_a_worker(text):
        return told
    if found := _EXECUTOR_LOST.search(text):
        why = f": {found.group(2).strip()}" if found.group(2) else ""
        return f"executor {found.group(1)} was lost{why}"[:CHARS_SHOWN]
    telling = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    if found := _OF_A_TASK.search("\n".join(telling)):
        return cause_of(found.group(1))
    return cause_of("\n".join(telling))


def _wrong(text: str) -> str:
    """Return what is wrong with the executors or the program, which no repetition mends; "" if nothing is known."""
    if told := _word_of_a_worker(text):
        return told if told.endswith(OTHER_RELEASE) else ""
    if found := _NO_MODULE.search(text):
        return _missing(found.group(1))
    if found := _OTHER_VERSION.search(text):
        return (
            f"the executors' Python is {found.group(1)}, and this one is {found.group(2)}: set PYSPARK_PYTHON to a "
            f"Python {found.group(2)} that is on every executor, with headgate installed"
        )
    if found := _NO_PROGRAM.search(text):
        return (
            f"the executors have no Python at {found.group(1)}: set PYSPARK_PYTHON to one that is on every executor, "
            "with headgate installed"
        )
    for line in map(str.strip, text.splitlines()):
        if line.startswith(("ImportError:", "AttributeError:")):
            return f"a worker's Python reports {line}"[:CHARS_SHOWN]
    return ""


def _word_of_a_worker(text: str) -> str:
    """Return what a worker has said that was told to end, or ended itself; "" if none has."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line.removeprefix("RuntimeError: ")[:CHARS_SHOWN] for line in lines if line.startswith(_WORKER)), "")


def _missing(module: str) -> str:
    top = module.partition(".")[0]
    if top in NEEDED:
        return (
            f"the executors' Python has no '{top}': install headgate there, or set PYSPARK_PYTHON to a Python on every "
            "executor that has it"
        )
    return (
        f"the executors cannot import '{module}': install it for their Python, or give its file with headgate run "
        "--py-files; modules and packages right beside the program go there by themselves"
    )
