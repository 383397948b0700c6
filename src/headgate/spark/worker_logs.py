"""The log file of a worker: ``<directory>/<pipeline>/worker-<number>.log``, rotated.

``print()`` in a user's function, the ``logging`` of its libraries and their warnings go there, each line with its time,
its level and the operator that ran: on a terminal they would be torn into the table of ``headgate run``. Counterparts:
``spark.worker_main``, which begins it, and ``runtime.worker.busy_time``, which knows the running operator. What cannot
be written is lost: no pipeline fails for its log.
"""

from __future__ import annotations

import io
import logging
import logging.handlers
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from headgate.storage.local_files import make_directories, user_state_directory

FILE_BYTES_MAX = 10 << 20
FILES_KEPT = 4
"""Older files beside the present one."""

LINE_CHARS_MAX = 10_000
"""Of a line that does not end: then it counts as one."""

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(process)d %(operator)s: %(message)s"
DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"
PRINTED = logging.INFO
COMPLAINED = logging.WARNING
"""Levels of what is written to standard output and to standard error."""

VARIABLE = "HEADGATE_LOG_DIR"

NOBODY = "-"
"""Stands where no operator runs, and for threads beside the one of the operators."""


class WorkerLog:
    """The log of one worker, from ``begin`` to the end of its process."""

    def __init__(self, directory: Path, pipeline: str, worker: int) -> None:
        self._path = directory / pipeline / f"worker-{worker}.log"

    def begin(self, running: Callable[[], str]) -> None:
        """Send everything there from now on; ``running`` says which operator runs in the calling thread.

        Raises:
            OSError: there can be no such file; nothing has changed.
        """
        make_directories(self._path.parent)
        handler = _Rotated(self._path, maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT, encoding="utf-8")
        mine = threading.get_ident()

        def name_operator(record: logging.LogRecord) -> bool:
            record.operator = (running() or NOBODY) if record.thread == mine else NOBODY
            return True

        handler.addFilter(name_operator)
        handler.setFormatter(logging.Formatter(FORMAT, DATE_FORMAT))
        root = logging.getLogger()
        for former in [h for h in root.handlers if isinstance(h, _Rotated)]:  # Spark uses a process again
            root.removeHandler(former)
            former.close()
        root.addHandler(handler)
        if root.level in (logging.NOTSET, logging.WARNING):
            root.setLevel(logging.INFO)
        logging.captureWarnings(True)
        sys.stdout = _Lines(sys.stdout, "headgate.printed", PRINTED, handler)
        sys.stderr = _Lines(sys.stderr, "headgate.complained", COMPLAINED, handler)


def log_directory(*, is_local: bool) -> Path | None:
    """Return where logs go: what ``HEADGATE_LOG_DIR`` says; else, of workers on this machine, ``logs`` in the user's
    state directory. None: Spark keeps what its executors write.
    """
    given = os.environ.get(VARIABLE, "")
    if given:
        return Path(given).absolute()
    if not is_local:
        return None
    try:
        return user_state_directory() / "logs"
    except RuntimeError:
        return None


def spark_log(pipeline: str) -> Path | None:
    """Return the file for the warnings of Spark's JVM in a local session, in a directory that is there; None: none."""
    directory = log_directory(is_local=True)
    if directory is None:
        return None
    try:
        make_directories(directory / pipeline)
    except OSError:
        return None
    return directory / pipeline / "spark.log"


class _Rotated(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: its own words would come back as the next record."""


class _Lines(io.TextIOBase):
    """A text stream that writes each line as a record of a log."""

    def __init__(self, former: TextIO, name: str, level: int, handler: logging.Handler) -> None:
        """``handler`` alone takes the lines: a user's handler that writes here would be given its own."""
        self.original: TextIO = getattr(former, "original", former)
        self._keep: Callable[[str], object] = getattr(self.original, "keep", lambda text: None)
        self._log = logging.getLogger(name)
        self._log.propagate = False
        self._log.handlers = [handler]
        self._log.setLevel(logging.INFO)
        self._level = level
        self._of_thread = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As every file of text has one."""
        return "utf-8"

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Take ``text``; a line is logged when it ends. It is also kept as the last output of the worker."""
        self._keep(text)
        *lines, rest = (getattr(self._of_thread, "rest", "") + text).split("\n")
        if len(rest) > LINE_CHARS_MAX:
            lines, rest = [*lines, rest], ""
        self._of_thread.rest = rest
        for line in lines:
            self._log.log(self._level, "%s", line)
        return len(text)
