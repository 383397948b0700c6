"""The command line: all sub-commands, and how errors leave it.

Exit codes: see ``model.exit_codes``.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headgate import __version__
from headgate.cli import checkpoints, doctor, nexmark, pipelines, run, state, store, streams
from headgate.cli.options import unwrap_help
from headgate.cli.output import report_error
from headgate.errors import HeadgateError
from headgate.tracebacks import wants_full_traceback

app = typer.Typer(
    name="headgate",
    help="Exactly-once stream processing for Python, on Apache Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.command("stop")(pipelines.stop)
app.command("cancel")(pipelines.cancel)
app.command("reset")(pipelines.reset)
app.command("pipelines")(pipelines.pipelines)
app.command("ui")(pipelines.ui)
app.command("doctor")(doctor.doctor)
app.command("prepare")(doctor.prepare)
app.add_typer(streams.app, name="streams")
app.add_typer(store.app, name="store")
app.add_typer(pipelines.sinks_app, name="sinks")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(checkpoints.savepoints_app, name="savepoints")
app.add_typer(state.app, name="state")
app.add_typer(nexmark.app, name="nexmark")


unwrap_help(app)


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
        if wants_full_traceback():
            raise
        sys.exit(report_error(error))


if __name__ == "__main__":
    main()
