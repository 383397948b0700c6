"""``headgate savepoints``: have one taken, and look at what is there. Removes nothing: savepoints are their owner's."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from headgate.api.config import CHECKPOINT_DIR_DEFAULT
from headgate.cli.checkpoints import asked, manifest_fields, print_manifest, subtask_fields
from headgate.cli.options import DirOption, JsonOption, PipelineArgument
from headgate.cli.terminal import Terminal
from headgate.cli.text import say, size_text, time_text
from headgate.errors import HeadgateError, PipelineFailed, UsageError
from headgate.model.run_request import RunRequest
from headgate.model.savepoint import SAVEPOINT_VERSION, Savepoint
from headgate.runtime.checkpoints.savepoints import SavepointDirectory, savepoints_below
from headgate.runtime.driver.stopping import RunningPipeline
from headgate.storage.backends import absolute_location, is_missing, local_directory
from headgate.storage.base import NotFound

app = typer.Typer(help="Savepoints of pipelines.", no_args_is_help=True)


@app.command("take")
def take(
    pipeline: PipelineArgument,
    path: Annotated[str, typer.Argument(help="An empty or new directory, or a URL.")],
    directory: DirOption = CHECKPOINT_DIR_DEFAULT,
) -> None:
    """Write a savepoint of a pipeline that runs on this machine, and wait until it is complete."""
    outcome = asked(RunningPipeline.find(absolute_location(directory), pipeline), RunRequest(absolute_location(path)))
    if outcome.savepoint is None:
        raise PipelineFailed(f"{pipeline}: there is no savepoint: {outcome.reason}")
    say(f"{pipeline}: savepoint {outcome.savepoint} is complete (checkpoint {outcome.checkpoint})")


@app.command("show")
def show(
    path: Annotated[str, typer.Argument(help="Where the savepoint is.")],
    as_json: JsonOption = False,
) -> None:
    """Show what a savepoint holds."""
    savepoint = _savepoint_at(absolute_location(path))
    if as_json:
        typer.echo(json.dumps({**_fields(savepoint), "subtasks": subtask_fields(savepoint.manifest)}))
        return
    say(f"savepoint of pipeline {savepoint.pipeline}, complete since {time_text(savepoint.taken_ms)} UTC")
    print_manifest(savepoint.manifest)


@app.command("list")
def list_savepoints(
    path: Annotated[str, typer.Argument(help="A directory or a URL below which savepoints are.")],
    as_json: JsonOption = False,
) -> None:
    """List the savepoints below a path."""
    root = _existing(absolute_location(path))
    found = {where: _at_or_why_not(f"{root.rstrip('/')}/{where}".rstrip("/")) for where in savepoints_below(root)}
    if as_json:
        fields = [
            {"path": where, **(_fields(one) if isinstance(one, Savepoint) else {"problem": one})}
            for where, one in found.items()
        ]
        typer.echo(json.dumps(fields))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("savepoint", "pipeline", "checkpoint", "complete since (UTC)", "size", ""):
        table.add_column(title, justify="right" if title in ("checkpoint", "size") else "left")
    for where, one in found.items():
        if isinstance(one, Savepoint):
            manifest = one.manifest
            size, moment = size_text(manifest.size_bytes), time_text(one.taken_ms)
            table.add_row(where or ".", one.pipeline, str(manifest.checkpoint), moment, size, manifest.mode.value)
        else:
            table.add_row(where or ".", "", "", "", "", one)
    Terminal().print(table if found else f"There are no savepoints below {root}.")


def _savepoint_at(url: str) -> Savepoint:
    try:
        return SavepointDirectory(_existing(url)).read()
    except NotFound:
        raise UsageError(
            f"there is no savepoint at {url}; 'headgate savepoints list' shows those below a path"
        ) from None


def _at_or_why_not(url: str) -> Savepoint | str:
    try:
        return _savepoint_at(url)
    except HeadgateError as error:
        return str(error)


def _existing(url: str) -> str:
    """Return ``url``; a directory that is missing is not made by looking at it."""
    if is_missing(url):
        raise UsageError(f"there is no directory {local_directory(url)}")
    return url


def _fields(savepoint: Savepoint) -> dict[str, Any]:
    return {
        "format": SAVEPOINT_VERSION,
        "id": savepoint.id,
        "pipeline": savepoint.pipeline,
        "complete_since": time_text(savepoint.taken_ms),
        **manifest_fields(savepoint.manifest),
    }
