"""Errors as a user of the command line sees them: a sentence, never a traceback of Headgate's own frames."""

from __future__ import annotations

import typer

from headgate.cli.text import say
from headgate.errors import HeadgateError
from headgate.model.exits import exit_of
from headgate.user_line import user_line


def report(error: HeadgateError) -> int:
    """Print ``error`` on standard error; return the exit code.

    The line of the program that led to it follows. ``PipelineFailed`` brings the short traceback of the user's own
    function with it.
    """
    say(f"Error: {error}{user_line(error.__traceback__)}", err=True, fg=typer.colors.RED)
    return int(exit_of(error))
