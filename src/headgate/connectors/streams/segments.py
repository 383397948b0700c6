"""The segments that one subtask of a stream's source reads, their positions in checkpoints, and stream cuts.

A position has 8 bytes, with an end 16, big-endian. ``protocol.store.reading_order`` decides what may be
read while the stream is scaled; ``stream_source`` reads. Source: docs/spec/stream-store.md. Never
reads an event.

A stream that is cut at one moment has its source set its own barriers (SC21): the hook records with every
checkpoint where each segment ends, in one transaction of the catalogue; readers stand still there. The natural form
of Pravega's reader-group checkpoints for this store: the cut is in the snapshot of the source and, for people, in the
manifest.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from headgate.connectors.base import CheckpointMarker, CoordinatorHook, HookContext, Polled, SourceContext
from headgate.errors import CorruptionError, StorageError
from headgate.operators.checkpoint_listeners import CheckpointListener
from headgate.protocol.store.layouts import Layout
from headgate.protocol.store.reading_order import Place, ReadingOrder, Start, passed_by
from headgate.protocol.store.truncation import Extent
from headgate.store.catalogue.records import Frontier, Marker, Reading
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
        """``at_once``: what was read to its end counts as passed before any checkpoint is completed."""
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
            self._tell(self._order.unannounced())
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
                # only after the store has it: until then they are named again with each checkpoint
                self._order.announced(numbers)

    def _take(self) -> None:
        for segment, place in self._order.ready().items():
            self._begin(segment, place)


def marks_of(pipeline: str, node: str) -> str:
    """Return the owner of the markers of one source of one pipeline."""
    return f"{pipeline}/{node}"


class StreamCutHook(CoordinatorHook, CheckpointListener):
    """Records the markers of one source, and forgets them."""

    is_listening = False
    """Nothing but tidying is left to do for a completed checkpoint."""

    def __init__(self, stream: str, root: str) -> None:
        self._stream, self._root = stream, root
        self._owner, self._generation = "", 0

    def open(self, context: HookContext) -> None:
        self._owner, self._generation = marks_of(context.pipeline, context.hook), context.generation

    def trigger(self, checkpoint_id: int) -> bytes:
        """Cut the stream here; return the cut, for people: the positions that count are those of the source."""
        cut = self._store.pipelines.mark(
            self._stream, owner=self._owner, generation=self._generation, checkpoint=checkpoint_id
        )
        return json.dumps({"stream": self._stream, "cut": {str(segment): end for segment, end in cut.items()}}).encode()

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        """Forget what former generations left: their checkpoints are over."""
        self._store.pipelines.unmark_others(owner=self._owner, generation=self._generation)

    def reset(self) -> None:
        self._store.pipelines.unmark_others(owner=self._owner, generation=self._generation)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Forget this marker and older ones; what cannot be forgotten now goes with the next completion."""
        with suppress(StorageError):
            self._store.pipelines.unmark(owner=self._owner, generation=self._generation, first=0, last=checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Forget this marker; one that stays does no harm, and goes with the next completion."""
        with suppress(StorageError):
            self._store.pipelines.unmark(
                owner=self._owner, generation=self._generation, first=checkpoint_id, last=checkpoint_id
            )

    @property
    def _store(self) -> Store:
        return Store.shared(self._root)


class SegmentCuts:
    """What a reader knows of the markers in its stream, and where it stands still."""

    def __init__(self, store: Store, stream: str, context: SourceContext) -> None:
        self._store, self._stream = store, stream
        self._owner, self._generation = marks_of(context.pipeline, context.node), int(context.generation)
        self._changes = -1
        self._frontier = Frontier({}, {}, is_sealed=False)
        self._asked: set[int] = set()
        self._met: dict[int, int] = {}
        self._still: set[str] = set()

    def look(self, segment: int) -> Frontier:
        """Return the frontier of ``segment``, and of all others that were looked at.

        Events after it may have markers between them that are not known yet.
        """
        changes = self._store.changes()
        if changes != self._changes or segment not in self._asked:
            self._asked.add(segment)
            self._frontier = self._store.pipelines.frontier(
                self._stream, owner=self._owner, generation=self._generation, segments=self._asked
            )
            self._changes = changes  # taken before looking
        return self._frontier

    def leave(self, segment: int) -> None:
        """Stop looking at ``segment``, which was read to its end."""
        self._asked.discard(segment)
        self._met.pop(segment, None)

    def stands_still(self, split: str) -> bool:
        """Whether nothing of ``split`` is read now."""
        return split in self._still

    def next(self, segment: int) -> Marker | None:
        """Return the marker of ``segment`` that comes next, as far as the last look tells."""
        markers = self._frontier.markers.get(segment, ())
        met = self._met.get(segment, 0)
        found = next((marker for marker in markers if marker.checkpoint > met), None)
        later = {marker.checkpoint for others in self._frontier.markers.values() for marker in others}
        missed = min((x for x in later if met < x and (found is None or x < found.checkpoint)), default=None)
        return found if missed is None else Marker(missed, 0)  # it came after that checkpoint was cut

    def meet(self, split: str, segment: int, position: int) -> Polled:
        """Return the marker that the reader stands at, if there is one, and stand still (SC21)."""
        marker = self.next(segment)
        if marker is None or position < marker.position:
            return None
        self._met[segment] = marker.checkpoint
        self._still.add(split)
        return CheckpointMarker(split, marker.checkpoint)

    def limit(self, segment: int) -> int:
        """Return where reading of ``segment`` must end, as far as the last look tells."""
        marker, end = self.next(segment), self._frontier.ends[segment]
        return end if marker is None else min(end, marker.position)

    def read_on(self, splits: Sequence[str]) -> None:
        self._still -= set(splits)
