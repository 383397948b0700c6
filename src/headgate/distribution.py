"""Name of the distribution, which differs from the import name.

``headgate`` on the package index is a foreign package, so no text of ours may tell a user to install that.
"""

from __future__ import annotations

DISTRIBUTION = "headgate-streams"
"""Name of the distribution; the import name and the command are ``headgate``."""


def install_command(extra: str = "") -> str:
    """Return the command that installs Headgate, or one of its extras into an environment that has it."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"
