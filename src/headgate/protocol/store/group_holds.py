"""What a reader group holds of a stream, and what of that moves from one of its states to the next: pure decisions.

Counterpart: ``store.catalogue.groups`` writes it. Source: RG17 and RG28 of docs/spec/reader-groups.md. Never looks at
what a stream was, unless other segments are held than before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
    """Return what the group may still be asked for: behind its durable positions, and behind its checkpoints (RG17).

    Of segments that it does not name everything is needed.
    """
    found = [whole_cut(view, x) for x in _all(group, stream)]
    named = set(found[0]).intersection(*found)  # of what one of them has not begun everything is needed
    return {x: max(view.extents[x].head, min(cut[x] for cut in found)) for x in sorted(named)}


def worth_holding(view: View, wanted: Mapping[int, int]) -> dict[int, int]:
    """Return ``wanted`` without closed segments that have no events any more: holding all of nothing is the same.

    It names one segment at least. Who names none holds nothing, and all of what it does not name is needed.
    """
    gone = {x.segment_id for x in view.layout.segments if x.closed_epoch is not None and _is_empty(view, x.segment_id)}
    found = {segment: position for segment, position in wanted.items() if segment not in gone}
    if found:
        return found
    last = max(wanted or view.extents)
    return {last: wanted.get(last, view.extents[last].head)}


def moved(before: Group, after: Group, stream: str) -> HoldMoved | None:
    """Return how what is held of a stream moves; None: ``needed`` has to tell (RG28).

    What a cut names hangs on which segments its progress has, not on how far it is in each. So if the same sets of
    segments are there as before, the same ones are held; and a position counts where a progress has one: any other
    that names the segment is at its end.
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
