"""What is done to timers by column, in arrays; and what was done since a snapshot (MC9).

Counterpart: ``column_timers``, which keeps timers as what was done to them, too. Arrays are never written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headgate.state.columns import KeyedColumns
from headgate.state.key_hash import Words
from headgate.state.key_index import Slots
from headgate.state.memory.changes import Interval, are_too_many

Changes: TypeAlias = tuple[Words, Words]
"""Times, and for each ``slot · 2``, or one more if the timer was deleted."""


class TimerChanges:
    """What had been done to timers at a barrier, in the order in which it was done. A place is one thing that was."""

    def __init__(self, found: Sequence[tuple[int, Changes]], known_since: int) -> None:
        """``found``: what was done in each interval, in order. ``known_since``: see ``changes.SlotChanges``."""
        self._found = found
        self._known_since = known_since
        self.after = cache(self._after)

    @cached_property
    def _all(self) -> Changes:
        nothing = np.empty(0, np.int64)
        return together([(nothing, nothing), *(found for _, found in self._found)])

    def _after(self, interval: int) -> Slots | None:
        """Return the last thing that was done to each timer after the snapshot of ``interval``; None: nobody knows."""
        if interval < self._known_since:
            return None
        times, changes = self._all
        start = sum(len(found[0]) for number, found in self._found if number <= interval)
        return start + _last_of_each(times[start:], changes[start:] >> 1)

    def living(self, places: Slots) -> KeyedColumns:
        """Return the timers that were registered at ``places``."""
        return self._of(places, is_gone=False)

    def gone(self, places: Slots) -> KeyedColumns:
        """Return the timers that were deleted or taken at ``places``."""
        return self._of(places, is_gone=True)

    def _of(self, places: Slots, *, is_gone: bool) -> KeyedColumns:
        times, changes = self._all
        places = places[changes[places] & 1 == is_gone]
        return columns_of((times[places], changes[places]))


class NotedTimers:
    """What was done to timers, by interval. Nothing is noted before there is a snapshot to which it would matter."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._known_since = 0
        self._before: list[tuple[int, Changes]] = []
        self._now: list[Changes] | None = None
        self._rows = 0

    def start(self) -> None:
        """What was restored is in a snapshot: note what is done from now on."""
        self._now = []

    def add(self, times: Words, changes: Words, timers_count: int) -> None:
        """This was done; give up if it is so much that a snapshot of all ``timers_count`` timers is hardly more."""
        if self._now is None or not len(times):
            return
        self._rows += len(times)
        if are_too_many(self._rows, timers_count):
            self.forget()
            return
        self._now.append((times, changes))
        while len(self._now) > 1 and len(self._now[-2][0]) < 2 * len(self._now[-1][0]):  # few arrays, rarely copied
            self._now[-2:] = [together(self._now[-2:])]

    def forget(self) -> None:
        """What was done until now is not known: the snapshot of this interval must have all timers."""
        self._before, self._now, self._rows = [], None, 0
        self._known_since = self._interval.number

    @property
    def number(self) -> int:
        """The interval that will end with the next freeze."""
        return self._interval.number

    def since(self, number: int) -> list[Changes] | None:
        """Return what was done after the snapshot of interval ``number``, in order; None: nobody knows."""
        if self._now is None or number < max(self._known_since, self._interval.needed_since):
            return None
        return [*(changes for at, changes in self._before if at > number), *self._now]

    def freeze(self) -> TimerChanges:
        """Return what was done in this interval and in those before it, as far as anybody may ask."""
        number = self._interval.number
        self._before += [(number, changes) for changes in self._now or ()]
        self._before = [found for found in self._before if found[0] > self._interval.needed_since]
        self._rows = sum(len(changes[0]) for _, changes in self._before)
        self._now = []
        return TimerChanges(tuple(self._before), self._known_since)


def latest(found: Sequence[Changes]) -> Changes:
    """Return changes, given from the oldest to the latest, in the order of time and slot, the latest of each timer."""
    times, changes = together(found)
    places = _last_of_each(times, changes >> 1)
    return times[places], changes[places]


def living(changes: Changes) -> Changes:
    """Return the timers that were not deleted."""
    is_there = changes[1] & 1 == 0
    return changes[0][is_there], changes[1][is_there]


def together(found: Sequence[Changes]) -> Changes:
    """Return changes one behind the other."""
    times, changes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return times, changes


def _last_of_each(times: Words, slots: Slots) -> Slots:
    """Return where each timer is for the last time, in the order of time and slot."""
    order = np.lexsort((slots, times))
    times, slots = times[order], slots[order]
    is_last = np.ones(len(times), np.bool_)
    is_last[:-1] = (times[1:] != times[:-1]) | (slots[1:] != slots[:-1])
    return order[is_last]


def columns_of(found: Changes) -> KeyedColumns:
    """Return the slot and the time of each."""
    times, changes = found
    return changes >> 1, [pa.array(times, pa.int64())]
