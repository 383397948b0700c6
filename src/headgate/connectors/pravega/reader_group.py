"""Reader groups of Pravega: where one has come to, and the group of a source, which readers and retention policies see.

A stream with a retention policy waits for what the group of a source releases: never what a retained checkpoint needs.
A pipeline may begin where a group of Pravega's own client has come to. The state of its own group says what the newest
completed checkpoint has read, so that programs in Java see it, and may read on from there. Nothing is restored from a
group: ``reader`` keeps the positions, which are part of checkpoints.

The state of a group is a log, appended to in one step with what was read, and kept short. A mark at the segment says
where Pravega's own clients begin to read; it is at a record that has the whole state. Moved and followed by truncation
as ``StateSynchronizerImpl.compact`` does it. Source: PV10, PV11, PV14–PV17.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from uuid import NAMESPACE_URL, UUID, uuid5

from headgate.connectors.base import HoldContext
from headgate.connectors.pravega.controller import Controller, Cut, ReaderGroup, Release, StreamName
from headgate.connectors.pravega.group_state import (
    GroupMark,
    GroupState,
    newest_mark,
    numbers_in,
    record_of,
    state_after,
)
from headgate.connectors.pravega.scaled_stream import Position, cut_before, ended_beside
from headgate.connectors.pravega.segment_store import (
    Access,
    Command,
    Connection,
    Fields,
    SegmentError,
    refusal,
    segment_info,
    unexpected,
    utf,
)
from headgate.connectors.pravega.stream_log import APPENDS_MAX, SegmentLog
from headgate.environment import Environment
from headgate.errors import FencedError, ProtocolViolation, StorageError, UsageError

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


LOG_BYTES_MAX = 64 << 10
"""With more bytes after the mark of a log, the mark moves."""

_MARK = UUID("7df9a874-246c-c9d6-9397-cdd19ead68c5")
"""The attribute of the segment."""

_NONE = -(1 << 63)
"""The value of an attribute that is not set."""


class GroupLog:
    """The log of one group. Every call may raise StorageError, and be repeated then."""

    def __init__(
        self, client: Controller, scope: str, group: str, environment: Environment, *, only_reads: bool = False
    ) -> None:
        """``only_reads``: nothing will be written."""
        self._name = f"reader group '{group}' of scope '{scope}'"
        self._log = SegmentLog(client, StreamName(scope, f"_RG{group}"), environment, only_reads=only_reads)
        self._records: list[bytes] = []

    @property
    def is_there(self) -> bool:
        """Whether there is such a group."""
        return self._log.is_there

    def look(self) -> None:
        """Read what came since the last look."""
        self._records += self._log.news()

    @property
    def state(self) -> GroupState | None:
        """What the group had when it was looked at; None: nothing yet.

        Raises:
            UsageError: it cannot be read.
        """
        try:
            return state_after(self._records)
        except ProtocolViolation as error:
            raise UsageError(
                f"the state of {self._name} is none that Pravega 0.13 writes ({error.problem}); give another group, or "
                "a stream cut"
            ) from error

    @property
    def mark(self) -> GroupMark | None:
        """Which checkpoint of Headgate was written last, when it was looked at."""
        return newest_mark(self._records)

    @property
    def last_record(self) -> bytes:
        """The last record, when it was looked at; empty: there is none."""
        return self._records[-1] if self._records else b""

    def write(self, record: bytes) -> bool:
        """Append a record with the whole state, if nothing came since the last look. Return whether it did."""
        at = self._log.read_to
        if not self._log.append_if_newest(record):
            return False
        self._shorten(at)
        return True

    def _shorten(self, at: int) -> None:
        """Let readers begin at the record at ``at``, if the log is long; remove what they began with before."""
        if at - self._log.begin <= LOG_BYTES_MAX:
            return
        connection, segment = self._log.connect(), self._log.segment
        before = _attribute(connection, segment)
        if at - max(before, self._log.begin) <= LOG_BYTES_MAX or not _set_attribute(connection, segment, before, at):
            return
        # up to the former mark, not to the new one: a reader that has just read the former one begins there
        if before != _NONE:
            _truncate(connection, segment, before)

    def close(self) -> None:
        """Close the connection."""
        self._log.close()


def _attribute(connection: Connection, segment: str) -> int:
    kind, data = connection.ask(
        Command.GET_SEGMENT_ATTRIBUTE, lambda number: _number(number) + utf(segment) + _MARK.bytes + connection.token()
    )
    fields = _expected(connection, kind, data, Command.SEGMENT_ATTRIBUTE)
    fields.long()
    return fields.long()


def _set_attribute(connection: Connection, segment: str, before: int, now: int) -> bool:
    """Set the mark if it is ``before``. Return whether it was."""
    kind, data = connection.ask(
        Command.UPDATE_SEGMENT_ATTRIBUTE,
        lambda number: (
            _number(number) + utf(segment) + _MARK.bytes + _number(now) + _number(before) + connection.token()
        ),
    )
    fields = _expected(connection, kind, data, Command.SEGMENT_ATTRIBUTE_UPDATED)
    fields.long()
    return fields.flag()


def _truncate(connection: Connection, segment: str, offset: int) -> None:
    kind, data = connection.ask(
        Command.TRUNCATE_SEGMENT, lambda number: _number(number) + utf(segment) + _number(offset) + connection.token()
    )
    if kind != Command.SEGMENT_IS_TRUNCATED:  # else it begins later by now
        _expected(connection, kind, data, Command.SEGMENT_TRUNCATED)


def _expected(connection: Connection, kind: int, data: bytes, expected: Command) -> Fields:
    if (refused := refusal(kind, data)) is not None:
        raise connection.failed(str(refused[1]))
    if kind != expected:
        raise unexpected(connection, kind, data)
    return Fields(data)


def _number(value: int) -> bytes:
    return struct.pack(">q", value)


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
            # only if nothing came since the look above: else what came is looked at, and it is decided again
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
