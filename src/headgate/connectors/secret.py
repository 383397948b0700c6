"""Where a secret is found, which is never part of a program: in the environment or in a file of every process."""

from __future__ import annotations

import os
from pathlib import Path

from headgate.errors import UsageError

ENVIRONMENT, FILE = "env:", "file:"


def is_secret_place(text: str) -> bool:
    """Whether ``text`` is ``env:NAME`` or ``file:/path``."""
    return text.startswith((ENVIRONMENT, FILE))


def read_secret(place: str, what: str) -> str:
    """Return the secret at ``place``, which is ``env:NAME`` or ``file:/path``. ``what`` needs it, such as "Kafka".

    Raises:
        UsageError: it is not there.
    """
    if place.startswith(ENVIRONMENT):
        name = place.removeprefix(ENVIRONMENT)
        if (value := os.environ.get(name)) is None:
            raise UsageError(f"the secret for {what} is not there: set the environment variable {name} on every worker")
        return value
    path = place.removeprefix(FILE)
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"the secret for {what} cannot be read from {path}: {reason}") from error
