"""How many timers there are, and which, told from a former snapshot and what was done since (MC9).

So a checkpoint costs what changed, however many timers there are and however long ago somebody has sorted all of them.
Counterpart: ``column_timers``, whose snapshots hand it on. Arrays are never written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headgate.state.key_hash import Words
from headgate.state.key_index import Slots
from headgate.state.memory.timer_changes import Changes, latest, living
from headgate.state.slot_array import Mask

_LITTLE = 4
"""When more than one part in so many was done to timers, they are put into one order again."""


@dataclass(frozen=True, slots=True)
class CountedTimers:
    """Timers at a barrier. All changes are in the order of time and slot, one of each timer.

    Attributes:
        base: all timers that there once were; none of them is a deletion.
        done: what was done since.
        count: how many there are.
    """

    base: Changes
    done: Changes
    count: int

    def after(self, more: Sequence[Changes]) -> CountedTimers:
        """Return the timers after this was done to them, the oldest first. Costs what sorting ``more`` does."""
        if not more:
            return self
        newer = latest(more)
        at, is_known = _places(self.done, newer)
        was_there = np.zeros(len(at), np.bool_)
        was_there[is_known] = self.done[1][at[is_known]] & 1 == 0
        was_there[~is_known] = _places(self.base, (newer[0][~is_known], newer[1][~is_known]))[1]
        count = self.count + int((newer[1] & 1 == 0).sum()) - int(was_there.sum())
        found = CountedTimers(self.base, _merged(self.done, newer, at, is_known), count)
        return counted(found.whole()) if len(found.done[0]) > len(self.base[0]) // _LITTLE else found

    def whole(self) -> Changes:
        """Return all timers. Nothing is sorted for it."""
        return living(_merged(self.base, self.done, *_places(self.base, self.done))) if len(self.done[0]) else self.base


def counted(timers: Changes) -> CountedTimers:
    """Return timers that are in the order of time and slot."""
    nothing = timers[0][:0], timers[1][:0]
    return CountedTimers(timers, nothing, len(timers[0]))


def _places(older: Changes, newer: Changes) -> tuple[Slots, Mask]:
    """Return where each timer of ``newer`` is in ``older``, or would be, and whether it is.

    All are bisected at once, among those of their time by slot.
    """
    times, slots = newer[0], newer[1] >> 1
    low, end = np.searchsorted(older[0], times, "left"), np.searchsorted(older[0], times, "right")
    held, high = older[1] >> 1, end.copy()
    while len(rows := np.flatnonzero(low < high)):
        middle = (low[rows] + high[rows]) // 2
        is_before = held[middle] < slots[rows]
        low[rows[is_before]] = middle[is_before] + 1
        high[rows[~is_before]] = middle[~is_before]
    found: Mask = low < end
    found[found] = held[low[found]] == slots[found]
    return low, found


def _merged(older: Changes, newer: Changes, at: Slots, is_known: Mask) -> Changes:
    """Return both in order, of a timer that is in both what ``newer`` says. ``at``, ``is_known``: see ``_places``."""
    changes: Words = older[1].copy()
    changes[at[is_known]] = newer[1][is_known]
    between = at[~is_known]
    return np.insert(older[0], between, newer[0][~is_known]), np.insert(changes, between, newer[1][~is_known])
