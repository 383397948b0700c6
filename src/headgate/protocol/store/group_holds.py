"""What a reader group holds of a stream, and what of that moves from one of its states to the next: pure decisions.

Counterpart: ``store.catalogue.groups`` writes it. Source: RG17 and RG28 of docs/spec/reader-groups.md. Never looks at
what a stream was, unless other segments are held than before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.protocol.store.reader_group import Group
from headgate.protocol.store.reading_order import Progress, View, whole_cut

_Shape: TypeAlias = tuple[frozenset[int], frozenset[int], frozenset[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class HoldMoved:
    """The same segments are held as before, some of them from other positions on.

    Attributes:
        positions: segment → the first position that is needed now; one that was not held is not held now either.
        certain: those of them that were held, whatever the stream was.
    """

    positions: Mapping[int, int]
    certain: frozenset[int]


def needed(group: Group, stream: str, view: View) -> dict[int, int]:
    """Return from where on a group may still read: from its durable positions and those of its checkpoints (RG17).

    A segment that is not in the result is needed as a whole.
    """
    found = [whole_cut(view, x) for x in _all(group, stream)]
    named = set(found[0]).intersection(*found)  # of what one of them has not begun everything is needed
    # of a segment that was truncated by force, what is gone cannot be held
    return {x: max(view.extents[x].head, min(cut[x] for cut in found)) for x in sorted(named)}


def worth_holding(view: View, wanted: Mapping[int, int]) -> dict[int, int]:
    """Return ``wanted`` without closed segments that have no events any more: to hold those has no effect.

    It names one segment at least: a hold without segments holds nothing, and a segment that it does not name is needed
    as a whole.
    """
    gone = {x.segment_id for x in view.layout.segments if x.closed_epoch is not None and _is_empty(view, x.segment_id)}
    found = {segment: position for segment, position in wanted.items() if segment not in gone}
    if found:
        return found
    last = max(wanted or view.extents)
    return {last: wanted.get(last, view.extents[last].head)}


def moved(before: Group, after: Group, stream: str) -> HoldMoved | None:
    """Return how the hold on a stream moves; None: call ``needed`` instead (RG28).

    The segments of a cut depend on the segments of its progress, not on the positions in them. So with the same sets of
    segments as before, the same ones are held. Where a progress has a position, it counts: any other cut that names the
    segment is at its end.
    """
    if before.epoch != after.epoch:
        return None  # a reset leads anywhere, and to another stream of this name
    was, now = _all(before, stream), _all(after, stream)
    if {_shape(x) for x in was} != {_shape(x) for x in now}:
        return None
    old, new = _lowest(was), _lowest(now)
    certain = frozenset(new).intersection(*({*x.positions, *x.begins} for x in now))
    positions = {segment: position for segment, position in sorted(new.items()) if position != old[segment]}
    return HoldMoved(positions, certain & positions.keys())


def _all(group: Group, stream: str) -> list[Progress]:
    return [group.progress[stream], *(x.progress[stream] for x in group.checkpoints)]


def _shape(progress: Progress) -> _Shape:
    return frozenset(progress.positions), progress.done, frozenset(progress.begins.items())


def _lowest(found: Sequence[Progress]) -> dict[int, int]:
    lowest: dict[int, int] = {}
    for progress in found:
        for segment, position in {**progress.begins, **progress.positions}.items():
            lowest[segment] = min(position, lowest.get(segment, position))
    return lowest


def _is_empty(view: View, segment: int) -> bool:
    extent = view.extents[segment]
    return extent.head >= extent.end
