"""``headgate streams read`` and ``tail``: print the events of a stream, and those that come.

Counterpart: ``headgate.store.following``. ``streams`` has the other commands. Source: CL1 and CL2 of
docs/spec/stream-clients.md. Never joins a reader group, and holds nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import StrEnum
from types import FrameType
from typing import Annotated

import typer

from headgate.cli.streams_open import Name, StoreOption, opened
from headgate.cli.streams_text import Format, is_json, text_lines
from headgate.cli.text import write_lines
from headgate.errors import HeadgateError, UsageError
from headgate.store.cuts import StreamCut
from headgate.store.followed_store import EARLIEST, LATEST
from headgate.store.following import StreamFollower
from headgate.store.store import Store

LINES_AT_A_TIME = 8_192
LISTENS_AGAIN = "1s"
"""So often it is looked whether there was a Ctrl-C."""

Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Wait for new events until the stream is sealed; Ctrl-C ends it.")
]
Key = Annotated[str | None, typer.Option("--key", help="Only events with this value of the routing key.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print events.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per event, whatever the columns are.")]


class Start(StrEnum):
    """Where reading begins."""

    EARLIEST = EARLIEST
    LATEST = LATEST


def add_read(app: typer.Typer) -> None:
    """Add the commands of this file to those about streams."""
    for command in (read, tail):
        app.command(command.__name__)(command)


def read(
    name: Name,
    follow: Follow = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="Stop after this many events.")] = None,
    start: Annotated[Start, typer.Option("--start", help="Where to begin.")] = Start.EARLIEST,
    at: Annotated[
        datetime | None, typer.Option("--at", help="Begin with events that became visible at this local time or later.")
    ] = None,
    cut: Annotated[str | None, typer.Option("--cut", help="Begin at this cut, from 'headgate streams cut'.")] = None,
    until: Annotated[str | None, typer.Option("--end", help="End at this cut.")] = None,
    key: Key = None,
    format_: FormatOption = Format.AUTO,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Print the events of a stream. Events of a routing key stay in order, even while the stream is scaled."""
    with opened(store) as opened_store:
        if (at is not None) + (cut is not None) + (start is not Start.EARLIEST) > 1:
            raise UsageError("say where to begin once: --start, --at or --cut")
        if follow and until is not None:
            raise UsageError("--end says where to end, so it does not go with --follow")
        begin = at or (StreamCut.parse(cut) if cut is not None else start.value)
        end = LATEST if until is None else StreamCut.parse(until)
        follower = opened_store.follow(name, start=begin, end=None if follow else end, key=key)
        _print(follower, limit=limit, follow=follow, as_json=is_json(format_, follower.stream, as_json=as_json))


def tail(
    name: Name,
    follow: Follow = False,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many events of each segment.")] = 10,
    key: Key = None,
    format_: FormatOption = Format.AUTO,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Print the last events of each segment of a stream, and with -f all new events."""
    with opened(store) as opened_store:
        begin = _last(opened_store, name, count)
        follower = opened_store.follow(name, start=begin, end=None if follow else LATEST, key=key)
        _print(follower, limit=None, follow=follow, as_json=is_json(format_, follower.stream, as_json=as_json))


def _last(store: Store, name: str, count: int) -> StreamCut:
    """Return the cut in front of the last events of the segments that take events."""
    stream = store.find(name)
    layout, extents = store.layout_and_extents(stream)
    present = {segment.segment_id for segment in layout.present}
    begins = {
        number: max(extent.head, extent.end - count) if number in present else extent.end
        for number, extent in extents.items()
    }
    return StreamCut(stream.name, stream.stream_id, begins)


def _print(follower: StreamFollower, *, limit: int | None, follow: bool, as_json: bool) -> None:
    left = sys.maxsize if limit is None else limit
    with _ending_quietly(follow) as was_interrupted:
        while left > 0 and not follower.has_ended:
            found = follower.read(min(left, LINES_AT_A_TIME), timeout=LISTENS_AGAIN if follow else 0)
            if was_interrupted():
                raise KeyboardInterrupt
            if found is None:
                if not follow:
                    break
                continue
            left -= found.batch.num_rows
            write_lines(text_lines(found.batch, as_json=as_json))
            if follow:
                sys.stdout.flush()
        sys.stdout.flush()


@contextlib.contextmanager
def _ending_quietly(follow: bool) -> Iterator[Callable[[], bool]]:
    """End without a word where a person, or who reads the output, has ended it (CL2).

    Yields whether there was a Ctrl-C: its exception is lost if it comes where Python or a library ignores exceptions,
    as in a finaliser, and SQLite makes another one of it in a callback.
    """
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    is_ours = follow and threading.current_thread() is threading.main_thread()
    former = signal.signal(signal.SIGINT, interrupt) if is_ours else None
    try:
        yield lambda: bool(interrupts)
    except KeyboardInterrupt:
        if not follow:
            raise
        raise typer.Exit(0) from None
    except HeadgateError:
        if not interrupts:
            raise
        raise typer.Exit(0) from None
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # what is still to be written at the end has nowhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    finally:
        if former is not None:
            signal.signal(signal.SIGINT, former)
