"""Starts Spark's JVM, and says in one sentence why a session could not be started.

What the JVM writes until it is up is kept, for that sentence; afterwards it goes on to standard error line by line,
with what Spark's workers write. Counterparts: ``spark.session``, and ``spark.jvm_process``, which begins it.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headgate.errors import HeadgateError, PipelineFailed
from headgate.plain_text import printable
from headgate.spark.jvm_process import JvmProcess, begun, end_ahead, launch_of
from headgate.spark.jvm_settings import LOG, START_LOG
from headgate.spark.prerequisites import SUBMITTED

_SECRET = "PYSPARK_GATEWAY_SECRET"

MEANWHILE = ("pyspark.sql.pandas.functions", "pyspark.sql.classic.dataframe", "pandas")
"""What a session and its first job import: done while the JVM starts, which takes longer."""

LINES_MAX = 200
"""Kept of what a starting JVM writes: the beginning says why, the rest are frames."""

HEARD_S = 5.0
"""How long to wait for the last words of a JVM that has ended: who inherited its standard error may hold it open."""

CHARS_SHOWN = 300

NOISE = (
    "WARNING: Using incubator modules",
    "Setting default log level to",
    "To adjust logging level use",
    "Using Spark's default log4j profile",
    "Picked up ",
)
"""What every start prints, and nobody needs."""


def says_more_than_an_end(record: logging.LogRecord) -> bool:
    """Whether a record of the root logger is not py4j's traceback about a JVM that ended while it was asked.

    Depending on the moment, py4j raises and says nothing, or raises and prints pages. The raised error becomes a
    sentence of ours.
    """
    return not (record.module == "java_gateway" and record.msg == "Exception while sending command.")


class Listener:
    """Reads what the JVM writes to standard error, until it ends."""

    def __init__(self, source: int) -> None:
        """``source``: the descriptor to read from, which it closes."""
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._passes_on = False
        self._source = source
        self._thread = threading.Thread(target=self._listen, name="headgate-jvm", daemon=True)
        self._thread.start()
        atexit.register(self.hush)  # a thread that prints while Python ends would end it with an error

    def pass_on(self) -> None:
        """From now on, print everything but noise; first what was kept."""
        with self._lock:
            self._passes_on = True
            for line in self._lines:
                _print(line)
            self._lines.clear()

    def hush(self) -> None:
        """Print nothing any more."""
        with self._lock:
            self._passes_on = False

    def heard(self) -> list[str]:
        """Return what was written and not passed on; waits until there is no more."""
        self._thread.join(HEARD_S)
        with self._lock:
            return list(self._lines)

    def _listen(self) -> None:
        with os.fdopen(self._source, "rb") as source:
            for raw in source:
                line = raw.decode(errors="replace").rstrip("\r\n")
                with self._lock:
                    if self._passes_on:
                        _print(line)
                    elif len(self._lines) < LINES_MAX:  # the first ones, not the last ones
                        self._lines.append(line)


def _print(line: str) -> None:
    if not is_noise(line):
        with suppress(OSError, ValueError):  # standard error may be closed: the JVM must be read from all the same
            print(printable(line), file=sys.stderr, flush=True)


def is_noise(line: str) -> bool:
    """Return whether every start of Spark prints ``line``."""
    return line.startswith(NOISE)


def telling_line(lines: Sequence[str]) -> str:
    """Return which of the lines of a JVM that ended says why, without the class of the exception; "" if none does."""
    telling = [line.strip() for line in lines if line.strip() and not is_noise(line)]
    told = [line for line in telling if not line.startswith(("at ", "..."))]
    thrown = [line for line in told if line.startswith(("Exception in thread", "Caused by:"))]
    for line in thrown[:1] or told[:1]:
        return cause_of(line.split('" ', 1)[-1])[:CHARS_SHOWN]
    return ""


def cause_of(text: str) -> str:
    """Return what an exception of Java's says, without its class, its frames, and py4j's introduction."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line[1:].strip() for line in lines if line.startswith(":")), lines[0] if lines else "")
    name, colon, message = said.partition(": ")
    is_class = bool(colon) and "." in name and " " not in name
    return (message if is_class else said)[:CHARS_SHOWN]


def ensure_jvm(settings: Mapping[str, str]) -> None:
    """Have a JVM run for this process: the one that is there, or one with these settings of Spark.

    Raises:
        PipelineFailed: it ended while it started.
    """
    from pyspark import SparkContext

    forget_dead_jvm()
    if SparkContext._gateway is not None or SUBMITTED in os.environ:
        end_ahead()  # OM11: somebody else has one
        return
    jvm = begun(launch_of(settings, os.environ))
    listener = Listener(jvm.words)
    for name in MEANWHILE:
        with suppress(ImportError):  # whoever needs it says so
            importlib.import_module(name)
    address = jvm.address()
    if address is None:
        raise _not_started(telling_line(listener.heard()))
    SparkContext._ensure_initialized(gateway=_gateway_of(jvm, *address))
    logging.getLogger().addFilter(says_more_than_an_end)
    listener.pass_on()


def _gateway_of(jvm: JvmProcess, port: int, secret: str) -> Any:
    """Return PySpark's end of a JVM that is there: it asks the environment for one, as in a program of spark-submit."""
    from pyspark.java_gateway import launch_gateway

    os.environ.update({SUBMITTED: str(port), _SECRET: secret})
    try:
        gateway = launch_gateway()
    finally:
        for name in (SUBMITTED, _SECRET):
            del os.environ[name]
    gateway.proc = jvm.process
    return gateway


def log_to(file: Path | None) -> None:
    """Have the JVM write its warnings to ``file`` from now on; those of its start go there, too (OM13).

    Nothing happens if it was told by others where to write, or there can be no such file.
    """
    from pyspark import SparkContext

    java = SparkContext._jvm
    before = None if java is None else java.java.lang.System.getProperty(LOG)
    if file is None or before is None or before == str(file):
        return
    if Path(before).name == START_LOG:
        with suppress(OSError), open(file, "ab") as log:
            log.write(Path(before).read_bytes())
    java.java.lang.System.setProperty(LOG, str(file))
    java.org.apache.logging.log4j.core.config.Configurator.reconfigure()


def forget_dead_jvm() -> None:
    """Let PySpark start another JVM when its own has ended: it would talk to the dead one for ever."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if gateway is None or process is None or process.poll() is None:
        return
    with suppress(Exception):  # whatever is left of its connections
        gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


@contextmanager
def starting_up() -> Iterator[None]:
    """What Spark raises within this block becomes one sentence.

    Raises:
        PipelineFailed: the JVM ended, or Spark could not start; starting again may help.
    """
    try:
        yield
    except HeadgateError:
        raise
    except Exception as error:
        if _jvm_ended():
            forget_dead_jvm()
            raise _not_started("") from None  # of py4j's pages nobody learns more
        why = cause_of(str(error)) or type(error).__name__
        raise PipelineFailed(f"Spark could not start the session: {why}") from None


def _jvm_ended() -> bool:
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return False
    with suppress(Exception):  # what talked to it noticed a moment before its parent can
        process.wait(2.0)
    return process.poll() is not None


def _not_started(why: str) -> PipelineFailed:
    told = f": {why.rstrip('.')}" if why else ", and left no word; it may have been killed, perhaps for want of memory"
    return PipelineFailed(f"Spark's JVM ended while the session started{told}; 'headgate doctor' checks this machine")
