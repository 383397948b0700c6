"""The segments that one subtask of a stream's source reads, and their positions as checkpoints store them.

A position has 8 bytes, with an end 16, big-endian (SC1, SC30). ``protocol.store.reading_order`` decides what may be
read while the stream is scaled; ``stream_source`` reads. Source: SC40 to SC44 of docs/spec/stream-store.md. Never
reads an event.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from headgate.connectors.base import SourceContext
from headgate.errors import CorruptionError, StorageError
from headgate.protocol.store.layouts import Layout
from headgate.protocol.store.reading_order import Place, ReadingOrder, Start, passed_by
from headgate.protocol.store.truncation import Extent
from headgate.store.catalogue.records import Reading
from headgate.store.store import Store
from headgate.store.streams import StreamInfo

_POSITION = struct.Struct(">q")
_POSITION_AND_END = struct.Struct(">qq")


def encode_position(place: Place) -> bytes:
    """Return the position of a segment as it is stored."""
    if place.end is None:
        return _POSITION.pack(place.position)
    return _POSITION_AND_END.pack(place.position, place.end)


def decode_position(split: str, data: bytes) -> Place:
    """Return how far a segment was read, with its end when it is not followed.

    Raises:
        CorruptionError
    """
    if len(data) == _POSITION.size:
        return Place(int(_POSITION.unpack(data)[0]))
    if len(data) == _POSITION_AND_END.size:
        position, end = _POSITION_AND_END.unpack(data)
        return Place(int(position), int(end))
    raise CorruptionError(f"position of split '{split}'", 0, "8 or 16 bytes", f"{len(data)}")


def places_of(stream: str, positions: Mapping[str, bytes]) -> dict[int, Place]:
    """Return the positions of a stream's segments, by number.

    Raises:
        CorruptionError
    """
    mine = {split: data for split, data in positions.items() if split.rpartition("/")[0] == stream}
    return {int(split.rpartition("/")[2]): decode_position(split, data) for split, data in mine.items()}


def first_needed(layout: Layout, extents: Mapping[int, Extent], places: Mapping[int, Place]) -> dict[int, int]:
    """Return, for every segment, from where on a checkpoint with these positions needs it."""
    passed = passed_by(layout, extents, places)
    needed = {}
    for number, extent in extents.items():
        place = places.get(number)
        is_begun = place is not None and place.is_begun
        needed[number] = place.position if place is not None and is_begun else extent.head
        if number in passed:
            needed[number] = extent.end
    return needed


class OwnSegments:
    """Asks the store which segments there are, and which others have passed."""

    def __init__(
        self, store: Store, stream: StreamInfo, context: SourceContext, start: Start, *, at_once: bool
    ) -> None:
        """``at_once``: what was read to its end counts as passed before any checkpoint is completed (SC43)."""
        self._store, self._stream = store, stream
        self._reading = Reading(f"{context.pipeline}/{context.node}", context.life, context.generation)
        self._order = ReadingOrder(context.subtask_index, context.parallelism, start)
        self._at_once = at_once
        self._epoch, self._is_sealed, self._changes = -1, False, -1
        self._begin: Callable[[int, Place], None] = lambda segment, place: None

    def open(self, begin: Callable[[int, Place], None]) -> None:
        """Look for the first time; ``begin`` is called for every segment that can be read, now and later."""
        self._begin = begin
        self.look()

    @property
    def waiting(self) -> Mapping[int, Place]:
        """Own segments that cannot be read yet."""
        return self._order.waiting

    @property
    def done(self) -> Mapping[int, Place]:
        """Own segments that former generations have read, as far as that may still be needed."""
        return self._order.done

    @property
    def is_complete(self) -> bool:
        """Whether no segment follows but those that are known."""
        return self._is_sealed or self._order.start.is_bounded

    def look(self) -> None:
        """See whether the stream was scaled or others have passed something, unless nothing has changed."""
        changes = self._store.changes()
        if changes == self._changes:
            return
        epoch, is_sealed = self._store.pipelines.look(self._stream)
        if epoch != self._epoch:
            layout, extents = self._store.pipelines.layout_and_extents(self._stream)
            self._order.see(layout, extents)
            self._epoch = layout.epoch
        if self._order.waiting:
            self._order.learn(self._store.pipelines.passed(self._stream, self._reading))
        self._is_sealed = is_sealed and epoch == self._epoch
        self._changes = changes  # taken before looking
        self._take()

    def end(self, segment: int) -> None:
        """An own segment was read to its end."""
        self.look()  # what took its keys
        self._order.end(segment)
        if self._at_once:
            self._tell(self._order.untold())
        self._take()

    def cut(self, checkpoint: int) -> None:
        """A snapshot is taken for ``checkpoint``."""
        self._order.cut(checkpoint)

    def completed(self, checkpoint: int) -> None:
        """``checkpoint`` is complete: what ended before it has gone through the pipeline."""
        self._tell(self._order.completed(checkpoint))

    def _tell(self, segments: Iterable[int]) -> None:
        """Record that these were passed; what fails now is recorded with the next checkpoint."""
        numbers = sorted(segments)
        if numbers:
            with suppress(StorageError):
                self._store.pipelines.pass_segments(self._stream, self._reading, numbers)
                self._order.told(numbers)

    def _take(self) -> None:
        for segment, place in self._order.ready().items():
            self._begin(segment, place)
