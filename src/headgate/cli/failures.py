"""Errors as a user of the command line sees them: a sentence, never a traceback of Headgate's own frames."""

from __future__ import annotations

import typer

from headgate.errors import BadRecord, FencedError, HeadgateError, OutputDenied, PipelineFailed, UsageError
from headgate.model.exits import Exit


def report(error: HeadgateError) -> int:
    """Print ``error`` on standard error; return the exit code.

    ``PipelineFailed`` brings the short traceback of the user's own function with it.
    """
    typer.secho(f"Error: {error}", err=True, fg=typer.colors.RED)
    return int(exit_of(error))


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
