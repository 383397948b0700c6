"""Streams of one segment as logs, to which several processes append, and what Headgate keeps in logs beside a stream.

``SegmentLog`` is as ``RevisionedStreamClient`` in Java: what is appended only if nothing came since the log was read
orders the writers. ``SideStream`` is a log of JSON records beside a stream of a user, as Pravega's own clients keep the
state of reader groups; its name begins with ``headgate-``. ``StreamOwner`` is such a log, which says who writes to a
stream, which transactions they opened, and which they committed: of two that claim at the same time one reads again.
Pravega itself cannot list open transactions by their owner, and forgets what became of them after a day.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from headgate.connectors.fenced_sink import Fence
from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.connectors.pravega.events import unframe
from headgate.connectors.pravega.segment_store import (
    Access,
    Command,
    Connection,
    SegmentError,
    append_if_at,
    read,
    segment_info,
)
from headgate.dataclass import dataclass
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


CLAIMS_MAX = 200
"""So often another process may come first."""

LOG_BYTES_MAX = 64 << 10
"""A longer log is replaced by one record."""


@dataclass(slots=True)
class Known:
    """What the log has of one sink.

    Attributes:
        opened: ids of transactions → generation that opened them, unless it is known that they are decided.
        committed: ids → checkpoint.
    """

    generation: int = -1
    life: str = ""
    opened: dict[str, int] = field(default_factory=dict)
    committed: dict[str, int] = field(default_factory=dict)


class StreamOwner:
    """The log of the sinks in front of one stream. Every call may raise StorageError, and be repeated then."""

    def __init__(self, client: Controller, stream: StreamName, environment: Environment) -> None:
        self._side = SideStream(client, stream, "sinks", environment)
        self._known: dict[str, Known] = {}

    @property
    def name(self) -> str:
        """The name of the stream with the log."""
        return self._side.name

    def known(self, owner: str) -> Known:
        """Return what the log has of a sink now."""
        self._read()
        return self._known.setdefault(owner, Known())

    def fence(self, owner: str) -> Fence | None:
        """Return the fence of a sink, if there is one."""
        found = self.known(owner)
        return None if found.generation < 0 else Fence(owner, found.generation, found.life)

    def fences(self) -> list[Fence]:
        """Return the fences of all sinks."""
        self._read()
        return [fence for owner in list(self._known) if (fence := self.fence(owner)) is not None]

    def refuse_if_replaced(self, fence: Fence) -> None:
        """Raise if a newer generation has claimed the stream.

        Raises:
            FencedError
        """
        fence.refuse_if_older_than(self.known(fence.owner).generation)

    def claim(self, fence: Fence) -> None:
        """Remember ``fence``, in one step with the comparison.

        Raises:
            FencedError: a newer fence is there, or one of another life.
        """
        for _ in range(CLAIMS_MAX):
            known = self.fence(fence.owner)
            fence.refuse_if_replaced_by(known)
            if known == fence:
                return
            record = {"kind": "claim", "owner": fence.owner, "generation": fence.generation, "life": fence.life}
            if self._side.append_if_newest(record):
                return
        raise StorageError("claim", f"stream '{self.name}'", "others claim it all the time")

    def opened(self, fence: Fence, transaction: str) -> None:
        """Remember a transaction that was opened.

        Raises:
            FencedError: a newer generation has claimed the stream, and may not have seen it.
        """
        record = {"kind": "opened", "owner": fence.owner, "generation": fence.generation, "id": transaction}
        # in this order: a generation that claims after the record sees it, and one that claimed before is seen here
        self._side.append(record)
        self.refuse_if_replaced(fence)

    def decided(self, owner: str, committed: Mapping[str, int], aborted: Iterable[str] = ()) -> None:
        """Remember what became of transactions. ``committed``: id → checkpoint."""
        record = {"kind": "decided", "owner": owner, "committed": dict(committed), "aborted": list(aborted)}
        if committed or record["aborted"]:
            self._side.append(record)

    def forget(self, owner: str, before: int, kept: Iterable[str]) -> None:
        """Forget what was committed for checkpoints below ``before``, but for ``kept``; keep the log short."""
        known, kept = self.known(owner), set(kept)
        if any(at < before and one not in kept for one, at in known.committed.items()):
            self._side.append({"kind": "forgotten", "owner": owner, "before": before, "kept": sorted(kept)})
        self._read()
        if self._side.length > LOG_BYTES_MAX:
            # where the next record will stand, if nothing comes in between
            begin = self._side.read_to
            whole = {name: [one.generation, one.life, one.opened, one.committed] for name, one in self._known.items()}
            if self._side.append_if_newest({"kind": "whole", "owners": whole}):
                # only now: a reader that begins meanwhile has either the whole log, or this record
                self._side.truncate(begin)

    def close(self) -> None:
        """Close the connection."""
        self._side.close()

    def _read(self) -> None:
        for record in self._side.news():
            self._apply(record)

    def _apply(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "whole":
            self._known = {name: Known(*parts) for name, parts in record["owners"].items()}
            return
        known = self._known.setdefault(record["owner"], Known())
        match record["kind"]:
            case "claim":
                known.generation, known.life = record["generation"], record["life"]
            case "opened":
                known.opened[record["id"]] = record["generation"]
            case "decided":
                known.committed |= record["committed"]
                for one in (*record["committed"], *record["aborted"]):
                    known.opened.pop(one, None)
            case "forgotten":
                kept = set(record["kept"])
                known.committed = {
                    one: at for one, at in known.committed.items() if at >= record["before"] or one in kept
                }
