"""A stream of the embedded store as source: one split per segment, read from event positions.

Counterpart: ``headgate.store.reader.SegmentReader``. Source: rules SC21 of
docs/spec/stream-store.md. Writes nothing but what it holds, and makes no store by looking at one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import ClassVar, cast

import pyarrow as pa

from headgate.connectors.base import (
    CoordinatorHook,
    FailStopReader,
    HoldContext,
    Polled,
    Source,
    SourceBatch,
    SourceContext,
    SplitPosition,
)
from headgate.connectors.streams.segments import (
    OwnSegments,
    SegmentCuts,
    StreamCutHook,
    encode_position,
    first_needed,
    places_of,
)
from headgate.errors import TruncatedError, UsageError
from headgate.model.config import check_switches
from headgate.model.state_schema import Form
from headgate.operators.checkpoint_listeners import CheckpointedFunction, CheckpointListener, SnapshotContext
from headgate.operators.schemas import canonical_schema, carried
from headgate.protocol.store.reading_order import NOT_BEGUN, FirstStart, Place, Restored, Start
from headgate.store.location import store_root
from headgate.store.reader import SegmentReader
from headgate.store.store import Store
from headgate.store.streams import StreamCut, StreamInfo, newest_matching, no_such_stream

EARLIEST, LATEST = "earliest", "latest"
"""Where reading may begin, beside a cut."""

WAKEUP_SOON_MS, WAKEUP_LATE_MS = 2, 8
"""A look for news costs some microseconds; half of the pause is the median latency it adds."""
POLLS_SOON = 500
"""Looks without news after which the pause becomes longer: one second of silence."""


@dataclass(frozen=True, slots=True)
class StreamSource(Source):
    """Reads a stream of the store.

    Attributes:
        stream: the name of the stream, such as ``app/logs``.
        store: directory of the store; default $HEADGATE_STORE, else ``.headgate/store``. A relative path is made
            absolute immediately, because workers may run in other directories.
        start: where the first start begins: at the ``"earliest"`` event, after the ``"latest"`` one, or at a
            ``StreamCut`` (for example from ``store.cut_at(name, date)``) or its text.
        follow: True waits for new events until the stream is sealed. False stops at the end that the stream had at the
            first start.
        end: a ``StreamCut`` or its text at which reading ends, whatever ``follow`` says. None: ``follow`` decides.
        stream_cuts: True cuts all segments at the same moment in every checkpoint. The store records that moment when
            the checkpoint begins, and the checkpoint completes when the readers have reached it. False cuts each
            reader at its current position.
        holds: True keeps all events to which a checkpoint of the pipeline may be restored: neither retention nor a
            command can truncate them. False lets them go; a pipeline that needs them then fails with an error.
    """

    stream: str
    store: str | None = None
    start: StreamCut | str = EARLIEST
    follow: bool = True
    stream_cuts: bool = False
    holds: bool = True
    end: StreamCut | str | None = None

    only_looks: ClassVar[bool] = False
    """Whether it leaves nothing in the store, not even at which moment its subtasks begin."""

    def __post_init__(self) -> None:
        check_switches("StreamSource: ", follow=self.follow, stream_cuts=self.stream_cuts, holds=self.holds)
        for name, given in (("start", self.start), ("end", self.end)):
            is_word = given in (EARLIEST, LATEST) if name == "start" else given is None
            if not is_word:
                object.__setattr__(self, name, self._cut_text(name, given))
        object.__setattr__(self, "store", store_root(self.store))

    def schema(self) -> pa.Schema:
        """Return the stream's schema in canonical types.

        Raises:
            UsageError: there is no such stream, or ``start`` or ``end`` is a cut of another stream.
        """
        info = self._describe()
        self.cuts(info)
        return canonical_schema(info.schema)

    def cuts(self, stream: StreamInfo) -> tuple[StreamCut | None, StreamCut | None]:
        """Return the cuts at which reading begins and ends, where there are any.

        Raises:
            UsageError: one is of another stream.
        """
        begin = None if self.start in (EARLIEST, LATEST) else StreamCut.parse(str(self.start))
        end = None if self.end is None else StreamCut.parse(str(self.end))
        for cut in (begin, end):
            if cut is not None:
                cut.check(stream)
        return begin, end

    def _cut_text(self, name: str, given: object) -> str:
        """Return a cut as text: a source can be hashed, and travels."""
        words = "'earliest', 'latest' or " if name == "start" else ""
        problem = f"{name} of stream '{self.stream}' must be {words}a StreamCut of it, or its text, not {given!r}"
        try:
            cut = given if isinstance(given, StreamCut) else StreamCut.parse(str(given))
        except UsageError as error:
            raise UsageError(problem) from error
        if cut.stream != self.stream:
            raise UsageError(problem)
        return str(cut)

    def identity(self) -> str:
        """Return what tells this stream from a later one of the same name."""
        info = self._describe()
        first = len(
            Store.shared(self.store).layout(info.name).of_epoch(0)
        )  # it stays the same stream when it is scaled
        return f"{Form.STREAM.value}{info.name} created {info.created_ms} with {first} segments"

    def how_to_end(self) -> str | None:
        """See ``Source``. A sealed stream ends although it is followed."""
        if not self.follow or self.end is not None or self._describe().is_sealed:
            return None
        return f"read what is there with follow=False, or seal stream '{self.stream}' first"

    def open(self, context: SourceContext) -> StreamSourceReader:
        """Return a reader of the segments that belong to this subtask."""
        reader = StreamCutReader if self.stream_cuts else StreamSourceReader
        return reader(self, Store.shared(self.store), context)

    def coordinator_hook(self) -> CoordinatorHook | None:
        return StreamCutHook(self.stream, str(self.store)) if self.stream_cuts else None

    def without_hook(self) -> StreamSource:
        """See ``Source``: what reads the stream in a run that only looks."""
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return LookingSource(**(mine | {"stream_cuts": False, "holds": False}))

    def hold(self, context: HoldContext, needed: Sequence[Mapping[str, bytes]]) -> None:
        """See ``Source``: the cut that is held is the oldest position of each segment.

        A store that is not written to is not written to for that: it is not truncated either.
        """
        store, is_held = Store.shared(self.store), False
        holder = holder_of(context.pipeline, context.node)
        while not is_held and not store.is_untouched:
            cut = self._needed(store, needed)
            with suppress(TruncatedError):  # it was truncated since the look
                store.hold(cut, holder=holder, life=context.life, epoch=context.generation)
                is_held = True

    def _needed(self, store: Store, needed: Sequence[Mapping[str, bytes]]) -> StreamCut:
        stream = store.find(self.stream)
        layout, extents = store.pipelines.layout_and_extents(stream)
        first = {number: extent.head for number, extent in extents.items()}
        found = [first_needed(layout, extents, places_of(stream.name, stored)) for stored in needed]
        positions = {number: max(head, min(x[number] for x in found)) for number, head in first.items() if found}
        return StreamCut(stream.name, stream.stream_id, positions or first)

    def _describe(self) -> StreamInfo:
        """Return the stream; a pipeline that is being built makes no store."""
        if not Store.exists(self.store):
            raise no_such_stream(self.stream, str(self.store), ())
        return Store.shared(self.store).find(self.stream)


@dataclass(frozen=True, slots=True)
class LookingSource(StreamSource):
    """A ``StreamSource`` of a run that only looks: it leaves nothing in the store."""

    only_looks: ClassVar[bool] = True


def holder_of(pipeline: str, node: str) -> str:
    """Return the name under which a source holds what its pipeline needs of a stream."""
    return f"{pipeline}/{node}"


class StreamSourceReader(FailStopReader, CheckpointedFunction, CheckpointListener):
    """Reads the segments of one subtask in turn, those that follow them when the stream is scaled too."""

    def __init__(self, source: StreamSource, store: Store, context: SourceContext) -> None:
        """Use ``StreamSource.open``."""
        info = store.describe(source.stream)
        self._name = info.name
        self._version, self._schema = read_as(store.schemas(source.stream), context.schema)
        self._readers: dict[str, SegmentReader] = {}
        self._ends: dict[str, int | None] = {}
        self._finished: set[str] = set()
        self._store = store
        self._turn = 0
        self._idle_changes = -1
        self._empty_polls = 0
        self._paused: frozenset[str] = frozenset()
        self._told_ms: dict[str, int] = {}
        """The event time that the stream's writers had come to, as it was last told, of each split."""
        places = None if context.positions is None else places_of(info.name, context.positions)
        start = start_of(store, info, context, source, places)
        self._segments = OwnSegments(store, info, context, start, at_once=self._passes_at_once(context))
        self._segments.open(self._begin)

    def _passes_at_once(self, context: SourceContext) -> bool:
        return not context.takes_checkpoints

    def _begin(self, segment: int, place: Place) -> None:
        """Read a segment from now on."""
        split = f"{self._name}/{segment}"
        self._readers[split] = self._store.reader(self._name, segment, place.position, schema_version=self._version)
        self._ends[split] = place.end
        # there may be something in it since before the change that was seen last
        self._idle_changes = -1

    def snapshot(self, context: SnapshotContext) -> None:
        """See ``CheckpointedFunction``; the positions have been asked for."""
        self._segments.cut(context.checkpoint_id)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._segments.completed(checkpoint_id)

    def pause(self, splits: Collection[str]) -> None:
        self._paused, self._idle_changes = frozenset(splits), -1

    def is_behind(self, split: str) -> bool:
        """See ``PausableReader``: ``poll`` finds what there is."""
        return False

    def splits(self) -> Sequence[str]:
        """Return the segments not read to their end; those that wait hold event time back."""
        reading = [split for split in self._readers if split not in self._finished]
        return reading + [f"{self._name}/{segment}" for segment in self._segments.waiting]

    def _poll(self) -> SourceBatch | None:
        """Return the next events of one segment."""
        return cast(SourceBatch | None, self._poll_segments())

    def _poll_segments(self) -> Polled:
        changes = self._store.changes()
        if changes == self._idle_changes:
            self._empty_polls += 1
            return None
        if self._segments.waiting or len(self._finished) == len(self._readers):
            self._segments.look()  # else the end of a segment tells when there is something new
        names = [split for split in self._readers if split not in self._finished and split not in self._paused]
        for step in range(len(names)):
            split = names[(self._turn + step) % len(names)]
            found = self._poll_split(split)
            if found is not None:
                # the next poll begins with the segment after this one: a busy one does not keep others waiting
                self._turn += step + 1
                self._empty_polls = 0
                return found
        self._idle_changes = changes  # taken before looking: what came meanwhile is looked for again
        self._empty_polls += 1
        return None

    def _has_ended(self) -> bool:
        """Whether every segment of this subtask is read to its end, and no other will come."""
        return len(self._finished) == len(self._readers) and not self._segments.waiting and self._segments.is_complete

    def _positions(self) -> dict[str, bytes]:
        """Return position (and end, when it does not follow) of every segment."""
        places = {split: Place(reader.position, self._ends[split]) for split, reader in self._readers.items()}
        for segment, place in self._segments.done.items():
            places[f"{self._name}/{segment}"] = place
        for segment, place in self._segments.waiting.items():
            if place.end is not None:  # how far it is to be read was decided at the first start
                places[f"{self._name}/{segment}"] = Place(NOT_BEGUN, place.end)
        return {split: encode_position(place) for split, place in places.items()}

    def progress(self) -> Mapping[str, SplitPosition]:
        """See ``SourceReader``: events; where a segment that is followed ended when it was last read."""
        return {
            split: SplitPosition(reader.position, reader.known_end if self._ends[split] is None else self._ends[split])
            for split, reader in self._readers.items()
        }

    def wakeup_ms(self) -> int:
        """Return a short pause after recent events, else a longer one."""
        return WAKEUP_SOON_MS if self._empty_polls < POLLS_SOON else WAKEUP_LATE_MS

    def close(self) -> None:
        """The store is shared by the process and stays open."""
        for reader in self._readers.values():
            reader.close()

    def _poll_split(self, split: str) -> Polled:
        reader, end = self._readers[split], self._ends[split]
        batch = None if end is not None and reader.position >= end else reader.read(end=end)
        if batch is None:
            is_over = reader.has_ended() if end is None else reader.position >= end
            return self._over(split) if is_over else self._advance(split)
        return self._batch(split, batch)

    def _advance(self, split: str) -> SourceBatch | None:
        """Return a batch without records where event time has advanced beyond the end of a segment (S92)."""
        before, event_ms = self._told_ms.get(split), self._readers[split].event_ms
        if event_ms is None or (before is not None and event_ms <= before):
            return None
        empty = pa.RecordBatch.from_pylist([], schema=self._schema)
        return SourceBatch(split, empty, watermark_ms=self._event_ms(split))

    def _batch(self, split: str, batch: pa.RecordBatch) -> SourceBatch:
        records = carried(batch, self._schema, f"stream '{self._name}'")
        return SourceBatch(
            split, records, written_ms=self._readers[split].visible_ms, watermark_ms=self._event_ms(split)
        )

    def _event_ms(self, split: str) -> int | None:
        found = self._readers[split].event_ms
        if found is not None:
            self._told_ms[split] = found
        return found

    def _over(self, split: str) -> SourceBatch:
        self._finished.add(split)
        self._segments.end(self._readers[split].segment)
        return SourceBatch(split, pa.RecordBatch.from_pylist([], schema=self._schema), is_split_finished=True)


class StreamCutReader(StreamSourceReader):
    """Stands still at the markers of its generation, in every segment (SC21). An ``InducedReader``."""

    def __init__(self, source: StreamSource, store: Store, context: SourceContext) -> None:
        """Use ``StreamSource.open``."""
        super().__init__(source, store, context)
        self._cuts = SegmentCuts(store, source.stream, context)

    def _passes_at_once(self, context: SourceContext) -> bool:
        return True  # the cut may lie after the end of one segment and within those that follow it

    def poll(self) -> Polled:  # type: ignore[override]
        return super().poll()

    def read_on(self, splits: Sequence[str]) -> None:
        self._cuts.read_on(splits)
        self._idle_changes = -1

    def _poll_segments(self) -> Polled:
        met = self._meet_waiting()
        return super()._poll_segments() if met is None else met

    def _over(self, split: str) -> SourceBatch:
        self._cuts.leave(self._readers[split].segment)
        return super()._over(split)

    def _meet_waiting(self) -> Polled:
        """Return a marker in front of a segment that waits: a checkpoint has nothing of it."""
        for segment in self._segments.waiting:
            split = f"{self._name}/{segment}"
            if not self._cuts.stands_still(split):
                self._cuts.look(segment)
                met = self._cuts.meet(split, segment, 0)
                if met is not None:
                    return met
        return None

    def _poll_split(self, split: str) -> Polled:
        if self._cuts.stands_still(split):
            return None
        reader, end = self._readers[split], self._ends[split]
        frontier = self._cuts.look(reader.segment)
        last = frontier.ends[reader.segment] if end is None else end
        is_over = end is not None or frontier.is_sealed or reader.segment in frontier.closed
        if reader.position >= last and is_over:
            return self._over(split)  # first, or checkpoint after checkpoint would keep it from its end
        met = self._cuts.meet(split, reader.segment, reader.position)
        if met is not None:
            return met
        limit = self._cuts.limit(reader.segment)
        limit = limit if end is None else min(limit, end)
        batch = None if reader.position >= limit else reader.read(end=limit)
        return None if batch is None else self._batch(split, batch)


def read_as(schemas: Sequence[pa.Schema], built: pa.Schema | None) -> tuple[int, pa.Schema]:
    """Return which of the schemas of a stream is read, in canonical types: the one a pipeline was built with.

    Where that is not known, or another source made something else of the stream, it is the newest.
    """
    forms = [canonical_schema(schema) for schema in schemas]
    version = newest_matching(forms, lambda form: "" if built is None or form.equals(built) else "other columns")
    version = len(forms) - 1 if version is None else version
    return version, forms[version]


def start_of(
    store: Store, stream: StreamInfo, context: SourceContext, source: StreamSource, places: Mapping[int, Place] | None
) -> Start:
    """Return where reading begins. On a first start that is one moment, which the first subtask records.

    A run that only looks records nothing.
    """
    if places is not None:
        return Restored(places)
    begin, end = source.cuts(stream)
    moment = _moment(store, stream, context, source)
    from_latest, is_bounded = source.start == LATEST, end is not None or not source.follow
    if end is None:
        return FirstStart(moment, from_latest, is_bounded, None if begin is None else begin.positions)
    first = moment if from_latest else None
    return FirstStart(end.positions, False, is_bounded, first if begin is None else begin.positions)


def _moment(store: Store, stream: StreamInfo, context: SourceContext, source: StreamSource) -> Mapping[int, int]:
    """Return where the segments ended when the first subtask looked."""
    if store.is_untouched or source.only_looks or not context.life:
        return dict(enumerate(stream.ends))
    owner = f"{holder_of(context.pipeline, context.node)} {context.life}"
    marked = store.pipelines.mark(stream.name, owner=owner, generation=context.generation, checkpoint=0)
    _, extents = store.pipelines.layout_and_extents(
        stream
    )  # after the marker: a segment that it does not name has its final end
    return {number: marked.get(number, extents[number].end) for number in range(max(marked) + 1)}
