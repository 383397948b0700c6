"""Named points at which a test may have the process killed, for real, by SIGKILL.

Production code announces a point with ``reach(name)``, which does nothing unless the environment variable
``HEADGATE_KILL_AT`` is set to ``name:count:marker``, or several of these separated by ";". The process then kills
itself the ``count``-th time it reaches the point, once for all processes, because the marker file is created
exclusively first. With ``name=pid`` it kills another process, such as a server, and goes on. Which test uses which
point: docs/spec/faults.md.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "HEADGATE_KILL_AT"

_reached: dict[str, int] = {}


def reach(name: str) -> None:
    """Announce that ``name`` is about to be passed."""
    wanted = os.environ.get(VARIABLE)
    if wanted is not None:
        _maybe_kill(name, wanted)


def _maybe_kill(name: str, wanted: str) -> None:
    for entry in wanted.split(";"):
        target, count, marker = entry.split(":", 2)
        point, _, victim = target.partition("=")
        if point != name:
            continue
        _reached[entry] = _reached.get(entry, 0) + 1
        if _reached[entry] == int(count) and _is_first(marker):
            os.kill(int(victim or os.getpid()), signal.SIGKILL)


def _is_first(marker: str) -> bool:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
