"""Tracking of what changed since a snapshot: a checkpoint of state in memory writes only that (MC2).

Time is counted in *intervals*: one ends with each freeze, and the snapshot at its end has its number. So "what changed
since snapshot 7" is what changed in an interval after 7, however many snapshots failed or are still on their way.
Each state knows on its own since when it knows what has changed (MC11). Counterparts: ``incremental_snapshot``, which
says since which snapshot, and the backends, which note each change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headgate.state.key_index import Slots
from headgate.state.vectors import Array, SlotArray

KEYS_FREE = 4_096
"""So many changed keys may always be remembered; else at most half as many as there are."""


def are_too_many(changed_count: int, keys_count: int) -> bool:
    """Whether so much has changed that a snapshot of all ``keys_count`` keys is hardly more."""
    return changed_count > max(keys_count // 2, KEYS_FREE)


class Interval:
    """In which interval the states of one operator are.

    Attributes:
        number: of the interval. What was restored is of number 0, as if it had been there before everything.
        needed_since: changes in intervals up to this one are not needed. Set by the thread that writes snapshots.
    """

    def __init__(self) -> None:
        self.number = 0
        self.needed_since = 0


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """When each slot had last changed at a barrier.

    Attributes:
        intervals: by slot, -1 if nothing was ever there.
        known_since: only from a snapshot of this number, or of a later one, it is known what has changed since.
    """

    intervals: Array
    known_since: int

    def after(self, interval: int) -> Slots | None:
        """Return the slots that changed after the snapshot of ``interval``; None: unknown."""
        return None if interval < self.known_since else np.flatnonzero(self.intervals > interval)


class ChangedSlots:
    """The interval in which each slot last changed: four bytes for each, written together with the state."""

    def __init__(self, interval: Interval, known_since: int = 0) -> None:
        """``known_since``: see ``SlotChanges``."""
        self._interval = interval
        self._known_since = known_since
        self._in = SlotArray(np.int32, -1)

    def mark(self, slots: Slots, size: int) -> None:
        """``slots`` changed now; ``size`` exceeds every slot."""
        self._in.written(size)[slots] = self._interval.number

    def freeze(self, size: int) -> SlotChanges:
        """Return when each slot last changed."""
        return SlotChanges(self._in.freeze(size), self._known_since)

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``; they become 0, 1, 2 … What was removed before has no slot any more."""
        self._in.renumber(old)
        self._known_since = self._interval.number

    def start_over(self) -> ChangedSlots:
        """Return the changes of slots that were all renumbered: the next snapshot has everything."""
        return ChangedSlots(self._interval, self._interval.number)


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """Which keys had changed at a barrier. Immutable.

    Attributes:
        by_interval: the keys that changed in each, as far as they are needed.
        known_since: see ``SlotChanges``.
    """

    by_interval: tuple[tuple[int, dict[Any, None]], ...] = ()
    known_since: int = 0

    def after(self, interval: int) -> dict[Any, None] | None:
        """Return the keys that changed after the snapshot of ``interval``, as they first did; None: unknown."""
        if interval < self.known_since:
            return None
        found: dict[Any, None] = {}
        for number, keys in self.by_interval:
            if number > interval:
                found.update(keys)
        return found


class ChangedKeys:
    """The keys that changed, by interval. Nothing is noted before there is a snapshot to which it would matter.

    Attributes:
        now: those of this interval, to which its owner adds them; None: all.
    """

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._known_since = 0
        self._before: list[tuple[int, dict[Any, None]]] = []
        self._before_count = 0
        self.now: dict[Any, None] | None = None

    def start(self) -> None:
        """What was restored is in a snapshot: note what changes from now on."""
        assert not self._before, "tracking starts with a restore, before the first snapshot"
        self.now = {}

    def bounded(self, keys_count: int) -> dict[Any, None] | None:
        """Return ``now``; give up if so much has changed that a snapshot of all ``keys_count`` keys is hardly more."""
        if self.now is not None and are_too_many(self._before_count + len(self.now), keys_count):
            self._before, self._before_count, self.now = [], 0, None
            self._known_since = self._interval.number
        return self.now

    def freeze(self) -> KeyChanges:
        """Return what changed in this interval and in those before it, as far as they are needed."""
        # in the order of intervals: ``after`` relies on it for the order of keys
        assert not self._before or self._before[-1][0] < self._interval.number, "an interval ends once"
        if self.now is not None:
            self._before.append((self._interval.number, self.now))
        self._before = [found for found in self._before if found[0] > self._interval.needed_since]
        self._before_count = sum(len(keys) for _, keys in self._before)
        self.now = {}
        return KeyChanges(tuple(self._before), self._known_since)
