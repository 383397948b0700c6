"""The directories that a user names: made for whom the user wants, or refused where they say otherwise.

Counterpart: ``access``, which decides everything below them. Source: rules SE2 and SE3 of docs/spec/security.md. Never
changes a directory that is there.
"""

from __future__ import annotations

from pathlib import Path

from headgate.errors import UsageError
from headgate.model.security import Access
from headgate.storage.access import access_in
from headgate.storage.local import make_directories


def make_root(directory: Path, access: Access, what: str) -> None:
    """Create ``directory``, which is a ``what``, unless it exists.

    Raises:
        UsageError: it exists and is not shared with its group although ``access`` says so.
        OSError: it cannot be created.
    """
    if not directory.is_dir():
        make_directories(directory, access)
    elif access is Access.GROUP and access_in(directory) is not Access.GROUP:
        raise UsageError(
            f"{what} {directory} exists and is not shared with its group, as access='group' asks; share it once with "
            f"'chmod -R g+rwX {directory}; find {directory} -type d -exec chmod g+s {{}} +', or choose a new directory"
        )


def checked_access(access: str, what: str, *choices: Access) -> Access:
    """Return what the text ``access`` means.

    Raises:
        UsageError: it is not one of ``choices``.
    """
    found = next((choice for choice in choices if choice.value == access), None)
    if found is None:
        names = " or ".join(f"'{choice.value}'" for choice in choices)
        raise UsageError(f"{what} must be {names}, not {access!r}")
    return found
