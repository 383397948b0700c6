"""Names of objects: rules for paths and for names read from files, and objects named by numbers.

Numbers name log entries, ids, claims and owners. What else is in their directory, in whatever subdirectory, is not
ours (backups, notes, files of a desktop): it counts for nothing, and is left alone. Source: docs/spec/storage.md and
docs/spec/security.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from headgate.errors import CorruptionError, UsageError
from headgate.storage.base import Storage

TEMP_PREFIX = ".hg-tmp-"
"""Names that begin so are unfinished writes: never listed, never readable, harmless when left by a crash."""

PATH_CHARS_MAX = 900
"""Object stores allow 1,024 bytes; the rest is for the prefix of the storage itself."""

BARE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~-]*")
"""The names that Headgate itself gives to files: none is hidden, leads elsewhere, or has other characters."""

NAME_CHARS_MAX = 255


def read_name(name: str, where: str, form: re.Pattern[str] = BARE_NAME) -> str:
    """Return ``name``, which the file ``where`` says: only now may it be joined to a directory.

    Raises:
        CorruptionError: it is not the bare name of a file, or not of this ``form``.
    """
    if len(name) > NAME_CHARS_MAX or BARE_NAME.fullmatch(name) is None or form.fullmatch(name) is None:
        raise CorruptionError(where, 0, "the bare name of a file", f"{name[:NAME_CHARS_MAX]!a}")
    return name


def read_path(path: str, where: str) -> str:
    """Return the object path ``path``, which the file ``where`` says.

    Raises:
        CorruptionError: it is not relative, or leads elsewhere; see ``checked_path``.
    """
    try:
        return checked_path(path)
    except UsageError as error:
        raise CorruptionError(where, 0, "the path of a file", f"{path[:NAME_CHARS_MAX]!a}") from error


def checked_path(path: str) -> str:
    """Return ``path`` when it is relative, "/"-separated and free of surprises.

    Raises:
        UsageError: it is empty, absolute, too long, or a component is empty, ".", ".." or a temporary name.
    """
    problem = ""
    if not path or len(path) > PATH_CHARS_MAX:
        problem = f"it must have 1 to {PATH_CHARS_MAX} characters"
    elif "\\" in path or "\0" in path:
        problem = "it must not contain a backslash or NUL"
    else:
        for part in path.split("/"):
            if part in ("", ".", ".."):
                problem = "its components must not be empty, '.' or '..'"
            elif part.startswith(TEMP_PREFIX):
                problem = f"components beginning with {TEMP_PREFIX} are reserved for unfinished writes"
    if problem:
        raise UsageError(f"object path {path!r} is not usable: {problem}")
    return path


def checked_prefix(prefix: str) -> str:
    """Return ``prefix`` without slashes at its ends; "" means everything."""
    stripped = prefix.strip("/")
    return checked_path(stripped) if stripped else ""


_NUMBER = re.compile(r"[0-9]{10,}")


def number_name(number: int) -> str:
    """Return the name of object ``number``: names sort as numbers do."""
    return f"{number:010d}"


def list_numbered(storage: Storage, directory: str) -> dict[int, str]:
    """Return the paths of the numbered objects in ``directory``, ascending.

    Raises:
        StorageError
    """
    return _numbered(storage.list(directory), directory)


def list_numbered_below(storage: Storage, directory: str) -> dict[str, dict[int, str]]:
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
