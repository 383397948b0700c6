"""The JVM of a session that Headgate makes: where it puts temporary files, and which signals it leaves to its driver.

Spark never removes what a killed JVM leaves (``blockmgr-*``, ``artifacts-*``, native libraries), so each process that
starts one gives it a directory that the next such process can tell from one in use. Counterpart: ``spark.session``.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from headgate.storage.own_directory import OwnDirectory

_PARENT = f"headgate-spark-{os.getuid()}"
"""Of this user: the directory for temporary files is everybody's, and nobody else may read what is below (0700)."""

_own: list[tuple[int, OwnDirectory]] = []
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
            mine = [OwnDirectory(parent, is_users=True)]
        except OSError:
            return None
        _own.append((os.getpid(), mine[0]))
        atexit.register(_remove, os.getpid(), mine[0])
    return mine[0].path


def _remove(process: int, own: OwnDirectory) -> None:
    """Remove it at the end of the process that made it: a fork has none."""
    if process == os.getpid():
        own.remove()


def options_of(directory: Path | None) -> tuple[dict[str, str], str]:
    """Return Spark's options and the JVM's for a session whose temporary files are in ``directory``."""
    if directory is None:
        return {}, ""
    return {"spark.local.dir": str(directory)}, f'"-Djava.io.tmpdir={directory}"'


def leave_sigterm_to_the_driver(session: Any) -> None:
    """Have the JVM ignore SIGTERM, as PySpark has it ignore Ctrl-C.

    Whoever ends a service sends it to every process of it, and a pipeline whose JVM has ended can take no last
    checkpoint. Without its driver the JVM ends anyway: its input closes.
    """
    with suppress(Exception):  # a JVM without these classes is one that ends with the signal, as ever
        signals = session._jvm.sun.misc
        signals.Signal.handle(signals.Signal("TERM"), signals.SignalHandler.SIG_IGN)
