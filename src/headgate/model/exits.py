"""What the exit code of a command says, for whoever may start it again (KR4)."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of ``headgate``. A process that a signal killed has none of these."""

    DONE = 0
    """Finished, drained, or stopped after a last checkpoint."""
    FAILED = 1
    """Starting again may help: a process, a machine or storage failed."""
    USAGE = 2
    """The command, the program or the configuration is wrong."""
    FOR_GOOD = 3
    """Starting again fails in the same way until somebody changes something."""
    REPLACED = 4
    """Somebody else runs the pipeline now."""
