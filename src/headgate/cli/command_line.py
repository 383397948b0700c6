"""The command line, and how errors leave it.

``app`` has all commands, and ``__main__`` has the one that is called: the modules of the others would be half of what
it imports. Exit codes: see ``model.failure``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from headgate import __version__
from headgate.cli.options import unwrap_help
from headgate.cli.output import report_error
from headgate.errors import HeadgateError
from headgate.tracebacks import wants_full_traceback

COMMANDS = {
    "run": ("run", "run"),
    "stop": ("pipelines", "stop"),
    "cancel": ("pipelines", "cancel"),
    "reset": ("pipelines", "reset"),
    "pipelines": ("pipelines", "pipelines"),
    "ui": ("pipelines", "ui"),
    "doctor": ("doctor", "doctor"),
    "prepare": ("doctor", "prepare"),
    "streams": ("streams", "app"),
    "store": ("store", "app"),
    "sinks": ("pipelines", "sinks_app"),
    "checkpoints": ("checkpoints", "app"),
    "savepoints": ("checkpoints", "savepoints_app"),
    "state": ("state", "app"),
    "nexmark": ("nexmark", "app"),
}
"""The module of each command or group of commands, and its name there."""


def command_line(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the command line with these commands; no module of another one is imported for them."""
    app = typer.Typer(
        name="headgate",
        help="Exactly-once stream processing for Python, on Apache Spark.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(options)
    for name in names:
        module, attribute = COMMANDS[name]
        command = getattr(importlib.import_module(f"headgate.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    unwrap_help(app)
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
