"""What the exit code of a command says, for whoever may start it again (KR4)."""

from __future__ import annotations

from enum import IntEnum

from headgate.errors import BadRecord, FencedError, HeadgateError, OutputDenied, PipelineFailed, UsageError


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


def exit_of(error: HeadgateError) -> Exit:
    """Return what whoever might start the command again has to know about ``error`` (KR4)."""
    match error:
        case UsageError():
            return Exit.USAGE
        case FencedError():
            return Exit.REPLACED
        case OutputDenied() | BadRecord() | PipelineFailed(is_for_good=True):
            return Exit.FOR_GOOD
        case _:
            return Exit.FAILED
