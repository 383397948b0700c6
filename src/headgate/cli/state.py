"""``headgate state``: show the state of a checkpoint or savepoint, or write a savepoint with other state.

Takes no lock and changes nothing that is there (docs/spec/reading-state.md, docs/spec/writing-state.md), and may be
used while the pipeline runs.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import pyarrow as pa
import typer
from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from headgate.api.config import CHECKPOINT_DIR_DEFAULT
from headgate.api.state_access import EditedSavepoint, edit_savepoint
from headgate.cli.line_format import json_lines, python_rows
from headgate.cli.options import DirOption, load_pipeline
from headgate.cli.output import Terminal, count_text, say, size_text, time_text, write_lines
from headgate.codec.arrow import LOCAL_TIME, MOMENT
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.operators.expressions import elementwise_problem
from headgate.operators.schemas import empty_frame
from headgate.plain_text import printable
from headgate.runtime.state_reader.lookup import StoredCheckpoint, find_checkpoint
from headgate.runtime.state_reader.reader import (
    StoredState,
    batches_of,
    catalog_row,
    main_of,
    selection,
    state_named,
    states_of,
)
from headgate.storage.base import Storage
from headgate.storage.urls import absolute_location, local_directory


def resolve_checkpoint_path(path: str, directory: str) -> str:
    """Return where ``path`` is: what it says, unless it is a word that only means a pipeline in ``directory``."""
    if not path or "/" in path or "\\" in path:
        return path
    here = local_directory(absolute_location(path))
    if here is None or any(os.path.exists(here / name) for name in ("savepoint", "log")):
        return path
    return f"{absolute_location(directory).rstrip('/')}/{path}"


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

WRITE_EXAMPLES = """\
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
        UsageError: its kind is unknown, or it cannot be read.
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
    return edit_savepoint(resolve_checkpoint_path(source, directory), to, id=checkpoint, pipeline=pipeline)


ROWS_DEFAULT = 20
"""So many rows are a table that can be read."""

CELL_CHARS_MAX = 60

COLUMNS_CHARS_MIN = 30
"""The names of a state's columns have so much room in a list, however narrow the terminal is."""

app = typer.Typer(help="State in completed checkpoints and savepoints, without their pipeline.", no_args_is_help=True)
app.command("write", epilog=WRITE_EXAMPLES)(write)
app.command("drop", epilog=WRITE_EXAMPLES)(drop)


@dataclass(frozen=True, slots=True)
class _RowFilter:
    """Which rows of a state are asked for."""

    columns: str | None
    where: str | None
    keys: Sequence[str]
    limit: int | None

    @property
    def is_anything(self) -> bool:
        return bool(self.columns is not None or self.where is not None or self.keys)


SHOW_EXAMPLES = """\
Examples:

headgate state show orders  (what there is, with rows and bytes)

headgate state show checkpoints/orders/chk-41 totals --key 42 --json

headgate state show /backup/monday totals --where "value > 10"

headgate state show orders alerts headgate.timers.event_time --limit 0
"""


@app.command("show", epilog=SHOW_EXAMPLES)
def show(
    path: Annotated[
        str,
        typer.Argument(
            help="A savepoint; DIRECTORY/PIPELINE for the newest checkpoint of a pipeline; DIRECTORY/PIPELINE/chk-ID; "
            "or the name of a pipeline in --dir."
        ),
    ],
    operator: Annotated[str | None, typer.Argument(help="An operator; without it, everything is listed.")] = None,
    state: Annotated[str | None, typer.Argument(help="One of its states; not needed if it has only one.")] = None,
    checkpoint: Annotated[
        int | None, typer.Option("--id", help="Id of the checkpoint, if it is not the newest one.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Only these columns, with commas between them; there are also _subtask, with a key _key_group, and "
            "with a TTL _expires."
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(help='Only rows for which this condition over columns holds, in SQL, such as "value > 10".'),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Only the rows of this key; may be repeated. A key of several columns: a,1. A binary is in "
            "hexadecimal. Only the files that can hold it are read."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=0, help=f"At most so many rows; 0: all. Default: {ROWS_DEFAULT}, with --json all."
        ),
    ] = None,
    directory: DirOption = CHECKPOINT_DIR_DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; for rows, one object per line.")] = False,
) -> None:
    """List the states of a checkpoint or savepoint with their rows and bytes, or show the rows of one.

    Nothing is changed or locked, and a running pipeline is not disturbed. Everything that is read is verified.
    """
    found = find_checkpoint(resolve_checkpoint_path(path, directory), checkpoint)
    storage = found.storage()
    wanted = _RowFilter(columns, where, key or (), limit)
    again = f"{shlex.quote(path)} OPERATOR STATE"
    again += "" if directory == CHECKPOINT_DIR_DEFAULT else f" --dir {shlex.quote(directory)}"
    again += "" if checkpoint is None else f" --id {checkpoint}"
    if operator is None:
        if wanted.is_anything:
            raise UsageError("--columns, --where and --key choose rows of one state: name its operator")
        _print_catalog(found, states_of(found, storage), again, as_json=as_json)
        return
    if state is None and not wanted.is_anything:
        several = main_of(states_of(found, storage, operator))
        if len(several) > 1:
            _print_catalog(found, several, again, as_json=as_json)
            return
    _print_rows(found, storage, state_named(found, storage, operator, state), wanted, as_json=as_json)


def _print_catalog(found: StoredCheckpoint, states: Sequence[StoredState], again: str, *, as_json: bool) -> None:
    manifest = found.manifest
    if as_json:
        fields = {
            "pipeline": found.pipeline,
            "checkpoint": manifest.checkpoint,
            "parallelism": manifest.parallelism,
            "key_groups": manifest.max_parallelism,
            "states": [catalog_row(state) for state in states],
        }
        typer.echo(json.dumps(fields))
        return
    say(f"{found.what}, triggered {time_text(manifest.trigger_wall_ms)} UTC, {manifest.mode.value}")
    if not states:
        say("It holds no state.")
        return
    titles = ("operator", "state", "kind", "rows", "size", "key", "columns")
    lines = [titles, *map(_catalog_cells, states)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    table = Table(box=None, pad_edge=False)
    for title, width in zip(titles, widths, strict=True):
        is_last = title == titles[-1]  # the others are whole on any terminal: names are typed to see the rows
        justify: JustifyMethod = "right" if title in ("rows", "size") else "left"
        table.add_column(title, justify=justify, no_wrap=not is_last, width=None if is_last else width)
    for cells in lines[1:]:
        table.add_row(*map(Text, map(printable, cells)))
    needed = sum(widths[:-1]) + len(titles) + min(widths[-1], COLUMNS_CHARS_MIN)
    console = Terminal()
    Terminal(width=max(console.width, needed)).print(table)
    say(f"Rows of a state: headgate state show {again}")


def _catalog_cells(state: StoredState) -> tuple[str, ...]:
    row = catalog_row(state)
    rows = "?" if state.rows is None else count_text(state.rows)
    columns = ", ".join(state.shape.shown.names)
    return state.operator, state.name, row["kind"], rows, size_text(state.size_bytes), ", ".join(row["keys"]), columns


def _print_rows(
    found: StoredCheckpoint, storage: Storage, state: StoredState, wanted: _RowFilter, *, as_json: bool
) -> None:
    default = sys.maxsize if as_json else ROWS_DEFAULT
    limit = default if wanted.limit is None else wanted.limit or sys.maxsize
    schema, batches = _rows(found, storage, state, wanted)
    if as_json:
        for batch in _first(batches, limit):
            write_lines(json_lines(batch))
        return
    rows = [row for batch in _first(batches, limit + 1 if limit < sys.maxsize else limit) for row in python_rows(batch)]
    table = Table(box=None, pad_edge=False)
    for field in schema:
        is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        table.add_column(Text(printable(field.name)), justify="right" if is_number else "left", overflow="fold")
    for row in rows[:limit]:
        table.add_row(*(_cell(row[name]) for name in schema.names))
    Terminal().print(table)
    if len(rows) > limit:
        of_all = "" if state.rows is None or wanted.where or wanted.keys else f" of {count_text(state.rows)}"
        say(f"The first {count_text(limit)}{of_all} rows; --limit shows more, --where and --key choose.")
    elif not rows:
        say("There are no such rows." if wanted.is_anything else "It has no rows.")


def _rows(
    found: StoredCheckpoint, storage: Storage, state: StoredState, wanted: _RowFilter
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the columns and the rows that are asked for."""
    key_groups_count = found.manifest.max_parallelism
    columns = None if wanted.columns is None else [name.strip() for name in wanted.columns.split(",")]
    schema = selection(state, key_groups_count, columns).schema
    condition = None if wanted.where is None else _condition(wanted.where, state.shape.all)
    needed = [] if condition is None else [n for n in condition.meta.root_names() if n not in schema.names]
    keys = [_key(state, text) for text in wanted.keys] if wanted.keys else None
    chosen = selection(state, key_groups_count, [*schema.names, *needed], keys)
    batches = batches_of(found, storage, state, chosen)
    if condition is not None:
        batches = _where(batches, str(wanted.where))
    return schema, (batch.select(schema.names) for batch in batches)


def _condition(text: str, schema: pa.Schema) -> pl.Expr:
    try:
        found = pl.sql_expr(text)
    except pl.exceptions.PolarsError as error:
        raise _no_condition(text, error) from None
    problem = _problem_of(found, text, schema)
    if problem:
        raise UsageError(
            f"--where {text!r} {problem.partition(';')[0]}, but is asked of each row by itself; compare columns with "
            "values, or read the rows with headgate.read_state and compare them there"
        )
    return found


def _problem_of(condition: pl.Expr, text: str, schema: pa.Schema) -> str:
    """Return why a condition is not about one row: it would see one part of a snapshot at a time."""
    rows = empty_frame(schema).lazy()
    try:
        return elementwise_problem(condition, rows.with_columns(condition))
    except pl.exceptions.PolarsError:
        pass  # as SQL a time may be compared with its text
    try:
        return elementwise_problem(condition, rows.sql(f"SELECT ({text}) FROM self"))
    except pl.exceptions.PolarsError:
        return ""  # what is wrong is said when it is asked of rows, as the same SQL


def _where(batches: Iterator[pa.RecordBatch], text: str) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        frame = pl.from_arrow(batch)
        assert isinstance(frame, pl.DataFrame)
        try:
            # as in a query, so that a time may be compared with its text
            rows = frame.sql(f"SELECT ({text}) FROM self").to_series()
        except pl.exceptions.PolarsError as error:
            raise _no_condition(text, error) from None
        if rows.dtype != pl.Boolean:
            raise _no_condition(text, f"it is {rows.dtype}, neither true nor false")
        if len(rows) == 1 and batch.num_rows != 1:  # a condition without columns
            rows = pl.repeat(rows[0], batch.num_rows, dtype=pl.Boolean, eager=True)
        if rows.any():
            yield batch.filter(rows.fill_null(value=False).to_arrow())


def _no_condition(text: str, error: Exception | str) -> UsageError:
    reason = str(error).strip().split("\n", 1)[0]
    return UsageError(
        f"--where {text!r} is no condition over the columns: {reason}; such as \"value > 10 and key = 'a'\""
    )


def _key(state: StoredState, text: str) -> Any:
    """Return a key as its columns have it."""
    fields = [state.shape.schema.field(name) for name in state.shape.keys]
    parts = _parts(text, len(fields))
    if not fields:
        return tuple(parts)  # ``selection`` says that there is no key
    try:
        if len(parts) != len(fields):
            raise ValueError(f'{len(fields)} values are needed, with commas between them; one with a comma is "a,b"')
        values = [_value(part, f.type) for part, f in zip(parts, fields, strict=True)]
    except (pa.ArrowException, ValueError) as error:
        described = ", ".join(f"{n}: {f.type}" for n, f in zip(state.shape.shown_keys, fields, strict=True))
        raise UsageError(f"--key {text!r} is no key of operator '{state.operator}' ({described}): {error}") from None
    return values[0] if len(values) == 1 else tuple(values)


def _parts(text: str, count: int) -> list[str]:
    """Return the values of ``count`` columns, which may be quoted, as in CSV; what is no CSV is as it stands."""
    if count == 1:
        return [text]
    rows = list(csv.reader(io.StringIO(text, newline=""))) if '"' in text else []
    return rows[0] if len(rows) == 1 and len(rows[0]) == count else text.split(",")


def _value(text: str, dtype: pa.DataType) -> Any:
    """Return the value that a text says, as it is shown; a moment without a zone is in UTC."""
    if pa.types.is_large_binary(dtype):
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise ValueError("bytes are hexadecimal digits") from None
    if pa.types.is_duration(dtype):
        raise ValueError("durations cannot be given with --key; give --where \"column = INTERVAL '90 seconds'\"")
    if dtype == MOMENT:
        with suppress(pa.ArrowException):
            return pa.scalar(text).cast(LOCAL_TIME).cast(MOMENT).as_py()
    return pa.scalar(text).cast(dtype).as_py()


def _first(batches: Iterator[pa.RecordBatch], limit: int) -> Iterator[pa.RecordBatch]:
    """Yield the first ``limit`` rows; no more are read."""
    left = limit
    while left > 0 and (batch := next(batches, None)) is not None:
        yield batch.slice(0, left)
        left -= batch.num_rows


def _cell(value: object) -> Text:
    if value is None:
        return Text("null", style="dim")
    text = value.hex() if isinstance(value, bytes) else str(value)
    text = printable(text)
    return Text(text if len(text) <= CELL_CHARS_MAX else text[:CELL_CHARS_MAX] + "…")
