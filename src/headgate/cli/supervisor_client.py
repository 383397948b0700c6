"""The driver's connection to its supervisor (``cli.supervisor``).

It dies with it, and reports to it (KR7, KR9–KR13).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from contextlib import suppress

from headgate.cli.supervisor import KEPT, LISTENING, Terms
from headgate.errors import UsageError
from headgate.model.heartbeat import Course
from headgate.model.ids import Generation

_PR_SET_PDEATHSIG = 1


class SupervisorClient:
    """Between a driver and its keeper. Of a driver without one, nothing is told to nobody."""

    def __init__(self, terms: Terms | None) -> None:
        self._terms = terms

    @classmethod
    def by_environment(cls) -> SupervisorClient:
        """Return what the environment says, and take it out: it is for this process alone.

        From now on this process dies when its keeper does (KR9).
        """
        text = os.environ.pop(KEPT, None)
        if text is None:
            return cls(None)
        terms = Terms(**json.loads(text))
        os.set_inheritable(terms.words, False)
        die_with_parent(terms.keeper)
        return cls(terms)

    @property
    def claimant(self) -> str:
        """Under which name to claim; "" for one of its own."""
        return "" if self._terms is None else self._terms.claimant

    @property
    def keeper(self) -> int:
        """The process id of the keeper; 0: there is none."""
        return 0 if self._terms is None else self._terms.keeper

    @property
    def after(self) -> Generation | None:
        """The newest generation that a driver of the same keeper claimed, if any."""
        after = None if self._terms is None else self._terms.after
        return None if after is None else Generation(after)

    @property
    def restarts(self) -> int:
        """How often the keeper has started its driver again."""
        return 0 if self._terms is None else self._terms.restarts

    def listens(self) -> None:
        """Tell that every signal is taken from now on."""
        self._tell(LISTENING)

    def claimed(self, generation: Generation) -> None:
        """Tell that ``generation`` was claimed."""
        self._tell(str(int(generation)))

    def wished(self, course: Course) -> None:
        """Tell what the user asked of this driver: to be ``STOPPING``, or ``DRAINING`` (KR13)."""
        self._tell(course.value)

    def _tell(self, word: str) -> None:
        if self._terms is not None:
            with suppress(BrokenPipeError):  # without a keeper this process is about to die
                os.write(self._terms.words, f"{word}\n".encode())


def die_with_parent(keeper: int) -> None:
    """Have the system kill this process when its parent dies; end at once if ``keeper`` is not the parent any more.

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
    if os.getppid() != keeper:  # it died before the system knew
        os.kill(os.getpid(), signal.SIGKILL)
