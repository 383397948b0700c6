"""What clients of a log have done and seen: operations with their steps, and what came of each.

Counterpart: ``checks`` and ``cycles`` judge it, ``recording`` writes and reads it. Source: docs/spec/log-histories.md.
Knows nothing of the store: a segment is a number, a position is a number within it, a value is there once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Place(NamedTuple):
    """Where an event is. Of the events of one key, those that came first are at smaller places."""

    segment: int
    position: int


class Outcome(StrEnum):
    """What became of an operation."""

    OK = "ok"
    """It was acknowledged: it took effect before that."""
    FAILED = "failed"
    """It certainly took no effect, and never will."""
    UNKNOWN = "unknown"
    """Nobody was told: it may have taken effect, then or later."""


@dataclass(frozen=True, slots=True)
class Send:
    """An event that somebody wants in the log.

    Attributes:
        key: events of one key stay in the order in which a process sent them.
        value: no other event has it.
        place: where it is, as its writer was told; None: it was not told.
        author: who sent it, of those that share one operation: its order counts within its author.
    """

    key: str
    value: str
    place: Place | None = None
    author: str = ""


@dataclass(frozen=True, slots=True)
class Poll:
    """What a read of one segment returned, at one moment.

    Attributes:
        segment: the one that was read.
        events: (position, value), in order.
        end: a position where nothing followed at that moment; None: it did not look so far.
    """

    segment: int
    events: tuple[tuple[int, str], ...] = ()
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Seek:
    """From here on the process reads this segment from somewhere else."""

    segment: int


Step: TypeAlias = Send | Poll | Seek


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that one process did; all its sends take effect together or not at all.

    Attributes:
        process: who did it; its operations follow each other. A new life is another process.
        begun_ns: before the first step.
        ended_ns: behind the last one, by a clock that all processes share; None: it was never told.
        shown_ns: from here on its sends may be seen: when a transaction was asked to commit; None: from its begin on.
        group: a group of readers whose members share the events; "": nobody shares them.
        read_ns: when a member had in its hands what it read; None: it read nothing.
    """

    process: str
    begun_ns: int
    ended_ns: int | None
    outcome: Outcome
    steps: tuple[Step, ...] = ()
    shown_ns: int | None = None
    group: str = ""
    read_ns: int | None = None

    @property
    def sends(self) -> tuple[Send, ...]:
        """The events that it wants in the log, in order."""
        return tuple(step for step in self.steps if isinstance(step, Send))

    @property
    def polls(self) -> tuple[Poll, ...]:
        """What it read, in order."""
        return tuple(step for step in self.steps if isinstance(step, Poll))

    @property
    def effect_ns(self) -> int:
        """It took no effect before."""
        return self.begun_ns if self.shown_ns is None else self.shown_ns

    def __str__(self) -> str:
        what = [f"{len(self.sends)} sends"] * bool(self.sends) + [f"{len(self.polls)} polls"] * bool(self.polls)
        return f"{self.process}@{self.begun_ns} ({', '.join(what) or 'nothing'}, {self.outcome})"


@dataclass(frozen=True, slots=True)
class Index:
    """A history by values, places and processes."""

    operations: Sequence[Operation]
    writer_of: dict[str, Operation] = field(default_factory=dict)
    key_of: dict[str, str] = field(default_factory=dict)
    places_of: dict[str, set[Place]] = field(default_factory=lambda: defaultdict(set))
    values_at: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    readers_of: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, operations: Iterable[Operation]) -> Index:
        """Return the index of a history."""
        found = cls(sorted(operations, key=lambda operation: operation.begun_ns))
        for operation in found.operations:
            for send in operation.sends:
                assert send.value not in found.writer_of, f"{send.value} was sent twice: the history says nothing"
                found.writer_of[send.value], found.key_of[send.value] = operation, send.key
                if send.place is not None:
                    found._see(send.value, send.place)
            for poll in operation.polls:
                for position, value in poll.events:
                    found._see(value, Place(poll.segment, position))
                    found.readers_of[value].append(operation)
        return found

    def _see(self, value: str, place: Place) -> None:
        self.places_of[value].add(place)
        self.values_at[place].add(value)

    def place_of(self, value: str) -> Place | None:
        """Return where a value is, if anybody knows; the first of several."""
        return min(self.places_of[value], default=None) if value in self.places_of else None

    def by_process(self) -> dict[str, list[Operation]]:
        """Return the operations of each process, in its order."""
        found: dict[str, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            found[operation.process].append(operation)
        return dict(found)

    def writers(self) -> Iterator[Operation]:
        """Iterate over the operations that send."""
        return (operation for operation in self.operations if operation.sends)

    def highest_read(self) -> dict[int, int]:
        """Return, by segment, the highest position that anybody read."""
        found: dict[int, int] = {}
        for operation in self.operations:
            for poll in operation.polls:
                for position, _ in poll.events:
                    found[poll.segment] = max(position, found.get(poll.segment, position))
        return found
