"""``headgate streams``: create, look at, write, read, seal, delete and check streams.

Counterpart: ``headgate.store.store.Store``. Never prints a traceback for a mistake of its user.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from headgate.cli import streams_transactions
from headgate.cli.sinks import belongs_to
from headgate.cli.streams_cut import MaxAge, MaxSize, add_cuts, retention_of
from headgate.cli.streams_groups import add_groups
from headgate.cli.streams_open import Name, StoreOption, opened
from headgate.cli.streams_scale import add_scale, share_of
from headgate.cli.streams_scaling import add_scaling
from headgate.cli.streams_text import batch_of_json, batch_of_lines, line_blocks, parse_columns, size_text, text_lines
from headgate.cli.streams_update import add_update
from headgate.errors import UsageError
from headgate.store.schemas import TEXT_SCHEMA
from headgate.store.store import Store, store_root
from headgate.store.streams import StreamInfo

app = typer.Typer(help="Streams of the embedded store.", no_args_is_help=True)
add_cuts(app)
add_groups(app)
add_scale(app)
add_scaling(app)
add_update(app)
app.add_typer(streams_transactions.app, name="transactions")

FOLLOW_PAUSE_S = 0.02


class Format(StrEnum):
    """How events look as text."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


class Start(StrEnum):
    """Where reading begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


@app.command("create")
def create(
    name: Name,
    segments: Annotated[int, typer.Option(help="How many readers can share the stream.")] = 4,
    columns: Annotated[str, typer.Option(help="Columns as name:type,…; default is one text column 'line'.")] = "",
    key: Annotated[str | None, typer.Option(help="Routing key: equal values stay in order.")] = None,
    if_not_exists: Annotated[bool, typer.Option(help="No error when it fits the stream there is.")] = False,
    max_age: MaxAge = None,
    max_size: MaxSize = None,
    chunks: Annotated[
        str | None, typer.Option(help="Where a new store on PostgreSQL keeps its events: s3://bucket/prefix, …")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Create a stream."""
    with opened(store, makes=True, chunks=chunks) as opened_store:
        schema = parse_columns(columns) if columns else TEXT_SCHEMA
        info = opened_store.create_stream(
            name,
            schema,
            segments=segments,
            routing_key=key,
            if_not_exists=if_not_exists,
            retention=retention_of(max_age, max_size),
        )
        typer.echo(f"stream {info.name}: {info.segments_count} segments, {_columns(info)}")


@app.command("list")
def list_(
    scope: Annotated[str, typer.Argument(help="Only streams below this scope.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a stream.")] = False,
    store: StoreOption = None,
) -> None:
    """List the streams."""
    if not Store.exists(store) and not as_json:
        typer.echo(f"no streams in {store_root(store)}")
    if not Store.exists(store):
        return
    with opened(store) as opened_store:
        infos = opened_store.list_streams(scope)
        if as_json:
            for info in infos:
                typer.echo(json.dumps(_facts(info)))
            return
        if not infos:
            typer.echo(f"no streams in {opened_store.root}")
            return
        table = Table("stream", "segments", "events", "size", "state", "routing key", "columns")
        for info in infos:
            state = "sealed" if info.is_sealed else "open"
            table.add_row(
                info.name,
                str(info.segments_count),
                f"{info.events_count:,}",
                size_text(info.size_bytes),
                state,
                info.routing_key or "",
                escape(_columns(info)),
            )
        Console().print(table)


@app.command("describe")
def describe(
    name: Name,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    store: StoreOption = None,
) -> None:
    """Show one stream, its segments and its undecided transactions."""
    with opened(store) as opened_store:
        info = opened_store.describe(name)
        if as_json:
            typer.echo(json.dumps(_facts(info)))
            return
        console = Console()
        facts = Table(show_header=False, box=None)
        for label, value in _facts(info).items():
            if label not in ("present", "heads", "ends", "columns"):
                facts.add_row(label, str(value))
        console.print(facts)
        columns = Table("column", "type")
        for field in info.schema:
            columns.add_row(escape(field.name), escape(str(field.type)))
        keys = {segment.segment_id: share_of(segment) for segment in info.segments}
        segments = Table("segment", "keys", "events", "from position", "to")
        for segment, (head, end) in enumerate(zip(info.heads, info.ends, strict=True)):
            if segment in keys or head < end:  # what is closed and has nothing left tells nobody anything
                segments.add_row(str(segment), keys.get(segment, "closed"), f"{end - head:,}", f"{head:,}", f"{end:,}")
        console.print(columns, segments)
        held = opened_store.holds(name)
        if held:
            table = Table("held by", "events it keeps")
            for holder, kept in held.items():
                table.add_row(escape(holder), f"{opened_store.events_between(kept):,}")
            console.print(table)
        waiting = [x for x in opened_store.list_transactions(stream=name) if not x.status.is_terminal]
        if waiting:
            table = Table("open or prepared transaction", "state", "events", "epoch")
            for x in waiting:
                table.add_row(x.name, x.status.value, f"{x.events_count:,}", str(x.epoch))
            console.print(table)


@app.command("write")
def write(
    name: Name,
    files: Annotated[list[Path] | None, typer.Argument(help="Files; default: standard input.")] = None,
    format_: Annotated[Format, typer.Option("--format", help="What the input is.")] = Format.AUTO,
    create_: Annotated[bool, typer.Option("--create", help="Create a text stream when missing.")] = False,
    store: StoreOption = None,
) -> None:
    """Append lines of files or of standard input; they are durable when the command says so.

    Equal routing keys stay in order. Without a routing key only streams of one segment keep the order of lines.
    """
    with opened(store, makes=create_) as opened_store:
        if create_:
            opened_store.create_stream(name, TEXT_SCHEMA, if_not_exists=True)
        info = opened_store.describe(name)
        is_text = format_ is Format.TEXT or (format_ is Format.AUTO and info.schema.equals(TEXT_SCHEMA))
        count = 0
        with opened_store.writer(name, linger=None) as writer, _progress(files) as advance:
            for file in _inputs(files):
                with file:
                    for block in line_blocks(file):
                        batch = batch_of_lines(block, info.schema) if is_text else batch_of_json(block, info.schema)
                        writer.append(batch)
                        if not files:
                            writer.flush()  # a pipe may be slow: do not keep its lines waiting
                        count += batch.num_rows
                        advance(len(block))
        typer.echo(f"{count:,} events written to {name}", err=True)


@app.command("read")
def read(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new events until sealed.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="Stop after so many events.")] = None,
    start: Annotated[Start, typer.Option("--from", help="Where to begin.")] = Start.EARLIEST,
    format_: Annotated[Format, typer.Option("--format", help="How to print events.")] = Format.AUTO,
    store: StoreOption = None,
) -> None:
    """Print events, segment by segment."""
    with opened(store) as opened_store:
        info = opened_store.describe(name)
        as_json = format_ is Format.JSON or (format_ is Format.AUTO and not info.schema.equals(TEXT_SCHEMA))
        left = sys.maxsize if limit is None else limit
        readers = [
            opened_store.reader(name, segment, None if start is Start.EARLIEST else end)
            for segment, end in enumerate(info.ends)
        ]
        while left > 0:
            count = 0
            # What came when the stream was scaled is behind what it follows: that is read to its end first.
            for segment in range(len(readers), len(opened_store.describe(name).ends)):
                readers.append(opened_store.reader(name, segment, 0))
            for reader in readers:
                batch = reader.read(min(left, 8_192)) if left > 0 else None
                while batch is not None:
                    sys.stdout.writelines(line + "\n" for line in text_lines(batch, as_json=as_json))
                    count += batch.num_rows
                    left -= batch.num_rows
                    batch = reader.read(min(left, 8_192)) if left > 0 else None
            sys.stdout.flush()
            if count:
                continue
            if not follow or all(reader.has_ended() for reader in readers):
                return
            time.sleep(FOLLOW_PAUSE_S)


@app.command("seal")
def seal(name: Name, store: StoreOption = None) -> None:
    """End a stream: no more events; readers that follow it finish."""
    with opened(store) as opened_store:
        opened_store.seal(name)
        typer.echo(f"stream {name} is sealed")


@app.command("delete")
def delete(
    name: Name,
    force: Annotated[bool, typer.Option(help="Also when it is not sealed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreOption = None,
) -> None:
    """Delete a stream with all its events."""
    with opened(store) as opened_store:
        info = opened_store.describe(name)
        if not yes:
            typer.confirm(f"Delete stream {name} with {info.events_count:,} events?", abort=True)
        opened_store.delete(name, force=force)
        typer.echo(f"stream {name} is deleted")


@app.command("forget")
def forget(
    owner: Annotated[str, typer.Argument(help="PIPELINE/SINK, as in the error message.")],
    abort_prepared: Annotated[
        bool, typer.Option("--abort-prepared", help="Abort what it has prepared and not committed, at once.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreOption = None,
) -> None:
    """Allow a pipeline whose checkpoints were removed to start again with the stream that it has already written.

    The store forgets which checkpoints the sink belongs to, so the next start of a pipeline of that name can claim it.
    All events stay. That start, or --abort-prepared, aborts output that was prepared and never committed.
    """
    with opened(store) as opened_store:
        found = opened_store.owner(owner)
        if not found.generation and found.life is None:
            raise UsageError(f"no pipeline has written to {opened_store.root} as '{owner}'")
        if not yes:
            typer.confirm(f"Forget that {owner} {belongs_to(found)}?", abort=True)
        opened_store.forget_owner(owner)
        if abort_prepared:
            typer.echo(f"{opened_store.abort_prepared(owner)} prepared transactions are aborted")
        typer.echo(f"{owner} is forgotten: the next start of that pipeline has it")


@app.command("check")
def check(
    quick: Annotated[bool, typer.Option(help="Do not read the events.")] = False,
    remove_orphans: Annotated[
        bool, typer.Option(help="Remove files that crashes left. Only while nothing writes to the store.")
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Hold what reader groups need, and nothing else.")] = False,
    store: StoreOption = None,
) -> None:
    """Check the whole store; the exit code is 1 when something is wrong."""
    with opened(store) as opened_store:
        if repair:
            for mended in opened_store.repair():
                typer.echo(f"mended: {mended}")
        if remove_orphans:
            typer.echo(f"{opened_store.collect_orphans()} files removed")
        problems = opened_store.fsck(verify_events=not quick)
        for problem in problems:
            typer.echo(f"{'note' if problem.is_harmless else 'PROBLEM'}: {problem.where}: {problem.what}")
        serious = sum(not problem.is_harmless for problem in problems)
        typer.echo(f"{opened_store.root}: {serious} problems, {len(problems) - serious} notes")
        if serious:
            raise typer.Exit(1)


def _facts(info: StreamInfo) -> dict[str, object]:
    return {
        "stream": info.name,
        "segments": info.segments_count,
        "present": [segment.segment_id for segment in info.segments],
        "routing_key": info.routing_key,
        "is_sealed": info.is_sealed,
        "events": info.events_count,
        "heads": list(info.heads),
        "ends": list(info.ends),
        "retention": None if info.retention is None else str(info.retention),
        "scaling": None if info.scaling is None else str(info.scaling),
        "chunks": info.chunks_count,
        "size_bytes": info.size_bytes,
        "prepared_transactions": info.prepared_count,
        "created_ms": info.created_ms,
        "schema_version": info.schema_version,
        "columns": {field.name: str(field.type) for field in info.schema},
    }


def _columns(info: StreamInfo) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in info.schema)


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


class _Advance:
    """Counts bytes; shows them when there is something to show them on."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("writing", total=total) if progress is not None else None

    def __call__(self, size_bytes: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, size_bytes)


def _file_bytes(path: Path) -> int:
    """Return the size of a file, 0 if it is none or has gone: reading it says so."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


@contextlib.contextmanager
def _progress(files: list[Path] | None) -> Iterator[_Advance]:
    total = sum(_file_bytes(path) for path in files or [])
    console = Console(stderr=True)
    if total < 16 << 20 or not console.is_terminal:
        yield _Advance(None, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Advance(progress, total)
