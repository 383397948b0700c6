"""``headgate streams copy``: the events of a stream into another one, of the same store or another.

Counterparts: ``headgate.store.following`` reads, ``headgate.store.shared_transaction`` writes. Source: CL5 of
docs/spec/stream-clients.md. Never shows a part of a copy.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from headgate.cli.bars import Bar, bar
from headgate.cli.streams_open import JsonOption, Name, StoreOption, answer, opened
from headgate.errors import HeadgateError, UsageError
from headgate.store.cuts import StreamCut
from headgate.store.followed_store import EARLIEST, LATEST
from headgate.store.following import StreamFollower
from headgate.store.shared_transaction import SharedTransaction

Target = Annotated[str, typer.Argument(metavar="TARGET", help="The stream to copy to; created if it does not exist.")]


def add_copy(app: typer.Typer) -> None:
    """Add the command of this file to those about streams."""
    app.command("copy")(copy)


def copy(
    name: Name,
    target: Target,
    to_store: Annotated[
        str | None, typer.Option("--to-store", help="The store of TARGET, if it is another one; created if missing.")
    ] = None,
    cut: Annotated[
        str | None, typer.Option("--cut", help="Begin at this cut, for example the one of an earlier copy.")
    ] = None,
    until: Annotated[str | None, typer.Option("--end", help="End at this cut, instead of the present end.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Only events with this value of the routing key.")] = None,
    as_json: JsonOption = False,
    store: StoreOption = None,
) -> None:
    """Copy the events of a stream into another one. All of them become visible at once, or none.

    Events of a routing key stay in order. The command prints the cut at which it ended; with --cut the next copy begins
    there.
    """
    with opened(store) as source, opened(store if to_store is None else to_store, makes=True) as other:
        if (source.root, name) == (other.root, target):
            raise UsageError(f"stream '{name}' is not copied into itself; name another one")
        info = source.describe(name)
        begin = EARLIEST if cut is None else StreamCut.parse(cut)
        end = LATEST if until is None else StreamCut.parse(until)
        follower = source.follow(name, start=begin, end=end, key=key)
        columns, segments = follower.stream.schema, info.segments_count
        other.create_stream(target, columns, segments=segments, routing_key=info.routing_key, if_not_exists=True)
        transaction = other.begin_shared(target)
        try:
            with bar(f"copying {name}", info.size_bytes) as shown:
                count = _write(follower, transaction, shown)
            transaction.commit()
        except BaseException:
            with contextlib.suppress(HeadgateError):
                transaction.abort()
            raise
        ended = str(follower.cut())
        told = f"{count:,} events of {name} copied to {target}, up to {ended}"
        answer(told, {"stream": name, "target": target, "events": count, "cut": ended}, as_json=as_json)


def _write(follower: StreamFollower, transaction: SharedTransaction, shown: Bar) -> int:
    """Write what is read into the transaction; return how many events."""
    count = 0
    with transaction.writer("copy") as writer:
        for found in follower:
            writer.write(found.batch)
            count += found.batch.num_rows
            shown.advance(found.batch.nbytes)
    return count
