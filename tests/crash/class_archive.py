"""What Spark's JVMs load when they start, in one file that they map: two fifths of a start's processor time otherwise.

Tests start more than a hundred of them. ``python -m tests.crash.class_archive`` makes the file in ``.cache``, once for
each Java and PySpark, and prints what to set ``SPARK_SUBMIT_OPTS`` to. A JVM that the file does not fit goes on
without it, as do tests that nobody has told.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

from headgate.spark.session import JVM_OPTIONS

CACHE = Path(__file__).resolve().parents[2] / ".cache"

COMMON = "-XX:+UseSerialGC -Xlog:disable"
"""JVMs that live for seconds need no threads that collect garbage beside them."""

WAIT_S = 600

SESSION = f"""
from headgate.spark.session import make_session
session = make_session("classes", 2, None)
assert session.range(10).count() == 10
jvm = session.sparkContext._gateway.proc
session.stop()
jvm.stdin.close()
jvm.wait({WAIT_S})
"""


def place() -> Path | None:
    """Return where the file belongs; None without Java."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        return None
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    key = hashlib.md5(f"{told} {pyspark.__version__} {pyspark.__file__}".encode()).hexdigest()
    return CACHE / f"spark-classes-{key[:16]}.jsa"


def make(file: Path) -> None:
    """Have a JVM that ran a job write down what it has loaded."""
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        made = Path(directory) / file.name
        around = {**os.environ, JVM_OPTIONS: f"{COMMON} -XX:ArchiveClassesAtExit={made}"}
        subprocess.run([sys.executable, "-c", SESSION], env=around, stdout=sys.stderr, check=False, timeout=2 * WAIT_S)
        if made.exists():
            made.replace(file)


def options() -> str:
    """Return the options of JVMs that tests start, after making the file."""
    file = place()
    if file is not None and not file.exists():
        make(file)
    return f"{COMMON} -XX:SharedArchiveFile={file}" if file is not None and file.exists() else COMMON


if __name__ == "__main__":
    print(options())
