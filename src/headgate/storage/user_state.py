"""Where a program keeps what it remembers for its user on this machine, by the rules of XDG."""

from __future__ import annotations

import os
from pathlib import Path


def user_state_directory() -> Path:
    """Return ``headgate`` in ``$XDG_STATE_HOME``, or in ``~/.local/state``; it may not be there.

    Raises:
        RuntimeError: this user has no home.
    """
    given = os.environ.get("XDG_STATE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state") / "headgate"
