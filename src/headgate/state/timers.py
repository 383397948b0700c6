"""What timers are to a state backend, and to a snapshot: per kind of time, keys with times, each pair once (TM2, TM6).

Counterparts: ``operators.process.timers``, through which users' functions register and delete them; backends, which
hold them. Times are milliseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from headgate.codec.snapshot import MetaSection
from headgate.state.descriptors import KeyColumns, Section
from headgate.state.key_hash import Hashes, Words
from headgate.state.key_index import Slots
from headgate.state.vectors import Mask

RESERVED_PREFIX = "headgate."
"""No state of a user's has such a name."""

TIMERS = "headgate.timers"
"""The section about a subtask's timers that belongs to no key (``TimersMeta``). Without it a snapshot has no timers."""

TIME_COLUMN = "time_ms"

DATES_MS = range(-62_135_596_800_000, 253_402_300_800_000)
"""Times that a ``datetime`` can be: the years 1 to 9999."""

_META = MetaSection(TIMERS, "timers")


class TimeKind(Enum):
    """What a timer waits for."""

    EVENT_TIME = "event_time"
    PROCESSING_TIME = "processing_time"


class RowTimers(Protocol):
    """The timers of one kind by row: keys are Python values, as in ``RowBackend``."""

    def __len__(self) -> int:
        """Return how many there are."""

    def register(self, key: Any, time_ms: int) -> None:
        """Add a timer; nothing happens if the key has one for this time."""

    def delete(self, key: Any, time_ms: int) -> None:
        """Remove a timer; nothing happens if there is none."""

    def next_ms(self) -> int | None:
        """Return the earliest time, or None. Cheap; polled often."""

    def take(self, until_ms: int, keys_max: int) -> tuple[int, list[Any]] | None:
        """Remove timers of the earliest time, if that is not after ``until_ms``: some or all of its keys (TM5).

        Returns:
            The time, and the keys in the order of their hashes; None if no timer is due.
        """

    def all(self) -> Iterator[tuple[int, Any]]:
        """Yield the time and key of every timer, in no particular order; change none meanwhile."""


class ColumnTimers(Protocol):
    """The timers of one kind by column: keys are slots of the backend's index."""

    def __len__(self) -> int:
        """Return how many there are, or somewhat more: what was deleted may still count."""

    def register(self, slots: Slots, times_ms: Words) -> None:
        """Add a timer per row; nothing happens where the key has one for this time. The arrays become the backend's."""

    def delete(self, slots: Slots, times_ms: Words) -> None:
        """Remove a timer per row; nothing happens where there is none. The arrays become the backend's."""

    def next_ms(self) -> int | None:
        """Return the earliest time, or None; it may be that of a timer that was deleted. Cheap; polled often."""

    def take(self, until_ms: int, rows_max: int) -> tuple[Slots, Words]:
        """Remove the first timers, none after ``until_ms``, in the order of time and hash of the key (TM5).

        Returns:
            Slots and times, no slot twice. Nothing if no timer is due.
        """


View = TypeVar("View")


@dataclass(frozen=True, slots=True)
class TimersMeta:
    """What a snapshot says of a subtask's timers beside their keys.

    Attributes:
        processing_time_ms: processing time at the barrier; it never goes back, not over a restore either (TM8).
        has_ended: all input had ended, and the last watermark has fired what it fires (TM9).
    """

    processing_time_ms: int
    has_ended: bool

    def encode(self) -> bytes:
        """Return it as a section."""
        return _META.encode(ms=self.processing_time_ms, has_ended=self.has_ended)

    @staticmethod
    def found_in(sections: Mapping[str, memoryview], path: str) -> TimersMeta | None:
        """Return what one part of a former snapshot says; None: it knows of no timers.

        Raises:
            CorruptionError: it is of a version that is not known here.
        """
        found = _META.found_in(sections, path)
        return None if found is None else TimersMeta(found["ms"], found["has_ended"])


@dataclass
class TimersByKind(Generic[View]):
    """All timers of one operator in one subtask. ``meta`` is what the next snapshots say of them."""

    event_time: View
    processing_time: View
    meta: TimersMeta

    def of(self, kind: TimeKind) -> View:
        """Return those of one kind."""
        return self.event_time if kind is TimeKind.EVENT_TIME else self.processing_time


def timers_of_each_kind(make: Callable[[TimeKind], View]) -> dict[TimeKind, View]:
    """Return what ``make`` makes for the timers of each kind."""
    return {kind: make(kind) for kind in TimeKind}


def timers_by_kind(held: Mapping[TimeKind, View]) -> TimersByKind[View] | None:
    """Return the timers that a new backend holds, as it shows them; None: its operator has none."""
    if not held:
        return None
    return TimersByKind(held[TimeKind.EVENT_TIME], held[TimeKind.PROCESSING_TIME], TimersMeta(0, False))


def first_timers(times_ms: Words, hashes: Hashes, count: int) -> Mask:
    """Return which timers come first in the order of TM5, about ``count`` of them.

    Timers of one time with keys of one hash stay together, and the first ones are always among them: their order is
    not defined.
    """
    found = np.ones(len(times_ms), np.bool_)
    if len(times_ms) <= count:
        return found
    order = np.lexsort((hashes, times_ms))
    at = order[count]
    is_alike = (times_ms[order] == times_ms[at]) & (hashes[order] == hashes[at])
    cut = int(np.argmax(is_alike)) or int(np.count_nonzero(is_alike))
    found[order[cut:]] = False
    return found


def timer_section(keys: KeyColumns, kind: TimeKind) -> Section:
    """Return the section of the timers of one kind: the key, then the time."""
    fields = [pa.field(name, dtype) for name, dtype in zip(keys.section_names, keys.types, strict=True)]
    schema = pa.schema([*fields, pa.field(TIME_COLUMN, pa.int64())])
    return Section(f"{TIMERS}.{kind.value}", schema, tuple(keys.section_names))
