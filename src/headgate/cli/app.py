"""The command line: all sub-commands."""

from __future__ import annotations

from headgate.cli import checkpoints, doctor, nexmark, pipelines, run, state, store, streams
from headgate.cli.command_line import call, command_line
from headgate.cli.options import unwrap_help

app = command_line()
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


def main() -> None:
    """Run the command line."""
    call(app)


if __name__ == "__main__":
    main()
