"""The SparkSession of a module of tests, and how it runs a streaming query to its end."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate.spark.jvm import quick_jvm

PYTHON = f"""#!/bin/sh
IFS=:
kept=
for entry in $PYTHONPATH; do
    case $entry in *.zip | *.jar) ;; *) kept=$kept:$entry ;; esac
done
PYTHONPATH=${{kept#:}} exec {sys.executable} "$@"
"""
"""Takes PySpark from where it is installed: Spark's archive of it has no compiled modules. It begins in a third of the
time, and Spark gives the Python of a streaming source ten seconds."""


@contextmanager
def session(**settings: str) -> Iterator[Any]:
    """Make a local one with two slots and a JVM that starts quickly, and stop it; the JVM stays with this process."""
    from pyspark.sql import SparkSession

    options = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.python.daemon.module": "headgate.spark.python_daemon",  # forks workers that have their imports done
        **settings,
    }
    with pytest.MonkeyPatch.context() as patch, quick_jvm(), tempfile.TemporaryDirectory() as directory:
        python = Path(directory, "python")
        python.write_text(PYTHON)
        python.chmod(0o700)
        patch.setenv("PYSPARK_PYTHON", str(python))
        builder = SparkSession.builder.master("local[2]")
        for name, value in options.items():
            builder = builder.config(name, value)
        made = builder.getOrCreate()
        try:
            yield made
        finally:
            made.stop()


WAIT_S = 600.0
LATE = "Python worker failed to connect back"
"""Spark gives the Python of a streaming source ten seconds to start; no setting makes that more on a busy machine."""


def run_to_end(output: Any, *start: str) -> Any:
    """Run a query that takes what is there, and return it."""

    def run() -> Any:
        query = output.start(*start)
        assert query.awaitTermination(WAIT_S)
        return query

    return patiently(run)


def patiently(run: Callable[[], Any]) -> Any:
    """Call ``run``, which starts a query, again where its Python began too late; return what it returns."""
    from pyspark.errors import StreamingQueryException

    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return run()
        except StreamingQueryException as error:
            if LATE not in str(error) or time.monotonic() > deadline:
                raise
