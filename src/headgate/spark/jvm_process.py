"""The process of Spark's JVM: what it takes from the process that begins it, and when it can be talked to.

PySpark's ``launch_gateway`` begins and waits in one step. These are two steps here: ``headgate run`` begins a JVM
before it imports anything else (``begin_ahead``), and whoever needs one takes it, if it is just as one that is begun
now (``begun``). Imports no PySpark. Counterparts: ``spark.jvm``, which talks to it, and ``cli.entry``.
"""

from __future__ import annotations

import atexit
import os
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from headgate.clock import SYSTEM_CLOCK
from headgate.errors import UsageError
from headgate.spark.prerequisites import spark_home

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
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    surroundings: tuple[object, ...]


def launch_of(settings: Mapping[str, str], environment: Mapping[str, str]) -> Launch:
    """Return what a JVM with these settings of Spark takes, if it is begun now in ``environment``.

    Raises:
        UsageError: there is no Spark.
    """
    home = spark_home(environment)
    if home is None:
        raise UsageError("PySpark is not installed; 'headgate doctor' checks the rest")
    given = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    rest = shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))  # as PySpark has it
    command = (os.path.join(home, "bin", "spark-submit"), *given, *rest)
    return Launch(command, {**environment, "SPARK_HOME": home}, _surroundings())


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
        words: the descriptor from which its standard error is read, by whoever took it.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._owner = os.getpid()
        _remove_old()
        # Not in the directory that the next start sweeps: a JVM that cannot write there lives on without its driver.
        self._place = Path(tempfile.mkdtemp(prefix=PLACE))
        self._told = self._place / "address"
        environment = {
            **launch.environment,
            "SPARK_CONNECT_MODE": "0",
            "_PYSPARK_DRIVER_CONN_INFO_PATH": str(self._told),
        }
        self.words, sink = os.pipe()
        try:
            self.process = subprocess.Popen(
                launch.command, stdin=subprocess.PIPE, stderr=sink, env=environment, preexec_fn=_leave_ctrl_c
            )
        except BaseException:
            os.close(self.words)
            shutil.rmtree(self._place, ignore_errors=True)
            raise
        finally:
            os.close(sink)

    @property
    def is_mine(self) -> bool:
        """Whether this process began it, and is no fork of the one that did."""
        return os.getpid() == self._owner

    def address(self) -> tuple[int, str] | None:
        """Wait until it can be talked to; return the port and the secret, None if it ended before."""
        try:
            while not self._told.exists():  # it gets its name when it is whole
                if self.process.poll() is not None:
                    return None
                time.sleep(LOOK_S)
            told = self._told.read_bytes()
        finally:
            shutil.rmtree(self._place, ignore_errors=True)
        port, length = struct.unpack_from(">ii", told)
        return port, told[8 : 8 + length].decode()

    def end(self) -> None:
        """End it: nobody has taken it."""
        if not self.is_mine:
            return
        self.process.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        os.close(self.words)
        shutil.rmtree(self._place, ignore_errors=True)


def _remove_old() -> None:
    """Remove what others of this user left long ago."""
    for path in Path(tempfile.gettempdir()).glob(f"{PLACE}*"):
        with suppress(OSError):  # somebody else does it, too
            found = path.lstat()
            if found.st_uid == os.getuid() and SYSTEM_CLOCK.wall_ms() / 1000 - found.st_mtime > OLD_S:
                shutil.rmtree(path)


def _leave_ctrl_c() -> None:
    """As PySpark has it: the last checkpoint needs the JVM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_ahead: list[JvmProcess] = []


def begin_ahead(launch: Launch) -> None:
    """Begin a JVM that this process will probably need (OM10). Call before there are threads."""
    _ahead.append(JvmProcess(launch))
    atexit.register(end_ahead)


def imports_have_set(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Have what the command's own imports set in the environment not count: Polars tells its allocator something."""
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    for process in _ahead:
        process.launch = replace(process.launch, environment={**process.launch.environment, **changed})


def end_ahead() -> None:
    """End the JVM that was begun ahead and not taken (OM11). Idempotent."""
    while _ahead:
        _ahead.pop().end()


def begun(launch: Launch) -> JvmProcess:
    """Return the JVM that was begun ahead, if it is as one that is begun now and lives, else a new one (OM10)."""
    while _ahead:
        found = _ahead.pop()
        if found.is_mine and found.launch == launch and found.process.poll() is None:
            return found
        found.end()
    return JvmProcess(launch)
