"""Timers in memory, by column and by row: see ``state.backend``.

By column, timers are sorted runs of what was done to them. Registering and deleting append to a tail; a full tail
becomes a run, sorted by time and slot; runs of like size are merged, and of what was done to one timer the latest
counts. So each timer is sorted a few times in its life. Arrays are never written twice: snapshots refer to them, and so
do the changes noted for the next checkpoints.

By row, they are the keys of each time and a heap of the times. The keys of a time are a dict, or the key itself while
there is only one, which is the usual case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from headgate.dataclass import dataclass
from headgate.state.backend import first_timers
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Hashes, Words, hash_columns, value_hash
from headgate.state.key_index import Slots
from headgate.state.memory.change_tracking import (
    ChangedKeys,
    FrozenCells,
    Interval,
    KeyChanges,
    MemoryCells,
    are_too_many,
)
from headgate.state.values import Mask
from headgate.state.vectors import FrozenChanges, FrozenRows, KeyedColumns

TimerOps: TypeAlias = tuple[Words, Words]
"""Times, and for each ``slot · 2``, or one more if the timer was deleted."""


class TimerChanges:
    """What had been done to timers at a barrier, in the order in which it was done. A place is one thing that was."""

    def __init__(self, found: Sequence[tuple[int, TimerOps]], known_since: int) -> None:
        """``found``: what was done in each interval, in order. ``known_since``: see ``change_tracking.SlotChanges``."""
        self._found = found
        self._known_since = known_since
        self.after = cache(self._after)

    @cached_property
    def _all(self) -> TimerOps:
        nothing = np.empty(0, np.int64)
        return join_changes([(nothing, nothing), *(found for _, found in self._found)])

    def _after(self, interval: int) -> Slots | None:
        """Return the last thing that was done to each timer after the snapshot of ``interval``; None: unknown."""
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
        return timer_columns((times[places], changes[places]))


class NotedTimers:
    """What was done to timers, by interval. Nothing is noted before there is a snapshot to which it would matter."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._known_since = 0
        self._before: list[tuple[int, TimerOps]] = []
        self._now: list[TimerOps] | None = None
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
            self._now[-2:] = [join_changes(self._now[-2:])]

    def forget(self) -> None:
        """What was done until now is not known: the snapshot of this interval must have all timers."""
        self._before, self._now, self._rows = [], None, 0
        self._known_since = self._interval.number

    @property
    def number(self) -> int:
        """The interval that will end with the next freeze."""
        return self._interval.number

    def since(self, number: int) -> list[TimerOps] | None:
        """Return what was done after the snapshot of interval ``number``, in order; None: unknown."""
        if self._now is None or number < max(self._known_since, self._interval.needed_since):
            return None
        return [*(changes for at, changes in self._before if at > number), *self._now]

    def freeze(self) -> TimerChanges:
        """Return what was done in this interval and in those before it, as far as it is needed."""
        number = self._interval.number
        self._before += [(number, changes) for changes in self._now or ()]
        # it may have risen meanwhile: the thread that writes snapshots sets it
        self._before = [found for found in self._before if found[0] > self._interval.needed_since]
        self._rows = sum(len(changes[0]) for _, changes in self._before)
        self._now = []
        return TimerChanges(tuple(self._before), self._known_since)


def latest_changes(found: Sequence[TimerOps]) -> TimerOps:
    """Return changes, given from the oldest to the latest, in the order of time and slot, the latest of each timer."""
    times, changes = join_changes(found)
    places = _last_of_each(times, changes >> 1)
    return times[places], changes[places]


def live_timers(changes: TimerOps) -> TimerOps:
    """Return the timers that were not deleted."""
    is_there = changes[1] & 1 == 0
    return changes[0][is_there], changes[1][is_there]


def join_changes(found: Sequence[TimerOps]) -> TimerOps:
    """Return changes one after the other."""
    times, changes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return times, changes


def _last_of_each(times: Words, slots: Slots) -> Slots:
    """Return where each timer is for the last time, in the order of time and slot."""
    order = np.lexsort((slots, times))
    times, slots = times[order], slots[order]
    is_last = np.ones(len(times), np.bool_)
    is_last[:-1] = (times[1:] != times[:-1]) | (slots[1:] != slots[:-1])
    return order[is_last]


def timer_columns(found: TimerOps) -> KeyedColumns:
    """Return the slot and the time of each."""
    times, changes = found
    return changes >> 1, [pa.array(times, pa.int64())]


_MERGE_SHARE = 4
"""When more than one part in so many was done to timers, they are put into one order again."""


@dataclass(frozen=True, slots=True)
class CountedTimers:
    """Timers at a barrier. All changes are in the order of time and slot, one of each timer.

    Attributes:
        base: all timers that there once were; none of them is a deletion.
        done: what was done since.
        count: how many there are.
    """

    base: TimerOps
    done: TimerOps
    count: int

    def after(self, more: Sequence[TimerOps]) -> CountedTimers:
        """Return the timers after this was done to them, the oldest first. Costs what sorting ``more`` does."""
        if not more:
            return self
        newer = latest_changes(more)
        at, is_known = _find_timers(self.done, newer)
        was_there = np.zeros(len(at), np.bool_)
        was_there[is_known] = self.done[1][at[is_known]] & 1 == 0
        was_there[~is_known] = _find_timers(self.base, (newer[0][~is_known], newer[1][~is_known]))[1]
        count = self.count + int((newer[1] & 1 == 0).sum()) - int(was_there.sum())
        assert 0 <= count <= len(self.base[0]) + len(self.done[0]) + len(at), "timers are counted once"
        found = CountedTimers(self.base, _merge_changes(self.done, newer, at, is_known), count)
        return count_timers(found.whole()) if len(found.done[0]) > len(self.base[0]) // _MERGE_SHARE else found

    def whole(self) -> TimerOps:
        """Return all timers. Nothing is sorted for it."""
        return (
            live_timers(_merge_changes(self.base, self.done, *_find_timers(self.base, self.done)))
            if len(self.done[0])
            else self.base
        )


def count_timers(timers: TimerOps) -> CountedTimers:
    """Return timers that are in the order of time and slot."""
    nothing = timers[0][:0], timers[1][:0]
    return CountedTimers(timers, nothing, len(timers[0]))


def _find_timers(older: TimerOps, newer: TimerOps) -> tuple[Slots, Mask]:
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


def _merge_changes(older: TimerOps, newer: TimerOps, at: Slots, is_known: Mask) -> TimerOps:
    """Return both in order, of a timer that is in both what ``newer`` says. ``at``, ``is_known``: see ``_places``."""
    changes: Words = older[1].copy()
    changes[at[is_known]] = newer[1][is_known]
    between = at[~is_known]
    return np.insert(older[0], between, newer[0][~is_known]), np.insert(changes, between, newer[1][~is_known])


_TAIL_ROWS = 65_536
_TAIL_PARTS = 64
_RUNS_MERGED = 8
_DUE_ROWS = 262_144
"""About so many timers that are due are brought into order at once."""

_NONE: Words = np.empty(0, np.int64)


@dataclass(slots=True)
class _Run:
    """TimerOps in the order of time and slot, one of each timer; those before ``start`` are done with."""

    times: Words
    changes: Words
    start: int = 0

    def rest(self) -> TimerOps:
        return self.times[self.start :], self.changes[self.start :]

    def end(self, until_ms: int) -> int:
        return self.start + int(np.searchsorted(self.times[self.start :], until_ms, "right"))

    @property
    def size_class(self) -> int:
        return (len(self.times) - self.start).bit_length() // 3


class MemoryColumnTimers:
    """See ``timers.ColumnTimers``."""

    def __init__(self, hashes: Callable[[Slots], Hashes], interval: Interval | None = None) -> None:
        """Make none.

        Args:
            hashes: of the keys of slots.
            interval: what is done to timers is noted by it; None: not tracked.
        """
        self._hashes = hashes
        self._noted = None if interval is None else NotedTimers(interval)
        self._due: TimerOps = _NONE, _NONE
        self._due_to_ms = 0
        self._runs: list[_Run] = []
        self._tail: list[TimerOps] = []
        self._tail_rows = 0
        self._tail_ms = 0
        self._window = 64
        self._counted: tuple[int, CountedTimers] | None = None
        """All timers at the end of an interval: set by the thread that writes snapshots."""

    def __len__(self) -> int:
        return len(self._due[0]) + sum(len(run.times) - run.start for run in self._runs) + self._tail_rows

    def register(self, slots: Slots, times_ms: Words) -> None:
        self._append(times_ms, slots << 1)

    def delete(self, slots: Slots, times_ms: Words) -> None:
        self._append(times_ms, (slots << 1) | 1)

    def next_ms(self) -> int | None:
        times = [int(run.times[run.start]) for run in self._runs]
        times += [self._tail_ms] if self._tail else []
        times += [int(self._due[0][0])] if len(self._due[0]) else []
        return min(times, default=None)

    def take(self, until_ms: int, rows_max: int) -> tuple[Slots, Words]:
        # nothing of a tail is in order
        if self._tail and self._tail_ms <= until_ms:
            self._close_tail()
        # registered or deleted since, for times that were due already
        if len(self._due[0]) and any(run.times[run.start] <= self._due_to_ms for run in self._runs):
            self._bring(self._due_to_ms)
        while not len(self._due[0]):
            if not any(run.times[run.start] <= until_ms for run in self._runs):
                return _NONE, _NONE
            self._bring(self._cut_ms(until_ms))
        return self._first(rows_max)

    def _first(self, rows_max: int) -> tuple[Slots, Words]:
        """Take from what is due up to the first key that comes again."""
        times, changes = self._due
        slots = changes[: min(self._window, rows_max)] >> 1
        order = np.argsort(slots, kind="stable")
        is_again = slots[order[1:]] == slots[order[:-1]]
        count = int(order[1:][is_again].min()) if is_again.any() else len(slots)
        # not many more than this time are looked at the next time
        self._window = 64 + 2 * count
        self._due = times[count:], changes[count:]
        # to the next snapshots it is as if they had been deleted
        self._note(times[:count], changes[:count] | 1)
        return slots[:count], times[:count]

    def _cut_ms(self, until_ms: int) -> int:
        """Return a time, ``until_ms`` at most, up to which not many more than ``_DUE_ROWS`` timers are due."""
        share = max(1, _DUE_ROWS // len(self._runs))
        cuts = [int(run.times[run.start + share]) for run in self._runs if run.end(until_ms) - run.start > share]
        return min([until_ms, *cuts])

    def _bring(self, until_ms: int) -> None:
        """Have all that is left up to ``until_ms`` in ``_due``, in the order of time and hash."""
        found = [self._due]
        for run in self._runs:
            end = run.end(until_ms)
            found.append((run.times[run.start : end], run.changes[run.start : end]))
            run.start = end
        self._runs = [run for run in self._runs if run.start < len(run.times)]
        # all runs have given what they have up to this time, so deletions have met their timers, and go
        times, changes = live_timers(latest_changes(found))
        order = np.lexsort((self._hashes(changes >> 1), times))
        self._due, self._due_to_ms = (times[order], changes[order]), until_ms

    def _append(self, times: Words, changes: Words) -> None:
        if len(times) == 0:
            return
        first_ms = int(times.min())
        self._tail_ms = min(self._tail_ms, first_ms) if self._tail else first_ms
        assert len(times) == len(changes), "each change has its time"
        self._tail.append((times, changes))
        self._tail_rows += len(times)
        self._note(times, changes)
        if self._tail_rows >= _TAIL_ROWS or len(self._tail) >= _TAIL_PARTS:
            self._close_tail()

    def _note(self, times: Words, changes: Words) -> None:
        """This was done to timers."""
        if self._noted is not None:
            self._noted.add(times, changes, len(self))

    def track_changes(self) -> None:
        """All timers were restored from a snapshot that the next one may refer to."""
        assert self._noted is not None
        self._noted.start()

    def _close_tail(self) -> None:
        found = latest_changes(self._tail)
        self._tail, self._tail_rows = [], 0
        # a deletion is kept as long as its timer may be in an older run, or among those that are due
        self._runs.append(_Run(*(found if self._runs or len(self._due[0]) else live_timers(found))))
        while (count := self._mergeable()) >= _RUNS_MERGED:
            merged = latest_changes([run.rest() for run in self._runs[-count:]])
            is_oldest = count == len(self._runs) and not len(self._due[0])
            self._runs[-count:] = [_Run(*(live_timers(merged) if is_oldest else merged))]
        self._runs = [run for run in self._runs if len(run.times)]

    def _mergeable(self) -> int:
        """Return how many of the latest runs are no larger than the last one, about."""
        count = 0
        for run in reversed(self._runs):
            if run.size_class > self._runs[-1].size_class:
                break
            count += 1
        return count

    def _whole(self) -> TimerOps:
        """Return all timers there are."""
        return live_timers(latest_changes([self._due, *(run.rest() for run in self._runs), *self._tail]))

    def split(self, count: int) -> tuple[Slots, Words]:
        """Remove the last timers, so that about ``count`` stay (``first_timers``); return those that went."""
        times, changes = self._whole()
        stays = first_timers(times, self._hashes(changes >> 1), count)
        self._due, self._tail, self._tail_rows = (_NONE, _NONE), [], 0
        self._runs = [_Run(times[stays], changes[stays])] if stays.any() else []
        return changes[~stays] >> 1, times[~stays]

    def tidy(self) -> None:
        """Forget what was done to timers that are there no more."""
        whole = self._whole()
        self._due, self._tail, self._tail_rows = (_NONE, _NONE), [], 0
        self._runs = [_Run(*whole)] if len(whole[0]) else []

    def living(self, slots_count: int) -> Mask:
        """Return which slots have a timer. Exact after ``tidy``."""
        found = np.zeros(slots_count, np.bool_)
        for _, changes in [self._due, *(run.rest() for run in self._runs), *self._tail]:
            found[changes >> 1] = True
        return found

    def renumber(self, living: Slots) -> None:
        """Keep only the slots ``living``, in any order, which become 0, 1, 2 …; called after ``tidy``."""
        times, changes = self._whole()
        ascending = np.argsort(living)
        assert len(self._due[0]) == len(self._tail) == 0, "slots are renumbered after ``tidy``"
        slots = ascending[np.searchsorted(living, changes >> 1, sorter=ascending)]
        # what was noted and counted is by the former slots
        if self._noted is not None:
            self._noted.forget()
            self._counted = None
        self._runs = [_Run(*latest_changes([(times, slots << 1)]))] if len(times) else []

    def freeze(self) -> FrozenRows:
        """Return the timers as they are now, to be read in any thread. Takes references only."""
        former = self._since_counted()
        if former is not None:
            self._refer_to(*former)
        held = [self._due, *(run.rest() for run in self._runs), *self._tail]
        done_to = None if self._noted is None else self._noted.number

        # done once, and in the thread that writes: the count and the rows come from it
        @cache
        def found() -> CountedTimers:
            now = count_timers(live_timers(latest_changes(held))) if former is None else former[0].after(former[1])
            if done_to is not None:
                self._counted = done_to, now
            return now

        @cache
        def rows() -> KeyedColumns:
            return timer_columns(found().whole())

        def count() -> int:
            return found().count

        if self._noted is None:
            return FrozenRows(count, rows, _no_places)
        noted = self._noted.freeze()
        return FrozenRows(count, rows, noted.living, FrozenChanges(noted.after, noted.gone))

    def _since_counted(self) -> tuple[CountedTimers, list[TimerOps]] | None:
        """Return the timers of a former snapshot that were counted, and what was done since."""
        if self._noted is None or self._counted is None:
            return None
        number, found = self._counted
        since = self._noted.since(number)
        return None if since is None else (found, since)

    def _refer_to(self, former: CountedTimers, since: list[TimerOps]) -> None:
        """Have the timers of a former snapshot in memory once, and what was done since after them.

        Not while timers are due, which are in an order of their own.
        """
        # by identity: this was done for a snapshot before
        if len(self._due[0]) or (self._runs and self._runs[0].times is former.base[0]):
            return
        self._runs = [_Run(*found) for found in (former.base, former.done) if len(found[0])]
        self._tail = list(since)  # a list of its own: the snapshot that is taken now reads the other one, later
        self._tail_rows = sum(len(part) for part, _ in since)
        self._tail_ms = min((int(part.min()) for part, _ in since), default=0)


def _no_places(places: Slots) -> KeyedColumns:
    raise AssertionError("what was done to these timers was not noted")


_STALE_TIMES_MAX = 1_024
"""So many times without timers the heap may always have."""

_HASHED_ONE_BY_ONE = 32
"""Up to so many keys are hashed without making a column of them."""


@dataclass(frozen=True, slots=True)
class FrozenRowTimers:
    """The timers of one kind at a barrier.

    Attributes:
        cells: the keys of each time.
        changes: which timers came or went before it, as pairs of time and key.
        count: how many there were.
    """

    cells: FrozenCells
    changes: KeyChanges
    count: int

    def has(self, time_ms: int, key: Any) -> bool:
        """Whether there was such a timer."""
        found = self.cells.objects.get(time_ms)
        return key in found if type(found) is dict else bool(found == key)


class MemoryRowTimers:
    """See ``timers.RowTimers``."""

    def __init__(self, keys: KeyColumns, interval: Interval | None = None) -> None:
        """``interval``: which timers come and go is noted by it; None: not tracked."""
        self._changes = None if interval is None else ChangedKeys(interval)
        self._changed: dict[Any, None] | None = None
        self._key_columns = keys
        self._hash = value_hash(keys.types[0]) if len(keys.types) == 1 else None
        self.cells = MemoryCells()
        self._heap: list[int] = []
        self._times_count = 0
        self._count = 0
        self._due_ms = 0
        self._due: list[Any] = []

    def __len__(self) -> int:
        return self._count

    def register(self, key: Any, time_ms: int) -> None:
        found = self.cells.get(time_ms)
        if found is None:
            self.cells.put(time_ms, key)
            heappush(self._heap, time_ms)
            self._times_count += 1
        elif type(found) is dict:
            if key in found:
                return
            self.cells.writable(time_ms)[key] = None
        elif found == key:
            return
        else:
            self.cells.put(time_ms, {found: None, key: None})
        self._count += 1
        if self._changed is not None:
            self._changed[time_ms, key] = None

    def delete(self, key: Any, time_ms: int) -> None:
        found = self.cells.get(time_ms)
        if type(found) is dict:
            if key not in found:
                return
        elif found is None or found != key:
            return
        if type(found) is dict and len(found) > 1:
            del self.cells.writable(time_ms)[key]
            self._count -= 1
        else:
            self._forget(time_ms, 1)
        if self._changed is not None:
            self._changed[time_ms, key] = None

    def next_ms(self) -> int | None:
        # a time without timers stays in the heap until it is met
        heap = self._heap
        while heap and self.cells.get(heap[0]) is None:
            heappop(heap)
        return heap[0] if heap else None

    def take(self, until_ms: int, keys_max: int) -> tuple[int, list[Any]] | None:
        """See ``RowTimers``. Keys of one time are sorted once, however many turns they take."""
        heap, held = self._heap, None
        while held is None:
            if not heap or heap[0] > until_ms:
                return None
            time_ms = heap[0]
            held = self.cells.get(time_ms)
            if type(held) is not dict:
                heappop(heap)
        if type(held) is not dict:
            self._forget(time_ms, 1)
            if self._changed is not None:
                self._changed[time_ms, held] = None
            return time_ms, [held]
        # what is registered for this time meanwhile is sorted when these are done
        if self._due_ms != time_ms or not self._due:
            self._due_ms, self._due = time_ms, self._ordered(list(held))[::-1]
        taken = [self._due.pop() for _ in range(min(keys_max, len(self._due)))]
        taken = [key for key in taken if key in held]  # the others were deleted since they were sorted
        if len(taken) == len(held):
            self._forget(time_ms, len(taken))
        elif taken:
            keys = self.cells.writable(time_ms)
            for key in taken:
                del keys[key]
            self._count -= len(taken)
        if self._changed is not None:
            self._changed.update(((time_ms, key), None) for key in taken)
        return time_ms, taken

    def all(self) -> Iterator[tuple[int, Any]]:
        for time_ms in self.cells.keys():  # noqa: SIM118 - no dict
            found = self.cells.get(time_ms)
            for key in found if type(found) is dict else (found,):
                yield time_ms, key

    def absorb(self) -> None:
        """Do what has to be done now and then: see ``MemoryCells``."""
        self.cells.absorb()
        if self._changes is not None:
            self._changed = self._changes.bounded(self._count)

    def track_changes(self) -> None:
        """All timers were restored from a snapshot that the next one may refer to."""
        assert self._changes is not None
        self._changes.start()
        self._changed = self._changes.now

    def freeze(self) -> FrozenRowTimers:
        """Put the timers aside, with what came and went before."""
        self.absorb()
        changes = KeyChanges() if self._changes is None else self._changes.freeze()
        self._changed = None if self._changes is None else self._changes.now
        return FrozenRowTimers(self.cells.freeze(), changes, self._count)

    def split(self, count: int) -> dict[int, list[Any]]:
        """Remove the last timers, so that about ``count`` stay (``first_timers``); return the keys by time."""
        assert self._changes is None, "what is removed so is not noted"
        found = list(self.all())
        times_ms, keys = np.array([time_ms for time_ms, _ in found], np.int64), [key for _, key in found]
        removed: dict[int, list[Any]] = {}
        for place in np.flatnonzero(~first_timers(times_ms, self._hashes(keys), count)).tolist():
            removed.setdefault(found[place][0], []).append(keys[place])
        for time_ms, gone in removed.items():
            self._remove(time_ms, gone)
        self._due = []
        return removed

    def _remove(self, time_ms: int, keys: list[Any]) -> None:
        if len(keys) == len(self._keys_of(time_ms)):
            self._forget(time_ms, len(keys))
            return
        held = self.cells.writable(time_ms)
        for key in keys:
            del held[key]
        self._count -= len(keys)

    def _keys_of(self, time_ms: int) -> list[Any]:
        found = self.cells.get(time_ms)
        return list(found) if type(found) is dict else [found]

    def _forget(self, time_ms: int, keys_count: int) -> None:
        """Remove a time with its last keys; its place in the heap goes when it is met, or when there are too many."""
        self.cells.remove(time_ms)
        self._count -= keys_count
        self._times_count -= 1
        assert self._count >= self._times_count >= 0, "each time has at least one timer"
        if len(self._heap) > 2 * self._times_count + _STALE_TIMES_MAX:
            self._heap = list(self.cells.keys())
            heapify(self._heap)

    def _ordered(self, keys: list[Any]) -> list[Any]:
        """Return keys in the order of their hashes."""
        if self._hash is not None and len(keys) <= _HASHED_ONE_BY_ONE:
            return sorted(keys, key=self._hash)
        order = np.argsort(self._hashes(keys), kind="stable")
        return [keys[place] for place in order.tolist()]

    def _hashes(self, keys: Sequence[Any]) -> Hashes:
        names = self._key_columns.section_names
        batch = pa.RecordBatch.from_arrays(key_arrays(self._key_columns, keys), names=names)
        return hash_columns(batch, names)


def key_arrays(columns: KeyColumns, keys: Sequence[Any]) -> list[pa.Array]:
    """Return keys, as functions by row see them, as columns."""
    if len(columns.types) == 1:
        return [pa.array(keys, columns.types[0])]
    return [pa.array(list(c), dtype) for c, dtype in zip(zip(*keys, strict=True), columns.types, strict=True)]


def timers_count(frozen: FrozenCells) -> int:
    """Return how many timers there were at the barrier."""
    return sum(len(found) if type(found) is dict else 1 for found in frozen.objects.values())


def timer_batches(section: Section, keys: KeyColumns, frozen: FrozenCells, times_max: int) -> Iterator[pa.RecordBatch]:
    """Return the rows of a section of timers, those of ``times_max`` times at once."""
    items = iter(frozen.objects.items())
    while part := list(islice(items, times_max)):
        rows = [(time, key) for time, found in part for key in (found if type(found) is dict else (found,))]
        yield _timer_batch(section.schema, keys, rows)


def timer_pair_batches(
    schema: pa.Schema, keys: KeyColumns, timers: Iterable[Any], rows_max: int
) -> Iterator[pa.RecordBatch]:
    """Return pairs of time and key as rows, ``rows_max`` at once."""
    items = iter(timers)
    while rows := list(islice(items, rows_max)):
        yield _timer_batch(schema, keys, rows)


def _timer_batch(schema: pa.Schema, keys: KeyColumns, rows: Sequence[tuple[int, Any]]) -> pa.RecordBatch:
    columns = [*key_arrays(keys, [key for _, key in rows]), pa.array([time for time, _ in rows], pa.int64())]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
