"""``headgate streams write``: append lines of files, or of standard input.

Counterpart: ``headgate.store.writer``. ``streams_read`` prints what was written. Source: CL3 and CL4 of
docs/spec/stream-clients.md. Never holds more than one block of its input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated

import pyarrow as pa
import typer

from headgate.cli.bars import Bar, bar
from headgate.cli.json_lines import batch_of_json
from headgate.cli.streams_open import JsonOption, Name, StoreOption, opened
from headgate.cli.streams_text import Format, batch_of_lines, is_json, line_blocks
from headgate.cli.text import say
from headgate.errors import UsageError
from headgate.store.schemas import TEXT_SCHEMA
from headgate.store.writer import StreamWriter


def add_write(app: typer.Typer) -> None:
    """Add the command of this file to those about streams."""
    app.command("write")(write)


def write(
    name: Name,
    files: Annotated[list[Path] | None, typer.Argument(help="Files; default: standard input.")] = None,
    format_: Annotated[Format, typer.Option("--format", help="What the input is.")] = Format.AUTO,
    create_: Annotated[bool, typer.Option("--create", help="Create a text stream when missing.")] = False,
    writer_id: Annotated[
        str,
        typer.Option(
            "--writer-id", help="Number the events: the same command with the same input writes only what is new."
        ),
    ] = "",
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Append the lines of files or of standard input. They are durable when the command says so.

    Equal routing keys stay in order. Without a routing key, only streams with one segment keep the order of lines. If a
    command with --writer-id was interrupted, repeat it with the whole input, which may have grown by whole lines: it
    writes only what is missing. Each input needs its own writer id.
    """
    with opened(store, makes=create_) as opened_store:
        if create_:
            opened_store.create_stream(name, TEXT_SCHEMA, if_not_exists=True)
        info = opened_store.find(name)
        batch_of = batch_of_json if is_json(format_, info) else batch_of_lines
        writer = opened_store.writer(name, writer_id=writer_id, linger=None)
        there = writer.next_sequence - 1
        with writer, bar(f"writing {name}", sum(map(_file_bytes, files or []))) as shown:
            count = 0
            for batch in _batches(files, lambda block: batch_of(block, info.schema), shown):
                new = batch.slice(max(0, there - count))
                _append(writer, new, is_numbered=bool(writer_id))
                if not files:
                    writer.flush()  # a pipe may be slow: do not keep its lines waiting
                count += batch.num_rows
        skipped = min(there, count)
        if as_json:
            typer.echo(json.dumps({"stream": name, "events": count - skipped, "already_there": skipped}))
            return
        again = f", {skipped:,} were there already" if skipped else ""
        say(f"{count - skipped:,} events written to {name}{again}", err=True)


def _append(writer: StreamWriter, batch: pa.RecordBatch, *, is_numbered: bool) -> None:
    """Append events; numbered ones one by one, because their number must not depend on how the input is cut up."""
    if not is_numbered:
        writer.append(batch)
        return
    for at in range(batch.num_rows):
        writer.append(batch.slice(at, 1))


def _batches(
    files: list[Path] | None, batch_of: Callable[[bytes], pa.RecordBatch], shown: Bar
) -> Iterator[pa.RecordBatch]:
    for file in _inputs(files):
        with file:
            for block in line_blocks(file):
                yield batch_of(block)
                shown.advance(len(block))


def _inputs(files: list[Path] | None) -> Iterator[IO[bytes]]:
    if not files:
        yield sys.stdin.buffer
        return
    for path in files:
        try:
            file = path.open("rb")
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        yield file


def _file_bytes(path: Path) -> int:
    """Return the size of a file, 0 if it is none or has gone: reading it says so."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
