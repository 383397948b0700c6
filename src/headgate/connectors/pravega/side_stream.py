"""Small streams of one segment that Headgate keeps beside those of users, as a log of JSON records.

Pravega's own clients keep the state of reader groups in the same way. A name begins with ``headgate-``.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.connectors.pravega.segment_log import SegmentLog
from headgate.environment import Environment


class SideStream:
    """The log of one purpose beside one stream. Every call may raise StorageError, and be repeated then."""

    def __init__(self, client: Controller, beside: StreamName, purpose: str, environment: Environment) -> None:
        """``purpose``: what the log is for; logs of other purposes are other streams."""
        name = hashlib.sha256(f"{beside}\0{purpose}".encode()).hexdigest()[:16]
        self._log = SegmentLog(client, StreamName(beside.scope, f"headgate-{name}"), environment)

    @property
    def name(self) -> str:
        """The name of the stream, for people."""
        return str(self._log.stream)

    def news(self) -> list[Any]:
        """Return the records since the last call; of a log that is not there, none."""
        return [json.loads(record) for record in self._log.news()]

    def append(self, record: Any) -> None:
        """Append a record, whatever else is there. It may be there twice after a call that raised."""
        self._create()
        self._log.append(_encoded(record))

    def append_if_newest(self, record: Any) -> bool:
        """Append a record if there is none that ``news`` has not returned. Return whether it was appended.

        After a call that raised, ``news`` tells whether it was.
        """
        self._create()
        return self._log.append_if_newest(_encoded(record))

    def truncate(self, offset: int) -> None:
        """Remove the records in front of ``offset``."""
        self._log.client.truncate(self._log.stream, {self._log.number: offset})

    @property
    def length(self) -> int:
        """How many bytes the log had when ``news`` was called."""
        return self._log.read_to - self._log.begin

    @property
    def read_to(self) -> int:
        """The offset that ``news`` has come to."""
        return self._log.read_to

    def close(self) -> None:
        """Close the connection."""
        self._log.close()

    def _create(self) -> None:
        if not self._log.is_there:
            self._log.client.create_stream(self._log.stream, 1)


def _encoded(record: Any) -> bytes:
    return json.dumps(record, sort_keys=True).encode()
