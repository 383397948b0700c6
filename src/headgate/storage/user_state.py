"""Where a program keeps what it remembers for its user on this machine, and what can be made anew: by XDG's rules."""

from __future__ import annotations

import os
from pathlib import Path


def user_state_directory() -> Path:
    """Return ``headgate`` in ``$XDG_STATE_HOME``, or in ``~/.local/state``; it may not be there.

    Raises:
        RuntimeError: this user has no home.
    """
    return _directory("XDG_STATE_HOME", ".local/state")


def user_cache_directory() -> Path:
    """Return ``headgate`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``; it may not be there.

    Raises:
        RuntimeError: this user has no home.
    """
    return _directory("XDG_CACHE_HOME", ".cache")


def _directory(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    return (Path(given) if os.path.isabs(given) else Path.home() / default) / "headgate"
