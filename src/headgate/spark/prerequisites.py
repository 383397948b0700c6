"""What has to be there before a JVM is worth starting: Java, Spark, and a master that answers.

Spark would tell each of these in its own way, after up to a minute, with pages of frames. Decisions are functions of
the environment; only ``check_prerequisites`` and ``answers`` look at the machine. Counterpart: ``cli.doctor``.
"""

from __future__ import annotations

import os
import runpy
import shutil
import socket
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from headgate.errors import PipelineFailed, UsageError
from headgate.spark.masters import Master

REACH_S = 5.0
"""How long all hosts of a master together have to accept a connection; the sentence comes within ten seconds."""

INSTALL_JAVA = "install Java 17 or newer, for example with 'apt-get install openjdk-17-jre-headless'"
SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Set by ``spark-submit`` in a Python program: its JVM runs already."""


def java_problem(environ: Mapping[str, str], find: Callable[[str], str | None]) -> str | None:
    """Return why Spark's scripts would find no Java, as a sentence; None if they find one.

    Args:
        environ: of the process that would start Spark.
        find: returns the path of a program that can be executed, None if there is none; as ``shutil.which``.
    """
    home = environ.get("JAVA_HOME")
    if home and find(str(Path(home) / "bin" / "java")) is None:
        return f"JAVA_HOME is {home}, but there is no {Path(home) / 'bin' / 'java'}: correct JAVA_HOME, or unset it"
    if not home and find("java") is None:
        return f"there is no java on the PATH: {INSTALL_JAVA}"
    return None


def spark_home_problem(environ: Mapping[str, str], find: Callable[[str], str | None]) -> str | None:
    """Return why a ``SPARK_HOME`` that is set leads nowhere, as a sentence; None if all is well."""
    home = environ.get("SPARK_HOME")
    submit = Path(home) / "bin" / "spark-submit" if home else None
    if submit is None or find(str(submit)) is not None:
        return None
    return f"SPARK_HOME is {home}, but there is no {submit}: unset SPARK_HOME to use the Spark that came with PySpark"


def spark_home(environ: Mapping[str, str]) -> str | None:
    """Return where PySpark finds Spark, without importing PySpark; None if there is no PySpark."""
    given = environ.get("SPARK_HOME")
    if given:
        return given
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    search = runpy.run_path(str(Path(spec.origin).with_name("find_spark_home.py")))["_find_spark_home"]
    try:
        return str(search())
    except SystemExit:  # it has said so
        return None


def own_settings(environ: Mapping[str, str]) -> list[Path]:
    """Return where a script of the user's may set ``JAVA_HOME`` for Spark: what it does is not known here."""
    places = [environ.get("SPARK_CONF_DIR", ""), os.path.join(environ.get("SPARK_HOME", ""), "conf")]
    return [Path(place) / "spark-env.sh" for place in places if os.path.isabs(place)]


def check_prerequisites(master: Master) -> None:
    """Refuse to start a JVM that would end at once, or that would wait for a master that is not there.

    Raises:
        UsageError: no Java, or a wrong SPARK_HOME.
        PipelineFailed: no host of ``master`` answers; it may do so later.
    """
    if SUBMITTED not in os.environ:
        problem = spark_home_problem(os.environ, shutil.which)
        if problem is None and not any(place.exists() for place in own_settings(os.environ)):
            problem = java_problem(os.environ, shutil.which)
        if problem is not None:
            raise UsageError(f"{problem}; 'headgate doctor' checks the rest")
    unanswered = [_named(place) for place in master.endpoints if not answers(place, REACH_S / len(master.endpoints))]
    if master.endpoints and len(unanswered) == len(master.endpoints):
        raise PipelineFailed(
            f"the Spark master {master.url} cannot be reached: nothing accepts connections at "
            f"{' or '.join(unanswered)}; check the URL, and that the master runs"
        )


def answers(endpoint: tuple[str, int], timeout_s: float) -> bool:
    """Return whether anything accepts a connection there."""
    try:
        socket.create_connection(endpoint, timeout_s).close()
    except OSError:
        return False
    return True


def _named(endpoint: tuple[str, int]) -> str:
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
