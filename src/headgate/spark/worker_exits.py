"""Exit status and last output of the processes that Spark's daemon forked: a killed one cannot report them itself.

The daemon notices each end. A process that it forks afterwards inherits what is known, and reports it to the driver
(``codec.messages.Obituary``), which knows which workers it has lost. What a process writes goes on to where it always
went; its end is kept, too, in memory that the daemon shares.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections import deque
from types import FrameType
from typing import Any, TextIO

from headgate.codec.messages import Obituary

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
        """Keep what is written elsewhere in place of the stream (``spark.worker_logs``)."""
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
