"""Which keys changed since a snapshot: what a checkpoint writes of the state in memory is told by this (MC2).

Time is told in *intervals*: one ends with each freeze, and the snapshot at its end has its number. So "what changed
since snapshot 7" is what changed in an interval after 7, however many snapshots failed or are still on their way.
Counterparts: ``chunk_log``, which says since which snapshot, and the backends, which note each change.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from headgate.state.key_index import Slots
from headgate.state.slot_array import Array, SlotArray

KEYS_FREE = 4_096
"""So many changed keys may always be remembered; else at most half as many as there are."""

KeyChanges: TypeAlias = tuple[tuple[int, dict[Any, None]], ...]
"""The keys that changed in each interval. Nobody changes it."""


class Interval:
    """In which interval the states of one operator are.

    Attributes:
        number: of the interval. What was restored is of number 0, as if it had been there before everything.
        known_since: only from a snapshot of this number, or of a later one, it is known what has changed since.
        needed_since: nobody asks what changed in an interval up to this one. Set by the thread that writes snapshots.
    """

    def __init__(self) -> None:
        self.number = 0
        self.known_since = 0
        self.needed_since = 0

    def forget(self) -> None:
        """What changed until now is not known: the snapshot of this interval must have everything."""
        self.known_since = self.number


class ChangedSlots:
    """The interval in which each slot last changed: four bytes for each, written together with the state."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._in = SlotArray(np.int32, -1)

    def mark(self, slots: Slots, size: int) -> None:
        """``slots`` changed now; ``size`` exceeds every slot."""
        self._in.written(size)[slots] = self._interval.number

    def freeze(self, size: int) -> Array:
        """Return the interval of each slot, -1 if nothing was ever there."""
        return self._in.freeze(size)

    def renumber(self, old: Slots) -> None:
        """Keep only the slots ``old``; they become 0, 1, 2 … What was removed before has no slot any more."""
        self._in.renumber(old)
        self._interval.forget()

    def begin_anew(self) -> ChangedSlots:
        """Return the changes of slots that were all numbered anew."""
        self._interval.forget()
        return ChangedSlots(self._interval)


class ChangedKeys:
    """The keys that changed, by interval. Nothing is noted before there is a snapshot to which it would matter.

    Attributes:
        now: those of this interval, to which its owner adds them; None: all.
    """

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._before: list[tuple[int, dict[Any, None]]] = []
        self._before_count = 0
        self.now: dict[Any, None] | None = None

    def start(self) -> None:
        """What was restored is in a snapshot: note what changes from now on."""
        self.now = {}

    def bounded(self, keys_count: int) -> dict[Any, None] | None:
        """Return ``now``; give up if so much has changed that a snapshot of all ``keys_count`` keys is hardly more."""
        if self.now is not None and self._before_count + len(self.now) > max(keys_count // 2, KEYS_FREE):
            self._before, self._before_count, self.now = [], 0, None
            self._interval.forget()
        return self.now

    def freeze(self) -> KeyChanges:
        """Return what changed in this interval and in those before it, as far as anybody may ask."""
        if self.now is not None:
            self._before.append((self._interval.number, self.now))
        self._before = [found for found in self._before if found[0] > self._interval.needed_since]
        self._before_count = sum(len(keys) for _, keys in self._before)
        self.now = {}
        return tuple(self._before)


def keys_after(changes: KeyChanges, interval: int) -> dict[Any, None]:
    """Return the keys that changed after ``interval``, in the order in which they first did."""
    found: dict[Any, None] = {}
    for number, keys in changes:
        if number > interval:
            found.update(keys)
    return found


def slots_after(intervals: Array, interval: int) -> Slots:
    """Return the slots that changed after ``interval``."""
    return np.flatnonzero(intervals > interval)
