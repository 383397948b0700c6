"""A stream of one segment as a log of records that several processes append to, as ``RevisionedStreamClient`` in Java.

What is appended only if nothing came since the log was read orders the writers.
"""

from __future__ import annotations

from headgate.connectors.pravega.access import Access
from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.connectors.pravega.events import unframe
from headgate.connectors.pravega.segment_store import (
    Command,
    Connection,
    SegmentError,
    append_if_at,
    read,
    segment_info,
)
from headgate.environment import Environment
from headgate.errors import StorageError, UsageError

APPENDS_MAX = 200
"""So often another process may come first."""


class SegmentLog:
    """The log. Every call may raise StorageError, and be repeated then."""

    def __init__(
        self, client: Controller, stream: StreamName, environment: Environment, *, only_reads: bool = False
    ) -> None:
        """``only_reads``: the user needs no right to write the stream."""
        self.client, self.stream = client, stream
        self._access = Access(client, stream, environment, only_reads=only_reads)
        self._connection: Connection | None = None
        self.segment, self.number = "", 0
        self.begin = self.read_to = 0
        """Where the log began, and how far it was read, when ``news`` was called."""

    @property
    def is_there(self) -> bool:
        """Whether the stream is there."""
        if not self.segment:
            if not self.client.exists(self.stream):
                return False
            try:
                (segment,) = self.client.head(self.stream)
            except UsageError as error:  # another process has not finished to create it
                why = "it is being created or deleted"
                raise StorageError("look at", f"stream '{self.stream}'", why) from error
            self.segment = self.stream.segment(segment)
            self.number = segment
        return True

    def news(self) -> list[bytes]:
        """Return the records since the last call; of a log that is not there, none."""
        if not self.is_there:
            return []
        connection = self.connect()
        try:
            info = segment_info(connection, self.segment)
            self.begin, begin = info.start, max(self.read_to, info.start)
            data = read(connection, self.segment, begin, info.end)
        except SegmentError as error:
            if error.kind is Command.NO_SUCH_SEGMENT:
                self.segment, self.read_to = "", 0
                return []
            raise connection.failed(str(error)) from error
        events, ends = unframe(data, f"stream {self.stream}")
        self.read_to = begin + int(ends[-1])
        found: list[bytes] = events.to_pylist()
        return found

    def append(self, record: bytes) -> None:
        """Append a record, whatever else is there. It may be there twice after a call that raised."""
        for _ in range(APPENDS_MAX):
            if self._append(record, None):
                return
        raise StorageError("append to", f"stream '{self.stream}'", "others write to it all the time")

    def append_if_newest(self, record: bytes) -> bool:
        """Append a record if there is none that ``news`` has not returned. Return whether it was appended.

        After a call that raised, ``news`` tells whether it was.
        """
        return self._append(record, self.read_to)

    def _append(self, record: bytes, at: int | None) -> bool:
        """``at``: where the log must end; None: wherever."""
        if not self.is_there:
            raise StorageError("append to", f"stream '{self.stream}'", "it is not there")
        connection = self.connect()
        try:
            end = segment_info(connection, self.segment).end if at is None else at
            return append_if_at(connection, self.segment, end, record)
        except SegmentError as error:
            raise connection.failed(str(error)) from error

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def connect(self) -> Connection:
        """Return a connection to the store that has the segment."""
        if self._connection is None or self._connection.is_closed:
            self._connection = Connection(self.client.place(self.stream, self.number), self._access)
        return self._connection
