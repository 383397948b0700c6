"""How much of a stream one micro-batch takes, what of it is read in order, and whether it is written yet: decisions.

Counterparts: ``spark.stream_reader`` and ``spark.stream_writer`` carry them out. Source: SP4, SP5, SP9 and SP10 of
docs/spec/spark-streams.md; Pravega's rule that a segment is read when those before it have been. A predecessor has a
lower number than what follows it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import accumulate, pairwise

from headgate.dataclass import dataclass
from headgate.protocol.store.layouts import Layout, Range
from headgate.protocol.store.truncation import Extent


@dataclass(frozen=True, slots=True)
class Piece:
    """Events of one segment, from position ``begin`` up to, and not including, ``end``."""

    segment: int
    begin: int
    end: int

    @property
    def rows_count(self) -> int:
        """How many events it has."""
        return self.end - self.begin


def pieces_between(extents: Mapping[int, Extent], begin: Mapping[int, int], end: Mapping[int, int]) -> list[Piece]:
    """Return what lies between two cuts, by segment.

    A segment that ``begin`` does not name came after it, and is read from its head; one that ``end`` does not name came
    after that, and is not read.
    """
    found = [Piece(x, max(begin.get(x, 0), extents[x].head), end[x]) for x in sorted(extents) if x in end]
    return [piece for piece in found if piece.rows_count > 0]


def first_missing(extents: Mapping[int, Extent], begin: Mapping[int, int]) -> int | None:
    """Return a segment with truncated events after the cut ``begin``, if there is one."""
    return next((number for number, extent in sorted(extents.items()) if begin.get(number, 0) < extent.head), None)


def taken(layout: Layout, unread: Sequence[Piece], rows_max: int) -> list[Piece]:
    """Return what of ``unread`` the next micro-batch takes, at most ``rows_max`` events.

    Nothing of a segment is taken before all of those that had its keys before it. Segments that may be read share what
    there is in proportion to what they have, so that none of them waits for another one's backlog.
    """
    left = {piece.segment: piece for piece in unread}
    until: dict[int, int] = {}
    while rows_max > 0 and (ready := _ready(layout, left.values())):
        shares = _shares([piece.rows_count for piece in ready], rows_max)
        for piece, share in zip(ready, shares, strict=True):
            until[piece.segment] = piece.begin + share
            left[piece.segment] = replace(piece, begin=piece.begin + share)
        rows_max -= sum(shares)
    found = [replace(piece, end=until.get(piece.segment, piece.begin)) for piece in unread]
    return [piece for piece in found if piece.rows_count > 0]


def in_order(layout: Layout, pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Group pieces of segments with common keys, each group in the order in which it has to be read."""
    groups: list[list[Piece]] = []
    bound = 0
    for piece in sorted(pieces, key=lambda piece: layout.segments[piece.segment].keys):
        low, high = layout.segments[piece.segment].keys
        if not groups or low >= bound:
            groups.append([])
        # the keys of a former segment may span several later ones: they are one group, read by number
        groups[-1].append(piece)
        bound = max(bound, high)
    return [sorted(group, key=lambda piece: piece.segment) for group in groups]


def cut_up(pieces: Iterable[Piece], rows_max: int) -> list[Piece]:
    """Cut pieces so that none has more than ``rows_max`` events."""
    return [
        Piece(piece.segment, begin, min(begin + rows_max, piece.end))
        for piece in pieces
        for begin in range(piece.begin, piece.end, rows_max)
    ]


def distribute(pieces: Iterable[Piece], rows_max: int, rows_min: int, at_once: int) -> list[list[Piece]]:
    """Deal pieces out to tasks of equal size, of which ``at_once`` run at one time (SP3).

    Args:
        pieces: in the order in which they are dealt out; one is cut where a task has enough.
        rows_max: no task has more events.
        rows_min: tasks of less would cost more than they save.
        at_once: as many tasks have something to do, or a multiple of them, unless they had too little.
    """
    left = [piece for piece in pieces if piece.rows_count]
    rows = sum(piece.rows_count for piece in left)
    if not rows:
        return []
    needed = -(-rows // rows_max)
    tasks = max(needed, min(-(-needed // at_once) * at_once, rows // rows_min))
    share = -(-rows // tasks)
    found: list[list[Piece]] = [[]]
    room = share
    for piece in left:
        begin = piece.begin
        while begin < piece.end:
            if not room:
                found.append([])
                room = share
            end = min(piece.end, begin + room)
            found[-1].append(Piece(piece.segment, begin, end))
            begin, room = end, room - (end - begin)
    assert sum(piece.rows_count for task in found for piece in task) == rows, "every event goes to one task"
    return found


class Turn(Enum):
    """What becomes of a micro-batch that is to be committed."""

    WRITE = "write"
    DONE = "done"
    """It is in the stream already: Spark repeats the latest one."""
    LATE = "late"
    """A later batch is committed: Spark never goes back past that."""


def turn_of(batch: int, committed: Collection[int]) -> Turn:
    """Decide about a micro-batch by the numbers of those that are known to be committed (SP9, SP10)."""
    latest = max(committed, default=-1)
    if batch > latest:
        return Turn.WRITE
    return Turn.DONE if batch == latest else Turn.LATE


def _ready(layout: Layout, left: Iterable[Piece]) -> list[Piece]:
    """Return the pieces in front of which nothing is left."""
    found = []
    blocked: list[Range] = []  # by key, without overlaps
    for piece in sorted(left, key=lambda piece: piece.segment):
        if not piece.rows_count:
            continue
        keys = layout.segments[piece.segment].keys
        if _overlaps(blocked, keys):
            _block(blocked, keys)
        else:
            found.append(piece)
            insort(blocked, keys)
    return found


def _overlaps(ranges: Sequence[Range], keys: Range) -> bool:
    at = bisect_left(ranges, (keys[1], 0))
    return at > 0 and ranges[at - 1][1] > keys[0]


def _block(ranges: list[Range], keys: Range) -> None:
    """Add keys to ranges some of which have keys in common with them."""
    low, high = keys
    last = bisect_left(ranges, (high, 0))
    first = last
    while first > 0 and ranges[first - 1][1] > low:
        first -= 1
        low, high = min(low, ranges[first][0]), max(high, ranges[first][1])
    ranges[first:last] = [(low, high)]


def _shares(counts: Sequence[int], rows_max: int) -> list[int]:
    """Share ``rows_max`` rows in proportion to ``counts``, of which there are more; or take all."""
    total = sum(counts)
    if total <= rows_max:
        return list(counts)
    # of sums, not of each count: what rounding takes from one share goes to the next
    ends = [count * rows_max // total for count in accumulate(counts, initial=0)]
    assert ends[-1] == rows_max, "shares make up the whole"
    return [end - begin for begin, end in pairwise(ends)]
