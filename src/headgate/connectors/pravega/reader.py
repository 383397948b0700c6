"""Reads the segments of a stream of Pravega: one split per segment, whose position is an offset in it.

Positions are held here and not in a reader group of Pravega, so that they are part of every snapshot, and a restore at
any parallelism needs nothing of Pravega but the events. Subtasks own segments by a rule: what follows a segment goes to
the same subtask, whose watermark it holds back. A segment is read when all that it follows were read to their ends. If
another subtask reads some of these, it says so in a side stream, once a completed checkpoint has it: so no checkpoint
has events of a key without all that were written before them. A thread of each subtask fetches; ``poll`` takes what is
there. Source: the rules PV of docs/spec/connectors.md.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.connectors.base import FailStopReader, SourceBatch, SourceContext, SplitPosition, owner_of_split
from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.connectors.pravega.events import unframe
from headgate.connectors.pravega.scaled_stream import Position, ScaledStream, segment_of, without_needless
from headgate.connectors.pravega.segment_store import (
    PATIENCE_MS,
    PAUSE_S,
    Access,
    Command,
    Connection,
    Place,
    SegmentData,
    SegmentError,
    ask_for_data,
    data_in,
)
from headgate.connectors.pravega.stream_log import SideStream
from headgate.connectors.pravega.time_marks import MarkReader, SegmentTimes, TimeMark
from headgate.dataclass import dataclass
from headgate.environment import Environment, ThreadEnded
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.operators.checkpoint_listeners import CheckpointedFunction, CheckpointListener, SnapshotContext
from headgate.protocol.watermarks import WATERMARK_MIN_MS

READ_BYTES = 1 << 20
AHEAD = 2
"""Answers of a segment that wait to be polled."""

WAIT_MS = 20
"""How long the thread may take to notice what it is to do."""

NEWS_MS = 500
"""Between two looks into the side stream, or for marks of event time."""

SEALED_MS = 5_000
"""Between two looks whether the stream was sealed."""

WAKEUP_MS = 5

DecodeEvents: TypeAlias = Callable[[int, pa.Array, npt.NDArray[np.int64], str], SourceBatch]
"""Segment, events, where each begins, and the name of the node → records."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read.

    Attributes:
        begin, end: the cuts at which reading begins, and ends if it does.
        is_end_given: the program says at which offsets it ends; otherwise restored positions say it.
        is_time_noted: watermarks come from what the writers of the stream note.
        decode: makes records of events.
        schema: of the records.
    """

    stream: StreamName
    begin: Mapping[int, int]
    end: Mapping[int, int] | None
    is_end_given: bool
    make_client: Callable[[], Controller]
    decode: DecodeEvents
    schema: pa.Schema
    environment: Environment
    is_time_noted: bool = False


@dataclass(frozen=True, slots=True)
class _Delivery:
    """Records of a segment, or None at its end, with the offset that follows. ``after``: what follows the segment."""

    segment: int
    batch: SourceBatch | None
    offset: int
    after: dict[int, list[int]] | None = None


@dataclass(frozen=True, slots=True)
class _News:
    """What other subtasks said, and what is known of the stream."""

    records: Sequence[Mapping[str, list[int]]] = ()
    layout: Mapping[int, dict[int, list[int]]] = field(default_factory=dict)
    is_sealed: bool = False
    marks: Sequence[TimeMark] = ()


class PravegaReader(FailStopReader, CheckpointedFunction, CheckpointListener):
    """Reads the segments of one subtask."""

    def __init__(self, reading: Reading, context: SourceContext) -> None:
        """Use ``Pravega.open``."""
        self._reading, self._context, self._stream = reading, context, reading.stream
        everything = self._first_positions()
        self._scaled = ScaledStream(everything)
        self._owners = {one: owner_of_split(at, context.parallelism) for at, one in enumerate(sorted(everything))}
        self._places = {segment: one for segment, one in everything.items() if self._owns(segment)}
        self._end = next((one.end for one in everything.values()), None)
        self._finished = {segment for segment, one in self._places.items() if one.after is not None}
        """Splits that are not to be reported as finished any more."""
        self._said = set(self._finished)
        """Ended segments of which others know; from a restored position they do."""
        self._begun = set(everything)
        """Segments of others that are known to be read."""
        self._handing: dict[int, set[int]] = {}
        """Segment that was read to its end → what others have not begun of what follows it."""
        self._cuts: dict[int, set[int]] = {}
        """Checkpoint → segments that were read to their ends, of checkpoints that are not completed."""
        self._is_sealed = False
        self._paused: frozenset[int] = frozenset()
        marks_begin = min((one.marks for one in self._places.values()), default=0)
        self._times = SegmentTimes(marks_begin) if reading.is_time_noted else None
        self._told_ms: dict[int, int] = {}
        """Watermarks of segments, as they were last given to the pipeline."""
        self._to_tell: set[int] = set()
        """Segments that may have come further in event time since."""
        self._work = _FetchThread(reading, context, self._end, marks_begin)
        try:
            if self._end is not None:
                self._plan(self._end)
            for segment, one in self._places.items():
                if one.after is None:
                    self._work.begin(segment, one.offset)
            self._begin_what_can()
            self._work.start()
        except BaseException:
            self._work.close()
            raise

    def splits(self) -> Sequence[str]:
        """See ``SourceReader``. Those that wait hold event time back."""
        return [self._split(one) for one in sorted(self._own - self._finished)]

    def progress(self) -> Mapping[str, SplitPosition]:
        """See ``SourceReader``: bytes; the end is that of a bounded reading."""
        ends = self._end or {}
        return {
            self._split(segment): SplitPosition(one.offset, ends.get(segment), "bytes")
            for segment, one in self._places.items()
        }

    def wakeup_ms(self) -> int:
        """See ``SourceReader``."""
        return WAKEUP_MS

    def pause(self, splits: Collection[str]) -> None:
        """See ``PausableReader``. What a paused segment has sent is kept; then it sends no more."""
        self._paused = frozenset(map(segment_of, splits))

    def is_behind(self, split: str) -> bool:
        """See ``PausableReader``: ``poll`` finds what there is."""
        return False

    def snapshot(self, context: SnapshotContext) -> None:
        """See ``CheckpointedFunction``; the positions have been asked for."""
        self._cuts[context.checkpoint_id] = {one for one, place in self._places.items() if place.after is not None}

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """See ``CheckpointListener``: what the checkpoint has at its end, others may go on from."""
        for number in [number for number in self._cuts if number <= checkpoint_id]:
            self._say_ends(self._cuts.pop(number))

    def close(self) -> None:
        """See ``SourceReader``."""
        self._work.close()

    @property
    def _own(self) -> set[int]:
        return {one for one in self._scaled.known if self._owns(one)} | self._places.keys()

    def _split(self, segment: int) -> str:
        return f"{self._stream}/{segment}"

    def _owns(self, segment: int) -> bool:
        """Whether this subtask reads a segment: as its first predecessor (PV1). Of no one, if that is not known yet."""
        following = []
        while segment not in self._owners:
            before = self._scaled.before(segment)
            if not before:
                return False
            following.append(segment)
            segment = min(before)
        owner = self._owners[segment]
        self._owners |= dict.fromkeys(following, owner)
        return owner == self._context.subtask_index

    def _first_positions(self) -> dict[int, Position]:
        """Return where reading begins, in all subtasks."""
        begin, end = self._reading.begin, self._reading.end
        restored = self._context.positions
        until = None if end is None else dict(end)
        if restored is None:
            return {one: Position(at, {} if end and end.get(one) == at else None, until) for one, at in begin.items()}
        found = {segment_of(split): Position.decode(split, data) for split, data in restored.items()}
        if end is None:
            found = {one: msgspec.structs.replace(at, end=None) for one, at in found.items()}
        elif self._reading.is_end_given or all(one.end is None for one in found.values()):
            found = {one: msgspec.structs.replace(at, end=dict(end)) for one, at in found.items()}
        return without_needless(found)

    def _plan(self, end: Mapping[int, int]) -> None:
        """Find all segments up to the end of a bounded reading."""
        scaled, client = self._scaled, self._work.client
        while unknown := scaled.unknown:
            for segment in unknown:
                scaled.note(segment, {} if segment in end else client.successors(self._stream, segment))
        if not end.keys() <= scaled.known:
            raise UsageError(
                f"the end of a bounded reading of Pravega stream '{self._stream}' is in front of its start; give a "
                "later end=, or leave it out"
            )

    # -- reading

    def _poll(self) -> SourceBatch | None:
        while True:
            for segment in [one for one, others in self._handing.items() if not others]:
                del self._handing[segment]
                self._finished.add(segment)
                return self._finish(segment)
            found = self._work.take(self._paused)
            if found is None:
                return self._advance()
            if isinstance(found, _News):
                self._take_news(found)
                continue
            place = self._places[found.segment]
            # with what is returned, not with what was read: a snapshot between two polls has just that
            assert found.offset >= place.offset, "a segment is never read backwards"
            self._places[found.segment] = Position(found.offset, found.after, place.end)
            if found.batch is not None:
                return self._timed(found.segment, found.batch)
            assert found.after is not None, "a delivery has records, or ends its segment"
            self._end_segment(found.segment, found.after)

    def _has_ended(self) -> bool:
        is_planned = self._end is not None or self._is_sealed
        return is_planned and not self._scaled.unknown and self._own <= self._finished

    def _positions(self) -> dict[str, bytes]:
        found = self._places
        if self._times is not None:
            begin_of = self._times.begin_of
            found = {one: msgspec.structs.replace(at, marks=begin_of(one)) for one, at in found.items()}
        return {self._split(segment): one.encode() for segment, one in found.items()}

    # -- event time

    def _timed(self, segment: int, batch: SourceBatch) -> SourceBatch:
        """Return records with the watermark that holds after them."""
        if self._times is None:
            return batch
        self._told_ms[segment] = self._times.watermark_ms(segment, self._places[segment].offset)
        if not self._work.wants_marks:
            self._make_room()
        return replace(batch, watermark_ms=self._told_ms[segment])

    def _advance(self) -> SourceBatch | None:
        """Return a batch without records where a mark came after the records in front of it."""
        while self._times is not None and (segments := self._to_tell - self._paused):
            segment = min(segments)
            self._to_tell.discard(segment)
            before_ms = self._told_ms.get(segment, WATERMARK_MIN_MS)
            if segment not in self._finished and segment in self._places:
                empty = SourceBatch(self._split(segment), pa.RecordBatch.from_pylist([], schema=self._reading.schema))
                batch = self._timed(segment, empty)
                if self._told_ms[segment] > before_ms:
                    return batch
        return None

    def _take_marks(self, marks: Sequence[TimeMark]) -> None:
        assert self._times is not None
        self._times.add(marks)
        self._to_tell = set(self._places) - self._finished
        self._make_room()

    def _make_room(self) -> None:
        """Forget marks that are not needed any more, and say whether others are."""
        assert self._times is not None
        reading = set(self._places) - self._finished
        for segment in reading:
            self._times.watermark_ms(segment, self._places[segment].offset)
        self._times.keep_for(reading)
        self._work.wants_marks = self._times.wants_more

    def _finish(self, segment: int) -> SourceBatch:
        empty = pa.RecordBatch.from_pylist([], schema=self._reading.schema)
        return SourceBatch(self._split(segment), empty, is_split_finished=True)

    # -- one segment after the other

    def _begin_what_can(self) -> None:
        """Begin the own segments that have nothing more to wait for."""
        begun = []
        for segment in sorted(self._own - self._places.keys()):
            before = self._scaled.before(segment)
            if before and not self._scaled.waits_for(segment):
                self._places[segment] = Position(0, None, self._end)
                self._work.begin(segment, 0)
                if not all(map(self._owns, before)):
                    begun.append(segment)
        if begun:
            self._work.say({"begun": begun})

    def _end_segment(self, segment: int, after: Mapping[int, Sequence[int]]) -> None:
        self._scaled.end(segment, after)
        # it counts as finished only when others have begun what follows: until then it holds event time back
        self._handing[segment] = {one for one in after if not self._owns(one)} - self._begun
        self._begin_what_can()
        if not self._context.takes_checkpoints:
            self._say_ends({segment})

    def _say_ends(self, segments: Collection[int]) -> None:
        """Tell the other subtasks which segments were read to their ends; they may read on from there later."""
        new = [one for one in sorted(segments) if one not in self._said and self._scaled.after[one]]
        self._said |= set(segments)
        if new and self._context.parallelism > 1:
            self._work.say({"ended": new})

    def _take_news(self, news: _News) -> None:
        """Note what others said, and what became known of the stream."""
        if news.marks:
            self._take_marks(news.marks)
        self._is_sealed = self._is_sealed or news.is_sealed
        for segment, after in news.layout.items():
            self._scaled.note(segment, after)
        for record in news.records:
            for segment in record.get("ended", []):
                self._scaled.known.add(segment)
                self._scaled.done.add(segment)
            self._begun |= set(record.get("begun", []))
            for others in self._handing.values():
                others -= self._begun
        unknown = self._scaled.unknown
        self._work.look_at(unknown if self._is_sealed else unknown & self._scaled.done)
        self._begin_what_can()


class _FetchThread:
    """Reads segments and the side stream, beside the mailbox thread."""

    def __init__(
        self, reading: Reading, context: SourceContext, end: Mapping[int, int] | None, marks_begin: int
    ) -> None:
        self._stream, self._node, self._end = reading.stream, context.node, end
        self._decode, self._environment = reading.decode, reading.environment
        self.client = reading.make_client()
        self._access = Access(self.client, reading.stream, reading.environment, only_reads=True)
        positions = sorted((context.positions or {}).items())
        digest = hashlib.sha256(repr(positions).encode()).hexdigest()[:16]
        self._token = f"{context.generation}-{digest}"
        """Of the generation: what an earlier one said says nothing of what this one has read."""
        purpose = f"{context.pipeline}/{context.node}/{context.life}"
        self._side = SideStream(self.client, reading.stream, purpose, self._environment)
        self._is_alone = context.parallelism == 1
        self._marks: MarkReader | None = None
        if reading.is_time_noted:
            self._marks = MarkReader(self.client, reading.stream, self._environment, marks_begin)
        self.wants_marks = True
        """Whether the mailbox thread has room for more."""
        self._changed = self._environment.condition()
        self._to_begin: deque[tuple[int, int]] = deque()
        self._to_say: deque[Mapping[str, list[int]]] = deque()
        self._to_look: set[int] = set()
        self._found: deque[_Delivery | _News] = deque()
        self._waiting: Counter[int] = Counter()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._offsets: dict[int, int] = {}
        """Of each segment that is read: where the events that are not decoded yet begin."""
        self._rest: dict[int, bytes] = {}
        """The beginning of an event, the end of which has not come yet."""
        self._places: dict[int, Place] = {}
        self._connections: dict[Place, Connection] = {}
        self._asked: dict[Place, dict[int, int]] = {}
        """Of each store: number of the request → segment."""
        self._is_sealed = False
        now_ms = self._environment.monotonic_ms()
        self._news_at_ms = self._marks_at_ms = self._sealed_at_ms = self._well_at_ms = now_ms
        self._thread = self._environment.thread(self._run, "pravega-fetch")

    # -- from the mailbox thread

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def begin(self, segment: int, offset: int) -> None:
        """Read a segment from now on."""
        with self._changed:
            self._to_begin.append((segment, offset))

    def say(self, record: Mapping[str, list[int]]) -> None:
        """Tell the other subtasks."""
        with self._changed:
            self._to_say.append(record)

    def look_at(self, segments: Collection[int]) -> None:
        """Find out what follows segments that were sealed."""
        with self._changed:
            self._to_look |= set(segments)

    def take(self, paused: Collection[int]) -> _Delivery | _News | None:
        """Return what was found next of segments that are not paused, or None.

        Raises:
            HeadgateError: reading failed for good.
        """
        with self._changed:
            for at, one in enumerate(self._found):
                if isinstance(one, _News):
                    del self._found[at]
                    return one
                if one.segment not in paused:
                    del self._found[at]
                    self._waiting[one.segment] -= 1
                    return one
            # after everything that was read before it
            if self._failure is not None:
                raise self._failure
            return None

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(1)  # it may be waiting for a store; it ends by itself
        else:
            # never started, because ``__init__`` failed: nothing else releases the connections
            self._release()

    # -- in the thread

    def _run(self) -> None:
        try:
            while not self._is_closed:
                try:
                    self._round()
                    self._well_at_ms = self._environment.monotonic_ms()
                except StorageError as error:
                    away_ms = self._environment.monotonic_ms() - self._well_at_ms
                    if away_ms > PATIENCE_MS or not error.is_transient:
                        raise
                    self._drop_connections()
                    self._environment.sleep(PAUSE_S)
        except ThreadEnded:
            raise
        except BaseException as error:
            with self._changed:
                self._failure = error
        finally:
            self._release()

    def _release(self) -> None:
        self._drop_connections()
        self._side.close()
        if self._marks is not None:
            self._marks.close()
        self.client.close()

    def _drop_connections(self) -> None:
        """Ask again for everything that has not come, maybe of other stores."""
        for connection in self._connections.values():
            connection.close()
        self._connections, self._asked, self._places = {}, {}, {}
        # what came of an event is asked for again with its beginning
        self._rest = dict.fromkeys(self._rest, b"")

    def _round(self) -> None:
        with self._changed:
            begin, self._to_begin = self._to_begin, deque()
            waiting = dict(self._waiting)
        for segment, offset in begin:
            self._offsets[segment], self._rest[segment] = offset, b""
        asked = {segment for numbers in self._asked.values() for segment in numbers.values()}
        for segment in [one for one in self._offsets if one not in asked and waiting.get(one, 0) < AHEAD]:
            self._ask(segment)
        self._tell_and_hear()
        wait_ms = WAIT_MS
        for place, connection in list(self._connections.items()):
            while (found := connection.receive(wait_ms)) is not None:
                wait_ms = 0
                self._answer(place, connection, *found)
                if self._is_closed:
                    return
            wait_ms = 0
        if wait_ms:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, wait_ms / 1000)

    def _ask(self, segment: int) -> None:
        offset = self._offsets[segment] + len(self._rest[segment])
        size = READ_BYTES
        if self._end is not None and segment in self._end:
            size = min(size, self._end[segment] - offset)
            if size <= 0:
                self._ended(segment, {})
                return
        if segment not in self._places:
            self._places[segment] = self.client.place(self._stream, segment)
        place = self._places[segment]
        if place not in self._connections:
            self._connections[place] = Connection(place, self._access)
            self._asked[place] = {}
        number = ask_for_data(self._connections[place], self._stream.segment(segment), offset, size)
        self._asked[place][number] = segment

    def _answer(self, place: Place, connection: Connection, kind: int, data: bytes) -> None:
        found = data_in(connection, kind, data)
        number = found.request if isinstance(found, SegmentData) else found[0]
        segment = self._asked[place].pop(number)
        if not isinstance(found, SegmentData):
            if found[1].kind is Command.SEGMENT_IS_SEALED:  # while it had no more; the next answer says that it ends
                return
            raise self._gone(segment, found[1])
        begin = self._offsets[segment]
        if found.data:
            rest = self._rest[segment] + found.data
            name = self._stream.segment(segment)
            events, ends = unframe(rest, f"segment {name} of Pravega")
            self._offsets[segment], self._rest[segment] = begin + int(ends[-1]), rest[ends[-1] :]
            if len(events):
                batch = self._decode(segment, events, begin + ends[:-1], self._node)
                self._put(_Delivery(segment, batch, self._offsets[segment]))
        elif found.is_end:
            if self._rest[segment]:
                raise CorruptionError(self._stream.segment(segment), begin, "an event", "the segment ends within it")
            self._ended(segment, self.client.successors(self._stream, segment))

    def _gone(self, segment: int, error: SegmentError) -> Exception:
        if error.kind is Command.WRONG_HOST:
            return StorageError("read", self._stream.segment(segment), "another store has it now")
        offset = self._offsets[segment]
        now = f"begins at offset {error.head} now" if error.kind is Command.SEGMENT_IS_TRUNCATED else "is gone"
        return UsageError(
            f"segment {segment} of Pravega stream '{self._stream}' {now}, and its events from offset {offset} were to "
            "be read: the stream was truncated or deleted, and they are lost; start over to read what is left "
            "(headgate reset), and let the stream keep its events for longer than the pipeline may be down"
        )

    def _ended(self, segment: int, after: dict[int, list[int]]) -> None:
        offset = self._offsets.pop(segment)
        del self._rest[segment]
        self._put(_Delivery(segment, None, offset, after))
        # nothing follows: the stream may be sealed, which is to be seen at once
        if not after:
            self._sealed_at_ms = self._environment.monotonic_ms()

    def _put(self, one: _Delivery) -> None:
        with self._changed:
            self._found.append(one)
            self._waiting[one.segment] += 1

    def _tell_and_hear(self) -> None:
        with self._changed:
            say, look = list(self._to_say), sorted(self._to_look)
        for record in say:
            self._side.append({"of": self._token, **record})
            with self._changed:
                # only now: if the append failed, the next round repeats it
                self._to_say.popleft()
        now_ms = self._environment.monotonic_ms()
        if not self._is_alone and (say or now_ms >= self._news_at_ms):
            self._news_at_ms = now_ms + NEWS_MS
            if records := [one for one in self._side.news() if one["of"] == self._token]:
                self._put_news(_News(records=records))
        if self._marks is not None and self.wants_marks and now_ms >= self._marks_at_ms:
            if marks := self._marks.read():
                self._put_news(_News(marks=marks))
            if not self._marks.has_more:
                self._marks_at_ms = now_ms + NEWS_MS
        if look:
            layout = {segment: self.client.successors(self._stream, segment) for segment in look}
            self._put_news(_News(layout=layout))
            with self._changed:
                # only now, for the same reason
                self._to_look -= set(look)
        if self._end is None and not self._is_sealed and now_ms >= self._sealed_at_ms:
            self._sealed_at_ms = now_ms + SEALED_MS
            if not self.client.current(self._stream):
                self._is_sealed = True
                self._put_news(_News(is_sealed=True))

    def _put_news(self, news: _News) -> None:
        with self._changed:
            self._found.append(news)
