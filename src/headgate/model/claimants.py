"""The names under which drivers claim a pipeline: made here, and taken apart here.

A name says whose driver it is, for people, and then which one, because one process may have several. Counterparts:
``runtime.driver.driver`` and ``cli.keeping`` claim under them; ``cli.standby`` tells people whose driver it was.
"""

from __future__ import annotations

_DRIVER = ", driver "


def claimant(owner: str, token: str) -> str:
    """Return the name of one driver of ``owner``; ``token`` differs for each."""
    return f"{owner}{_DRIVER}{token}"


def keeper(process_id: int, host: str) -> str:
    """Return the owner of a driver that a keeper starts again when it has died."""
    return f"supervisor {process_id} on {host}"


def owner_of(name: str) -> str:
    """Return whose driver claims under ``name``."""
    return name.partition(_DRIVER)[0]
