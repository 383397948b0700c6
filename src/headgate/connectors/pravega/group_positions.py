"""Positions of a source and of reader groups: where a group has come to, and a group that follows a pipeline.

A pipeline may begin where a group of Pravega's own client has come to. The state of its own group says what the newest
completed checkpoint has read, so that programs in Java see it, and may read on from there. Nothing is restored from the
group. Counterparts: ``group_log``, ``retention_group``. Source: PV14–PV17.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from headgate.connectors.base import HoldContext
from headgate.connectors.pravega.access import Access
from headgate.connectors.pravega.controller import Controller, Cut, StreamName
from headgate.connectors.pravega.group_log import GroupLog
from headgate.connectors.pravega.group_state import GroupMark, GroupState, numbers_in, record_of
from headgate.connectors.pravega.retention_group import claim
from headgate.connectors.pravega.scaled_stream import Position, cut_before, ended_beside
from headgate.connectors.pravega.segment_log import APPENDS_MAX
from headgate.connectors.pravega.segment_store import Connection, SegmentError, segment_info
from headgate.environment import Environment
from headgate.errors import FencedError, StorageError, UsageError

_TO_ITS_END = -1
"""The offset that Java gives a segment that was read to its end."""


def cut_of_group(
    client: Controller, stream: StreamName, name: str, environment: Environment, *, is_checkpoint: bool
) -> dict[int, int]:
    """Return the stream cut at which the readers of a group are, or at which its last checkpoint is.

    Raises:
        UsageError: there is no such group, or it does not read the stream, or its readers still read on.
        StorageError
    """
    where = f"reader group '{name}' of scope '{stream.scope}'"
    with closing(GroupLog(client, stream.scope, name, environment, only_reads=True)) as log:
        log.look()
        state = log.state
    if state is None:
        raise UsageError(
            f"Pravega at {client.address} has no {where} with positions; create it, or give another start="
        )
    if is_checkpoint:
        positions = state.last
        if not positions:
            raise UsageError(
                f"{where} has no checkpoint yet; take one, or begin at its positions: start='group:{name}'"
            )
    else:
        if state.assigned:
            raise UsageError(
                f"{where} still has readers ({_readers(state)}), and reads on; close them, or those that have died "
                f"with ReaderGroup.readerOffline, or begin at its last checkpoint: start='checkpoint:{name}'"
            )
        positions = state.unassigned
    found = numbers_in(stream, positions)
    if not found:
        raise UsageError(f"{where} has no position in stream '{stream}': it reads others, or has read all of it")
    cut = _whole_cut(client, stream, found, environment)
    if not client.is_valid(stream, cut):
        raise UsageError(
            f"{where} is at {cut} of stream '{stream}', which is no stream cut of it: the stream was created again"
        )
    return cut


def _whole_cut(
    client: Controller, stream: StreamName, positions: Mapping[int, int], environment: Environment
) -> dict[int, int]:
    """Return positions as a cut, which has the ends of segments that were read to their ends, too."""
    cut = {segment: at for segment, at in positions.items() if at != _TO_ITS_END}
    ended = positions.keys() - cut.keys()
    if ended or not client.is_valid(stream, cut):
        ended |= ended_beside(positions, lambda segment: client.successors(stream, segment))
    return cut | _ends(client, stream, ended, environment)


def _ends(client: Controller, stream: StreamName, segments: set[int], environment: Environment) -> dict[int, int]:
    found = {}
    access = Access(client, stream, environment, only_reads=True)
    for segment in sorted(segments):
        with closing(Connection(client.place(stream, segment), access)) as connection:
            try:
                found[segment] = segment_info(connection, stream.segment(segment)).end
            except SegmentError as error:
                raise UsageError(
                    f"segment {segment} of Pravega stream '{stream}' is gone, and a reader group still needs its end: "
                    "the stream was truncated; give a stream cut as start="
                ) from error
    return found


def publish(
    client: Controller,
    stream: StreamName,
    name: str,
    holder: HoldContext,
    checkpoint: int,
    cut: Cut,
    environment: Environment,
    *,
    begins: bool,
) -> None:
    """Let the state of a group say that a checkpoint is at ``cut``. May be repeated.

    Args:
        client: a connection.
        stream: what is read.
        name: of the group.
        holder: who reads.
        checkpoint: 0: none.
        cut: where it is.
        environment: of the process.
        begins: a generation begins there; then it does not matter where another life of the pipeline was.

    Raises:
        UsageError: the group is of another pipeline or program, or has readers.
        FencedError: a later generation has it.
        StorageError: the caller repeats it.
    """
    where = f"reader group '{name}' of stream '{stream}'"
    mark = GroupMark(holder.life, int(holder.generation), checkpoint)
    with closing(GroupLog(client, stream.scope, name, environment)) as log:
        for _ in range(APPENDS_MAX):
            log.look()
            record = record_of(stream, claim(client, stream, name, f"{holder.pipeline}/{holder.node}"), mark, cut)
            if _is_passed(log.mark, mark, where, begins=begins) or log.last_record == record:
                return
            state = log.state
            if state is not None and state.assigned:
                raise UsageError(
                    f"{where} has readers of Pravega's own client ({_readers(state)}), and is read by this pipeline, "
                    "too; close them, or those that have died with ReaderGroup.readerOffline, or give the pipeline a "
                    "group= of its own"
                )
            if log.write(record):
                return
    raise StorageError("note positions in", where, "others write to it all the time")


def _is_passed(found: GroupMark | None, mark: GroupMark, where: str, *, begins: bool) -> bool:
    """Whether the generation has noted a later checkpoint.

    Raises:
        FencedError: a later generation has noted one.
        UsageError: another life of the pipeline has.
    """
    if found is None:
        return False
    if found.life != mark.life:
        if begins:
            return False
        raise UsageError(
            f"{where} was taken over by another pipeline of the same name, with other checkpoints; give each of them a "
            "group= of its own"
        )
    if found.generation > mark.generation:
        raise FencedError(where, mark.generation, found.generation)
    return found.generation == mark.generation and found.checkpoint > mark.checkpoint


def _readers(state: GroupState) -> str:
    return ", ".join(sorted(state.assigned))


def cut_at(client: Controller, stream: StreamName, positions: Mapping[int, Position], begin: Cut) -> dict[int, int]:
    """Return the cut of one checkpoint; of empty positions: where reading begins."""
    if not positions:
        return dict(begin)
    return cut_before([positions], lambda segment: client.successors(stream, segment))
