"""``headgate streams``: create, list, describe, update, seal, delete and check streams."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.table import Table

from headgate.cli.output import Terminal, progress_bar, say
from headgate.cli.sinks import ownership_text
from headgate.cli.streams import events, groups, retention, scaling, transactions
from headgate.cli.streams.common import JsonOption, Name, StoreOption, YesOption, confirm, open_store, print_result
from headgate.cli.streams.line_format import parse_columns
from headgate.cli.streams.retention import MaxAge, MaxSize, retention_of
from headgate.cli.streams.scaling import share_of
from headgate.display.text import size_text, time_text
from headgate.errors import CorruptionError, UsageError
from headgate.store.fsck import Problem
from headgate.store.store import Store, store_root
from headgate.store.streams import TEXT_SCHEMA, StreamInfo

app = typer.Typer(help="Streams of the embedded store.", no_args_is_help=True)
for command in (
    *(events.copy, retention.retention, retention.cut, retention.truncate, retention.release),
    *(events.read, events.tail, scaling.scale, scaling.scaling),
):
    app.command(command.__name__)(command)
app.add_typer(groups.groups, name="groups")
app.add_typer(transactions.app, name="transactions")

QUIET_S = 1.0
"""Without writes for so long, orphans are removed: a file that is being written looks like one."""

CLOSED_SHOWN = 100
"""Of more closed segments only the number is shown; ``--json`` has them all."""


@app.command("update")
def update(
    name: Name,
    columns: Annotated[str, typer.Option(help="Columns that are added or get a wider type, as name:type,…")],
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Add columns to a stream, or widen the types of numbers. Stored events are not rewritten.

    They have null in new columns. Programs that write or read the former columns keep working.
    """
    with open_store(store) as opened_store:
        info = opened_store.update_stream(name, columns=parse_columns(columns))
        found = ", ".join(f"{field.name}: {field.type}" for field in info.schema)
        facts = {"stream": info.name, "schema_version": info.schema_version}
        types = {field.name: str(field.type) for field in info.schema}
        print_result(
            f"stream {info.name}: schema {info.schema_version}, {found}", {**facts, "columns": types}, as_json=as_json
        )


app.command("write")(events.write)


@app.command("create")
def create(
    name: Name,
    segments: Annotated[int, typer.Option(help="How many readers can share the stream.")] = 4,
    columns: Annotated[str, typer.Option(help="Columns as name:type,…; default is one text column 'line'.")] = "",
    key: Annotated[str | None, typer.Option("--routing-key", help="Routing key: equal values stay in order.")] = None,
    if_not_exists: Annotated[
        bool, typer.Option(help="No error if a stream with the same columns and key exists.")
    ] = False,
    max_age: MaxAge = None,
    max_size: MaxSize = None,
    chunks: Annotated[
        str | None, typer.Option(help="Where a new store on PostgreSQL keeps its events: s3://bucket/prefix, …")
    ] = None,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Create a stream."""
    with open_store(store, makes=True, chunks=chunks) as opened_store:
        schema = parse_columns(columns) if columns else TEXT_SCHEMA
        info = opened_store.create_stream(
            name,
            schema,
            segments=segments,
            routing_key=key,
            if_not_exists=if_not_exists,
            retention=retention_of(max_age, max_size),
        )
        told = f"stream {info.name}: {info.segments_count} segments, {_columns(info)}"
        print_result(told, _facts(opened_store.describe(name)) if as_json else {}, as_json=as_json)


@app.command("list")
def list_(
    scope: Annotated[str, typer.Argument(help="Only streams below this scope.")] = "",
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """List the streams."""
    if not Store.exists(store) and not as_json:
        say(f"no streams in {store_root(store)}")
    if not Store.exists(store):
        return
    with open_store(store) as opened_store:
        infos = opened_store.list_streams(scope)
        if as_json:
            for info in infos:
                typer.echo(json.dumps(_facts(info)))
            return
        if not infos:
            say(f"no streams in {opened_store.root}")
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
                _columns(info),
            )
        Terminal().print(table)


@app.command("describe")
def describe(
    name: Name,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Show one stream, its segments and its undecided transactions."""
    with open_store(store) as opened_store:
        info = opened_store.describe(name)
        if as_json:
            typer.echo(json.dumps(_facts(info)))
            return
        console = Terminal()
        facts = Table(show_header=False, box=None)
        for label, value in _facts_for_people(info).items():
            facts.add_row(label, value)
        console.print(facts)
        columns = Table("column", "type")
        for field in info.schema:
            columns.add_row(field.name, str(field.type))
        segments = _segments(info)
        console.print(columns, segments)
        held = opened_store.holds(name)
        if held:
            table = Table("held by", "events it keeps")
            for holder, kept in held.items():
                table.add_row(holder, f"{opened_store.events_between(kept):,}")
            console.print(table)
        waiting = [x for x in opened_store.list_transactions(stream=name) if not x.status.is_terminal]
        if waiting:
            table = Table("open or prepared transaction", "state", "events", "epoch")
            for x in waiting:
                table.add_row(x.name, x.status.value, f"{x.events_count:,}", str(x.epoch))
            console.print(table)


@app.command("seal")
def seal(name: Name, as_json: JsonOption = False, store: StoreOption = None) -> None:
    """End a stream: it takes no more events, and readers that follow it finish."""
    with open_store(store) as opened_store:
        opened_store.seal(name)
        print_result(f"stream {name} is sealed", {"stream": name, "is_sealed": True}, as_json=as_json)


@app.command("delete")
def delete(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it even if it is not sealed, or still needed.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Delete a sealed stream with all its events.

    Events that a pipeline, a reader group or another holder has not read yet are not deleted without --force: pipelines
    that need them would fail for good.
    """
    with open_store(store) as opened_store:
        info, needed = opened_store.describe(name), opened_store.needed_by(name)
        still = f", which {', '.join(needed)} still need" if needed else ""
        confirm(f"Delete stream {name} with {info.events_count:,} events{still}?", yes=yes, as_json=as_json)
        opened_store.delete(name, force=force)
        print_result(f"stream {name} is deleted", {"stream": name, "events": info.events_count}, as_json=as_json)


@app.command("forget")
def forget(
    owner: Annotated[str, typer.Argument(help="PIPELINE/SINK, as in the error message.")],
    abort_prepared: Annotated[
        bool, typer.Option("--abort-prepared", help="Abort at once what it has prepared and not committed.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Allow a pipeline whose checkpoints were removed to start again with the stream that it has already written.

    The store forgets which checkpoints the sink belongs to, so the next start of a pipeline of that name can claim it.
    All events stay. That start, or --abort-prepared, aborts output that was prepared and never committed.
    """
    with open_store(store) as opened_store:
        found = opened_store.pipelines.owner(owner)
        if not found.generation and found.life is None:
            raise UsageError(f"no pipeline has written to {opened_store.root} as '{owner}'")
        confirm(f"Forget that {owner} {ownership_text(found)}?", yes=yes, as_json=as_json)
        opened_store.pipelines.forget_owner(owner)
        aborted = opened_store.transactions.abort_all(owner) if abort_prepared else 0
        told = [f"{aborted} prepared transactions are aborted"] if abort_prepared else []
        told.append(f"{owner} is forgotten: the next start of that pipeline has it")
        print_result("\n".join(told), {"owner": owner, "aborted": aborted}, as_json=as_json)


@app.command("check")
def check(
    quick: Annotated[bool, typer.Option("--quick", help="Do not read the events.")] = False,
    remove_orphans: Annotated[
        bool,
        typer.Option(
            "--remove-orphans", help="Remove files that crashes left. Only while no process writes to the store."
        ),
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Restore the holds of reader groups; change nothing else.")
    ] = False,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Check the whole store; the exit code is 1 when something is wrong."""
    with open_store(store) as opened_store:
        mended = opened_store.repair() if repair else []
        removed = _without_orphans(opened_store) if remove_orphans else 0
        total = 0
        with suppress(CorruptionError):  # which is said below
            total = 0 if quick else 2 * sum(info.size_bytes for info in opened_store.list_streams())
        with progress_bar("checking", total) as shown:
            problems = opened_store.fsck(verify_events=not quick, on_bytes=shown.advance)
        serious = sum(not problem.is_harmless for problem in problems)
        if as_json:
            facts = {"store": opened_store.root, "problems": serious, "notes": len(problems) - serious}
            found = [{"where": x.where, "what": x.what, "is_harmless": x.is_harmless} for x in problems]
            typer.echo(json.dumps({**facts, "found": found, "mended": mended, "files_removed": removed}))
        else:
            told = [f"mended: {one}" for one in mended]
            told += [f"{removed} files removed"] if remove_orphans else []
            told += [*map(_problem_text, problems)]
            told.append(f"{opened_store.root}: {serious} problems, {len(problems) - serious} notes")
            say("\n".join(told))
        if serious:
            raise typer.Exit(1)


def _without_orphans(store: Store) -> int:
    """Remove orphans unless a process is seen to write; return how many."""
    before = _written(store)
    time.sleep(QUIET_S)
    if _written(store) != before:
        raise UsageError(
            f"processes write to the store at {store.root}, and --remove-orphans would also remove files that they "
            "have not recorded yet; stop them first"
        )
    return store.collect_orphans()


def _written(store: Store) -> list[tuple[str, int, int]]:
    return [(info.name, info.chunks_count, sum(info.ends)) for info in store.list_streams()]


def _problem_text(problem: Problem) -> str:
    return f"{'note' if problem.is_harmless else 'PROBLEM'}: {problem.where}: {problem.what}"


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


def _facts_for_people(info: StreamInfo) -> dict[str, str]:
    return {
        "stream": info.name,
        "segments": f"{info.segments_count:,}",
        "routing key": str(info.routing_key or "-"),
        "sealed": "yes" if info.is_sealed else "no",
        "events": f"{info.events_count:,}",
        "retention": "-" if info.retention is None else str(info.retention),
        "scaling": "-" if info.scaling is None else str(info.scaling),
        "chunks": f"{info.chunks_count:,}",
        "size": size_text(info.size_bytes),
        "prepared transactions": f"{info.prepared_count:,}",
        "created (UTC)": time_text(info.created_ms),
        "schema version": str(info.schema_version),
    }


def _segments(info: StreamInfo) -> Table:
    """Return the segments that take events, and the closed ones with events: each, or together when they are many."""
    keys = {segment.segment_id: share_of(segment) for segment in info.segments}
    extents = list(enumerate(zip(info.heads, info.ends, strict=True)))
    closed = [(segment, head, end) for segment, (head, end) in extents if segment not in keys and head < end]
    table = Table("segment", "keys", "events", "from position", "to")
    if len(closed) > CLOSED_SHOWN:
        table.add_row(f"{len(closed):,} others", "closed", f"{sum(end - head for _, head, end in closed):,}", "", "")
        closed = []
    shown = closed + [(segment, head, end) for segment, (head, end) in extents if segment in keys]
    for segment, head, end in sorted(shown):
        table.add_row(str(segment), keys.get(segment, "closed"), f"{end - head:,}", f"{head:,}", f"{end:,}")
    return table


def _columns(info: StreamInfo) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in info.schema)
