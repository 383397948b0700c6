"""Objects of ours that are named by numbers: log entries, ids, claims, owners.

Source: rule O25 of docs/spec/storage.md. What else is in their directory is somebody else's, in whatever subdirectory:
backups, notes, files of a desktop. It counts for nothing, and is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from headgate.storage.base import Storage

_NUMBER = re.compile(r"[0-9]{10,}")


def number_name(number: int) -> str:
    """Return the name of object ``number``: names sort as numbers do."""
    return f"{number:010d}"


def numbered(storage: Storage, directory: str) -> dict[int, str]:
    """Return the paths of the numbered objects in ``directory``, ascending.

    Raises:
        StorageError
    """
    return _numbered(storage.list(directory), directory)


def numbered_below(storage: Storage, directory: str) -> dict[str, dict[int, str]]:
    """Return the same of every directory in ``directory``, by its name; those with nothing of ours are left out.

    Raises:
        StorageError
    """
    paths: dict[str, list[str]] = {}
    for path in storage.list(directory):
        name, slash, _ = path.removeprefix(f"{directory}/").partition("/")
        if slash:
            paths.setdefault(name, []).append(path)
    found = {name: _numbered(below, f"{directory}/{name}") for name, below in paths.items()}
    return {name: numbers for name, numbers in found.items() if numbers}


def _numbered(paths: Iterable[str], directory: str) -> dict[int, str]:
    names = {path: path.removeprefix(f"{directory}/") for path in paths}
    found = {int(name): path for path, name in names.items() if _NUMBER.fullmatch(name)}
    return {number: path for number, path in sorted(found.items()) if names[path] == number_name(number)}
