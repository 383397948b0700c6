"""A reader of a whole stream: each event once, those of a key in order, also while the stream is scaled.

Counterparts: ``followed_store.FollowedStore`` makes it; ``protocol.store.reading_order`` says what may be read.
Source: rules FW1, FW2, FW5–FW7 of docs/spec/stream-clients.md. Never keeps anything in the store: it is no reader
group.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from headgate.errors import TruncatedError, UsageError
from headgate.model.config import Duration, duration_ms
from headgate.protocol.store.layouts import Layout
from headgate.protocol.store.reading_order import FirstStart, Place, ReadingOrder
from headgate.protocol.store.truncation import Extent
from headgate.store.core import StoreCore
from headgate.store.reader import READ_ROWS, SegmentReader
from headgate.store.reader_groups import LOOK_PAUSE_MS
from headgate.store.routing import places_of
from headgate.store.streams import OtherSchemaError, StreamCut, StreamInfo

WAIT_FOREVER = "365 days"
"""So long an iteration waits for the next events, again and again."""


@dataclass(frozen=True, slots=True)
class StreamEvents:
    """Events of one segment, from ``position`` on, in the schema that the stream had when they were read."""

    segment: int
    position: int
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """Only events with this routing key are wanted. ``place``: where that is among all keys."""

    column: str
    value: pa.Scalar
    place: int

    @classmethod
    def of(cls, stream: StreamInfo, value: pa.Scalar) -> KeyFilter:
        """Say where ``value``, of the type of the stream's routing key, is."""
        assert stream.routing_key is not None, "`_key_filter` refuses a stream without one"
        return cls(stream.routing_key, value, int(places_of(pa.array([value.as_py()], value.type))[0]))

    def of_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the events of ``batch`` with the key."""
        column = batch.column(self.column)
        value = self.value.cast(column.type)
        # Not a number is a key as any other, and equal to nothing.
        is_nan = pa.types.is_floating(column.type) and math.isnan(value.as_py())
        return batch.filter(pc.is_nan(column) if is_nan else pc.equal(column, value))


class StreamFollower:
    """Reads a whole stream, either up to a given end or without end. Use it in one thread at a time.

    It is an iterator that waits for new events, until it reaches the given end, or the end of a sealed stream.
    """

    def __init__(
        self,
        core: StoreCore,
        stream: StreamInfo,
        start: FirstStart,
        key: KeyFilter | None,
    ) -> None:
        """Use ``Store.follow``."""
        self.stream = stream
        """As it was when it was looked at last."""
        self._core = core
        self._catalogue = core.catalogue
        self._key = key
        self._clock = core.clock
        self._order = ReadingOrder(0, 1, start)
        self._layout = Layout(-1, ())
        self._extents: dict[int, Extent] = {}
        self._is_sealed = False
        self._places: dict[int, Place] = {}
        self._readers: dict[int, SegmentReader] = {}
        self._ended: dict[int, int] = {}
        self._latest = -1
        self._returned: StreamEvents | None = None
        self._looked: int | None = None
        self._pause = core.threads.event()
        self._look()

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to read: it has reached its end, or it has returned all events of a sealed stream."""
        is_complete = self._is_sealed or self._order.start.is_bounded
        return is_complete and not self._places and not self._order.waiting

    def read(self, rows_max: int = READ_ROWS, *, timeout: Duration = 0) -> StreamEvents | None:
        """Return the next events of one segment, or None if there are none.

        Args:
            rows_max: the maximum number of events.
            timeout: how long to wait for new events. It does not wait if ``has_ended`` is True.

        Raises:
            TruncatedError: events were truncated before they were read.
            CorruptionError, UsageError: see ``SegmentReader.read``.
        """
        until_ms = self._clock.monotonic_ms() + duration_ms(timeout, "timeout")
        found = self._read_now(rows_max)
        while found is None and not self.has_ended and self._clock.monotonic_ms() < until_ms:
            self._wait(until_ms)
            found = self._read_now(rows_max)
        return found

    def unread(self, found: StreamEvents) -> None:  # FW5
        """Undo the latest ``read`` if its events were not used: the next ``read`` returns them again.

        Raises:
            UsageError: these are not the events that the latest ``read`` returned.
        """
        if found is not self._returned:
            raise UsageError(f"only what the latest read of stream '{self.stream.name}' returned can be taken back")
        self._returned = None
        self._latest = found.segment - 1  # so that it is this segment's turn again
        # its reader is past the events; another one begins where they are
        self._readers.pop(found.segment, None)
        self._places[found.segment] = Place(found.position, self._places[found.segment].end)

    def cut(self) -> StreamCut:
        """Return the current cut: all events that were returned lie before it, all others after it."""
        passed = {number: self._extents[number].end for number in self._order.passed}
        waiting = {number: place.position for number, place in self._order.waiting.items() if place.position > 0}
        here = {number: self._position(number) for number in self._places}
        return StreamCut(self.stream.name, self.stream.stream_id, {**passed, **self._ended, **waiting, **here})

    def __iter__(self) -> Iterator[StreamEvents]:
        while not self.has_ended:
            found = self.read(timeout=WAIT_FOREVER)
            if found is not None:
                yield found

    def _wait(self, until_ms: int) -> None:
        """Wait until the store has changed since it was found to have nothing more (FW6)."""
        while (left_ms := until_ms - self._clock.monotonic_ms()) > 0 and self._catalogue.changes() == self._looked:
            self._pause.wait(min(left_ms, LOOK_PAUSE_MS) / 1_000)

    def _read_now(self, rows_max: int) -> StreamEvents | None:
        while True:
            changes = self._catalogue.changes()  # taken before looking
            # from the segment after the last one, so that a busy one does not keep others waiting
            for number in self._in_turn():
                self._returned = self._read_segment(number, rows_max)
                if self._returned is not None:
                    self._latest = number
                    return self._returned
            if changes != self._looked:
                self._look()
                self._looked = changes
            if not self._end_segments():
                return None

    def _in_turn(self) -> list[int]:
        wanted = sorted(number for number in self._places if self._is_wanted(number))
        later = [number for number in wanted if number > self._latest]
        return later + [number for number in wanted if number <= self._latest]

    def _read_segment(self, number: int, rows_max: int) -> StreamEvents | None:
        end = self._places[number].end
        while True:
            reader = self._reader(number)
            position = reader.position
            if end is not None and position >= end:
                return None
            try:
                batch = reader.read(rows_max, end)
            except OtherSchemaError:
                if not self._reload_schema():
                    raise
                continue
            if batch is None:
                return None
            if reader.newest_schema > self.stream.schema_version:
                reader.back_to(position)  # also if the stream cannot be looked at now
                self._reload_schema()
                continue
            wanted = batch if self._key is None else self._key.of_batch(batch)
            if wanted.num_rows:
                return StreamEvents(number, position, wanted)

    def _reload_schema(self) -> bool:
        """Read on in the schema that the stream has now; return whether that is another one."""
        found = self._catalogue.find_stream(self.stream.name)
        if found.stream_id != self.stream.stream_id:
            raise UsageError(f"stream '{found.name}' was deleted and created again while it was read; follow it again")
        is_other = found.schema_version != self.stream.schema_version
        self.stream = found
        # before the readers go, which know how far each segment was read
        self._places = {n: Place(self._position(n), place.end) for n, place in self._places.items()}
        self._readers.clear()
        return is_other

    def _look(self) -> None:
        """See which segments there are, and whether more events can come."""
        epoch, is_sealed = self._catalogue.look(self.stream)
        if epoch != self._layout.epoch:
            self._layout, self._extents = self._catalogue.layout_and_extents(self.stream)
            self._order.see(self._layout, self._extents)
            self._take()
        # if it was scaled between the two questions, only the next look knows whether all segments were seen
        self._is_sealed = is_sealed and epoch == self._layout.epoch

    def _end_segments(self) -> bool:
        """Have what follows segments that were read to their end be read from now on; return whether any was (FW1)."""
        assert self._readers.keys() <= self._places.keys(), "only segments that are read have readers"
        ended = {
            number: self._position(number) if self._is_wanted(number) else self._end_of(number)
            for number in sorted(self._places)
            if self._is_over(number)
        }
        if ended:
            self._look()  # what took their keys; after this nothing can fail and leave it half done
            for number, position in ended.items():
                self._ended[number] = position
                del self._places[number]
                self._readers.pop(number, None)
                self._order.end(number)
            self._take()
        return bool(ended)

    def _is_over(self, number: int) -> bool:
        """Whether nothing of a segment is left to be read; of one without the wanted key, nothing ever is."""
        end = self._places[number].end
        if not self._is_wanted(number):
            return end is not None or self._is_sealed or self._layout.segments[number].closed_epoch is not None
        if end is not None and self._position(number) >= end:
            return True
        return number in self._readers and self._readers[number].has_ended()

    def _end_of(self, number: int) -> int:
        """Return where a segment ends for good that is not read; what is known of a closed one is final."""
        end = self._places[number].end
        if end is None and self._layout.segments[number].closed_epoch is None:
            self._extents = self._catalogue.extents(self.stream)  # of a sealed stream
        return self._extents[number].end if end is None else end

    def _take(self) -> None:
        self._places.update(self._order.ready())

    def _is_wanted(self, number: int) -> bool:
        """Whether a segment can have events with the wanted key."""
        segment = self._layout.segments[number]
        return self._key is None or segment.key_low <= self._key.place < segment.key_high

    def _position(self, number: int) -> int:
        reader = self._readers.get(number)
        return self._places[number].position if reader is None else reader.position

    def _reader(self, number: int) -> SegmentReader:
        if number not in self._readers:
            position = self._places[number].position
            self._readers[number] = SegmentReader(self._core, self.stream, number, position)
        return self._readers[number]


EARLIEST, LATEST = "earliest", "latest"


def open_follower(
    core: StoreCore,
    stream: StreamInfo,
    start: str | StreamCut | dt.datetime,
    end: str | StreamCut | None,
    key: object,
) -> StreamFollower:
    """Return a reader of a whole stream; see ``Store.follow``."""
    _, extents = core.catalogue.layout_and_extents(stream)
    begin = _begin(core, stream, extents, start)
    moment = {segment: extent.end for segment, extent in extents.items()}
    if isinstance(end, StreamCut):
        _check_cut_exists(end, stream, extents)
        moment = dict(end.positions)
    elif end not in (None, LATEST):
        raise UsageError(f"a reader of a stream ends at a cut or at 'latest', not at {end!r}")
    first = FirstStart(moment, start == LATEST, end is not None, begin)
    return StreamFollower(core, stream, first, None if key is None else _key_filter(stream, key))


def _begin(
    core: StoreCore, stream: StreamInfo, extents: Mapping[int, Extent], start: str | StreamCut | dt.datetime
) -> Mapping[int, int] | None:
    """Return the positions at which a reader begins; None: at an end of the stream."""
    if isinstance(start, dt.datetime):
        return core.catalogue.cut_at(stream, round(start.timestamp() * 1_000))
    if isinstance(start, StreamCut):
        _check_cut_exists(start, stream, extents)
        for segment, position in sorted(start.positions.items()):
            if position < extents[segment].head:
                raise TruncatedError(stream.name, segment, position, extents[segment].head)
        return start.positions
    if start not in (EARLIEST, LATEST):
        raise UsageError(f"a reader of a stream starts at 'earliest', 'latest', a cut or a date, not at {start!r}")
    return None


def _check_cut_exists(cut: StreamCut, stream: StreamInfo, extents: Mapping[int, Extent]) -> None:
    cut.check(stream)
    for segment, position in sorted(cut.positions.items()):
        if segment not in extents or position > extents[segment].end:
            raise UsageError(
                f"the cut {cut} names position {position} of segment {segment}, which stream '{stream.name}' does not "
                "have: it comes from another store"
            )


def _key_filter(stream: StreamInfo, key: object) -> KeyFilter:
    """Return which events have ``key``, given as a value or as its text.

    Raises:
        UsageError: the stream has no routing key, or ``key`` can be no value of it.
    """
    if stream.routing_key is None:
        raise UsageError(f"stream '{stream.name}' has no routing key, so it has no events of one key")
    dtype = stream.schema.field(stream.routing_key).type
    try:
        value = pa.scalar(key).cast(dtype)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{key!r} is no value of '{stream.routing_key}', the routing key of stream '{stream.name}', which is of "
            f"type {dtype}"
        ) from error
    return KeyFilter.of(stream, value)
