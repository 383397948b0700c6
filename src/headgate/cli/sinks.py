"""``headgate sinks``: list the owners of the file sinks of a directory, and forget one.

Counterparts: ``connectors.files.ownership``, and ``connectors.fenced_sink`` for sinks that users write. For sinks to
streams: ``headgate streams forget``. Never removes data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from headgate.cli.options import ProgramArguments
from headgate.cli.output import say, time_text
from headgate.cli.program_loader import load_pipeline
from headgate.connectors.fenced_sink import FencedSink
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.files.ownership import owners_in
from headgate.errors import UsageError
from headgate.model.pipeline_identity import Owner
from headgate.storage.urls import absolute_location, is_missing, open_storage

app = typer.Typer(help="Whose the sinks of a directory are.", no_args_is_help=True)

Location = Annotated[str, typer.Argument(help="Directory or URL that the sink writes files to.")]


@app.command("list")
def list_(directory: Location) -> None:
    """List the sinks that write to a directory, and the checkpoints that each belongs to."""
    url = absolute_location(directory)
    found = {} if is_missing(url) else owners_in(open_storage(url))
    for sink, owner in found.items():
        say(f"{sink.pipeline}/{sink.node} {ownership_text(owner)}")
    if not found:
        say(f"No sink has written to {url}.")


@app.command("forget")
def forget(
    owner: Annotated[str, typer.Argument(help="PIPELINE/SINK, as in the error message.")],
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY|PROGRAM",
            help="Directory or URL that the sink writes files to; for a sink of your own the Python file that makes "
            "the pipeline.",
        ),
    ],
    arguments: ProgramArguments = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Allow a pipeline whose checkpoints were removed to start again with the output that it has already written.

    The target forgets which checkpoints the sink belongs to, so the next start of a pipeline of that name can claim it.
    All committed output stays. That start removes output that was prepared and never committed.
    """
    pipeline, _, node = owner.partition("/")
    if place.endswith(".py") or Path(place).is_file():
        where = place
        found, forget = _program_sink(pipeline, node, place, arguments or ())
    else:
        where = absolute_location(place)
        found, forget = _file_sink(pipeline, node, where)
    if not found.generation and found.life is None:
        raise UsageError(f"no pipeline has written to {where} as '{owner}'")
    if not yes:
        typer.confirm(f"Forget that {owner} {ownership_text(found)}?", abort=True)
    forget()
    say(f"{owner} is forgotten: the next start of that pipeline has it")


def _file_sink(pipeline: str, node: str, url: str) -> tuple[Owner, Callable[[], object]]:
    """Return the owner of the files, and a function that makes their directory forget it."""
    if is_missing(url):
        return Owner(), lambda: None
    target = FileSink(url).target(pipeline, node)
    return target.owner(), target.forget


def _program_sink(
    pipeline: str, node: str, program: str, arguments: Sequence[str]
) -> tuple[Owner, Callable[[], object]]:
    """Return the owner of the target of a sink in ``program``, and a function that makes it forget it.

    ``node`` may be a former name, by which only the target knows the sink (LV9).

    Raises:
        UsageError: there is no such sink of a user's own.
    """
    definition = load_pipeline(program, arguments).definition()
    sinks = {str(one.name): one.spec for one in definition.graph.nodes if isinstance(one.spec, FencedSink)}
    named = [sinks[node]] if node in sinks else []
    known = [one for one in sinks.values() if not one.owner(pipeline, node).is_unknown] or named
    if definition.config.name != pipeline or not known:
        there = ", ".join(f"'{definition.config.name}/{name}'" for name in sinks) or "none"
        raise UsageError(f"{program} has no sink of its own called '{pipeline}/{node}'; there is {there}")
    return known[0].owner(pipeline, node), lambda: [sink.forget_owner(pipeline, node) for sink in known]


def ownership_text(owner: Owner) -> str:
    """Return the owner as the end of a sentence."""
    if owner.life is not None:
        life = owner.life
        return f"belongs to the checkpoints in {life.home}, begun on {life.host} at {time_text(life.begun_ms)} UTC"
    return "is forgotten" if owner.is_forgotten else "was written to without a checkpoint directory"
