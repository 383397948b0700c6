"""Where the pipelines of this user have their checkpoints on this machine.

So that a start can mention another place, and somebody can look at all of them. Whether a pipeline is still in an
object store is not asked.

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


def remembered() -> list[tuple[str, str]]:
    """Return the name and the place of each pipeline that was noted, but for directories in which it is no more."""
    try:
        directories = list((user_state_directory() / "pipelines").iterdir())
    except (OSError, RuntimeError):
        return []
    found = [(directory.name, place) for directory in directories for place in _places(directory)]
    return [(name, place) for name, place in found if local_directory(place) is None or _is_there(place, name)]


def below(root: str) -> list[tuple[str, str]]:
    """Return the name and the place of each pipeline that has checkpoints in the directory ``root``."""
    local = local_directory(root)
    try:
        names = [] if local is None else [path.name for path in local.iterdir()]
    except OSError:
        names = []
    return [(name, root) for name in names if _is_there(root, name)]


def _places(directory: Path) -> list[str]:
    try:
        return [place for place in map(_place, directory.iterdir()) if place]
    except OSError:
        return []


def _place(path: Path) -> str:
    """Return what a record says; "" if it is gone, or another process is just writing it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""


def _is_there(root: str, pipeline: str) -> bool:
    local = local_directory(root)
    return local is not None and (local / pipeline / "log").is_dir()
