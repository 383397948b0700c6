"""Settings of Spark's JVM and of a session that Headgate makes, its temporary directory and its signals.

The settings of a JVM say nothing of its pipeline, so that ``headgate run`` can start it before it knows
the pipeline (OM10); what a session adds is set when it is made. Imports no PySpark.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headgate.spark.cds_archive import archive_options
from headgate.spark.prerequisites import JVM_OPTIONS, read_master
from headgate.storage.local_directories import ProcessDirectory

_PARENT = f"headgate-spark-{os.getuid()}"
"""Of this user: all users share the directory for temporary files, and only this one may read what is below (0700)."""

_own: list[tuple[int, ProcessDirectory]] = []
"""The one of this process, with its id: PySpark keeps one JVM as long as a process lives, whatever sessions it has."""


def temporary_directory() -> Path | None:
    """Return the directory of this process' JVM, after removing those of processes that are dead.

    The lock of a directory belongs to its process and ends with it, so that neither a process id that is used again nor
    a second pipeline can take it for another's. None: there can be none, and Spark uses what it always does.
    """
    mine = [own for process, own in _own if process == os.getpid()]
    if not mine:
        parent = Path(tempfile.gettempdir()) / _PARENT
        try:
            mine = [ProcessDirectory(parent, is_users=True)]
        except OSError:
            return None
        _own.append((os.getpid(), mine[0]))
        atexit.register(_remove, os.getpid(), mine[0])
    return mine[0].path


def _remove(process: int, own: ProcessDirectory) -> None:
    """Remove it at the end of the process that made it: a fork has none."""
    if process == os.getpid():
        own.remove()


def temporary_file_options(directory: Path | None) -> tuple[dict[str, str], str]:
    """Return the options of Spark and of its JVM that put temporary files into ``directory``."""
    if directory is None:
        return {}, ""
    return {"spark.local.dir": str(directory)}, f'"-Djava.io.tmpdir={directory}"'


def ignore_sigterm_in_jvm(session: Any) -> None:
    """Have the JVM ignore SIGTERM, as PySpark has it ignore Ctrl-C.

    The end of a service sends it to all processes of it, and a pipeline whose JVM has ended can take no last
    checkpoint. Without its driver the JVM ends anyway: its input closes.
    """
    with suppress(Exception):  # a JVM without these classes is one that ends with the signal, as ever
        signals = session._jvm.sun.misc
        signals.Signal.handle(signals.Signal("TERM"), signals.SignalHandler.SIG_IGN)


SLOTS_LOOK_S = 1
"""How often Spark looks whether a lost executor's replacement is there; its own 15 s would be recovery time."""

SLOTS_LOOKS_MAX = 600
"""As patient as Spark's own forty looks, for clusters that take minutes to find a machine."""

QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
"""A pipeline's JVM computes nothing: optimizing code that runs once was a third of the processor time of a start."""

LOG = "headgate.log"
"""The property of a JVM that names the file of Spark's warnings."""

START_LOG = "spark-start.log"
"""Where they are until the pipeline is known."""

_OF_A_SESSION = ("spark.app.name", "spark.master")


def session_options(name: str, master: str | None) -> dict[str, str]:
    """Return the settings of a session of a pipeline's own; ``master`` None: ``spark-submit`` has set it."""
    options = {
        "spark.app.name": f"headgate-{name}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": f"{SLOTS_LOOK_S}s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": str(SLOTS_LOOKS_MAX),
        "spark.python.daemon.module": "headgate.spark.python_daemon",
    }
    if master is not None:
        options["spark.master"] = read_master(master).url
    is_local = master is not None and read_master(master).is_local
    if is_local:
        options |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    directory = temporary_directory() if is_local else None
    given, java_options = temporary_file_options(directory)
    java = [] if "log4j" in os.environ.get(JVM_OPTIONS, "") else log_options(directory, is_local=is_local)
    if java_options:
        java.append(java_options)
    if java:
        options["spark.driver.extraJavaOptions"] = " ".join(java)
    return options | given


def jvm_settings(options: Mapping[str, str]) -> dict[str, str]:
    """Return which of the settings of a session, and of the user's, its JVM is begun with.

    A local one learns the name and the number of slots with its session, as PySpark has it for every second session.
    """
    if not read_master(options.get("spark.master", "yarn")).is_local:
        return dict(options)
    return {name: value for name, value in options.items() if name not in _OF_A_SESSION} | {"spark.master": "local"}


def log_options(directory: Path | None, *, is_local: bool) -> list[str]:
    """Return what tells the JVM to log nothing but what is serious; a local one, its warnings to a file.

    ``directory``: for that file until the pipeline is known; None: what is warned of until then is lost.
    """
    kind = "logged" if is_local else "quiet"
    url = Path(__file__).absolute().with_name(f"log4j2-{kind}.properties").as_uri()
    options = [f"-Dlog4j2.configurationFile={url}", f"-Dlog4j.configurationFile={url}"]
    if not is_local:
        return options
    return [*options, f'"-D{LOG}={os.devnull if directory is None else directory / START_LOG}"']


def quick_options(given: str | None) -> str:
    """Return the options of a JVM that starts quickly; options of the user's come later, and win."""
    return " ".join([QUICK_COMPILER, *archive_options(), *([] if given is None else [given])])


@contextmanager
def quick_jvm() -> Iterator[None]:
    """A JVM that is started within this block starts quickly, and computes slowly.

    Only for processes that do nothing with Spark but run a pipeline: PySpark keeps one JVM for the whole life of a
    process.
    """
    given = os.environ.get(JVM_OPTIONS)
    os.environ[JVM_OPTIONS] = quick_options(given)
    try:
        yield
    finally:
        if given is None:
            del os.environ[JVM_OPTIONS]
        else:
            os.environ[JVM_OPTIONS] = given
