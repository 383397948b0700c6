"""``headgate sinks``: which pipelines the file sinks of a directory belong to, and letting them begin anew.

Counterpart: ``connectors.files.owner``. For sinks to streams: ``headgate streams forget``. Never removes data.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headgate.cli.text import time_text
from headgate.connectors.files.layout import CLAIMS, OWNERS, SinkIdentity
from headgate.connectors.files.owner import FileOwner
from headgate.connectors.files.sink import FileSink
from headgate.errors import UsageError
from headgate.model.life import Owner
from headgate.storage.backends import absolute_location, is_missing, open_storage
from headgate.storage.base import Storage

app = typer.Typer(help="Whose the sinks of a directory are.", no_args_is_help=True)

Location = Annotated[str, typer.Argument(help="Directory or URL that the sink writes files to.")]


@app.command("list")
def list_(directory: Location) -> None:
    """List the sinks that write to a directory, and the checkpoints that each belongs to."""
    url = absolute_location(directory)
    found = [] if is_missing(url) else _sinks(open_storage(url))
    for sink, owner in found:
        typer.echo(f"{sink.pipeline}/{sink.node} {belongs_to(owner)}")
    if not found:
        typer.echo(f"No sink has written to {url}.")


def _sinks(storage: Storage) -> list[tuple[SinkIdentity, Owner]]:
    paths = [*storage.list(OWNERS), *storage.list(CLAIMS)]
    found = sorted({SinkIdentity.parse(path.split("/")[1]) for path in paths if path.count("/") == 2})
    return [(sink, FileOwner(storage, sink).owner()) for sink in found]


@app.command("forget")
def forget(
    owner: Annotated[str, typer.Argument(help="PIPELINE/SINK, as in the error message.")],
    directory: Location,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Let a pipeline begin anew in front of its files, after its checkpoints were removed.

    The directory forgets which checkpoints the sink belongs to; the next start of a pipeline of that name has it. All
    files stay. What the former one had prepared and not committed is removed by that start.
    """
    url = absolute_location(directory)
    pipeline, _, node = owner.partition("/")
    sink = None if is_missing(url) else FileSink(url).target(pipeline, node)
    found = Owner() if sink is None else sink.owner()
    if sink is None or (not found.generation and found.life is None):
        raise UsageError(f"no pipeline has written to {url} as '{owner}'")
    if not yes:
        typer.confirm(f"Forget that {owner} {belongs_to(found)}?", abort=True)
    sink.forget()
    typer.echo(f"{owner} is forgotten: the next start of that pipeline has it")


def belongs_to(owner: Owner) -> str:
    """Return whose something is, as the end of a sentence."""
    if owner.life is not None:
        life = owner.life
        return f"belongs to the checkpoints in {life.home}, begun on {life.host} at {time_text(life.begun_ms)} UTC"
    return "is forgotten" if owner.is_forgotten else "was written to by version 0.1, which did not say from where"
