"""Named points at which a test may have the process killed, for real, by SIGKILL.

Production code announces a point with ``reach(name)``, which does nothing unless the environment variable
``HEADGATE_KILL_AT`` is set to ``name[@worker]:count:marker``: the process then kills itself the ``count``-th time it
reaches the point, once for all processes, because the marker file is created exclusively first.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "HEADGATE_KILL_AT"

_reached = 0


def reach(name: str) -> None:
    """Announce that ``name`` is about to be passed."""
    wanted = os.environ.get(VARIABLE)
    if wanted is not None:
        _maybe_kill(name, wanted)


def _maybe_kill(name: str, wanted: str) -> None:
    global _reached
    point, count, marker = wanted.split(":", 2)
    if point != name:
        return
    _reached += 1
    if _reached != int(count):
        return
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
