"""``headgate streams scale`` and ``scaling``: change the number of segments, by hand or automatically."""

from __future__ import annotations

from typing import Annotated

import typer

from headgate.cli.streams.common import JsonOption, Name, StoreOption, open_store, print_result
from headgate.errors import UsageError
from headgate.protocol.store.layouts import KEY_SPACE, Layout, Segment
from headgate.store.policies import Scaling
from headgate.store.store import Store


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
    as_json: JsonOption = False,
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
    as_json: JsonOption = False,
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
