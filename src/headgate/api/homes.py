"""Where the pipelines of this user have their checkpoints on this machine, so that a start can mention another place.

Of directories only: whether a pipeline is still in an object store is not asked.

One small file for each: ``<state>/headgate/pipelines/<name>/<digest of the place>``, holding the place as text, where
``<state>`` is ``$XDG_STATE_HOME`` or ``~/.local/state``. Only a memory aid: what cannot be written or read is left out.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from headgate.model.security import Access
from headgate.storage.access import write_created
from headgate.storage.backends import local_directory
from headgate.storage.local import make_directories
from headgate.storage.user_state import user_state_directory


def remember(pipeline: str, root: str) -> list[str]:
    """Note that ``pipeline`` has its checkpoints in ``root``; return the other places where it has some."""
    try:
        directory = user_state_directory() / "pipelines" / pipeline
        make_directories(directory)
        mine = directory / xxhash.xxh3_64_hexdigest(root.encode())
        write_created(mine, root.encode(), Access.OWNER)
        others = [_place(path) for path in directory.iterdir() if path != mine]
    except (OSError, RuntimeError):  # no home directory, or one that is read-only
        return []
    return sorted(other for other in others if other and _is_there(other, pipeline))


def _place(path: Path) -> str:
    """Return what a record says; "" if it is gone, or another process is just writing it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""


def _is_there(root: str, pipeline: str) -> bool:
    local = local_directory(root)
    return local is not None and (local / pipeline / "log").is_dir()
