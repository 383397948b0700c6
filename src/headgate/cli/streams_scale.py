"""``headgate streams scale``: other segments for a stream.

Counterpart: ``headgate.store.scaled_store``. ``streams`` has the other commands.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headgate.cli.streams_open import JsonOption, Name, StoreOption, answer, opened
from headgate.errors import UsageError
from headgate.protocol.store.layouts import KEY_SPACE, Layout, Segment
from headgate.store.store import Store


def add_scale(app: typer.Typer) -> None:
    """Add the command of this file to those about streams."""
    app.command("scale")(scale)


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
    with opened(store) as opened_store:
        before = opened_store.find(name).segments_count
        layout = _scaled(opened_store, name, segments, split, into, merge)
        shares = ", ".join(f"{segment.segment_id} ({share_of(segment)} of the keys)" for segment in layout.present)
        told = f"stream {name}: {len(layout.present)} segments instead of {before}: {shares}"
        present = {str(x.segment_id): (x.key_high - x.key_low) / KEY_SPACE for x in layout.present}
        answer(told, {"stream": name, "segments": len(present), "before": before, "shares": present}, as_json=as_json)


def _scaled(store: Store, name: str, segments: int | None, split: int | None, into: int, merge: str | None) -> Layout:
    if segments is not None:
        return store.resize(name, segments)
    if split is not None:
        return store.split(name, split, into)
    numbers = [number.strip() for number in str(merge).split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"--merge takes numbers of segments, such as 3,4, not {merge!r}")
    return store.merge(name, [int(number) for number in numbers])
