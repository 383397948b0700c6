"""What checkpoints say of a stream that was scaled, without a server: random streams, read in random orders."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from tests.conftest import few

from headgate.connectors.pravega.scaled_stream import Position, cut_before, ended_beside, without_needless

E1, E2, E3 = 1 << 32, 2 << 32, 3 << 32


def test_an_ended_segment_is_kept_with_a_kept_one_that_it_follows() -> None:
    """Without segment 2, it would seem that what follows segment 0 has not begun: it would be read again."""
    after_0 = {E1 + 2: [0], E1 + 3: [0]}
    found = {0: Position(9, after_0), E1 + 2: Position(5, {E2 + 4: [E1 + 2]}), E2 + 4: Position(1)}
    assert without_needless(found) == found
    everything = found | {E1 + 3: Position(0)}
    assert without_needless(everything) == {E2 + 4: Position(1), E1 + 3: Position(0)}


def refuse(segment: int) -> Mapping[int, Sequence[int]]:
    raise AssertionError(f"asked for {segment}")


def test_the_cut_has_the_smallest_offsets() -> None:
    assert cut_before([{0: Position(5), 1: Position(7)}, {0: Position(9), 1: Position(3)}], refuse) == {0: 5, 1: 3}


def test_what_has_not_begun_is_in_front_of_its_first_event() -> None:
    ended = Position(9, {E1 + 2: [0], E1 + 3: [0]})
    assert cut_before([{0: ended, 1: Position(3), E1 + 2: Position(4)}], refuse) == {1: 3, E1 + 2: 4, E1 + 3: 0}


def test_a_segment_stays_while_what_it_is_merged_with_is_read() -> None:
    """Segment 0 was split; a part of it was merged with segment 1."""
    after = {E1 + 2: [0], E1 + 3: [0, 1]}
    one = {0: Position(9, after), 1: Position(3), E1 + 2: Position(4)}
    assert cut_before([one], refuse) == {0: 9, 1: 3}, "the cut has each key once"
    two = one | {1: Position(8, {E1 + 3: [0, 1]})}
    assert cut_before([two], refuse) == {E1 + 2: 4, E1 + 3: 0}


def test_an_end_of_a_bounded_reading_is_no_end_of_a_segment() -> None:
    assert cut_before([{0: Position(5, {}), 1: Position(7, {})}], refuse) == {0: 5, 1: 7}


@dataclass
class Stream:
    """A stream that is scaled at random: segments with the part of [0, 1) of their keys, and their lengths."""

    draw: random.Random
    ranges: dict[int, tuple[float, float]] = field(default_factory=dict)
    after: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    now: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(2):
            self._add(number, (number / 2, (number + 1) / 2))
        for epoch in range(1, self.draw.randint(1, 8)):
            self._scale(epoch)

    def _add(self, segment: int, keys: tuple[float, float]) -> None:
        self.ranges[segment], self.lengths[segment] = keys, self.draw.randint(0, 9)
        self.now = sorted([*self.now, segment], key=lambda one: self.ranges[one])

    def _scale(self, epoch: int) -> None:
        first = self.draw.randrange(len(self.now))
        sealed = self.now[first : first + self.draw.randint(1, 2)]
        low, high = self.ranges[sealed[0]][0], self.ranges[sealed[-1]][1]
        self.now = [one for one in self.now if one not in sealed]
        between = self.draw.choice([[], [(low + high) / 2], [low + (high - low) / 4, low + (high - low) / 2]])
        for begin, end in zip([low, *between], [*between, high], strict=True):
            segment = (epoch << 32) + len(self.ranges)
            self._add(segment, (begin, end))
            for one in sealed:
                if self.ranges[one][0] < end and begin < self.ranges[one][1]:
                    self.after.setdefault(one, {})[segment] = [
                        other for other in sealed if self.ranges[other][0] < end and begin < self.ranges[other][1]
                    ]

    def successors(self, segment: int) -> dict[int, list[int]]:
        return self.after.get(segment, {})

    def read(self, positions: dict[int, Position], steps: int) -> None:
        """Read on at random, as subtasks do."""
        for _ in range(steps):
            known = set(positions) | {one for at in positions.values() for one in at.after or ()}
            can = [one for one in sorted(known) if self._can_read(one, positions)]
            if not can:
                return
            segment = self.draw.choice(can)
            offset = positions[segment].offset if segment in positions else 0
            if offset < self.lengths[segment]:
                positions[segment] = Position(offset + self.draw.randint(1, self.lengths[segment] - offset))
            else:
                positions[segment] = Position(offset, self.after.get(segment))

    def _can_read(self, segment: int, positions: Mapping[int, Position]) -> bool:
        if segment in positions:
            at = positions[segment]
            return at.after is None and (at.offset < self.lengths[segment] or segment in self.after)
        before = {one for at in positions.values() for one in (at.after or {}).get(segment, ())}
        return all(one in positions and positions[one].after for one in before)

    def unread(self, positions: Mapping[int, Position]) -> set[tuple[int, int]]:
        """Return all events that come from these positions on: segment and offset."""
        begun = {(one, at) for one, place in positions.items() if not place.after for at in self._from(one, place)}
        waiting = {one for place in positions.values() for one in place.after or () if one not in positions}
        return begun | self.later(waiting | {one for one, place in positions.items() if not place.after}, waiting)

    def later(self, segments: set[int], whole: set[int]) -> set[tuple[int, int]]:
        """Return the events of all that follows ``segments``, and of ``whole``."""
        found = set(whole)
        todo = sorted(segments)
        while todo:
            new = set(self.successors(todo.pop())) - found
            found |= new
            todo += sorted(new)
        return {(one, at) for one in found for at in range(self.lengths[one])}

    def _from(self, segment: int, place: Position) -> range:
        return range(place.offset, self.lengths[segment])

    def is_cut(self, cut: Mapping[int, int]) -> bool:
        """Whether it is over all keys, each once."""
        parts = sorted(self.ranges[one] for one in cut)
        return [low for low, _ in parts] == [0.0, *(high for _, high in parts[:-1])] and parts[-1][1] == 1.0


@pytest.mark.parametrize("seed", few(range(300), 30))
def test_nothing_that_a_checkpoint_reads_again_is_in_front_of_the_cut(seed: int) -> None:
    """PV11; checkpoints of one reading, some of which were restored, and some of which were dropped."""
    draw = random.Random(seed)
    stream = Stream(draw)
    positions = {0: Position(0), 1: Position(0)}
    checkpoints = []
    for _ in range(draw.randint(1, 4)):
        stream.read(positions, draw.randint(0, 8))
        checkpoints.append(dict(positions))
        if draw.random() < 0.5:
            before = stream.unread(positions)
            positions = without_needless(positions)
            assert stream.unread(positions) == before, "the same follows"
    kept = [one for one in checkpoints if draw.random() < 0.6] or checkpoints[-1:]
    cut = cut_before(kept, stream.successors)
    assert stream.is_cut(cut)
    behind = {(one, at) for one, offset in cut.items() for at in range(offset, stream.lengths[one])}
    behind |= stream.later(set(cut), set())
    needed = set().union(*(stream.unread(one) for one in kept))
    assert needed <= behind
    if len(stream.ranges) == 2:
        assert needed == behind, "it is the latest one"


def test_a_cut_of_readers_has_the_ends_that_they_keep_no_position_of() -> None:
    """PV14."""
    split = {E1 + 2: [0], E1 + 3: [0]}
    merged = {E2 + 4: [1, E1 + 3]}
    after: dict[int, dict[int, list[int]]] = {0: split, 1: merged, E1 + 2: {}, E1 + 3: merged, E2 + 4: {}}
    successors = after.__getitem__
    assert ended_beside([0, 1], successors) == set(), "segment 3 has not begun"
    assert ended_beside([E1 + 2, E1 + 3], successors) == {1}
    assert ended_beside([E1 + 2, 1], successors) == {E1 + 3}
    assert ended_beside([E1 + 2, E2 + 4], successors) == set()
