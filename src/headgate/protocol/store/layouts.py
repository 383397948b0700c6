"""Which segment of a stream takes which keys, how its layouts follow each other, and when a policy scales it.

Pure decisions. ``store.catalogue.scaling`` asks inside the transaction that applies the answer, and observes the load
for policies. Source: Pravega's segments, epochs, rolling transactions and scaling policies (CT6, S72 to S75 and S79
to S81 of docs/spec/stream-store.md). No event moves when a stream is scaled: segments are closed, and others take
their keys from then on. A policy knows what the catalogue says at one moment, so every process decides the same; the
number of the layout keeps two from doing it twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

from headgate.dataclass import dataclass

KEY_SPACE = 1 << 32
"""Where a key is: the upper half of its hash, from 0 up to, and not including, this number (S2)."""

SEGMENTS_MAX = 4_096
"""Each flush may touch all segments; more would make its catalogue transaction too long."""

_NUMBERS_SHOWN = 20

Range: TypeAlias = tuple[int, int]
"""Keys from the first number up to, and not including, the second one."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a stream (CT6).

    Attributes:
        segment_id: its number within the stream; never used again.
        key_low, key_high: it takes the keys from ``key_low`` up to, and not including, ``key_high`` of ``KEY_SPACE``.
        created_epoch: the first layout that has it.
        closed_epoch: the first layout that has it no more; None: the present one has it.
    """

    segment_id: int
    key_low: int
    key_high: int
    created_epoch: int = 0
    closed_epoch: int | None = None

    @property
    def keys(self) -> Range:
        """The keys that it takes."""
        return self.key_low, self.key_high

    def is_in(self, epoch: int) -> bool:
        """Whether it belongs to the layout of this number."""
        return self.created_epoch <= epoch and (self.closed_epoch is None or epoch < self.closed_epoch)

    def overlaps(self, other: Segment) -> bool:
        """Whether there are keys that both take."""
        return self.key_low < other.key_high and other.key_low < self.key_high


@dataclass(frozen=True, slots=True)
class Layout:
    """The segments of a stream, those of former layouts included, by number."""

    epoch: int
    segments: tuple[Segment, ...]

    @property
    def present(self) -> tuple[Segment, ...]:
        """The segments that take events, by the keys that they take."""
        return _by_keys(segment for segment in self.segments if segment.closed_epoch is None)

    def of_epoch(self, epoch: int) -> tuple[Segment, ...]:
        """Return the segments that took events in a layout, by the keys that they took."""
        return _by_keys(segment for segment in self.segments if segment.is_in(epoch))

    def heirs(self, number: int) -> set[int]:
        """Return the segments that may have events which were routed to one: it, and later ones with all its keys."""
        own = next((x for x in self.segments if x.segment_id == number), None)
        if own is None:
            return {number}
        later = (x for x in self.segments if x.segment_id > number)
        return {number} | {x.segment_id for x in later if x.key_low <= own.key_low and own.key_high <= x.key_high}

    def problems(self) -> list[str]:
        """Return what is not as it must be: every key is in one segment, in each layout up to the present one."""
        numbers = [segment.segment_id for segment in self.segments]
        found = [] if numbers == [*range(len(numbers))] else [f"its segments have the numbers {_listed(numbers)}"]
        for segment in self.segments:
            closed = self.epoch if segment.closed_epoch is None else segment.closed_epoch
            if not 0 <= segment.created_epoch <= closed <= self.epoch or segment.created_epoch == segment.closed_epoch:
                found.append(f"segment {segment.segment_id} is of layouts that cannot be, up to layout {self.epoch}")
        return found + gaps_between(self.present) + self._uneven_steps()

    def _uneven_steps(self) -> list[str]:
        """Return the layouts in which the new segments do not take exactly the keys of the closed ones."""
        closed: dict[int, list[Range]] = {}
        opened: dict[int, list[Range]] = {}
        for segment in self.segments:
            opened.setdefault(segment.created_epoch, []).append(segment.keys)
            if segment.closed_epoch is not None:
                closed.setdefault(segment.closed_epoch, []).append(segment.keys)
        epochs = sorted((closed.keys() | opened.keys()) - {0})
        pairs = [(epoch, closed.get(epoch, []), opened.get(epoch, [])) for epoch in epochs]
        return [
            f"the segments of layout {epoch} do not take exactly the keys of those that it closed"
            for epoch, gone, new in pairs
            if _covered(gone) != _covered(new) or _overlap(gone) or _overlap(new)
        ]


class Lineage:
    """Which segments of a layout follow which: what took the keys of one when it was closed."""

    def __init__(self, layout: Layout) -> None:
        self._closed: dict[int, list[Segment]] = {}
        self._opened: dict[int, list[Segment]] = {}
        for segment in layout.segments:
            self._opened.setdefault(segment.created_epoch, []).append(segment)
            if segment.closed_epoch is not None:
                self._closed.setdefault(segment.closed_epoch, []).append(segment)

    def predecessors(self, segment: Segment) -> list[int]:
        """Return the segments that directly precede ``segment`` for some of its keys."""
        return [x.segment_id for x in self._closed.get(segment.created_epoch, ()) if x.overlaps(segment)]

    def successors(self, segment: Segment) -> list[int]:
        """Return the segments that took the keys of ``segment`` when it was closed; none if it takes events."""
        if segment.closed_epoch is None:
            return []
        return [x.segment_id for x in self._opened.get(segment.closed_epoch, ()) if x.overlaps(segment)]


def first_layout(segments_count: int) -> Layout:
    """Return the layout of a new stream: ranges of equal size, in the order of the segments' numbers (S2)."""
    ranges = equal_ranges((0, KEY_SPACE), segments_count)
    return Layout(0, tuple(Segment(number, low, high) for number, (low, high) in enumerate(ranges)))


def equal_ranges(keys: Range, count: int) -> list[Range]:
    """Cut ``keys`` into ``count`` ranges of equal size, or nearly so."""
    low, high = keys
    bounds = [low - (-number * (high - low) // count) for number in range(count + 1)]
    return list(pairwise(bounds))


@dataclass(frozen=True, slots=True)
class Plan:
    """How to scale a stream, planned from its layout of number ``epoch``.

    Attributes:
        epoch: that number.
        close: segments of it that are to take no more events.
        ranges: the keys of the new segments: all those of the closed ones, each once.
    """

    epoch: int
    close: tuple[int, ...]
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The stream cannot be scaled like that; ``problem`` says why."""

    problem: str


@dataclass(frozen=True, slots=True)
class Change:
    """The step to the next layout.

    Attributes:
        layout: the one that there is then.
        closed: the numbers of the segments that take no more events.
        opened: those that take their keys.
    """

    layout: Layout
    closed: tuple[int, ...]
    opened: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class AlreadyScaled:
    """This step was made before: the request is repeated because its answer was lost."""


@dataclass(frozen=True, slots=True)
class Outdated:
    """The plan was made for an older layout: the stream was scaled since."""


def split(layout: Layout, segment_id: int, count: int) -> Plan | Refused:
    """Let ``count`` segments, of ranges of equal size, take the keys of one."""
    found = [segment for segment in layout.present if segment.segment_id == segment_id]
    if not found:
        return _not_present(layout, (segment_id,))
    if not 2 <= count <= found[0].key_high - found[0].key_low:
        return Refused(f"segment {segment_id} cannot be split into {count}")
    return Plan(layout.epoch, (segment_id,), tuple(equal_ranges(found[0].keys, count)))


def merge(layout: Layout, segment_ids: Collection[int]) -> Plan | Refused:
    """Let one segment take the keys of several neighbours."""
    found = [segment for segment in layout.present if segment.segment_id in segment_ids]
    if len(found) < len(set(segment_ids)):
        return _not_present(layout, segment_ids)
    if len(found) < 2:
        return Refused("it takes two segments to merge them")
    if any(one.key_high != next_one.key_low for one, next_one in pairwise(found)):
        return Refused(f"segments {_listed(segment_ids)} are no neighbours: others take keys in between")
    close = tuple(sorted(set(segment_ids)))
    return Plan(layout.epoch, close, ((found[0].key_low, found[-1].key_high),))


def resize(layout: Layout, count: int) -> Plan | Refused:
    """Let ``count`` segments of equal ranges be the present ones; those that have such a range already stay."""
    if not 1 <= count <= SEGMENTS_MAX:
        return Refused(f"a stream has 1 to {SEGMENTS_MAX} segments, not {count}")
    plan = _towards(layout, equal_ranges((0, KEY_SPACE), count))
    return Refused(f"it has {count} segments of equal ranges already") if plan is None else plan


def scale(layout: Layout, plan: Plan) -> Change | AlreadyScaled | Outdated | Refused:
    """Close segments of the present layout, and have new ones take their keys (S72)."""
    if plan.epoch != layout.epoch:
        # a plan has no name: the step that it asks for, made from its layout, is taken for its own
        return AlreadyScaled() if _was_made(layout, plan) else Outdated()
    present = {segment.segment_id: segment for segment in layout.present}
    if not plan.close or set(plan.close) - set(present):
        return _not_present(layout, plan.close)
    if any(low >= high for low, high in plan.ranges) or _overlap(plan.ranges):
        return Refused("the new ranges are empty or overlap")
    if _covered(present[number].keys for number in plan.close) != _covered(plan.ranges):
        return Refused("the new ranges do not take exactly the keys of the segments that are to be closed")
    if len(present) - len(plan.close) + len(plan.ranges) > SEGMENTS_MAX:
        return Refused(f"it would have more than {SEGMENTS_MAX} segments")
    return _step(layout, plan)


@dataclass(frozen=True, slots=True)
class Reopened:
    """Where events go that were routed by a former layout (S75).

    Attributes:
        places: segment of that layout → the one that takes its events now.
        change: the step that has to come before, if any.
    """

    places: dict[int, int]
    change: Change | None = None


def reopen(layout: Layout, epoch: int, touched: Collection[int]) -> Reopened:
    """Find where events of the segments ``touched``, which were routed by the layout of number ``epoch``, go to.

    A segment that takes all keys of a closed one takes its events as well. Where several took its keys, it is unknown
    which event belongs to which, so segments of the old ranges are opened once more for these events: all earlier
    events precede them, and after ``back`` all later ones follow them.
    """
    homes = {number: _home(layout, number) for number in touched}
    places = {number: home for number, home in homes.items() if home is not None}
    if len(places) == len(homes):
        return Reopened(places)
    old = [segment for segment in layout.of_epoch(epoch) if segment.closed_epoch is not None]
    # all that came after that layout, so that the old ranges take every key once
    new = tuple(segment.segment_id for segment in layout.present if segment.created_epoch > epoch)
    change = _step(layout, Plan(layout.epoch, new, tuple(segment.keys for segment in old)))
    again = {segment.segment_id: x.segment_id for segment, x in zip(old, change.opened, strict=True)}
    return Reopened({number: again.get(number, number) for number in touched}, change)


def back(layout: Layout, ranges: Sequence[Range]) -> Change | None:
    """Return the step from what ``reopen`` did back to a layout of these ranges; None if it has them."""
    plan = _towards(layout, ranges)
    return None if plan is None else _step(layout, plan)


def _home(layout: Layout, number: int) -> int | None:
    """Return the present segment that takes all keys of segment ``number``, if there is one."""
    low, high = layout.segments[number].keys
    return next((x.segment_id for x in layout.present if x.key_low <= low and high <= x.key_high), None)


def _towards(layout: Layout, ranges: Sequence[Range]) -> Plan | None:
    """Return what leads to ``ranges``, which take every key once; None if the present segments have them."""
    close = tuple(sorted(segment.segment_id for segment in layout.present if segment.keys not in ranges))
    there = {segment.keys for segment in layout.present}
    return Plan(layout.epoch, close, tuple(keys for keys in ranges if keys not in there)) if close else None


def _step(layout: Layout, plan: Plan) -> Change:
    epoch = layout.epoch + 1
    kept = [replace(x, closed_epoch=epoch) if x.segment_id in plan.close else x for x in layout.segments]
    # numbers go on and are never used again: positions of readers and cuts name segments by them
    opened = tuple(Segment(len(kept) + number, *keys, epoch) for number, keys in enumerate(plan.ranges))
    after = Layout(epoch, (*kept, *opened))
    keys, before = ([segment.keys for segment in one.present] for one in (after, layout))
    assert _covered(keys) == _covered(before), "a step of the layout loses no keys (S72)"
    assert not _overlap(keys), "each key has one segment that takes its events (S72)"
    return Change(after, plan.close, opened)


def _was_made(layout: Layout, plan: Plan) -> bool:
    """Whether the step after the layout that ``plan`` was made for is the step that it asks for."""
    closed = {segment.segment_id for segment in layout.segments if segment.closed_epoch == plan.epoch + 1}
    opened = {segment.keys for segment in layout.segments if segment.created_epoch == plan.epoch + 1}
    return bool(closed) and closed == set(plan.close) and opened == set(plan.ranges)


def _not_present(layout: Layout, segment_ids: Collection[int]) -> Refused:
    present = sorted(segment.segment_id for segment in layout.present)
    gone = sorted(set(segment_ids) - set(present))
    what = f"segment {gone[0]} takes no events" if gone else "no segment is named"
    return Refused(f"{what}; those that do are {_listed(present)}")


def _by_keys(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(sorted(segments, key=lambda segment: segment.key_low))


def _covered(ranges: Iterable[Range]) -> list[Range]:
    """Return the same keys in as few ranges as possible."""
    found: list[Range] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _overlap(ranges: Sequence[Range]) -> bool:
    return any(one[1] > next_one[0] for one, next_one in pairwise(sorted(ranges)))


def gaps_between(segments: Sequence[Segment]) -> list[str]:
    """Return where segments, by the keys that they take, do not follow each other over all keys (CT6)."""
    found = []
    expected = 0
    for segment in segments:
        if segment.key_low != expected or segment.key_high <= segment.key_low:
            found.append(
                f"segment {segment.segment_id} takes the keys from {segment.key_low} to {segment.key_high} where "
                f"{expected} was to follow"
            )
        expected = segment.key_high
    if expected != KEY_SPACE:
        found.append(f"its segments take the keys up to {expected}, not {KEY_SPACE}")
    return found


def _listed(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    more = "" if len(found) <= _NUMBERS_SHOWN else f" and {len(found) - _NUMBERS_SHOWN} more"
    return ", ".join(map(str, found[:_NUMBERS_SHOWN])) + more


WINDOWS_MS = (120_000, 300_000, 600_000, 1_200_000)
"""Over so long what came is counted."""

HOT_FACTORS = (5.0, 2.0, 1.0)
"""A segment is hot if it gets more than so many times its target over one of the first windows: soon if it is much."""

SPLIT_MOST = 4
"""So many segments take the keys of a hot one at once. What came over a short time is no measure for more."""


class Unit(StrEnum):
    """What of a stream is counted."""

    EVENTS = "events"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """How many segments a stream gets by itself; checked, see ``store.streams.Scaling``.

    Attributes:
        unit: what is counted.
        target: so many of it a second one segment should get.
        segments_min, segments_max: no step by the policy leads below or above.
        cool_down_ms: so long after a step, also one by hand, there is no other.
    """

    unit: Unit
    target: int
    segments_min: int
    segments_max: int
    cool_down_ms: int

    def __str__(self) -> str:
        return f"{self.target:,} {self.unit} a second in a segment, {self.segments_min} to {self.segments_max} segments"


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """A stream at one moment.

    Attributes:
        layout: its segments.
        unchanged_ms: for so long it has had this layout.
        amounts: of each present segment, what it got over each of ``WINDOWS_MS``; None: some of it is truncated.
    """

    layout: Layout
    unchanged_ms: int
    amounts: Mapping[int, tuple[int | None, ...]]


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The stream keeps its segments; ``why``, for people."""

    why: str


def scaling_by_policy(policy: ScalingPolicy, observed: ObservedLoad) -> Plan | Unscaled:
    """Return the step to be made, if any: hot segments are split, or else cold neighbours are merged (S79).

    A segment that was merged gets at most half of the target, and one that is split more than all of it. So what keeps
    its rate is not split and merged in turn (S80).
    """
    if observed.unchanged_ms < policy.cool_down_ms:
        return Unscaled("it was scaled a short time ago")
    present = observed.layout.present
    split = _splits(policy, observed, present)
    if split:
        ranges = [keys for number, count in split.items() for keys in equal_ranges(_keys(present, number), count)]
        return Plan(observed.layout.epoch, tuple(sorted(split)), tuple(sorted(ranges)))
    pairs = _pairs(policy, observed, present)
    if pairs:
        close = tuple(sorted(segment.segment_id for pair in pairs for segment in pair))
        ranges = sorted((low.key_low, high.key_high) for low, high in pairs)
        return Plan(observed.layout.epoch, close, tuple(ranges))
    return Unscaled("no segment is too hot, and no two neighbours are cold enough")


def _splits(policy: ScalingPolicy, observed: ObservedLoad, present: Sequence[Segment]) -> dict[int, int]:
    """Return which segments are split into how many, the hottest ones first, as far as there is room."""
    heat = {segment: _heat(policy, observed, segment) for segment in present}
    room = policy.segments_max - len(present)
    found: dict[int, int] = {}
    for segment in sorted(present, key=lambda one: (-heat[one], one.segment_id)):
        width = segment.key_high - segment.key_low
        count = min(-(-heat[segment] // 1), SPLIT_MOST, room + 1, width) if heat[segment] > 1 else 0
        if count >= 2:
            found[segment.segment_id] = int(count)
            # one of the new segments takes the place of the one that is split
            room -= int(count) - 1
    return found


def _heat(policy: ScalingPolicy, observed: ObservedLoad, segment: Segment) -> float:
    """Return how many times its target a hot segment gets, over the longest window that says that it is hot; else 0."""
    heat = 0.0
    for window_ms, factor, amount in zip(WINDOWS_MS, HOT_FACTORS, observed.amounts[segment.segment_id], strict=False):
        # a window that began before the last step would count what came to other segments
        if amount is not None and observed.unchanged_ms >= window_ms:
            found = _share(policy, amount, window_ms)
            heat = found if found > factor else heat
    return heat


def _pairs(policy: ScalingPolicy, observed: ObservedLoad, present: Sequence[Segment]) -> list[tuple[Segment, Segment]]:
    """Return neighbours that are cold together, those that get least first, as far as enough segments remain."""
    cold = {}
    for pair in pairwise(present):
        amount = _cold_amount(policy, observed, pair)
        if amount is not None:
            cold[pair] = amount
    found: list[tuple[Segment, Segment]] = []
    taken: set[int] = set()
    for low, high in sorted(cold, key=lambda pair: (cold[pair], pair[0].key_low)):
        is_free = not {low.segment_id, high.segment_id} & taken
        if is_free and len(present) - len(found) > policy.segments_min:
            found.append((low, high))
            taken |= {low.segment_id, high.segment_id}
    return found


def _cold_amount(policy: ScalingPolicy, observed: ObservedLoad, pair: tuple[Segment, Segment]) -> int | None:
    """Return what both got over the longest window, if one segment that gets all of it would be cold."""
    both = [observed.amounts[segment.segment_id] for segment in pair]
    total = 0
    for window_ms, one, other in zip(WINDOWS_MS, *both, strict=True):
        if one is None or other is None or observed.unchanged_ms < window_ms:
            return None
        most = 0.5 if window_ms == WINDOWS_MS[-1] else 1.0
        total = one + other
        if _share(policy, total, window_ms) > most:
            return None
    return total


def _share(policy: ScalingPolicy, amount: int, window_ms: int) -> float:
    """Return how many times its target a segment gets."""
    return amount * 1_000 / window_ms / policy.target


def _keys(present: Sequence[Segment], number: int) -> Range:
    return next(segment.keys for segment in present if segment.segment_id == number)
