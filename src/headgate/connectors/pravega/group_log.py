"""The log with the state of a reader group: read, appended to in one step with what was read, and kept short.

A mark at the segment says where Pravega's own clients begin to read; it is at a record that has the whole state. Moved
and followed by truncation as ``StateSynchronizerImpl.compact`` does it. Source: PV14, PV15.
"""

from __future__ import annotations

import struct
from uuid import UUID

from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.connectors.pravega.group_state import GroupMark, GroupState, newest_mark, state_after
from headgate.connectors.pravega.segment_log import SegmentLog
from headgate.connectors.pravega.segment_store import Command, Connection, Fields, refusal, unexpected, utf
from headgate.environment import Environment
from headgate.errors import ProtocolViolation, UsageError

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
