"""The command ``headgate``: its sub-commands, and how errors leave it.

Exit codes: see ``model.exits``.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headgate import __version__
from headgate.cli import (
    checkpoints,
    doctor,
    pipelines,
    prepare,
    reset,
    run,
    savepoints,
    sinks,
    state,
    stop,
    store,
    streams,
)
from headgate.cli.failures import report
from headgate.cli.old_names import take_old_names
from headgate.cli.options import let_help_flow
from headgate.errors import HeadgateError, UsageError
from headgate.user_line import wants_everything

app = typer.Typer(
    name="headgate",
    help="Exactly-once stream processing for Python, on Apache Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("stop")(stop.stop)
app.command("cancel")(stop.cancel)
app.command("reset")(reset.reset)
app.command("pipelines")(pipelines.pipelines)
app.command("ui")(pipelines.ui)
app.command("doctor")(doctor.doctor)
app.command("prepare")(prepare.prepare)
app.add_typer(streams.app, name="streams")
app.add_typer(store.app, name="store")
app.add_typer(sinks.app, name="sinks")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(savepoints.app, name="savepoints")
app.add_typer(state.app, name="state")


@app.command("savepoint", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def savepoint() -> None:
    """It is called savepoints."""
    raise UsageError("the command is: headgate savepoints take NAME PATH")


@app.command("rescale", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def rescale() -> None:
    """There is no command for it."""
    raise UsageError("to change the parallelism, stop the pipeline and start it with headgate run --parallelism N")


let_help_flow(app)
take_old_names(app)


def _version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"headgate {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Exactly-once stream processing for Python, on Apache Spark."""


def main() -> None:
    """Run the command line; every error of Headgate becomes one clear sentence on standard error."""
    try:
        app()
    except HeadgateError as error:
        if wants_everything():
            raise
        sys.exit(report(error))


if __name__ == "__main__":
    main()
