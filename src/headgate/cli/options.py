"""Arguments and options that several commands have: everywhere they are called alike and mean the same."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from headgate.api.builder import check_name
from headgate.api.config import CHECKPOINT_DIR_DEFAULT


def checked_pipeline(name: str | None) -> str | None:
    """Return the name of a pipeline; what can be none is told before anything is looked for.

    Raises:
        UsageError
    """
    return None if name is None else check_name(name, "a pipeline")


PipelineArgument: TypeAlias = Annotated[
    str, typer.Argument(help="Name of the pipeline.", callback=checked_pipeline, show_default=False)
]
AnyPipelineArgument: TypeAlias = Annotated[
    str | None, typer.Argument(help="Name of a pipeline; without it, all are listed.", callback=checked_pipeline)
]
DirOption: TypeAlias = Annotated[
    str,
    typer.Option("--dir", help="Directory or URL of the checkpoints.", show_default=CHECKPOINT_DIR_DEFAULT),
]
LocalDirOption: TypeAlias = Annotated[
    str,
    typer.Option("--dir", help="Directory of the checkpoints.", show_default=CHECKPOINT_DIR_DEFAULT),
]
"""A pipeline of this machine is found by the lock in its directory."""

JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def flowing(text: str) -> str:
    """Return a docstring for the help: lines of a paragraph become one, because the terminal has a width of its own."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def let_help_flow(app: typer.Typer) -> None:
    """Have every command of ``app``, and of the groups in it, show its docstring in the width of the terminal."""
    for command in app.registered_commands:
        if command.help is None and command.callback is not None and command.callback.__doc__:
            command.help = flowing(command.callback.__doc__)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            let_help_flow(group.typer_instance)
