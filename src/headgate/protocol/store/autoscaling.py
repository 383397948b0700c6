"""When a stream is scaled by its policy: a pure decision over what was observed of it.

Counterparts: ``store.catalogue.autoscaling`` observes, ``store.autoscaled_store`` carries the plan out. Source:
Pravega's scaling policies (S79 to S81 of docs/spec/stream-store.md). It uses only what the catalogue says at one
moment, so every observer decides the same; the number of the layout prevents that two of them scale twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from headgate.protocol.store.layouts import Layout, Plan, Range, Segment, equal_ranges

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
    """How many segments a stream gets by itself; checked, see ``store.scaling.Scaling``.

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
class Observed:
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
class Stay:
    """The stream keeps its segments; ``why``, for people."""

    why: str


def decide(policy: ScalingPolicy, observed: Observed) -> Plan | Stay:
    """Return the step to be made, if any: hot segments are split, or else cold neighbours are merged (S79).

    A segment that was merged gets at most half of the target, and one that is split more than all of it. So what keeps
    its rate is not split and merged in turn (S80).
    """
    if observed.unchanged_ms < policy.cool_down_ms:
        return Stay("it was scaled a short time ago")
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
    return Stay("no segment is too hot, and no two neighbours are cold enough")


def _splits(policy: ScalingPolicy, observed: Observed, present: Sequence[Segment]) -> dict[int, int]:
    """Return which segments are split into how many, the hottest ones first, as far as there is room."""
    heat = {segment: _heat(policy, observed, segment) for segment in present}
    room = policy.segments_max - len(present)
    found: dict[int, int] = {}
    for segment in sorted(present, key=lambda one: (-heat[one], one.segment_id)):
        width = segment.key_high - segment.key_low
        count = min(-(-heat[segment] // 1), SPLIT_MOST, room + 1, width) if heat[segment] > 1 else 0
        if count >= 2:
            found[segment.segment_id] = int(count)
            room -= int(count) - 1
    return found


def _heat(policy: ScalingPolicy, observed: Observed, segment: Segment) -> float:
    """Return how many times its target a hot segment gets, over the longest window that says that it is hot; else 0."""
    heat = 0.0
    for window_ms, factor, amount in zip(WINDOWS_MS, HOT_FACTORS, observed.amounts[segment.segment_id], strict=False):
        if amount is not None and observed.unchanged_ms >= window_ms:
            found = _share(policy, amount, window_ms)
            heat = found if found > factor else heat
    return heat


def _pairs(policy: ScalingPolicy, observed: Observed, present: Sequence[Segment]) -> list[tuple[Segment, Segment]]:
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


def _cold_amount(policy: ScalingPolicy, observed: Observed, pair: tuple[Segment, Segment]) -> int | None:
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
