"""Spark's JVM.

Its settings, its start, the connection to it, and why a session could not be started, in one sentence.

PySpark's ``launch_gateway`` starts and waits in one step. These are two steps here: ``headgate run`` starts a JVM
before it imports anything else (``start_early``), and a session takes it if it is just as one that is started now. So
the settings of a JVM say nothing of its pipeline; what a session adds is set when it is made. What the JVM
writes until it is up is kept for that sentence; afterwards it goes on to standard error line by line. Imports PySpark
only when it is called.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import HeadgateError, PipelineFailed, UsageError
from headgate.plain_text import printable
from headgate.spark.class_archive import java_options
from headgate.spark.early_daemon import ADDRESS, MODULE, EarlyDaemon
from headgate.spark.prerequisites import JVM_OPTIONS, SUBMITTED, read_master, spark_home
from headgate.storage.local_files import ProcessDirectory

_PARENT = f"headgate-spark-{os.getuid()}"
"""Of this user: all users share the directory for temporary files, and only this one may read what is below (0700)."""

_own: list[tuple[int, ProcessDirectory]] = []
"""The one of this process, with its id: PySpark keeps one JVM as long as a process lives, whatever sessions it has."""


def temporary_directory() -> Path | None:
    """Return the directory of this process' JVM, after removing those of processes that are dead.

    The lock of a directory belongs to its process and ends with it, so that neither a process id that is used again nor
    a second pipeline can take it for another's. None: there can be none, and Spark uses what it always does.
    """
    # by process id: a fork inherits the list, but not the directory
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


def ignore_sigterm_in_jvm(context: Any) -> None:
    """Have the JVM ignore SIGTERM, as PySpark has it ignore Ctrl-C.

    The end of a service sends it to all processes of it, and a pipeline without its JVM can take no last
    checkpoint. Without its driver the JVM ends anyway: its input closes.
    """
    with suppress(Exception):  # a JVM without these classes is one that ends with the signal, as ever
        signals = context._jvm.sun.misc
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

DAEMON = "spark.python.daemon.module"

DAEMON_END_S = 5.0
"""For the process that forked workers for a JVM that has ended."""

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
        DAEMON: MODULE,
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
    return QUICK_COMPILER if given is None else f"{QUICK_COMPILER} {given}"


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


LOOK_S = 0.01
"""How often to look whether the JVM has said where it can be talked to."""

PLACE = "headgate-gateway-"
"""How the directories begin, among those for temporary files, in which a JVM says where it can be talked to."""

OLD_S = 3_600.0
"""What a command that was killed at its start left there is removed after so long: its JVM needs it until it ends."""

_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that a JVM takes from the process that begins it.

    Attributes:
        command: with the settings of Spark.
        environment: which the Python workers get from the JVM.
        surroundings: working directory, umask, priority, processors and limits.
        has_early_daemon: whether workers are forked on this machine, from Headgate's own process.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    surroundings: tuple[object, ...]
    has_early_daemon: bool = False


def launch_of(settings: Mapping[str, str], environment: Mapping[str, str]) -> Launch:
    """Return what a JVM with these settings of Spark takes, if it is begun now in ``environment``.

    Every JVM starts from the class data archive, if there is one; it makes none slower later.

    Raises:
        UsageError: there is no Spark.
    """
    home = spark_home(environment)
    if home is None:
        raise UsageError("PySpark is not installed; 'headgate doctor' checks the rest")
    given = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    rest = shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))  # as PySpark has it
    command = (os.path.join(home, "bin", "spark-submit"), *given, *rest)
    options = java_options(environment.get(JVM_OPTIONS, ""))
    environment = {**environment, "SPARK_HOME": home, **({JVM_OPTIONS: options} if options else {})}
    is_local = read_master(settings.get("spark.master", "yarn")).is_local
    return Launch(command, environment, _surroundings(), is_local and settings.get(DAEMON) == MODULE)


def _surroundings() -> tuple[object, ...]:
    mask = os.umask(0o077)
    os.umask(mask)
    limits = tuple(resource.getrlimit(limit) for limit in _LIMITS)
    processors = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return os.getcwd(), mask, os.getpriority(os.PRIO_PROCESS, 0), processors, limits


class JvmProcess:
    """A JVM that starts. It ends with the process that began it, because its input closes then.

    Attributes:
        launch: what it was begun with.
        process: the JVM; a script of Spark's, which becomes it, in the first moments.
        words: the descriptor from which its standard error is read.
        daemon: from which Spark will fork workers, begun at the same time.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._owner = os.getpid()
        _remove_old()
        # Not in the directory that the next start sweeps: a JVM that cannot write there lives on without its driver.
        self._place = Path(tempfile.mkdtemp(prefix=PLACE))
        self._address_file = self._place / "address"
        environment = {**launch.environment, "SPARK_CONNECT_MODE": "0"}
        self.daemon: EarlyDaemon | None = None
        if launch.has_early_daemon:
            self.daemon = EarlyDaemon.begin(environment, PLACE)
        if self.daemon is not None:
            environment[ADDRESS] = self.daemon.address
        environment["_PYSPARK_DRIVER_CONN_INFO_PATH"] = str(self._address_file)
        self.words, sink = os.pipe()
        try:
            self.process = subprocess.Popen(
                launch.command, stdin=subprocess.PIPE, stderr=sink, env=environment, preexec_fn=_leave_ctrl_c
            )
        except BaseException as error:
            os.close(self.words)
            # Ctrl-C may come when the JVM has begun: it needs its place to come to read its input, which has ended
            self._end_rest(is_begun=not isinstance(error, Exception))
            raise
        finally:
            # the JVM has its own: only so the reader sees the end of the pipe when the JVM ends
            os.close(sink)

    @property
    def is_mine(self) -> bool:
        """Whether this process began it, and is no fork of the one that did."""
        return os.getpid() == self._owner

    def address(self) -> tuple[int, str] | None:
        """Wait until it can be talked to; return the port and the secret, None if it ended before."""
        try:
            while not self._address_file.exists():  # it gets its name when it is whole
                if self.process.poll() is not None:
                    self._end_rest()
                    return None
                time.sleep(LOOK_S)
            address = self._address_file.read_bytes()
        except BaseException:  # as Ctrl-C is
            self.process.kill()
            self.process.wait()
            self._end_rest()
            raise
        shutil.rmtree(self._place, ignore_errors=True)
        port, length = struct.unpack_from(">ii", address)
        return port, address[8 : 8 + length].decode()

    def end(self) -> None:
        """End it: it was not needed."""
        if not self.is_mine:
            return
        self.process.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        # no session has taken it, so no reader has this end
        os.close(self.words)
        self._end_rest()

    def _end_rest(self, *, is_begun: bool = False) -> None:
        if self.daemon is not None:
            self.daemon.end()
        # a JVM that cannot write there lives on without its driver: what stays is removed by a later start
        if not is_begun:
            shutil.rmtree(self._place, ignore_errors=True)


def _remove_old() -> None:
    """Remove what others of this user left long ago."""
    for path in Path(tempfile.gettempdir()).glob(f"{PLACE}*"):
        with suppress(OSError):  # other processes do it, too
            found = path.lstat()
            if found.st_uid == os.getuid() and SYSTEM_CLOCK.wall_ms() / 1000 - found.st_mtime > OLD_S:
                shutil.rmtree(path)


def _leave_ctrl_c() -> None:
    """As PySpark has it: the last checkpoint needs the JVM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_ahead: list[JvmProcess] = []


def start_early(launch: Launch) -> None:
    """Begin a JVM that this process will probably need. Call before there are threads."""
    _ahead.append(JvmProcess(launch))
    atexit.register(discard_early)


def adopt_environment(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Have what the command's own imports set in the environment not count: Polars tells its allocator something."""
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    for process in _ahead:
        process.launch = replace(process.launch, environment={**process.launch.environment, **changed})


def discard_early() -> None:
    """End the JVM that was begun ahead and not taken. Idempotent."""
    while _ahead:
        _ahead.pop().end()


def take_or_start(launch: Launch) -> JvmProcess:
    """Return the JVM that was begun ahead, if it is as one that is begun now and lives, else a new one."""
    while _ahead:
        found = _ahead.pop()
        if found.is_mine and found.launch == launch and found.process.poll() is None:
            return found
        found.end()
    return JvmProcess(launch)


_SECRET = "PYSPARK_GATEWAY_SECRET"

PRELOADED_MODULES = ("pyspark.core.rdd", "pyspark.core.broadcast")
"""What a context and its first job import: done while the JVM starts, which takes longer."""

LINES_MAX = 200
"""Kept of what a starting JVM writes: the beginning says why, the rest are frames."""

HEARD_S = 5.0
"""For the last lines of a JVM that has ended: a process that inherited its standard error may hold it open."""

CHARS_SHOWN = 300

NOISE = (
    "WARNING: Using incubator modules",
    "Setting default log level to",
    "To adjust logging level use",
    "Using Spark's default log4j profile",
    "Picked up ",
)
"""What every start prints."""


PY4J_TRACEBACKS = frozenset({"Exception while sending command.", "KeyboardInterrupt while sending command."})
"""What py4j says before its traceback, of a JVM that ended and of Ctrl-C."""


def is_no_py4j_traceback(record: logging.LogRecord) -> bool:
    """Whether a record of the root logger is not py4j's traceback about a call that did not come to its end.

    Depending on the moment, py4j raises and says nothing, or raises and prints pages. The raised error becomes a
    sentence of ours.
    """
    return not (record.module == "java_gateway" and record.msg in PY4J_TRACEBACKS)


class StderrReader:
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


def reason_line(lines: Sequence[str]) -> str:
    """Return which of the lines of a JVM that ended says why, without the class of the exception; "" if none does."""
    telling = [line.strip() for line in lines if line.strip() and not is_noise(line)]
    lines = [line for line in telling if not line.startswith(("at ", "..."))]
    thrown = [line for line in lines if line.startswith(("Exception in thread", "Caused by:"))]
    for line in thrown[:1] or lines[:1]:
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
        discard_early()  # there is one already
        return
    jvm = take_or_start(launch_of(settings, os.environ))
    # reads from the start: a full pipe would hold the JVM up
    listener = StderrReader(jvm.words)
    for name in PRELOADED_MODULES:
        with suppress(ImportError):  # its first use says so
            importlib.import_module(name)
    address = jvm.address()
    if address is None:
        raise _not_started(reason_line(listener.heard()), jvm.process.poll())
    SparkContext._ensure_initialized(gateway=_gateway_of(jvm, *address))
    logging.getLogger().addFilter(is_no_py4j_traceback)
    listener.pass_on()


def _gateway_of(jvm: JvmProcess, port: int, secret: str) -> Any:
    """Return PySpark's end of a JVM that is there: it asks the environment for one, as in a program of spark-submit."""
    from pyspark.java_gateway import launch_gateway

    os.environ.update({SUBMITTED: str(port), _SECRET: secret})
    try:
        gateway = launch_gateway()
    finally:
        # a later start must not take this process for a program of spark-submit
        for name in (SUBMITTED, _SECRET):
            del os.environ[name]
    gateway.proc, gateway.early_daemon = jvm.process, jvm.daemon
    return gateway


def log_to(file: Path | None) -> None:
    """Have the JVM write its warnings to ``file`` from now on; those of its start go there, too.

    Nothing happens if its user chose another file, or there can be no such file.
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
    if (daemon := getattr(gateway, "early_daemon", None)) is not None:
        daemon.end(DAEMON_END_S)
    SparkContext._gateway = SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


@contextmanager
def startup_errors() -> Iterator[None]:
    """What Spark raises within this block becomes one sentence.

    Raises:
        PipelineFailed: the JVM ended, or Spark could not start; starting again may help.
    """
    try:
        yield
    except HeadgateError:
        raise
    except Exception as error:
        status = _status_of_dead_jvm()
        if status is not None:
            forget_dead_jvm()
            raise _not_started("", status) from None  # py4j's pages say no more
        why = cause_of(str(error)) or type(error).__name__
        raise PipelineFailed(f"Spark could not start the session: {why}") from None


def _status_of_dead_jvm() -> int | None:
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return None
    with suppress(Exception):  # what talked to it noticed a moment before its parent can
        process.wait(2.0)
    status: int | None = process.poll()
    return status


_ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Statuses of a process, and of a JVM, which ends in order."""


def _not_started(why: str, status: int | None) -> PipelineFailed:
    said = "Spark's JVM ended while the session started"
    if not why and status in _ENDED_BY_SIGTERM:
        return PipelineFailed(f"{said}: SIGTERM ended it, as it ends all processes of a service that is stopped")
    cause = f": {why.rstrip('.')}" if why else ", and left no word; it may have been killed, perhaps for want of memory"
    return PipelineFailed(f"{said}{cause}; 'headgate doctor' checks this machine")
