"""In which order the segments of a stream are read, by one subtask of a source and by a reader group.

Pure decisions.

Counterparts: ``connectors.streams`` carries out the ``ReadingOrder`` of a subtask; ``reader_group`` keeps one
``Progress`` for each stream. Source: Pravega's reader groups, where a segment that takes the keys of others waits
until those have been read.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.protocol.store.layouts import Layout, Lineage, Segment
from headgate.protocol.store.truncation import Extent

NOT_BEGUN = -1
"""Position of a segment that a reader knows of, and that has to wait."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far a segment was read.

    Attributes:
        position: of the next event; ``NOT_BEGUN`` while it waits.
        end: where reading ends; None: where the segment does.
    """

    position: int
    end: int | None = None

    @property
    def is_begun(self) -> bool:
        """Whether it does not wait any more."""
        return self.position != NOT_BEGUN


@dataclass(frozen=True, slots=True)
class FirstStart:
    """A first start: nothing was read before.

    Attributes:
        moment: where the segments ended at one moment, the same for all subtasks.
        from_latest: events before that moment are not read.
        is_bounded: events after that moment are not read.
        begin: a cut at which reading begins instead; a segment that it does not name is read as a whole. None: at the
            earliest event, or the moment.
    """

    moment: Mapping[int, int]
    from_latest: bool = False
    is_bounded: bool = False
    begin: Mapping[int, int] | None = None

    @property
    def known(self) -> tuple[int, ...]:
        """The segments that all subtasks know of when they begin."""
        return tuple(sorted(self.moment))


@dataclass(frozen=True, slots=True)
class Restored:
    """The positions of a checkpoint, of all subtasks."""

    places: Mapping[int, Place]

    @property
    def known(self) -> tuple[int, ...]:
        """The segments that all subtasks know of when they begin."""
        return tuple(sorted(self.places))

    @property
    def is_bounded(self) -> bool:
        """Whether nothing is read that the first start did not know of."""
        return any(place.end is not None for place in self.places.values())


Start: TypeAlias = FirstStart | Restored


def passed_by(layout: Layout, extents: Mapping[int, Extent], places: Mapping[int, Place]) -> set[int]:
    """Return the segments without anything left to read at these positions, in them or in any before them.

    Those are: a closed one that was read to its end, and one without a position if one of its successors was begun.
    """
    begun = {number: place for number, place in places.items() if place.is_begun}
    lineage, left, passed = Lineage(layout), list(begun), set[int]()
    while left:
        before = set(lineage.predecessors(layout.segments[left.pop()])) - passed
        passed |= before
        left += before
    closed = {x.segment_id for x in layout.segments if x.closed_epoch is not None}
    ended = {number for number, place in begun.items() if number in closed and place.position >= extents[number].end}
    return (passed - begun.keys()) | ended


@dataclass(slots=True)
class ReadingOrder:
    """The segments of one subtask, with number ``index`` of ``parallelism``.

    Segments that exist at the start are dealt out in turn; a later one goes to the subtask that read the first of its
    predecessors. So all subtasks agree, whenever each learns of a segment, and a subtask with a waiting segment was
    not idle: the event time of the waiting segment is not passed over.
    """

    index: int
    parallelism: int
    start: Start
    passed: set[int] = field(default_factory=set)
    """Segments of which nothing is left to be read, or, of other subtasks, to go through the pipeline."""
    waiting: dict[int, Place] = field(default_factory=dict)
    """Own segments that cannot be read yet, and where each begins."""
    done: dict[int, Place] = field(default_factory=dict)
    """Own segments that former generations have read to their end, as far as others may still ask for that."""
    _layout: Layout = field(default_factory=lambda: Layout(-1, ()))
    _ranks: dict[int, int] = field(default_factory=dict)
    _owners: dict[int, int] = field(default_factory=dict)
    _lineage: Lineage = field(default_factory=lambda: Lineage(Layout(-1, ())))
    _hollow: set[int] = field(default_factory=set)
    _unchecked: set[int] = field(default_factory=set)
    """Segments that ``ready`` has to look at: of others nothing has changed since it did."""
    _unannounced: set[int] = field(default_factory=set)
    _cuts: dict[int, set[int]] = field(default_factory=dict)

    def see(self, layout: Layout, extents: Mapping[int, Extent]) -> None:
        """The stream has this layout now."""
        assert 0 <= self.index < self.parallelism, "a subtask is one of so many"
        is_first = not self._layout.segments
        new = layout.segments[len(self._layout.segments) :]
        self._layout, self._lineage = layout, Lineage(layout)
        if is_first:
            self._ranks = {number: rank for rank, number in enumerate(self.start.known)}
        if is_first and isinstance(self.start, Restored):
            self.passed |= passed_by(layout, extents, self.start.places)
        self._hollow |= {x.segment_id for x in layout.segments if self._is_hollow(x, extents, is_first=is_first)}
        for segment in new:
            self._owners[segment.segment_id] = self._owner(segment)
            place = self._begin(segment, extents[segment.segment_id])
            if place is not None and segment.segment_id not in self.passed and self._is_mine(segment.segment_id):
                self.waiting[segment.segment_id] = place
        self._unchecked |= {x.segment_id for x in new} | (self._hollow - self.passed)
        if is_first and isinstance(self.start, Restored):
            self.done = {x: place for x, place in self.start.places.items() if self._is_asked_for(x, self.start)}

    def ready(self) -> dict[int, Place]:
        """Return own segments that can be read from now on, each once."""
        found: dict[int, Place] = {}
        to_check = sorted(self._unchecked)
        self._unchecked.clear()
        while to_check:
            number = heapq.heappop(to_check)  # a predecessor has a lower number
            if number in self._hollow and number not in self.passed and self._passed_before(number):
                self._pass(number)
                for successor in sorted(self._unchecked):
                    heapq.heappush(to_check, successor)
                self._unchecked.clear()
            if number in self.waiting and (self._is_resumed(number) or self._passed_before(number)):
                found[number] = self.waiting.pop(number)
        return found

    def end(self, number: int) -> None:
        """Everything in an own segment has been read, and the stream's present layout was seen."""
        assert self._is_mine(number), "a subtask reads its own segments only"
        successors = [x for x in self._lineage.successors(self._layout.segments[number]) if self._is_known(x)]
        if successors:
            self._pass(number)  # for this subtask: what it reads next goes the same way, after it
        # others read what follows: they wait until the pipeline has passed this one's last events
        if not all(map(self._is_mine, successors)):
            self._unannounced.add(number)

    def learn(self, numbers: Iterable[int]) -> None:
        """The pipeline has passed these segments of other subtasks."""
        for number in numbers:
            if number not in self.passed:
                self._pass(number)

    def cut(self, checkpoint: int) -> None:
        """A snapshot is taken: what ended before belongs to ``checkpoint``."""
        if self._unannounced:
            self._cuts[checkpoint] = set(self._unannounced)

    def completed(self, checkpoint: int) -> set[int]:
        """``checkpoint`` is complete; return the segments that the pipeline has passed, for other subtasks."""
        found = self._cuts.pop(checkpoint, set()) & self._unannounced
        # what older cuts held and is not announced yet is in this one, too
        self._cuts = {number: cut for number, cut in self._cuts.items() if number > checkpoint}
        return found

    def unannounced(self) -> set[int]:
        """Return own segments that ended and were not announced to other subtasks yet."""
        return set(self._unannounced)

    def announced(self, numbers: Iterable[int]) -> None:
        """Other subtasks can know of these."""
        self._unannounced -= set(numbers)

    def _pass(self, number: int) -> None:
        """Nothing is left of a segment: what follows it is to be looked at."""
        self.passed.add(number)
        if number < len(self._layout.segments):
            self._unchecked.update(self._lineage.successors(self._layout.segments[number]))

    def _is_asked_for(self, number: int, start: Restored) -> bool:
        """Whether a later start has to know that a segment was read to its end: its successors wait."""
        successors = self._lineage.successors(self._layout.segments[number])
        begun = {x for x in successors if x in self.passed or (x in start.places and start.places[x].is_begun)}
        return number in self.passed and self._is_mine(number) and len(begun) < len(successors)

    def _owner(self, segment: Segment) -> int:
        if segment.segment_id in self._ranks:
            return self._ranks[segment.segment_id] % self.parallelism
        before = self._lineage.predecessors(segment)
        return self._owners[min(before)] if before else segment.segment_id % self.parallelism

    def _begin(self, segment: Segment, extent: Extent) -> Place | None:
        """Return where a segment begins; None: it is not read."""
        number = segment.segment_id
        if isinstance(self.start, Restored):
            unknown = None if self.start.is_bounded else Place(0)
            place = self.start.places.get(number, unknown)
            return Place(0, place.end) if place is not None and not place.is_begun else place
        moment = self.start.moment
        if number not in moment:
            return None if self.start.is_bounded else Place(0)
        if self.start.begin is not None:
            return self._begin_at(segment, extent, self.start.begin, moment[number] if self.start.is_bounded else None)
        if self.start.is_bounded or not self.start.from_latest:
            end = moment[number] if self.start.is_bounded else None
            return Place(moment[number] if self.start.from_latest else extent.head, end)
        if any(x in moment for x in self._lineage.successors(segment)):
            self.passed.add(number)  # closed by then: all its events lie before the moment
            return None
        return Place(moment[number])

    def _begin_at(self, segment: Segment, extent: Extent, begin: Mapping[int, int], end: int | None) -> Place | None:
        """Return where a segment begins when reading begins at a cut; None: it ends before that."""
        position = begin.get(segment.segment_id, 0)
        was_closed = any(x in begin for x in self._lineage.successors(segment))  # by then, so its end is known for good
        if was_closed and position >= extent.end:
            self.passed.add(segment.segment_id)
            return None
        return Place(position, end)

    def _is_hollow(self, segment: Segment, extents: Mapping[int, Extent], *, is_first: bool) -> bool:
        """Whether there is nothing in it that anybody would read: it is passed with what lies before it."""
        extent = extents[segment.segment_id]
        is_gone = is_first and isinstance(self.start, FirstStart) and extent.head >= extent.end
        return segment.closed_epoch is not None and (extent.end == 0 or is_gone)

    def _is_known(self, number: int) -> bool:
        """Whether the segment is one that this pipeline reads."""
        match self.start:
            case Restored(places) if self.start.is_bounded:
                return number in places or number in self.passed
            case FirstStart(moment, _, True):
                return number in moment
            case _:
                return True

    def _is_mine(self, number: int) -> bool:
        return self._owners[number] == self.index

    def _is_resumed(self, number: int) -> bool:
        if isinstance(self.start, FirstStart):
            return self.start.from_latest and number in self.start.moment
        place = self.start.places.get(number)
        return place is not None and place.is_begun

    def _passed_before(self, number: int) -> bool:
        """Whether nothing is left of what comes directly before a segment."""
        return all(x in self.passed for x in self._lineage.predecessors(self._layout.segments[number]))


@dataclass(frozen=True, slots=True)
class View:
    """A stream at one moment."""

    layout: Layout
    extents: Mapping[int, Extent]
    is_sealed: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of reading a stream.

    A segment without a position was read if one of its successors was begun; otherwise it has to wait.

    Attributes:
        positions: of the next event of each begun segment, unless no later start needs it.
        done: those of them that are read to their end for good.
        begins: where segments begin that have to wait; those without a name begin with their first event.
    """

    positions: Mapping[int, int]
    done: frozenset[int] = frozenset()
    begins: Mapping[int, int] = field(default_factory=dict)

    @property
    def readable(self) -> tuple[int, ...]:
        """The segments that can be read now."""
        return tuple(sorted(self.positions.keys() - self.done))

    def moved(self, positions: Mapping[int, int]) -> Progress:
        """Return it with later positions of segments that can be read; one never goes back (RG2)."""
        later = {n: p for n, p in positions.items() if n in self.positions and p > self.positions[n]}
        return replace(self, positions={**self.positions, **later}) if later else self


def first(view: View, start: FirstStart) -> Progress:
    """Return the progress of a group that begins at ``start``."""
    order = ReadingOrder(0, 1, start)
    order.see(view.layout, view.extents)
    ready = {number: place.position for number, place in order.ready().items() if number not in order.passed}
    begins = {number: place.position for number, place in order.waiting.items() if place.position > 0}
    return next_step(view, _kept(view, order.passed, ready, begins))


def next_step(view: View, progress: Progress) -> Progress:
    """Return the progress when everything before its positions has been read: who waits no more is released (RG4)."""
    order = _order(view, progress)
    known = {**progress.begins, **progress.positions}
    ready = {number: known.get(number, 0) for number in order.ready() if number not in order.passed}
    begins = {number: position for number, position in progress.begins.items() if number in order.waiting}
    return _kept(view, order.passed, ready, begins)


def whole_cut(view: View, progress: Progress) -> dict[int, int]:
    """Return the stream cut of a progress: segments that were read are named with their end (RG10).

    A segment that it does not name was not begun: all its events come after the cut.
    """
    order = _order(view, progress)
    order.ready()
    ends = {number: view.extents[number].end for number in order.passed}
    return {**progress.begins, **progress.positions, **ends}


def _order(view: View, progress: Progress) -> ReadingOrder:
    order = ReadingOrder(0, 1, Restored({number: Place(position) for number, position in progress.positions.items()}))
    order.see(view.layout, view.extents)
    return order


def _kept(view: View, passed: Iterable[int], ready: Mapping[int, int], begins: Mapping[int, int]) -> Progress:
    """Return the progress to record: a segment that was read stays in it as long as a successor waits."""
    lineage, read = Lineage(view.layout), set(passed)
    asked_for = {
        number
        for number in read
        if not all(x in ready or x in read for x in lineage.successors(view.layout.segments[number]))
    }
    # RG5: nothing follows in a sealed stream.
    ended = {number for number, position in ready.items() if view.is_sealed and position >= view.extents[number].end}
    positions = {**ready, **{number: view.extents[number].end for number in asked_for}}
    return Progress(positions, frozenset(asked_for | ended), begins)
