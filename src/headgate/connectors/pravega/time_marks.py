"""Event time in a stream of Pravega: the marks that it makes of what writers note.

Writers note times (``Controller.note_time``). Every few seconds the controller appends a mark to an internal stream,
``_MARK`` and the name of the stream: the lowest of these times, and a stream cut after all that was written by then.
Format: ``io.pravega.shared.watermarks`` of Pravega 0.13. Source: PV12, PV13 of docs/spec/connectors.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.connectors.pravega.events import unframe
from headgate.connectors.pravega.segment_store import Access, Command, Connection, SegmentError, read, segment_info
from headgate.dataclass import dataclass
from headgate.environment import Environment
from headgate.errors import CorruptionError
from headgate.protocol.watermarks import WATERMARK_MIN_MS

READ_BYTES = 1 << 20

RETAINED_MAX = 2_000
"""So many marks wait until the slowest segment has passed them; then no more are read."""

_REVISION = struct.Struct(">BBBBi")
"""In front of a value: format, version, number of revisions, which revision, length."""
_BOUNDS = struct.Struct(">qq")
_SEGMENT = struct.Struct(">qdd")
_OFFSET = struct.Struct(">q")


def marks_of(stream: StreamName) -> StreamName:
    """Return the stream with the marks of a stream."""
    return StreamName(stream.scope, f"_MARK{stream.stream}")


@dataclass(frozen=True, slots=True)
class TimeMark:
    """No event beyond a cut is as early as a time.

    Attributes:
        at: where the mark stands in the stream of marks.
        watermark_ms: the time.
        cut: segment → offset, over all keys.
    """

    at: int
    watermark_ms: int
    cut: Mapping[int, int]

    def is_in_front_of(self, segment: int, offset: int) -> bool:
        """Whether a segment from an offset on is beyond the cut. A higher number follows what the cut has."""
        end = self.cut.get(segment)
        return segment > max(self.cut) if end is None else offset >= end


def time_mark(data: bytes, at: int, where: str) -> TimeMark:
    """Return the mark that an entry has.

    Raises:
        CorruptionError
    """
    try:
        place = _body(data, 0)
        earliest_ms, _ = _BOUNDS.unpack_from(data, place)
        count, place = _compact_int(data, place + _BOUNDS.size)
        cut = {}
        for _ in range(count):
            place = _body(data, place)
            segment = _SEGMENT.unpack_from(data, place)[0]
            cut[segment] = _OFFSET.unpack_from(data, place + _SEGMENT.size)[0]
            place += _SEGMENT.size + _OFFSET.size
        if not cut:
            raise ValueError("no segments")
    except (struct.error, IndexError, ValueError) as error:
        raise CorruptionError(where, at, "a watermark of Pravega", str(error)) from error
    return TimeMark(at, max(earliest_ms - 1, WATERMARK_MIN_MS), cut)


def _body(data: bytes, at: int) -> int:
    """Return where the first revision of a value begins; what later revisions add is not needed."""
    form, version, revisions, revision, _ = _REVISION.unpack_from(data, at)
    if (form, version, revision) != (0, 0, 0) or not revisions:
        raise ValueError(f"format {form}, version {version}, revision {revision}")
    return at + _REVISION.size


def _compact_int(data: bytes, at: int) -> tuple[int, int]:
    """Return a number that has as many bytes as its first two bits say, and what follows it."""
    size = (data[at] >> 6) + 1
    number = int.from_bytes(data[at : at + size], "big") & ((1 << (8 * size - 2)) - 1)
    return number, at + size


class MarkReader:
    """Reads marks one after the other. Every call may raise StorageError, and be repeated then."""

    def __init__(self, client: Controller, stream: StreamName, environment: Environment, begin: int) -> None:
        self._stream = marks_of(stream)
        self._client, self._next = client, begin
        self._access = Access(client, self._stream, environment, only_reads=True)
        self._connection: Connection | None = None
        self.has_more = True
        """Whether the last call has left some."""

    def read(self) -> list[TimeMark]:
        """Return the marks that follow, some of them if they are many.

        Raises:
            UsageError: Pravega has no marks for the stream.
        """
        if self._connection is None or self._connection.is_closed:
            self._connection = Connection(self._client.place(self._stream, 0), self._access)
        name = self._stream.segment(0)
        try:
            info = segment_info(self._connection, name)
            begin = max(self._next, info.start)
            end = min(info.end, begin + READ_BYTES)
            data = read(self._connection, name, begin, end)
        except SegmentError as error:
            if error.kind is not Command.WRONG_HOST:
                self.has_more = False
                return []  # the stream was deleted, which its segments say
            raise self._connection.failed(str(error)) from error
        events, ends = unframe(data, f"stream {self._stream}")
        self._next, self.has_more = begin + int(ends[-1]), end < info.end
        starts = (begin + ends[:-1]).tolist()
        return [time_mark(event, at, name) for event, at in zip(events.to_pylist(), starts, strict=True)]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


class SegmentTimes:
    """How far segments have come in event time, by the marks that their positions have passed."""

    def __init__(self, begin: int) -> None:
        """``begin``: where the marks begin that are given to ``add``."""
        self._begin = begin
        self._marks: list[TimeMark] = []
        self._passed: dict[int, tuple[int, int]] = {}
        """Segment → number of marks that need not be looked at again, and watermark."""

    def add(self, marks: Iterable[TimeMark]) -> None:
        """These follow."""
        self._marks += marks

    @property
    def wants_more(self) -> bool:
        """Whether there is room for more marks."""
        return len(self._marks) < RETAINED_MAX

    def watermark_ms(self, segment: int, offset: int) -> int:
        """Return the watermark of a segment that was read up to ``offset``."""
        count, found = self._passed.get(segment, (0, WATERMARK_MIN_MS))
        for at in range(count, len(self._marks)):
            mark = self._marks[at]
            if mark.is_in_front_of(segment, offset):
                count, found = at + 1, mark.watermark_ms
            elif segment in mark.cut:
                break
        self._passed[segment] = (count, found)
        return found

    def begin_of(self, segment: int) -> int:
        """Return where the marks begin that are needed to go on with a segment from where it is."""
        count, _ = self._passed.get(segment, (0, WATERMARK_MIN_MS))
        if not self._marks:
            return self._begin
        return self._marks[max(count - 1, 0)].at

    def keep_for(self, segments: Iterable[int]) -> None:
        """Forget the marks that all of ``segments`` have passed, but for the last of these."""
        self._passed = {one: self._passed.get(one, (0, WATERMARK_MIN_MS)) for one in segments}
        passed = min((count for count, _ in self._passed.values()), default=0) - 1
        if passed > 0:
            del self._marks[:passed]
            self._passed = {one: (count - passed, found) for one, (count, found) in self._passed.items()}
