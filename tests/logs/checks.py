"""Judges the history of a log by Jepsen's eight checks, and by those that this store promises beyond them.

Counterpart: ``history``; ``cycles`` is check 4; ``groups`` judges readers that share a log. Source:
docs/spec/log-histories.md, after the analysis of logs in Jepsen. Pure: a history in, anomalies out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from tests.logs.history import Index, Operation, Outcome, Place, Poll, Seek, Send


class Kind(StrEnum):
    """What may be wrong with a history; the numbers are those of the rules."""

    ABORTED_READ = "aborted read"
    UNWRITTEN_READ = "unwritten read"
    TWO_VALUES = "two values at one position"
    TWO_PLACES = "one value at two positions"
    LOST_WRITE = "lost write"
    CYCLE = "cycle"
    SKIPPED = "skipped by a reader"
    BACKWARDS = "read backwards"
    SCATTERED_WRITE = "scattered write"
    SENT_BACKWARDS = "sent backwards"
    TORN_READ = "torn read"
    PRECOMMITTED_READ = "precommitted read"
    PROCESSED_TWICE = "processed twice"
    NOT_PROCESSED = "not processed"
    OUT_OF_ORDER = "processed out of order"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something that no sound log shows."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


Check = Callable[[Index], Iterator[Anomaly]]


def aborted_reads(index: Index) -> Iterator[Anomaly]:
    """What was read was written by somebody whose operation did not fail."""
    for value, readers in index.readers_of.items():
        writer = index.writer_of.get(value)
        if writer is None:
            yield Anomaly(Kind.UNWRITTEN_READ, f"{readers[0]} read {value}, which nobody sent")
        elif writer.outcome is Outcome.FAILED:
            yield Anomaly(Kind.ABORTED_READ, f"{readers[0]} read {value} of {writer}")


def divergence(index: Index) -> Iterator[Anomaly]:
    """A position has one value, and a value one position, whoever tells."""
    for place, values in index.values_at.items():
        if len(values) > 1:
            yield Anomaly(Kind.TWO_VALUES, f"at {place}: {sorted(values)}")
    for value, places in index.places_of.items():
        if len(places) > 1:
            yield Anomaly(Kind.TWO_PLACES, f"{value} at {sorted(places)}")


def lost_writes(index: Index) -> Iterator[Anomaly]:
    """What was acknowledged at a position that readers have come beyond was read by one of them."""
    highest = index.highest_read()
    for value, writer in index.writer_of.items():
        place = index.place_of(value)
        if writer.outcome is not Outcome.OK or place is None or value in index.readers_of:
            continue
        if place.position <= highest.get(place.segment, -1):
            yield Anomaly(Kind.LOST_WRITE, f"{value} of {writer} at {place}; read up to {highest[place.segment]}")


def lost_in_the_end(index: Index) -> Iterator[Anomaly]:
    """Check a history of which the last reader has read everything: all that was acknowledged was read."""
    for operation in index.writers():
        missing = [send.value for send in operation.sends if send.value not in index.readers_of]
        if missing and operation.outcome is Outcome.OK:
            yield Anomaly(Kind.LOST_WRITE, f"{missing[:5]} of {operation}, and everything was read")
        elif missing and len(missing) < len(operation.sends):
            yield Anomaly(Kind.TORN_READ, f"{missing[:5]} of {operation} were never read, its other events were")


def contiguous_reads(index: Index) -> Iterator[Anomaly]:
    """A process reads each segment position by position."""
    for operations in index.by_process().values():
        reached: dict[int, int] = {}
        for operation in operations:
            for step in operation.steps:
                if isinstance(step, Seek):
                    reached.pop(step.segment, None)
                elif isinstance(step, Poll):
                    yield from _contiguous(operation, step, reached)


def _contiguous(operation: Operation, poll: Poll, reached: dict[int, int]) -> Iterator[Anomaly]:
    told = [position for position, _ in poll.events] + ([] if poll.end is None else [poll.end])
    for position in told:
        expected = reached.get(poll.segment, position)
        if position != expected:
            kind = Kind.SKIPPED if position > expected else Kind.BACKWARDS
            yield Anomaly(kind, f"{operation} in segment {poll.segment} at {position} instead of {expected}")
        reached[poll.segment] = position + 1
    if poll.end is not None:
        reached[poll.segment] = poll.end


def contiguous_writes(index: Index) -> Iterator[Anomaly]:
    """The events of one operation lie side by side in each segment, those of each author in its order."""
    for operation in index.writers():
        found = [(send, place) for send in operation.sends if (place := index.place_of(send.value)) is not None]
        for places in _by_segment(place for _, place in found):
            if places[-1].position - places[0].position >= len(places) and len(found) == len(operation.sends):
                yield Anomaly(Kind.SCATTERED_WRITE, f"{operation} has {len(places)} events in {places[0]}–{places[-1]}")
        yield from _backwards(operation, found, lambda send, place: (send.author, place.segment))


def _by_segment(places: Iterable[Place]) -> list[list[Place]]:
    found: dict[int, list[Place]] = defaultdict(list)
    for place in sorted(places):
        found[place.segment].append(place)
    return list(found.values())


def writes_in_order(index: Index) -> Iterator[Anomaly]:
    """Events of one key are in the order in which a process sent them, whatever was scaled."""
    for operations in index.by_process().values():
        sent = [send for operation in operations for send in operation.sends]
        found = [(send, place) for send in sent if (place := index.place_of(send.value)) is not None]
        yield from _backwards(operations[0], found, lambda send, _: (send.author, send.key))


def _backwards(
    operation: Operation, found: Sequence[tuple[Send, Place]], of: Callable[[Send, Place], object]
) -> Iterator[Anomaly]:
    kept: dict[object, list[tuple[Send, Place]]] = defaultdict(list)
    for send, place in found:
        kept[of(send, place)].append((send, place))
    for sent in kept.values():
        for (first, before), (second, after) in pairwise(sent):
            if after <= before:
                text = f"{operation.process} sent {first.value}, at {before}, before {second.value}, at {after}"
                yield Anomaly(Kind.SENT_BACKWARDS, text)


def torn_reads(index: Index) -> Iterator[Anomaly]:
    """Who has seen one event of an operation finds all others, in whatever segment it looks afterwards."""
    last: dict[int, dict[int, Place]] = {}  # writer → segment → where its last event is
    for writer in index.writers():
        places = [place for send in writer.sends if (place := index.place_of(send.value)) is not None]
        last[id(writer)] = {place.segment: place for place in sorted(places)}
    for operations in index.by_process().values():
        yield from _torn(index, operations, last)


def _torn(index: Index, operations: list[Operation], last: dict[int, dict[int, Place]]) -> Iterator[Anomaly]:
    wanted: dict[int, dict[Place, Operation]] = defaultdict(dict)  # segment → what must be there → whose it is
    seen: set[int] = set()
    for operation in operations:
        for poll in operation.polls:
            writers = [index.writer_of.get(value) for _, value in poll.events]
            for writer in writers:
                if writer is not None and id(writer) not in seen:
                    seen.add(id(writer))
                    for segment, place in last[id(writer)].items():
                        wanted[segment][place] = writer
            if poll.end is None:
                continue
            for place, writer in wanted.pop(poll.segment, {}).items():
                if place.position >= poll.end:
                    text = f"{operation} saw a part of {writer}, and the end of segment {poll.segment} in front of"
                    yield Anomaly(Kind.TORN_READ, f"{text} position {place.position}")


def precommitted_reads(index: Index) -> Iterator[Anomaly]:
    """Nobody sees an event before its writer asked for that, nor an event of its own operation."""
    for value, readers in index.readers_of.items():
        writer = index.writer_of.get(value)
        for reader in readers:
            if writer is None or reader.ended_ns is None:
                continue
            if reader is writer or reader.ended_ns < writer.effect_ns:
                yield Anomaly(Kind.PRECOMMITTED_READ, f"{reader} read {value} of {writer}")


POSITIONS: tuple[Check, ...] = (
    aborted_reads,
    divergence,
    lost_writes,
    contiguous_reads,
    contiguous_writes,
    writes_in_order,
    torn_reads,
    precommitted_reads,
)
