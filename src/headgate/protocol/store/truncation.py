"""How far a stream may be truncated: pure decisions about heads, stream cuts and holds.

Counterpart: ``store.catalogue.heads`` asks inside the transaction that applies the answer. Source: Pravega's stream
cuts and consumption-based retention (S65 to S71 of docs/spec/stream-store.md). Where Pravega discards the bound of
a slow subscriber, nothing that anybody holds goes here unless the caller says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from headgate.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """What there is of a segment: the events from ``head`` up to, and not including, ``end``."""

    head: int
    end: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Who still needs the events of a stream from where on, per segment.

    Of a segment that it does not name, which came after it, everything is needed.

    Attributes:
        holder: its name.
        positions: segment → first position that is needed.
        life, epoch: of a pipeline, its life and its generation; one that was replaced holds nothing any more.
    """

    holder: str
    positions: Mapping[int, int]
    life: str = ""
    epoch: int = 0

    def is_replaced_by(self, life: str, epoch: int) -> bool:
        """Whether what is held already, by ``life`` in ``epoch``, is by one that came after this one."""
        return life == self.life and epoch > self.epoch

    def position(self, segment: int, extent: Extent) -> int:
        """Return the first position of ``segment`` that is needed."""
        return self.positions.get(segment, extent.head)


GROUP_HOLDER = "reader group "
"""Prefix of the names of holds that belong to reader groups (RG17); other holders may not use it."""


def is_of_group(holder: str) -> bool:
    """Return whether a reader group holds under this name."""
    return holder.startswith(GROUP_HOLDER)


@dataclass(frozen=True, slots=True)
class Move:
    """The heads move: segment → its new head. Empty: the cut lies before all of them."""

    heads: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Outside:
    """The cut is outside the stream: it names a segment that does not exist, or a position after its end."""

    segment: int
    position: int
    extent: Extent | None


@dataclass(frozen=True, slots=True)
class Held:
    """``holder`` needs the events of ``segment`` from ``position`` on, and the cut lies at ``wanted``."""

    holder: str
    segment: int
    position: int
    wanted: int


Answer: TypeAlias = Move | Outside | Held


def truncate(cut: Mapping[int, int], extents: Mapping[int, Extent], holds: Sequence[Hold], *, anyway: bool) -> Answer:
    """Decide about a truncation that a user asked for; with ``anyway`` no hold counts."""
    for segment, position in sorted(cut.items()):
        extent = extents.get(segment)
        # all of the cut is checked before a head moves: it is carried out as a whole, or not at all
        if extent is None or position > extent.end:
            return Outside(segment, position, extent)
    moved = _forward(cut, extents)
    if not anyway:
        for segment, position in sorted(moved.items()):
            for hold in holds:
                needed = hold.position(segment, extents[segment])
                if needed < position:
                    return Held(hold.holder, segment, needed, position)
    return Move(moved)


def retain(cut: Mapping[int, int], extents: Mapping[int, Extent], holds: Sequence[Hold]) -> Move:
    """Decide about a cut that a retention policy found: shorten it to what no hold needs."""
    limited = {
        segment: min([position, *(hold.position(segment, extents[segment]) for hold in holds)])
        for segment, position in cut.items()
        if segment in extents
    }
    return Move(_forward(limited, extents))


def needed_by(extents: Mapping[int, Extent], holds: Sequence[Hold]) -> tuple[str, ...]:
    """Return the holders that still need events of a stream with these ``extents``: it is not deleted unasked."""
    return tuple(
        hold.holder
        for hold in holds
        if any(hold.position(segment, extent) < extent.end for segment, extent in extents.items())
    )


def _forward(cut: Mapping[int, int], extents: Mapping[int, Extent]) -> dict[int, int]:
    """Return the heads that ``cut`` moves: never back."""
    return {segment: position for segment, position in cut.items() if position > extents[segment].head}
