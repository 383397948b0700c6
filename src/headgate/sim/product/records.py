"""The records of simulated pipelines, and what each kind of step makes of them: plain Python, without time or subtasks.

Whether a record goes round a loop again is a pure function of it, and steps with state count in ways that no order can
change. So a step may be fed any part of its input at a time, and what it makes of all of it is always the same.
Counterpart: ``steps`` says the same in the public API.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

WINDOW_MS = 40
OUT_OF_ORDER_MS = 15
KEYS = 5
VALUES = 1009

Row: TypeAlias = dict[str, Any]


class Record(NamedTuple):
    """``left``: trips through loops, at most; -1: made by a window or a round. ``round`` is 0 outside loops."""

    k: int
    n: int
    v: int
    t: int
    left: int
    round: int = 0


Records: TypeAlias = Counter[Record]


class Plain(Protocol):
    """What one step does."""

    def feed(self, records: Records) -> Records:
        """Return what the step makes of more input."""

    def finish(self) -> Records:
        """Return what the end of all input makes it emit."""


class Each:
    """A step without state: each record becomes some others."""

    def __init__(self, function: Callable[[Record], list[Record]]) -> None:
        self._function = function

    def feed(self, records: Records) -> Records:
        """See ``Plain``."""
        found: Records = Counter()
        for record, times in records.items():
            for made in self._function(record):
                found[made] += times
        return found

    def finish(self) -> Records:
        """See ``Plain``."""
        return Counter()


class Numbered:
    """Numbers records that are equal in ``what``, from 1 on."""

    def __init__(self, what: Callable[[Record], object], made: Callable[[Record, int], Record]) -> None:
        self._what, self._made = what, made
        self._seen: Counter[object] = Counter()

    def feed(self, records: Records) -> Records:
        """See ``Plain``."""
        found: Records = Counter()
        for record, times in records.items():
            what = self._what(record)
            for _ in range(times):
                self._seen[what] += 1
                found[self._made(record, self._seen[what])] += 1
        return found

    def finish(self) -> Records:
        """See ``Plain``."""
        return Counter()


class First:
    """Passes on the first of equal records."""

    def __init__(self) -> None:
        self._seen: set[Record] = set()

    def feed(self, records: Records) -> Records:
        """See ``Plain``."""
        new = [record for record in records if record not in self._seen]
        self._seen.update(new)
        return Counter(new)

    def finish(self) -> Records:
        """See ``Plain``."""
        return Counter()


class Windows:
    """Counts and sums per key and window, at the end."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()
        self._sums: Counter[tuple[int, int]] = Counter()

    def feed(self, records: Records) -> Records:
        """See ``Plain``."""
        for record, times in records.items():
            window = record.k, record.t - record.t % WINDOW_MS
            self._counts[window] += times
            self._sums[window] += record.v * times
        return Counter()

    def finish(self) -> Records:
        """See ``Plain``."""
        found = Counter(summed(k, self._counts[k, t], self._sums[k, t], t) for k, t in self._counts)
        self._counts.clear()
        return found


class RoundSums:
    """Passes everything on; at the end of a round, emits count and sum of that round's records of each key."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()
        self._sums: Counter[tuple[int, int]] = Counter()

    def feed(self, records: Records) -> Records:
        """See ``Plain``."""
        for record, times in records.items():
            self._counts[record.k, record.round] += times
            self._sums[record.k, record.round] += record.v * times
        return records

    def finish(self) -> Records:
        """All rounds have ended with the input."""
        sums = Counter(
            Record(k, n, self._sums[k, round_] % VALUES, 0, -1, round_) for (k, round_), n in self._counts.items()
        )
        self._counts.clear()
        return sums


def summed(k: int, count: int, total: int, start_ms: int) -> Record:
    """What a window becomes."""
    return Record(k, count, total % VALUES, start_ms, -1)


def mapped(record: Record, salt: int) -> Record:
    """What a map makes of a record."""
    return record._replace(v=(record.v * 31 + salt) % VALUES)


def passes(record: Record) -> bool:
    """Whether a filter keeps it."""
    return (record.n + record.v) % 3 != 0


def split(record: Record) -> list[Record]:
    """What a flat map makes of it."""
    twin = record._replace(v=(record.v * 17 + 3) % VALUES)
    return [record, twin] if record.v % 4 == 0 else [record]


def rekeyed(record: Record) -> Record:
    """It moves on to another key."""
    return record._replace(k=(record.k * 3 + 1) % KEYS)


def is_refused(record: Record) -> bool:
    """Whether a picky map makes a bad record of it."""
    return record.n % 5 == 0


def goes_again(record: Record, modulus: int) -> bool:
    """Whether it goes round once more."""
    return record.left > 0 and (record.n * 7 + record.v) % modulus != 0
