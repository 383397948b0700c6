"""The command line: all sub-commands, and how errors leave it.

Exit codes: see ``model.exit_codes``.
"""

from __future__ import annotations

import copy
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headgate import __version__
from headgate.cli import checkpoints, doctor, pipelines, run, sinks, state, store
from headgate.cli.options import unwrap_help
from headgate.cli.output import report_error
from headgate.cli.streams import commands
from headgate.errors import HeadgateError, UsageError
from headgate.tracebacks import wants_full_traceback

OLD_NAMES = {
    "--dir": ("--checkpoint-dir", "--checkpoints"),
    "--restore": ("--from",),
    "--start": ("--from",),
    "--end": ("--until",),
    "--force": ("--anyway",),
    "--routing-key": ("--key",),
    "--retention-age": ("--max-age",),
    "--retention-size": ("--max-size",),
    "--min-segments": ("--min",),
    "--max-segments": ("--max",),
    "--checkpoints-kept": ("--keep",),
    "--program": ("--pipeline",),
}
"""By name: what the same option was called. A command that has another option of an old name keeps that one."""


class CommandWithOldNames(TyperCommand):
    """A command whose options can be called by their old names, too."""

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser, which knows the old names."""
        parser = super().make_parser(ctx)
        taken = {name for option in self.params for name in option.opts}
        for option in self.params:
            for old in OLD_NAMES.get(option.opts[0], ()):
                if old not in taken:
                    former = copy.copy(option)
                    former.opts, former.secondary_opts = [old], []
                    former.add_to_parser(parser, ctx)
        return parser


def take_old_names(app: typer.Typer) -> None:
    """Have every command of ``app``, and of the groups in it, take the old names of its options."""
    for command in app.registered_commands:
        command.cls = CommandWithOldNames
    for group in app.registered_groups:
        if group.typer_instance is not None:
            take_old_names(group.typer_instance)


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
app.add_typer(commands.app, name="streams")
app.add_typer(store.app, name="store")
app.add_typer(sinks.app, name="sinks")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(checkpoints.savepoints_app, name="savepoints")
app.add_typer(state.app, name="state")


@app.command("savepoint", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def savepoint() -> None:
    """It is called savepoints."""
    raise UsageError("the command is: headgate savepoints take NAME PATH")


@app.command("rescale", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def rescale() -> None:
    """There is no command for it."""
    raise UsageError("to change the parallelism, stop the pipeline and start it with headgate run --parallelism N")


unwrap_help(app)
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
        if wants_full_traceback():
            raise
        sys.exit(report_error(error))


if __name__ == "__main__":
    main()
