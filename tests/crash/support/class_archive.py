"""The file of classes that starts of Spark use (``headgate.spark.class_archive``), for the JVMs of tests.

Tests start more than a hundred of them. ``python -m tests.crash.support.class_archive`` makes the file in ``.cache``,
once for each Java and PySpark, and prints what to set ``SPARK_SUBMIT_OPTS`` to. A JVM that the file does not fit goes
on without it, as do tests without the variable.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headgate.spark.class_archive import archive_file

CACHE = Path(__file__).resolve().parents[3] / ".cache"

COMMON = ["-XX:+UseSerialGC", "-Xlog:disable"]
"""JVMs that live for seconds need no threads that collect garbage beside them."""

WAIT_S = 1_200

WRITE = "from headgate.spark.class_dump import dump_archive; import pathlib, sys; "
WRITE += "dump_archive(pathlib.Path(sys.argv[1]), *sys.argv[2:])"


def place() -> Path | None:
    """Return where the file belongs; None without Java."""
    file = archive_file(os.environ)
    return None if file is None else CACHE / file.name


def make(file: Path) -> None:
    """Have a JVM that ran a job write down what it has loaded."""
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        made = Path(directory) / file.name
        command = [sys.executable, "-c", WRITE, str(made), *COMMON]
        done = subprocess.run(command, stdout=sys.stderr, check=False, timeout=WAIT_S)
        if done.returncode == 0:
            made.replace(file)


def options() -> str:
    """Return the options of JVMs that tests start, after making the file."""
    file = place()
    if file is not None and not file.exists():
        make(file)
    archive = [f"-XX:SharedArchiveFile={file}"] if file is not None and file.exists() else []
    return " ".join([*COMMON, *archive])


if __name__ == "__main__":
    print(options())
