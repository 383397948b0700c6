"""How far a reader group has read one stream, and which segments may be read next: pure decisions.

Counterpart: ``reader_group`` keeps one ``Progress`` for each stream. Source: Pravega's reader groups, where a successor
is released when all its predecessors are finished (RG4 and RG5 of docs/spec/reader-groups.md). The order is that of
``reading_order``, as one subtask that reads everything has it. Never knows who reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from headgate.protocol.store.layouts import Layout, Lineage
from headgate.protocol.store.reading_order import FirstStart, Place, ReadingOrder, Restored
from headgate.protocol.store.truncation import Extent


@dataclass(frozen=True, slots=True)
class View:
    """A stream at one moment."""

    layout: Layout
    extents: Mapping[int, Extent]
    is_sealed: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stream was read.

    Of segments without a position, those lie behind whose successors were begun; the others have to wait.

    Attributes:
        positions: of the next event of each segment that was begun, as far as somebody may still ask for it.
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

    Those that it does not name were not begun: all that is in them lies behind the cut.
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
    """Return what has to be remembered: a segment that was read as long as what follows it waits."""
    lineage, behind = Lineage(view.layout), set(passed)
    asked_for = {
        number
        for number in behind
        if not all(x in ready or x in behind for x in lineage.successors(view.layout.segments[number]))
    }
    # RG5: nothing follows in a sealed stream.
    ended = {number for number, position in ready.items() if view.is_sealed and position >= view.extents[number].end}
    positions = {**ready, **{number: view.extents[number].end for number in asked_for}}
    return Progress(positions, frozenset(asked_for | ended), begins)
