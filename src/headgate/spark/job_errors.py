"""Why a Spark job failed, as one sentence with a remedy, from the pages that Spark gives.

Counterpart: ``spark.launcher``. What a worker itself has told the driver is told by the driver; this is for what
happens before a worker can tell anything. A function of the text alone.
"""

from __future__ import annotations

import re

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


def job_error(text: str) -> str:
    """Return the sentence for an error of Spark's; "" if it says nothing.

    Args:
        text: what Spark says, with the frames of its JVM and of the workers' Python.
    """
    lines = [line.strip() for line in text.splitlines()]
    for line in lines:
        if line.startswith(_WORKER):
            return line.removeprefix("RuntimeError: ")[:CHARS_SHOWN]
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
    for line in lines:
        if line.startswith(("ImportError:", "AttributeError:")):
            return f"a worker's Python reports {line}"[:CHARS_SHOWN]
    telling = [line for line in lines if line and not line.startswith("at ")]
    return telling[0][:CHARS_SHOWN] if telling else ""


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
