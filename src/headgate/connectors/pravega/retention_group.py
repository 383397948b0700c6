"""A reader group of Pravega without readers: a stream with a retention policy waits for what it releases.

Counterpart: ``reader`` keeps the positions, which are part of checkpoints. Nothing is restored from the group. Never
releases what a retained checkpoint needs. Source: PV10, PV11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import NAMESPACE_URL, UUID, uuid5

from headgate.connectors.pravega.controller import Controller, Cut, ReaderGroup, Release, StreamName
from headgate.connectors.pravega.scaled_stream import Position, cut_before
from headgate.errors import StorageError, UsageError

_BY_NAME = 5
"""The version of ids that are made of names; Pravega's own client draws ids of version 4."""


def hold_back(
    client: Controller,
    stream: StreamName,
    name: str,
    owner: str,
    begin: Cut,
    checkpoints: Sequence[Mapping[int, Position]],
) -> None:
    """Let the stream be truncated in front of what is needed, and no further.

    Args:
        client: a connection.
        stream: what is read.
        name: of the group, which is created in the scope of the stream.
        owner: who reads: pipeline and node.
        begin: where reading begins without a checkpoint.
        checkpoints: the positions of each that may be restored; empty ones are from before the source was there.

    Raises:
        UsageError: another pipeline, or a program of its own, has the group.
        StorageError: the caller repeats it.
    """
    group = claim(client, stream, name, owner)
    first = {segment: Position(offset) for segment, offset in begin.items()}
    needed = [positions or first for positions in checkpoints]
    cut = cut_before(needed or [first], lambda segment: client.successors(stream, segment))
    answer = client.release(stream, group, cut)
    if answer is Release.GOES_BACK and not checkpoints:  # started over: what was released is needed again
        client.update_group(stream, group, waits=False)
        answer = client.release(stream, claim(client, stream, name, owner), cut)
    if answer not in (Release.DONE, Release.GOES_BACK):  # a generation that was replaced may be late
        where = f"reader group '{name}' of stream '{stream}'"
        raise StorageError("release events for", where, f"Pravega answers {answer.name.lower().replace('_', ' ')}")


def forget(client: Controller, stream: StreamName, name: str) -> None:
    """Let the stream not wait any more for a group that ``hold_back`` made. May be repeated.

    The group stays: Pravega 0.13 does not answer when one of a deleted name is created.

    Raises:
        UsageError: it is not there, or is another one's.
        StorageError
    """
    group = client.group(stream.scope, name)
    if group is None:
        raise UsageError(f"Pravega at {client.address} has no reader group '{name}' in scope '{stream.scope}'")
    if group.id.version != _BY_NAME:
        raise UsageError(f"reader group '{name}' was not made by Headgate; delete it with the program that made it")
    client.update_group(stream, group, waits=False)


def claim(client: Controller, stream: StreamName, name: str, owner: str) -> ReaderGroup:
    """Return the group that the stream waits for; create it if it is missing.

    The stream does not wait after ``forget``, and if it was deleted and created again.

    Raises:
        UsageError: another pipeline, or a program of its own, has the group.
        StorageError
    """
    mine = _id(stream, name, owner)
    group = client.group(stream.scope, name) or client.create_group(stream, name, mine)
    if group.id != mine:
        raise UsageError(
            f"reader group '{name}' of scope '{stream.scope}' belongs to another pipeline, source or program than "
            f"'{owner}', or is for another stream than '{stream}'; give each source a group= of its own"
        )
    if group.releases_by_hand and client.is_subscribed(stream, group):
        return group
    return client.update_group(stream, group, waits=True)


def _id(stream: StreamName, name: str, owner: str) -> UUID:
    return uuid5(NAMESPACE_URL, f"headgate:{stream}:{name}:{owner}")
