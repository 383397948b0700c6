"""A ``spark.python_daemon`` that is begun beside the JVM: its imports take as long as the JVM's start.

Spark begins one when it needs its first worker. On this machine, that process finds the early one, gives it what Spark
gave to itself (standard streams, environment, arguments, import path), and then does nothing but end with it. An early
one whose environment differs is not used, since libraries read theirs while they are imported. Imports nothing of
Spark, Arrow or Polars.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

ADDRESS = "HEADGATE_EARLY_DAEMON"
"""The environment variable that names the socket of the early one to the one that Spark begins."""

SOCKET_BYTES_MAX = 107
"""Of the path of a socket, on Linux."""

MODULE = "headgate.spark.python_daemon"
OF_WORKERS = {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "YES"}
"""What Headgate and Spark set for local workers. A seed of hashes that is set stays."""

_OF_SHELLS = {"_", "SHLVL", "PWD", "OLDPWD", ADDRESS}
_OF_SPARK = ("SPARK", "PYSPARK", "_PYSPARK", "PYTHON")
_SEED = "PYTHONHASHSEED"

_TAKEN, _REFUSED = b"y", b"n"
_STREAMS = (0, 1, 2)


class EarlyDaemon:
    """One that was begun. It ends with the process that began it, because its input closes then, or with its Spark.

    Attributes:
        address: the path of its socket.
    """

    def __init__(self, environment: Mapping[str, str], place: Path) -> None:
        """``environment``: that of the JVM; ``place``: an empty directory, which is removed when it is not needed."""
        self._owner = os.getpid()
        self._place = place
        self.address = str(place / "socket")
        seed = environment.get(_SEED, OF_WORKERS[_SEED])
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, self.address],
            stdin=subprocess.PIPE,
            stdout=nothing,
            stderr=nothing,
            env={**environment, **OF_WORKERS, _SEED: seed, ADDRESS: ""},
            preexec_fn=_leave_ctrl_c,
        )

    @classmethod
    def begin(cls, environment: Mapping[str, str], prefix: str) -> EarlyDaemon | None:
        """Begin one in a new temporary directory; None: with such a ``TMPDIR`` the path of a socket is too long."""
        place = Path(tempfile.mkdtemp(prefix=prefix))
        if len(os.fsencode(place / "socket")) > SOCKET_BYTES_MAX:
            place.rmdir()
            return None
        return cls(environment, place)

    def end(self, wait_s: float = 0) -> None:
        """End it. Where Spark has it, it ends with Spark: let it end its workers in ``wait_s``."""
        if os.getpid() != self._owner:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._place, ignore_errors=True)


def _leave_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def hand_over() -> bool:
    """Give everything of this process to the early one and wait for its end; False: there is none that fits."""
    address = os.environ.get(ADDRESS)
    if not address:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(OSError):
        connection.connect(address)
        mine = json.dumps([dict(os.environ), sys.argv, sys.path]).encode("utf-8", "surrogateescape")
        socket.send_fds(connection, [_TAKEN], _STREAMS)
        connection.sendall(mine)
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1) != _TAKEN:
            return False
        with suppress(OSError):
            connection.recv(1)  # nothing comes, until its end
        return True
    return False


def take_over(address: str, prepare: Callable[[], None]) -> bool:
    """Prepare, then become what Spark begins; False: the process that began this one has ended.

    The socket is there before, so that Spark's waits for the rest of the preparation.
    """
    environment = dict(os.environ)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        prepare()
        # its input closes when the process that began it ends; the socket is ready when Spark begins one
        poller = select.poll()
        for one in (0, listener.fileno()):
            poller.register(one, select.POLLIN)
        is_taken = False
        while not is_taken and 0 not in dict(poller.poll()):
            with suppress(OSError, ValueError):  # one that ended in between
                is_taken = _take(listener.accept()[0], environment)
    shutil.rmtree(Path(address).parent, ignore_errors=True)
    return is_taken


def _take(connection: socket.socket, environment: Mapping[str, str]) -> bool:
    """Become the process at the other end if it has the same ``environment``."""
    _, streams, _, _ = socket.recv_fds(connection, 1, len(_STREAMS))
    with connection.makefile("rb") as given:
        theirs, arguments, path = json.loads(given.read().decode("utf-8", "surrogateescape"))
    # libraries have read their variables by now, so these must be the same
    is_same = read_by_libraries(theirs) == read_by_libraries(environment)
    connection.sendall(_TAKEN if is_same else _REFUSED)
    for stream, own in zip(streams, _STREAMS, strict=True):
        if is_same:
            os.dup2(stream, own)
        os.close(stream)
    if not is_same:
        connection.close()
        return False
    os.environ.clear()
    os.environ.update(theirs)
    sys.argv[:], sys.path[:] = arguments, path
    os.register_at_fork(after_in_child=connection.close)  # it tells the other end that this process has ended
    return True


def read_by_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what libraries may read while they are imported: what is neither Spark's nor a shell's own."""
    return {
        name: value
        for name, value in environment.items()
        if name == _SEED or (name not in _OF_SHELLS and not name.startswith(_OF_SPARK))
    }
