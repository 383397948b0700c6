"""Timers by column in memory: sorted runs of what was done to timers, merged as they become many.

Counterpart: ``operators.process.by_batch``. Registering and deleting append to a tail; a full tail becomes a run,
sorted by time and slot; runs of like size are merged, and of what was done to one timer the latest counts. So each
timer is sorted a few times in its life, and nobody looks at timers that are not due. Arrays are never written twice:
what is frozen refers to them (ST5, TM12), and so does what is noted for the next checkpoints (MC9).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from headgate.state.columns import FrozenChanges, FrozenRows, KeyedColumns
from headgate.state.key_hash import Hashes, Words
from headgate.state.key_index import Slots
from headgate.state.memory.changes import Interval
from headgate.state.memory.counted_timers import CountedTimers, counted
from headgate.state.memory.timer_changes import Changes, NotedTimers, columns_of, latest, living
from headgate.state.slot_array import Mask
from headgate.state.timers import stay_first

_TAIL_ROWS = 65_536
_TAIL_PARTS = 64
_RUNS_MERGED = 8
_DUE_ROWS = 262_144
"""About so many timers that are due are brought into order at once."""

_NONE: Words = np.empty(0, np.int64)


@dataclass(slots=True)
class _Run:
    """Changes in the order of time and slot, one of each timer; those before ``start`` are done with."""

    times: Words
    changes: Words
    start: int = 0

    def rest(self) -> Changes:
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
            interval: what is done to timers is noted by it (MC9); None: nobody asks.
        """
        self._hashes = hashes
        self._noted = None if interval is None else NotedTimers(interval)
        self._due: Changes = _NONE, _NONE
        self._due_to_ms = 0
        self._runs: list[_Run] = []
        self._tail: list[Changes] = []
        self._tail_rows = 0
        self._tail_ms = 0
        self._window = 64
        self._counted: tuple[int, CountedTimers] | None = None
        """All timers at the end of an interval: set by the thread that writes snapshots."""

    def __len__(self) -> int:
        return len(self._due[0]) + sum(len(run.times) - run.start for run in self._runs) + self._tail_rows

    def register(self, slots: Slots, times_ms: Words) -> None:
        """See ``ColumnTimers``."""
        self._append(times_ms, slots << 1)

    def delete(self, slots: Slots, times_ms: Words) -> None:
        """See ``ColumnTimers``."""
        self._append(times_ms, (slots << 1) | 1)

    def next_ms(self) -> int | None:
        """See ``ColumnTimers``."""
        times = [int(run.times[run.start]) for run in self._runs]
        times += [self._tail_ms] if self._tail else []
        times += [int(self._due[0][0])] if len(self._due[0]) else []
        return min(times, default=None)

    def take(self, until_ms: int, rows_max: int) -> tuple[Slots, Words]:
        """See ``ColumnTimers``."""
        if self._tail and self._tail_ms <= until_ms:
            self._close_tail()
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
        self._window = 64 + 2 * count
        self._due = times[count:], changes[count:]
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
        times, changes = living(latest(found))
        order = np.lexsort((self._hashes(changes >> 1), times))
        self._due, self._due_to_ms = (times[order], changes[order]), until_ms

    def _append(self, times: Words, changes: Words) -> None:
        if len(times) == 0:
            return
        first_ms = int(times.min())
        self._tail_ms = min(self._tail_ms, first_ms) if self._tail else first_ms
        self._tail.append((times, changes))
        self._tail_rows += len(times)
        self._note(times, changes)
        if self._tail_rows >= _TAIL_ROWS or len(self._tail) >= _TAIL_PARTS:
            self._close_tail()

    def _note(self, times: Words, changes: Words) -> None:
        """This was done to timers."""
        if self._noted is not None:
            self._noted.add(times, changes, len(self))

    def note_changes(self) -> None:
        """All timers were restored from a snapshot that the next one may refer to (MC7)."""
        assert self._noted is not None
        self._noted.start()

    def _close_tail(self) -> None:
        found = latest(self._tail)
        self._tail, self._tail_rows = [], 0
        self._runs.append(_Run(*(found if self._runs or len(self._due[0]) else living(found))))
        while (count := self._mergeable()) >= _RUNS_MERGED:
            merged = latest([run.rest() for run in self._runs[-count:]])
            is_oldest = count == len(self._runs) and not len(self._due[0])
            self._runs[-count:] = [_Run(*(living(merged) if is_oldest else merged))]
        self._runs = [run for run in self._runs if len(run.times)]

    def _mergeable(self) -> int:
        """Return how many of the latest runs are no larger than the last one, about."""
        count = 0
        for run in reversed(self._runs):
            if run.size_class > self._runs[-1].size_class:
                break
            count += 1
        return count

    def _whole(self) -> Changes:
        """Return all timers there are."""
        return living(latest([self._due, *(run.rest() for run in self._runs), *self._tail]))

    def split(self, count: int) -> tuple[Slots, Words]:
        """Remove the last timers, so that about ``count`` stay (``stay_first``); return those that went."""
        times, changes = self._whole()
        stays = stay_first(times, self._hashes(changes >> 1), count)
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
        """Keep only the slots ``living``, which become 0, 1, 2 …; called after ``tidy``."""
        times, changes = self._whole()
        slots = np.searchsorted(living, changes >> 1)
        if self._noted is not None:
            self._noted.forget()
            self._counted = None
        self._runs = [_Run(*latest([(times, slots << 1)]))] if len(times) else []

    def freeze(self) -> FrozenRows:
        """Return the timers as they are now, to be read in any thread. Takes references only."""
        former = self._since_counted()
        if former is not None:
            self._refer_to(*former)
        held = [self._due, *(run.rest() for run in self._runs), *self._tail]
        done_to = None if self._noted is None else self._noted.number

        @cache
        def found() -> CountedTimers:
            now = counted(living(latest(held))) if former is None else former[0].after(former[1])
            if done_to is not None:
                self._counted = done_to, now
            return now

        @cache
        def rows() -> KeyedColumns:
            return columns_of(found().whole())

        def count() -> int:
            return found().count

        if self._noted is None:
            return FrozenRows(count, rows, _no_places)
        noted = self._noted.freeze()
        return FrozenRows(count, rows, noted.living, FrozenChanges(noted.after, noted.gone))

    def _since_counted(self) -> tuple[CountedTimers, list[Changes]] | None:
        """Return the timers of a former snapshot that somebody has counted, and what was done since."""
        if self._noted is None or self._counted is None:
            return None
        number, found = self._counted
        since = self._noted.since(number)
        return None if since is None else (found, since)

    def _refer_to(self, former: CountedTimers, since: list[Changes]) -> None:
        """Have the timers of a former snapshot in memory once, and what was done since behind them.

        Not while timers are due, which are in an order of their own.
        """
        if len(self._due[0]) or (self._runs and self._runs[0].times is former.base[0]):
            return
        self._runs = [_Run(*found) for found in (former.base, former.done) if len(found[0])]
        self._tail = list(since)  # a list of its own: the snapshot that is taken now reads the other one, later
        self._tail_rows = sum(len(part) for part, _ in since)
        self._tail_ms = min((int(part.min()) for part, _ in since), default=0)


def _no_places(places: Slots) -> KeyedColumns:
    raise AssertionError("what was done to these timers was not noted")
