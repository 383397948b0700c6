"""``headgate streams retention``, ``cut``, ``truncate`` and ``release``: how long events stay, where streams begin."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from headgate.cli.streams.common import JsonOption, Name, StoreOption, YesOption, confirm, open_store, print_result
from headgate.errors import UsageError
from headgate.store.policies import Retention
from headgate.store.streams import StreamCut

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
    as_json: JsonOption = False,
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
    as_json: JsonOption = False,
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
    as_json: JsonOption = False,
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
    as_json: JsonOption = False,
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
