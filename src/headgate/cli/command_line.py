"""The command line without its commands, and how errors leave it.

``app`` adds all commands, and ``__main__`` adds ``run`` alone where that is what is called: the modules of the other
commands would be a third of what is imported until a pipeline starts. Exit codes: see ``model.exit_codes``.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headgate import __version__
from headgate.cli.output import report_error
from headgate.errors import HeadgateError
from headgate.tracebacks import wants_full_traceback


def command_line() -> typer.Typer:
    """Return the command line without a command."""
    app = typer.Typer(
        name="headgate",
        help="Exactly-once stream processing for Python, on Apache Spark.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(options)
    return app


def _version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"headgate {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Exactly-once stream processing for Python, on Apache Spark."""


def call(app: typer.Typer) -> None:
    """Run the command line; every error of Headgate becomes one clear sentence on standard error."""
    try:
        app()
    except HeadgateError as error:
        if wants_full_traceback():
            raise
        sys.exit(report_error(error))
