"""Rules for object paths, shared by every backend.

Counterpart: ``storage.Storage``. Source: docs/spec/storage.md.
Never touches a disk.
"""

from __future__ import annotations

from headgate.errors import UsageError

TEMP_PREFIX = ".hg-tmp-"
"""Names that begin so are unfinished writes: never listed, never readable, harmless when left by a crash."""

PATH_CHARS_MAX = 900
"""Object stores allow 1,024 bytes; the rest is for the prefix of the storage itself."""


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
