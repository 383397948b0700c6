"""``headgate streams groups``: list, create, checkpoint, reset and delete reader groups. Never joins one."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table

from headgate.cli.output import Terminal, say
from headgate.cli.store import JsonLinesOption, StoreOption, YesOption, confirm, open_store, print_result
from headgate.display.progress import size_text
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import CorruptionError, HeadgateError, UsageError
from headgate.model.config import duration_ms
from headgate.store.reader_groups import GroupInfo, ReaderGroup
from headgate.store.store import Store
from headgate.store.streams import StreamCut

groups = typer.Typer(help="Reader groups: programs that share streams.", no_args_is_help=True)

ASK_PAUSE_S = 0.1


class Begin(StrEnum):
    """Where reading begins in streams without a cut."""

    EARLIEST = "earliest"
    LATEST = "latest"


GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the reader group.")]
From = Annotated[Begin, typer.Option("--start", help="Where to begin in streams without a cut.")]
Cuts = Annotated[
    list[str] | None, typer.Option("--cut", help="Begin at this cut, from 'headgate streams cut'; one for each stream.")
]


@groups.command("list")
def list_(as_json: JsonLinesOption = False, store: StoreOption = None) -> None:
    """List the reader groups."""
    with open_store(store) as opened_store:
        names = opened_store.reader_groups()
        if as_json:
            for name in names:
                typer.echo(json.dumps(_facts_or_problem(opened_store, name)))
            return
        if not names:
            say(f"no reader groups in {opened_store.root}")
            return
        table = Table("group", "streams", "readers", "unread", "checkpoints")
        for name in names:
            table.add_row(name, *_row(opened_store, name))
        Terminal().print(table)


@groups.command("describe")
def describe(name: GroupName, as_json: JsonLinesOption = False, store: StoreOption = None) -> None:
    """Show who reads what in a group, what is unread, and its checkpoints."""
    with open_store(store) as opened_store:
        group = opened_store.reader_group(name)
        facts = _facts(group)
        if as_json:
            typer.echo(json.dumps(facts))
            return
        info, unread, cuts = group.describe(), group.unread(), group.cut()
        console = Terminal()
        console.print(f"reader group {info.name}: epoch {info.epoch}, {_count(len(info.readers), 'reader')}")
        segments = Table("stream", "segment", "reader", "processed up to", "unread")
        owners = {segment: reader for reader, own in info.readers.items() for segment in own}
        for stream, segment in sorted(owners.keys() | set(info.free) | unread.keys()):
            reader = owners.get((stream, segment), "nobody" if (stream, segment) in info.free else "waits")
            size = unread.get((stream, segment), 0)
            position = f"{cuts[stream].positions.get(segment, 0):,}" if stream in cuts else "its stream was deleted"
            segments.add_row(stream, str(segment), reader, position, size_text(size))
        console.print(segments)
        if info.checkpoints:
            checkpoints = Table("checkpoint", "state")
            for checkpoint, owed_by in info.checkpoints.items():
                state = f"not passed by {', '.join(owed_by)}" if owed_by else "complete"
                checkpoints.add_row(checkpoint, state)
            console.print(checkpoints)


@groups.command("create")
def create(
    name: GroupName,
    streams: Annotated[list[str], typer.Argument(metavar="STREAM", help="The streams that it reads.")],
    begin: From = Begin.EARLIEST,
    cuts: Cuts = None,
    checkpoints_kept: Annotated[
        int, typer.Option("--checkpoints-kept", help="How many completed checkpoints are kept to go back to.")
    ] = 1,
    if_not_exists: Annotated[
        bool, typer.Option(help="No error if a group that reads the same streams exists.")
    ] = False,
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Create a reader group. From now on, events that it still has to read are not truncated."""
    with open_store(store) as opened_store:
        if not if_not_exists and name in opened_store.reader_groups():
            raise UsageError(f"there is a reader group '{name}' already; --if-not-exists accepts it")
        group = opened_store.reader_group(
            name, streams, start=begin, cuts=_parsed(cuts), checkpoints_kept=checkpoints_kept
        )
        print_result(
            f"reader group {name} reads {', '.join(streams)}", _facts(group) if as_json else {}, as_json=as_json
        )


@groups.command("checkpoint")
def checkpoint(
    name: GroupName,
    checkpoint_name: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Name of the checkpoint, for --checkpoint of reset.")
    ],
    timeout: Annotated[str, typer.Option(help="How long to wait until all readers have passed it.")] = "60s",
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Take a checkpoint of a group, and wait until all readers have passed it. The exit code is 1 if they have not.

    A reader that is silent for as long as its lease is considered dead. Run the same command again to go on waiting.
    """
    with open_store(store) as opened_store:
        group = opened_store.reader_group(name)
        until_ms = SYSTEM_CLOCK.monotonic_ms() + duration_ms(timeout, "--timeout")
        while not (is_complete := group.checkpoint(checkpoint_name)) and SYSTEM_CLOCK.monotonic_ms() < until_ms:
            time.sleep(ASK_PAUSE_S)  # each look counts: who is silent for its lease meanwhile owes nothing any more
        cuts = {stream: str(cut) for stream, cut in group.cut(checkpoint_name).items()} if is_complete else {}
        owed_by = group.describe().checkpoints.get(checkpoint_name, ())
        if as_json:
            facts = {"group": name, "checkpoint": checkpoint_name, "is_complete": is_complete}
            typer.echo(json.dumps({**facts, "owed_by": list(owed_by), "cuts": cuts}))
        elif is_complete:
            say(f"checkpoint {checkpoint_name} of reader group {name} is complete")
            for cut in cuts.values():
                say(cut)
        else:
            say(f"checkpoint {checkpoint_name} of reader group {name} is not passed by {', '.join(owed_by)} yet")
        if not is_complete:
            raise typer.Exit(1)


@groups.command("forget")
def forget(
    name: GroupName,
    checkpoint_name: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The checkpoint.")],
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Drop a checkpoint of a group, complete or not, and the events that are kept for it."""
    with open_store(store) as opened_store:
        group = opened_store.reader_group(name)
        if checkpoint_name not in group.checkpoints():
            raise UsageError(f"reader group '{name}' has no checkpoint '{checkpoint_name}'")
        group.forget_checkpoint(checkpoint_name)
        told = f"checkpoint {checkpoint_name} of reader group {name} is forgotten"
        print_result(told, {"group": name, "checkpoint": checkpoint_name}, as_json=as_json)


@groups.command("reset")
def reset(
    name: GroupName,
    to_checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="Go back to this completed checkpoint.")
    ] = None,
    begin: Annotated[Begin | None, typer.Option("--start", help="Where to begin in streams without a cut.")] = None,
    cuts: Cuts = None,
    yes: YesOption = False,
    as_json: JsonLinesOption = False,
    store: StoreOption = None,
) -> None:
    """Reset a group to a checkpoint or a position. Its readers get an error and have to join again."""
    with open_store(store) as opened_store:
        if (to_checkpoint is None) == (begin is None and not cuts):
            raise UsageError("say where to: --checkpoint CHECKPOINT, or --start and --cut")
        group, wanted = opened_store.reader_group(name), _parsed(cuts)
        places = [f"checkpoint {to_checkpoint}"] if to_checkpoint else [*map(str, wanted)]
        if to_checkpoint is None and group.streams() != sorted({cut.stream for cut in wanted}):
            places.append(f"the {'first' if begin is not Begin.LATEST else 'next'} events of each other stream")
        readers = "" if yes else _count(len(group.readers()), "reader")
        confirm(f"Reset reader group {name} to {', '.join(places)}, and stop {readers}?", yes=yes, as_json=as_json)
        group.reset(checkpoint=to_checkpoint, start=begin or Begin.EARLIEST, cuts=wanted)
        told = f"reader group {name} begins at {', '.join(places)}"
        print_result(told, _facts(group) if as_json else {}, as_json=as_json)


@groups.command("delete")
def delete(
    name: GroupName, yes: YesOption = False, as_json: JsonLinesOption = False, store: StoreOption = None
) -> None:
    """Delete a group, its checkpoints, and the holds on events for it. Its readers fail. The streams stay."""
    with open_store(store) as opened_store:
        if name not in opened_store.reader_groups():
            opened_store.reader_group(name)  # which says what there is
        confirm(f"Delete reader group {name}, {'' if yes else _whose(opened_store, name)}?", yes=yes, as_json=as_json)
        opened_store.delete_reader_group(name)
        print_result(f"reader group {name} is deleted", {"group": name}, as_json=as_json)


def _row(store: Store, name: str) -> tuple[str, str, str, str]:
    """Return what the list says of a group; of a damaged one, what is wrong."""
    try:
        group = store.reader_group(name)
        info = group.describe()
        unread, there = group.unread(), group.cut()
    except HeadgateError as error:
        return "", "", "", str(error)
    streams = [name if name in there else f"{name} (deleted)" for name in info.streams]
    checkpoints = ", ".join(x if not owed_by else f"{x} (open)" for x, owed_by in info.checkpoints.items())
    behind = f"{size_text(sum(unread.values()))} in {_count(len(unread), 'segment')}" if unread else "nothing"
    return ", ".join(streams), ", ".join(info.readers), behind, checkpoints


def _facts_or_problem(store: Store, name: str) -> dict[str, object]:
    try:
        return _facts(store.reader_group(name))
    except HeadgateError as error:
        return {"group": name, "problem": str(error)}


def _facts(group: ReaderGroup) -> dict[str, object]:
    info: GroupInfo = group.describe()
    unread = group.unread()
    return {
        "group": info.name,
        "streams": list(info.streams),
        "epoch": info.epoch,
        "checkpoints_kept": info.checkpoints_kept,
        "readers": {reader: [list(segment) for segment in own] for reader, own in info.readers.items()},
        "unread_bytes": sum(unread.values()),
        "unread": [[*segment, size] for segment, size in sorted(unread.items())],
        "cuts": {stream: str(cut) for stream, cut in group.cut().items()},
        "checkpoints": [
            {"checkpoint": name, "is_complete": not owed_by, "owed_by": list(owed_by)}
            for name, owed_by in info.checkpoints.items()
        ],
    }


def _whose(store: Store, name: str) -> str:
    try:
        info = store.reader_group(name).describe()
    except CorruptionError:
        return "which cannot be read"
    return f"which has {_count(len(info.readers), 'reader')} and {_count(len(info.checkpoints), 'checkpoint')}"


def _parsed(cuts: list[str] | None) -> list[StreamCut]:
    return [StreamCut.parse(cut) for cut in cuts or ()]


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
