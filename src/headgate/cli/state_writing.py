"""``headgate state write`` and ``headgate state drop``: a savepoint that is another one with something changed.

Writes nothing but the new savepoint (WS11 of docs/spec/writing-state.md). Counterparts: ``api.written_state``, which
does the same for programs; ``cli.state``, which looks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import polars as pl
import typer

from headgate.api.config import CHECKPOINT_DIR_DEFAULT
from headgate.api.written_state import EditedSavepoint, edit_savepoint
from headgate.cli.load import load_pipeline
from headgate.cli.options import DirOption
from headgate.cli.state_places import located
from headgate.cli.text import say
from headgate.errors import UsageError

READERS: dict[str, Callable[[Path], pl.DataFrame]] = {
    ".parquet": pl.read_parquet,
    ".arrow": pl.read_ipc,
    ".feather": pl.read_ipc,
    ".jsonl": pl.read_ndjson,
    ".ndjson": pl.read_ndjson,
}
"""How files of rows are read, by the ends of their names. Text without types, such as CSV, is not among them."""

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SAVEPOINT",
        help="A savepoint; DIRECTORY/PIPELINE for the newest checkpoint of a pipeline; DIRECTORY/PIPELINE/chk-ID; "
        "or the name of a pipeline in --dir. It stays as it is.",
    ),
]
OperatorArgument = Annotated[str, typer.Argument(help="One of its operators.")]
ToOption = Annotated[str, typer.Option("--to", help="Where the new savepoint goes: a new directory, or a URL.")]
IdOption = Annotated[int | None, typer.Option("--id", help="Id of the checkpoint, if it is not the newest one.")]
PipelineOption = Annotated[
    str | None,
    typer.Option("--program", help="The program that declares the new form of the state, if its columns change."),
]

EXAMPLES = """\
Examples:

headgate state write /backup/monday totals sum right.parquet --to /backup/mended

headgate state drop orders old-totals --to /backup/without
"""


def write(
    source: SourceArgument,
    operator: OperatorArgument,
    state: Annotated[str, typer.Argument(help="One of its states.")],
    rows: Annotated[Path, typer.Argument(help=f"All rows of the state, in a file that ends in {', '.join(READERS)}.")],
    to: ToOption,
    checkpoint: IdOption = None,
    program: PipelineOption = None,
    directory: DirOption = CHECKPOINT_DIR_DEFAULT,
) -> None:
    """Write a copy of a savepoint or checkpoint with other rows in one state.

    The columns are those that 'headgate state show' prints. The original stays as it is.
    """
    draft = _draft(source, to, checkpoint, program, directory)
    say(str(draft.with_state(operator, state, read_rows(rows)).write()))


def drop(
    source: SourceArgument,
    operator: OperatorArgument,
    to: ToOption,
    state: Annotated[str | None, typer.Argument(help="One of its states; without it, all of its state.")] = None,
    checkpoint: IdOption = None,
    program: PipelineOption = None,
    directory: DirOption = CHECKPOINT_DIR_DEFAULT,
) -> None:
    """Write a copy of a savepoint or checkpoint without one state, or without an operator."""
    say(str(_draft(source, to, checkpoint, program, directory).drop(operator, state).write()))


def read_rows(path: Path) -> pl.DataFrame:
    """Return the rows in a file.

    Raises:
        UsageError: nobody can tell what it is, or it cannot be read.
    """
    reader = READERS.get(path.suffix)
    if reader is None:
        raise UsageError(f"{path} is no file of rows with types; it must end in {', '.join(READERS)}")
    try:
        return reader(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UsageError(f"{path} cannot be read: {reason}") from None


def _draft(source: str, to: str, checkpoint: int | None, program: str | None, directory: str) -> EditedSavepoint:
    pipeline = None if program is None else load_pipeline(program, [])
    return edit_savepoint(located(source, directory), to, id=checkpoint, pipeline=pipeline)
