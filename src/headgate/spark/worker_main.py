"""A worker of Spark: the function that a task runs, its log file, and the exit status and last output of its process.

``WorkerMain`` travels in Spark's own closure (never over our sockets); everything else is ``runtime.worker.worker``.
A killed process cannot report its end. The daemon that forked it notices; a process that is forked afterwards
inherits what is known, and reports it to the driver (``codec.messages.Obituary``). What a process writes goes where
it always went; its end is also kept in memory that the daemon shares.

The log is ``<directory>/<pipeline>/worker-<number>.log``, rotated. ``print()`` in a user's function, the ``logging`` of
its libraries and their warnings go there, each line with its time, its level and the operator that ran: on a terminal
they would be torn into the table of ``headgate run``. What cannot be written is lost: no pipeline fails for its log.
"""

from __future__ import annotations

import ctypes
import io
import logging
import logging.handlers
import mmap
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from headgate import __version__
from headgate.codec.messages import Obituary
from headgate.dataclass import dataclass
from headgate.model.ids import WorkerIndex
from headgate.model.plan import PipelineDefinition
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
        # Python's own level; any other one was chosen by the program
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
        # Spark uses a process again, and then one of these is there already
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
        # each thread has a line of its own: what two of them print is not mixed
        *lines, rest = (getattr(self._of_thread, "rest", "") + text).split("\n")
        if len(rest) > LINE_CHARS_MAX:
            lines, rest = [*lines, rest], ""
        self._of_thread.rest = rest
        for line in lines:
            self._log.log(self._level, "%s", line)
        return len(text)


WRITTEN_CHARS = 2_000
"""Kept of what a process wrote last."""

_PAGE_BYTES = 16_384
_HEAD_BYTES = 16
_KEPT_MAX = 16
"""Ended processes that are remembered: more than a machine loses between two starts of a worker."""


class SharedTail:
    """Memory that a process and the daemon share: its id, and what it wrote last."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _PAGE_BYTES)
        self._text = ""

    @property
    def pid(self) -> int:
        """The process that writes here; 0 before it does."""
        return int.from_bytes(self._memory[:8], "big")

    @property
    def written(self) -> str:
        """What it wrote last. It may have been killed within a character."""
        size = min(int.from_bytes(self._memory[8:_HEAD_BYTES], "big"), _PAGE_BYTES - _HEAD_BYTES)
        return self._memory[_HEAD_BYTES : _HEAD_BYTES + size].decode(errors="replace")

    def claim(self) -> None:
        """Say that this process writes here."""
        self._memory[:8] = os.getpid().to_bytes(8, "big")

    def add(self, text: str) -> None:
        """Keep the end of what has been written."""
        self._text = (self._text + text)[-WRITTEN_CHARS:]
        raw = self._text.encode(errors="replace")
        # the text first: after a kill in between, the length counts no bytes that were never written
        assert len(raw) <= _PAGE_BYTES - _HEAD_BYTES, "what is kept fits into the page"
        self._memory[_HEAD_BYTES : _HEAD_BYTES + len(raw)] = raw
        self._memory[8:_HEAD_BYTES] = len(raw).to_bytes(8, "big")

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class TeeStream:
    """A text stream that also keeps what goes through it."""

    def __init__(self, stream: TextIO, page: SharedTail) -> None:
        self._stream, self._page = stream, page

    def write(self, text: str) -> int:
        """Write, and keep."""
        self.keep(text)
        return self._stream.write(text)

    def keep(self, text: str) -> None:
        """Keep what is written elsewhere in place of the stream (``spark.worker_main``)."""
        self._page.add(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ChildWatch:
    """Notices how the children of this process end."""

    def __init__(self) -> None:
        self.known: deque[Obituary] = deque(maxlen=_KEPT_MAX)
        self._pages: list[SharedTail] = []
        self._daemon = 0

    def begin(self) -> None:
        """Watch every child that this process forks from now on."""
        self._daemon = os.getpid()
        os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        # here and not in begin(): Spark's daemon sets up its signals after that
        if os.getpid() == self._daemon:  # not where a worker forks
            signal.signal(signal.SIGCHLD, self._on_end)  # Spark's daemon ignores it, and so never hears a status
            self._pages.append(SharedTail())

    def _in_child(self) -> None:
        if os.getppid() != self._daemon or not self._pages:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        page = self._pages[-1]
        page.claim()
        sys.stdout, sys.stderr = TeeStream(sys.stdout, page), TeeStream(sys.stderr, page)

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        while True:
            try:
                # until there is none left: several ends may arrive as one signal
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._note(pid, status)

    def _note(self, pid: int, status: int) -> None:
        pages = [page for page in self._pages if page.pid == pid]
        self._pages = [page for page in self._pages if page.pid != pid]
        written = "".join(page.written for page in pages)
        for page in pages:
            page.close()
        how = how_ended(status)
        if how:
            self.known.append(Obituary(pid, how, written))


def how_ended(status: int) -> str:
    """Return what the status of a process says, as a clause; "" if it ended well."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        hint = ", perhaps by the system for want of memory" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"
    return f"ended with exit code {code}" if code else ""


WATCH = ChildWatch()
"""Of this process: in Spark's daemon it watches, in a worker it holds what the daemon knew when it forked it."""


ARROW_POOL = "ARROW_DEFAULT_MEMORY_POOL"
"""The variable with which Arrow lets its users choose an allocator."""

OTHER_RELEASE = "install the same release for both"
"""How a worker ends what it says when its Headgate is another one."""


@dataclass(frozen=True, slots=True)
class WorkerMain:
    """The function of the barrier stage: one call per Spark task, that is per worker."""

    definition: PipelineDefinition
    submission: int
    driver_host: str
    driver_port: int
    secret: bytes
    is_local: bool
    fingerprint: str
    release: str
    """Of the driver's Headgate."""
    log_directory: Path | None = None

    def __call__(self, rows: Iterator[Any]) -> Iterator[Any]:
        """Run a worker until its pipeline ends; gets no rows and yields none.

        Raises:
            RuntimeError: the worker was stopped or failed. One sentence: the driver has the details.
        """
        from pyspark import BarrierTaskContext

        from headgate.runtime.worker.worker import Worker, WorkerStopped, WorkerTask

        context = BarrierTaskContext.get()
        # first: what another release would make of the definition is unknown
        check_release(context.partitionId(), self.release)
        info = context.getTaskInfos()[context.partitionId()]
        host = "127.0.0.1" if self.is_local else info.address.rsplit(":", 1)[0]
        task = WorkerTask(
            self.definition,
            WorkerIndex(context.partitionId()),
            self.submission,
            context.taskAttemptId(),
            self.driver_host,
            self.driver_port,
            self.secret,
            host,
            self.fingerprint,
            spill_directory(),
            tuple(WATCH.known),
        )
        for _ in rows:  # Spark uses a Python process again only if its input was read
            pass
        ignore_sigterm()
        keep_freed_memory()
        choose_memory_pool()
        worker = Worker(task)
        if self.log_directory is not None:
            log = WorkerLog(self.log_directory, self.definition.config.name, context.partitionId())
            with suppress(OSError):  # no directory, no log
                log.begin(lambda: worker.running_operator)
        try:
            worker.run()
        except WorkerStopped as stopped:
            raise RuntimeError(f"headgate worker {task.worker} stopped: {stopped}") from None
        yield from ()  # a generator, as Spark wants it: all of this runs when Spark asks for the first row


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_FROM_SYSTEM_BYTES, _KEPT_BYTES = 32 << 20, 64 << 20


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, where it can be told so.

    Otherwise the memory of a batch goes back to the system after each batch, and the system clears it for the next one.
    """
    with suppress(OSError, AttributeError, TypeError):  # only glibc has it
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _FROM_SYSTEM_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def choose_memory_pool() -> None:
    """Have Arrow take memory by jemalloc where that is there, unless the environment names another allocator.

    mimalloc, Arrow's own choice, returns memory within milliseconds and asks for huge pages. The system then clears
    2 MiB for each small piece that is used again: up to a third of a worker's processor time with much state.
    """
    import pyarrow as pa

    if ARROW_POOL not in os.environ and "jemalloc" in pa.supported_memory_backends():
        pa.set_memory_pool(pa.jemalloc_memory_pool())


def ignore_sigterm() -> None:
    """Ignore SIGTERM: the end of a service sends it to all of its processes, and the last checkpoint needs them.

    A function, not ``SIG_IGN``: what a user's function starts must not inherit it. The worker ends with its connection
    to the driver.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)


def check_release(worker: int, release: str) -> None:
    """Refuse to run beside a driver of another release: their messages may mean different things.

    Raises:
        RuntimeError: one sentence, for the driver.
    """
    if release != __version__:
        raise RuntimeError(
            f"headgate worker {worker} stopped: the executors have headgate {__version__} and the driver has "
            f"{release}; {OTHER_RELEASE}"
        )


def spill_directory() -> str | None:
    """Return the first of the directories that Spark was given for its own temporary files, if there is one."""
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0].strip()
    return first if first and os.path.isdir(first) else None
