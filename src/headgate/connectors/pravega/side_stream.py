"""Small streams of one segment that Headgate keeps beside those of users, as a log of JSON records.

Pravega's own clients keep the state of reader groups in the same way. A name begins with ``headgate-``.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

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


class SideStream:
    """The log of one purpose beside one stream. Every call may raise StorageError, and be repeated then."""

    def __init__(self, client: Controller, beside: StreamName, purpose: str, environment: Environment) -> None:
        """``purpose``: what the log is for; logs of other purposes are other streams."""
        name = hashlib.sha256(f"{beside}\0{purpose}".encode()).hexdigest()[:16]
        self._stream = StreamName(beside.scope, f"headgate-{name}")
        self._client, self._access = client, Access(client, self._stream, environment)
        self._connection: Connection | None = None
        self._segment, self._number = "", 0
        self._begin = self._read_to = 0

    @property
    def name(self) -> str:
        """The name of the stream, for people."""
        return str(self._stream)

    def news(self) -> list[Any]:
        """Return the records since the last call; of a log that is not there, none."""
        if not self._is_there():
            return []
        connection = self._connect()
        try:
            info = segment_info(connection, self._segment)
            self._begin, begin = info.start, max(self._read_to, info.start)
            data = read(connection, self._segment, begin, info.end)
        except SegmentError as error:
            if error.kind is Command.NO_SUCH_SEGMENT:
                self._segment, self._read_to = "", 0
                return []
            raise connection.failed(str(error)) from error
        events, ends = unframe(data, f"stream {self._stream}")
        self._read_to = begin + int(ends[-1])
        return [json.loads(event) for event in events.to_pylist()]

    def append(self, record: Any) -> None:
        """Append a record, whatever else is there. It may be there twice after a call that raised."""
        for _ in range(APPENDS_MAX):
            if self._append(record, None):
                return
        raise StorageError("append to", f"stream '{self._stream}'", "others write to it all the time")

    def append_if_newest(self, record: Any) -> bool:
        """Append a record if there is none that ``news`` has not returned. Return whether it was appended.

        After a call that raised, ``news`` tells whether it was.
        """
        return self._append(record, self._read_to)

    def _append(self, record: Any, at: int | None) -> bool:
        """``at``: where the log must end; None: wherever."""
        if not self._is_there():
            self._client.create_stream(self._stream, 1)
            assert self._is_there()
        connection = self._connect()
        data = json.dumps(record, sort_keys=True).encode()
        try:
            end = segment_info(connection, self._segment).end if at is None else at
            return append_if_at(connection, self._segment, end, data)
        except SegmentError as error:
            raise connection.failed(str(error)) from error

    def truncate(self, offset: int) -> None:
        """Remove the records in front of ``offset``."""
        self._client.truncate(self._stream, {self._number: offset})

    @property
    def length(self) -> int:
        """How many bytes the log had when ``news`` was called."""
        return self._read_to - self._begin

    @property
    def read_to(self) -> int:
        """The offset that ``news`` has come to."""
        return self._read_to

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _is_there(self) -> bool:
        if not self._segment:
            if not self._client.exists(self._stream):
                return False
            try:
                (segment,) = self._client.head(self._stream)
            except UsageError as error:  # another process has not finished to create it
                why = "it is being created or deleted"
                raise StorageError("look at", f"stream '{self._stream}'", why) from error
            self._segment = self._stream.segment(segment)
            self._number = segment
        return True

    def _connect(self) -> Connection:
        if self._connection is None or self._connection.is_closed:
            self._connection = Connection(self._client.place(self._stream, self._number), self._access)
        return self._connection
