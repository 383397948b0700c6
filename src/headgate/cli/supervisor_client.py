"""The driver's connection to its supervisor (``cli.supervisor``).

It dies with it, and reports to it (KR7, KR9–KR13).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from contextlib import suppress

from headgate.cli.supervisor import LISTENING, SUPERVISED, Terms
from headgate.errors import UsageError
from headgate.model.heartbeat import Course
from headgate.model.ids import Generation

_PR_SET_PDEATHSIG = 1


class SupervisorClient:
    """The driver's end of the pipe to its supervisor. Without a supervisor, reports go nowhere."""

    def __init__(self, terms: Terms | None) -> None:
        self._terms = terms

    @classmethod
    def from_environment(cls) -> SupervisorClient:
        """Return the client that the environment describes, and remove that from it: it is for this process alone.

        From now on this process dies when its supervisor does (KR9).
        """
        text = os.environ.pop(SUPERVISED, None)
        if text is None:
            return cls(None)
        terms = Terms(**json.loads(text))
        os.set_inheritable(terms.pipe, False)
        die_with_parent(terms.supervisor_pid)
        return cls(terms)

    @property
    def claimant(self) -> str:
        """The name to claim under; "" for one of its own."""
        return "" if self._terms is None else self._terms.claimant

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor; 0: there is none."""
        return 0 if self._terms is None else self._terms.supervisor_pid

    @property
    def after(self) -> Generation | None:
        """The newest generation that a driver of the same supervisor claimed, if any."""
        after = None if self._terms is None else self._terms.after
        return None if after is None else Generation(after)

    @property
    def restarts(self) -> int:
        """How often the supervisor has started its driver again."""
        return 0 if self._terms is None else self._terms.restarts

    def report_listening(self) -> None:
        """Report that this process handles every signal from now on."""
        self._report(LISTENING)

    def report_claim(self, generation: Generation) -> None:
        """Report that ``generation`` was claimed."""
        self._report(str(int(generation)))

    def report_course(self, course: Course) -> None:
        """Report what the user requested of this driver: ``STOPPING`` or ``DRAINING`` (KR13)."""
        self._report(course.value)

    def _report(self, word: str) -> None:
        if self._terms is not None:
            with suppress(BrokenPipeError):  # without a supervisor this process is about to die
                os.write(self._terms.pipe, f"{word}\n".encode())


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent dies; end at once if ``parent`` is not the parent any more.

    Raises:
        UsageError: this system cannot do that.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except AttributeError:
        failed = -1
    if failed:
        raise UsageError("--supervised needs Linux: elsewhere a driver would outlive its supervisor")
    if os.getppid() != parent:  # it died before the system knew
        os.kill(os.getpid(), signal.SIGKILL)
