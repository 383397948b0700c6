"""The commands ``headgate streams``; those on a stream itself: create, list, describe, scale, truncate, delete."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table

from headgate.cli import stream_events, stream_groups
from headgate.cli.line_format import parse_columns
from headgate.cli.output import Terminal, progress_bar, say
from headgate.cli.pipelines import ownership_text
from headgate.cli.store import JsonLinesOption, Name, StoreOption, YesOption, confirm, open_store, print_result
from headgate.display.progress import size_text, time_text
from headgate.errors import CorruptionError, UsageError
from headgate.protocol.store.layouts import KEY_SPACE, Layout, Segment
from headgate.store.fsck import Problem
from headgate.store.location import store_root
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA, Retention, Scaling, StreamCut, StreamInfo

MaxAge = Annotated[str | None, typer.Option("--retention-age", help="Remove events that are older, such as '7 days'.")]
MaxSize = Annotated[
    str | None,
    typer.Option("--retention-size", help="Remove the oldest events beyond this size, such as 10GB."),
]


def retention_of(max_age: str | None, max_size: str | None) -> Retention | None:
    """Return what two options ask for."""
    return None if max_age is None and max_size is None else Retention(max_age, max_size)


def retention(
    name: Name,
    max_age: MaxAge = None,
    max_size: MaxSize = None,
    off: Annotated[bool, typer.Option("--off", help="Keep events until they are truncated or deleted.")] = False,
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Show or set how many events of a stream are kept, by age and size. Others are removed once a minute.

    Events that a pipeline or another holder still needs are kept.
    """
    wanted = retention_of(max_age, max_size)
    with open_store(store) as opened_store:
        if off and wanted is not None:
            raise UsageError("--off goes with neither --retention-age nor --retention-size")
        if off or wanted is not None:
            opened_store.set_retention(name, wanted)
        policy = opened_store.describe(name).retention
        told = f"stream {name}: " + ("events stay" if policy is None else f"events stay for {policy}")
        print_result(told, {"stream": name, "retention": None if policy is None else str(policy)}, as_json=as_json)


def cut(
    name: Name,
    at: Annotated[
        datetime | None, typer.Option("--at", help="The cut in front of events that became visible then, local time.")
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="The cut where the stream begins.")] = False,
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Print a stream cut, the positions of the end of a stream or of a time, for other commands and programs."""
    with open_store(store) as opened_store:
        if head and at is not None:
            raise UsageError("a cut is at --head or --at a time, not both")
        found = opened_store.head(name) if head else opened_store.tail(name)
        found = found if at is None else opened_store.cut_at(name, at)
        positions = {str(segment): position for segment, position in sorted(found.positions.items())}
        print_result(str(found), {"stream": name, "cut": str(found), "positions": positions}, as_json=as_json)


def truncate(
    name: Name,
    cut: Annotated[str | None, typer.Option("--cut", help="Up to this cut, from 'headgate streams cut'.")] = None,
    before: Annotated[
        datetime | None, typer.Option("--before", help="Events that became visible before then, local time.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Remove them even if a pipeline or another holder needs them.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Remove the oldest events of a stream for good, and the files that hold nothing else."""
    with open_store(store) as opened_store:
        if (cut is None) == (before is None):
            raise UsageError("say up to where: --cut CUT or --before DATE")
        wanted = StreamCut.parse(cut) if cut is not None else opened_store.cut_at(name, _given(before))
        if wanted.stream != name:
            raise UsageError(f"the cut {wanted} is of another stream than '{name}'")
        count = opened_store.events_between(opened_store.head(name), wanted)
        confirm(f"Remove {count:,} events of stream {name} for good?", yes=yes, as_json=as_json)
        head = opened_store.truncate(wanted, force=force)
        told = f"{count:,} events removed; {name} begins at {head}"
        print_result(told, {"stream": name, "events_removed": count, "head": str(head)}, as_json=as_json)


def release(
    name: Name,
    holder: Annotated[str, typer.Argument(help="The holder, as 'headgate streams describe' shows it.")],
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Release the events held by a pipeline that will not start again, so that they can be truncated."""
    with open_store(store) as opened_store:
        if holder not in opened_store.holds(name):
            raise UsageError(f"'{holder}' holds nothing of stream '{name}'")
        opened_store.release(name, holder=holder)
        told = f"stream {name} is not held by {holder} any more"
        print_result(told, {"stream": name, "holder": holder}, as_json=as_json)


def _given(date: datetime | None) -> datetime:
    assert date is not None
    return date


def share_of(segment: Segment) -> str:
    """Return which part of the keys a segment takes."""
    return f"{(segment.key_high - segment.key_low) / KEY_SPACE:.1%}"


def scale(
    name: Name,
    segments: Annotated[
        int | None, typer.Option("--segments", help="Spread the keys equally over this many segments.")
    ] = None,
    split: Annotated[int | None, typer.Option("--split", help="Cut this segment.")] = None,
    into: Annotated[int, typer.Option("--into", help="How many segments take its keys.")] = 2,
    merge: Annotated[str | None, typer.Option("--merge", help="Join these neighbours, such as 3,4.")] = None,
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Scale a stream: its keys go to other segments from now on. No event moves, and keys stay in order.

    Writers, transactions and pipelines go on. A pipeline reads with more subtasks from its next start on.
    """
    if sum(choice is not None for choice in (segments, split, merge)) != 1:
        raise UsageError("say one of --segments, --split and --merge")
    with open_store(store) as opened_store:
        before = opened_store.find(name).segments_count
        layout = _scaled(opened_store, name, segments, split, into, merge)
        shares = ", ".join(f"{segment.segment_id} ({share_of(segment)} of the keys)" for segment in layout.present)
        told = f"stream {name}: {len(layout.present)} segments instead of {before}: {shares}"
        present = {str(x.segment_id): (x.key_high - x.key_low) / KEY_SPACE for x in layout.present}
        print_result(
            told, {"stream": name, "segments": len(present), "before": before, "shares": present}, as_json=as_json
        )


def _scaled(store: Store, name: str, segments: int | None, split: int | None, into: int, merge: str | None) -> Layout:
    if segments is not None:
        return store.resize(name, segments)
    if split is not None:
        return store.split(name, split, into)
    numbers = [number.strip() for number in str(merge).split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"--merge takes numbers of segments, such as 3,4, not {merge!r}")
    return store.merge(name, [int(number) for number in numbers])


def scaling(
    name: Name,
    events: Annotated[int | None, typer.Option("--events-per-second", help="Target for one segment.")] = None,
    data: Annotated[str | None, typer.Option("--bytes-per-second", help="Target for one segment, such as 1MB.")] = None,
    least: Annotated[int, typer.Option("--min-segments", help="Least number of segments.")] = 1,
    most: Annotated[int, typer.Option("--max-segments", help="Greatest number of segments.")] = 64,
    cool_down: Annotated[str, typer.Option("--cool-down", help="Time between two steps.")] = "10 minutes",
    off: Annotated[bool, typer.Option("--off", help="Turn automatic scaling off.")] = False,
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Show or set how a stream scales automatically: hot segments are split, cold neighbours merged.

    Processes that write to the stream check once a minute.
    """
    is_set = events is not None or data is not None
    with open_store(store) as opened_store:
        if off and is_set:
            raise UsageError("--off goes with neither --events-per-second nor --bytes-per-second")
        if off:
            opened_store.set_scaling(name, None)
        elif is_set:
            opened_store.set_scaling(name, Scaling(events, data, least, most, cool_down))
        policy = opened_store.find(name).scaling
        told = f"stream {name}: " + ("it is scaled by hand only" if policy is None else str(policy))
        print_result(told, {"stream": name, "scaling": None if policy is None else str(policy)}, as_json=as_json)


app = typer.Typer(help="Streams of the embedded store.", no_args_is_help=True)
for command in (
    *(stream_events.copy, retention, cut, truncate, release),
    *(stream_events.read, stream_events.tail, scale, scaling),
):
    app.command(command.__name__)(command)
app.add_typer(stream_groups.groups, name="groups")
app.add_typer(stream_events.app, name="transactions")

QUIET_S = 1.0
"""Without writes for so long, orphans are removed: a file that is being written looks like one."""

CLOSED_SHOWN = 100
"""Of more closed segments only the number is shown; ``--json`` has them all."""


@app.command("update")
def update(
    name: Name,
    columns: Annotated[str, typer.Option(help="Columns that are added or get a wider type, as name:type,…")],
    as_json: JsonLinesOption = False,
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


app.command("write")(stream_events.write)


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
    as_json: JsonLinesOption = False,
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
    as_json: JsonLinesOption = False,
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
    as_json: JsonLinesOption = False,
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
def seal(name: Name, as_json: JsonLinesOption = False, store: StoreOption = None) -> None:
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
    as_json: JsonLinesOption = False,
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
    as_json: JsonLinesOption = False,
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
    as_json: JsonLinesOption = False,
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
