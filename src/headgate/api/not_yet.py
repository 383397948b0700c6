"""What Headgate will do but does not do yet: one sentence each, instead of an AttributeError."""

from __future__ import annotations

from typing import NoReturn

from headgate.errors import UsageError


def not_there_yet(what: str, instead: str = "") -> NoReturn:
    """Raise the sentence for ``what`` (with its article or in quotes); ``instead`` says what to use today.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"{what} is not there yet" + (f"; {instead}" if instead else ""))
