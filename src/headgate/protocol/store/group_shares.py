"""Who of a reader group reads which segments: shares of about equal size. Pure decisions.

Counterpart: ``reader_group`` asks after every change of who reads. Source: Pravega's reader groups, RG6
and RG7 of docs/spec/reader-groups.md. Where Pravega's readers take and give by timers of their own, one decision is
taken here for all. Never takes a segment from a reader: it asks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

SEGMENT_WEIGHT_BYTES = 1 << 20
"""What a segment weighs that has nothing unread: sizes below this decide little, so that shares do not flap."""


class GroupSegment(NamedTuple):
    """A segment of one of the streams of a group."""

    stream: str
    segment: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Which reader reads what.

    Attributes:
        owners: segment → its reader; others are nobody's.
        leaving: segments that their readers are asked to give up.
    """

    owners: Mapping[GroupSegment, str]
    leaving: frozenset[GroupSegment] = frozenset()

    def of(self, reader: str) -> tuple[GroupSegment, ...]:
        """Return what ``reader`` has, in order."""
        return tuple(sorted(segment for segment, owner in self.owners.items() if owner == reader))

    def without(self, gone: Iterable[GroupSegment]) -> Shares:
        """Return shares in which nobody has these."""
        left = set(gone)
        owners = {segment: owner for segment, owner in self.owners.items() if segment not in left}
        return Shares(owners, self.leaving - left)


def dealt(
    shares: Shares, free: Collection[GroupSegment], takers: Collection[str], sizes: Mapping[GroupSegment, int]
) -> Shares:
    """Give every free segment to that of ``takers`` who has least to read, the largest first (RG6)."""
    owners = dict(shares.owners)
    loads = {reader: sum(_weight(x, sizes) for x in shares.of(reader)) for reader in takers}
    for segment in sorted(free, key=lambda x: (-_weight(x, sizes), x)):
        if not loads:
            break
        reader = min(loads, key=lambda x: (loads[x], x))
        owners[segment] = reader
        loads[reader] += _weight(segment, sizes)
    return Shares(owners, shares.leaving)


def balanced(shares: Shares, readers: Collection[str], sizes: Mapping[GroupSegment, int]) -> Shares:
    """Ask who has most to read for a segment, if that makes him and who has least more equal (RG7).

    One at a time, and only if it does not turn the two around: so shares come to rest.
    """
    if len(readers) < 2 or shares.leaving:
        return shares
    loads = {reader: sum(_weight(x, sizes) for x in shares.of(reader)) for reader in readers}
    most = min(loads, key=lambda x: (-loads[x], x))
    gap = loads[most] - min(loads.values())
    fitting = [x for x in shares.of(most) if 2 * _weight(x, sizes) <= gap]
    if not fitting:
        return shares
    return Shares(shares.owners, frozenset({min(fitting, key=lambda x: (-_weight(x, sizes), x))}))


def _weight(segment: GroupSegment, sizes: Mapping[GroupSegment, int]) -> int:
    return SEGMENT_WEIGHT_BYTES + sizes.get(segment, 0)
