"""What must be there before a JVM is started: a valid master URL, Java, Spark, and a master that answers.

Spark would say each of these in its own way, after up to a minute, with pages of frames. Decisions are functions of
the environment; only ``check_prerequisites`` and ``answers`` look at the machine.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import socket
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from headgate.dataclass import dataclass
from headgate.errors import PipelineFailed, UsageError

KINDS = "local[N], spark://HOST:PORT, yarn or k8s://HOST:PORT"

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\d+)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[(\d+),(\d+),\d+\]")
_PORT_OF_SCHEME = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class Master:
    """A Spark master.

    Attributes:
        url: as Spark takes it.
        slots: how many tasks run at a time; None: only the cluster knows, or ``has_all_processors``.
        has_all_processors: it has a slot for each processor of this machine.
        endpoints: hosts and ports, one of which must answer; none where the URL does not say.
    """

    url: str
    slots: int | None = None
    has_all_processors: bool = False
    endpoints: tuple[tuple[str, int], ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether tasks run on this machine, in the JVM that this process starts."""
        return self.slots is not None or self.has_all_processors


def read_master(url: str) -> Master:
    """Return what ``url`` says.

    Raises:
        UsageError: Spark knows no such master.
    """
    text = "".join(url.split())
    if local := _LOCAL.fullmatch(text):
        if local.group(1) == "*":
            return Master(text, has_all_processors=True)
        return Master(text, slots=_positive(url, int(local.group(1) or 1)))
    if several := _LOCAL_CLUSTER.fullmatch(text):
        return Master(text, slots=int(several.group(1)) * int(several.group(2)))
    if text == "yarn":
        return Master(text)
    if text.startswith("spark://"):
        hosts = text.removeprefix("spark://").split(",")
        return Master(text, endpoints=tuple(_endpoint(url, urlsplit(f"spark://{host}"), None) for host in hosts))
    if text.startswith("k8s://"):
        server = text.removeprefix("k8s://")
        parts = urlsplit(server if "://" in server else f"https://{server}")
        return Master(text, endpoints=(_endpoint(url, parts, _PORT_OF_SCHEME.get(parts.scheme)),))
    if text.startswith("sc://"):
        raise UsageError(f"'{url}' is Spark Connect, on which pipelines do not run yet; give {KINDS}")
    raise _malformed(url)


def same_master(one: str, other: str) -> bool:
    """Return whether both texts name the same master; Spark itself writes some in another way."""
    return _normal(one) == _normal(other)


def _normal(url: str) -> str:
    text = "".join(url.split()).removesuffix("/")
    if text.startswith("k8s://") and "://" not in text.removeprefix("k8s://"):
        return f"k8s://https://{text.removeprefix('k8s://')}"
    return "local[1]" if text == "local" else text


def _endpoint(url: str, parts: SplitResult, port_default: int | None) -> tuple[str, int]:
    try:
        host, port = parts.hostname, parts.port or port_default
    except ValueError:  # the port is no number
        raise _malformed(url) from None
    if not host or port is None:
        raise _malformed(url)
    return host, port


def _positive(url: str, slots: int) -> int:
    if slots < 1:
        raise _malformed(url)
    return slots


def _malformed(url: str) -> UsageError:
    return UsageError(f"'{url}' is not the URL of a Spark master; give {KINDS}")


REACH_S = 5.0
"""How long all hosts of a master together have to accept a connection; the sentence comes within ten seconds."""

INSTALL_JAVA = "install Java 17 or newer, for example with 'apt-get install openjdk-17-jre-headless'"
JVM_OPTIONS = "SPARK_SUBMIT_OPTS"
"""Environment variable: options of the JVM that Spark's scripts start."""

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
