"""The segments of a stream of Pravega that is scaled: which follow which, and how far checkpoints have read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from headgate.codec.decodable import decodable
from headgate.errors import CorruptionError

_POSITION_VERSION = 1


class Position(msgspec.Struct, frozen=True):
    """A position as checkpoints store it.

    Attributes:
        offset: of the next event.
        after: the segments that follow, each with all that it follows; None: the segment is not read to its end.
        end: the cut at which a bounded reading ends; None: it does not.
        marks: from where on marks of event time are needed (``time_marks``).
    """

    offset: int
    after: dict[int, list[int]] | None = None
    end: dict[int, int] | None = None
    version: int = _POSITION_VERSION
    marks: int = 0

    def encode(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, split: str, data: bytes) -> Position:
        """Return the position of a split.

        Raises:
            CorruptionError
        """
        try:
            found = msgspec.json.decode(data, type=decodable(cls))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptionError(f"position of split '{split}'", 0, "an offset", str(error)) from error
        if found.version != _POSITION_VERSION:
            problem = f"version {found.version}"
            raise CorruptionError(f"position of split '{split}'", 0, f"version {_POSITION_VERSION}", problem)
        return found


class ScaledStream:
    """Which segments follow each other, as far as it is known, and which were read to their ends."""

    def __init__(self, begin: Mapping[int, Position]) -> None:
        """``begin``: where reading begins, in all subtasks."""
        self.known = set(begin)
        self.done: set[int] = set()
        self.after: dict[int, dict[int, list[int]]] = {}
        self._before: dict[int, set[int]] = {}
        for segment, position in begin.items():
            # read to its end before the checkpoint: what follows it need not wait
            if position.after is not None:
                self.end(segment, position.after)

    def end(self, segment: int, after: Mapping[int, Sequence[int]]) -> None:
        """A segment was read to its end."""
        self.note(segment, after)
        self.done.add(segment)

    def note(self, segment: int, after: Mapping[int, Sequence[int]]) -> None:
        """It is known what follows a segment."""
        self.after[segment] = {one: list(before) for one, before in after.items()}
        self.known |= {segment, *after}
        for one, before in after.items():
            self._before.setdefault(one, set()).update(before)

    def waits_for(self, segment: int) -> set[int]:
        """Return the segments that are to be read to their ends before ``segment`` begins."""
        return self.before(segment) - self.done

    def before(self, segment: int) -> set[int]:
        """Return the segments that ``segment`` follows; none, if it is not known to follow any."""
        return self._before.get(segment, set())

    @property
    def unknown(self) -> set[int]:
        """Segments of which it is not known what follows them."""
        return self.known - self.after.keys()


def segment_of(split: str) -> int:
    """Return the segment of a split."""
    return int(split.rpartition("/")[2])


def without_needless(found: Mapping[int, Position]) -> dict[int, Position]:
    """Return positions without those of segments that were read to their ends and tell nothing any more.

    All that follows such a segment has begun. And it follows none that is kept: of that one, it would be the next.
    """
    needless: set[int] = set()
    for segment, at in sorted(found.items()):  # what follows a segment has a higher number
        before = {one for one, other in found.items() if other.after and segment in other.after}
        if at.after and before <= needless and at.after.keys() <= found.keys():
            needless.add(segment)
    return {one: at for one, at in found.items() if one not in needless}


def cut_before(
    checkpoints: Sequence[Mapping[int, Position]], successors: Callable[[int], Mapping[int, Sequence[int]]]
) -> dict[int, int]:
    """Return the latest stream cut that is in front of all that any of some checkpoints has still to read.

    Args:
        checkpoints: positions, at least one; those of each are over all keys.
        successors: what follows a segment, each with all that it follows. Only asked if a stream was scaled between
            the checkpoints.

    Source: PV11.
    """
    mentioned = {segment for positions in checkpoints for segment in positions}
    after: dict[int, Mapping[int, Sequence[int]]] = {
        segment: at.after for positions in checkpoints for segment, at in positions.items() if at.after
    }
    if any(positions.keys() != mentioned for positions in checkpoints):
        _find_between(mentioned, after, successors)
    later = _descendants(after)
    read = {
        segment: min(_read(positions, segment, later) for positions in checkpoints)
        for segment in mentioned | {one for following in after.values() for one in following}
    }
    ends = {segment: at.offset for positions in checkpoints for segment, at in positions.items() if at.after}
    cut = mentioned - {one for segment in mentioned for one in later.get(segment, ())}
    while replaced := next(filter(None, (_replaceable(one, cut, read, after) for one in sorted(cut))), None):
        cut = cut - replaced | {one for segment in replaced for one in after[segment]}
    return {one: ends[one] if read[one] == math.inf else int(read[one]) for one in sorted(cut)}


def ended_beside(positions: Collection[int], successors: Callable[[int], Mapping[int, Sequence[int]]]) -> set[int]:
    """Return the segments that were read to their ends, and that readers keep no position of, but a cut needs.

    They share what follows them with a segment that is not read to its end.

    Args:
        positions: the segments that are being read.
        successors: what follows a segment, each with all that it follows.

    Source: PV14.
    """
    last_epoch = max(segment >> 32 for segment in positions)
    before: set[int] = set()
    todo, later = sorted(positions), set[int]()
    while todo:
        for one, all_before in successors(todo.pop()).items():
            before |= set(all_before)
            if one not in later and one >> 32 <= last_epoch:
                todo.append(one)
            later.add(one)
    return before - later - set(positions)


def _find_between(
    mentioned: set[int],
    after: dict[int, Mapping[int, Sequence[int]]],
    successors: Callable[[int], Mapping[int, Sequence[int]]],
) -> None:
    """Add to ``after`` what lies between the segments that are mentioned."""
    last_epoch = max(segment >> 32 for segment in mentioned)
    todo = sorted(mentioned)
    seen = set(todo)
    while todo:
        segment = todo.pop()
        if segment not in after and segment >> 32 < last_epoch:  # others have nothing between them and the last ones
            after[segment] = successors(segment)
        new = [one for one in after.get(segment, ()) if one not in seen]
        seen |= set(new)
        todo += new


def _descendants(after: Mapping[int, Mapping[int, Sequence[int]]]) -> dict[int, set[int]]:
    """Return all that follows each segment, however far."""
    found: dict[int, set[int]] = {}
    for segment in sorted(after, reverse=True):  # what follows a segment has a higher number
        found[segment] = set(after[segment]).union(*(found.get(one, ()) for one in after[segment]))
    return found


def _read(positions: Mapping[int, Position], segment: int, later: Mapping[int, set[int]]) -> float:
    """Return how far a checkpoint has read a segment: ``inf``: to its end."""
    at = positions.get(segment)
    if at is not None:
        return math.inf if at.after else at.offset
    return 0 if later.get(segment, set()).isdisjoint(positions) else math.inf


def _replaceable(
    segment: int, cut: set[int], read: Mapping[int, float], after: Mapping[int, Mapping[int, Sequence[int]]]
) -> set[int] | None:
    """Return the segments that can leave a cut, with ``segment``, for those that follow them; None: they cannot.

    They share what follows them; all of them were read to their ends.
    """
    found, todo = {segment}, [segment]
    while todo:
        one = todo.pop()
        if one not in cut or read[one] != math.inf:
            return None
        new = {before for all_before in after[one].values() for before in all_before} - found
        found |= new
        todo += new
    return found
