"""Judges the history of a log by Jepsen's eight checks, and by those that this store promises beyond them.

Check 4 looks for cycles among operations: no order of them explains what they saw. Readers that share a log process
each event once, those of a key in order. An operation of a member of a group is a read together with what came of its
commit: acknowledged, refused, or never answered.

Counterpart: ``history``. Source: docs/spec/log-histories.md, after the analysis of logs in Jepsen; R. Tarjan,
Depth-first search and linear graph algorithms, 1972, without recursion. Pure: a history in, anomalies out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
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


def group_anomalies(index: Index, *, is_complete: bool) -> Iterator[Anomaly]:
    """Judge each group of the history by itself."""
    members: dict[str, list[Operation]] = defaultdict(list)
    for operation in index.operations:
        if operation.group:
            members[operation.group].append(operation)
    for group, operations in members.items():
        committed = sorted((x for x in operations if x.outcome is Outcome.OK), key=lambda x: x.read_ns or x.begun_ns)
        yield from _twice(group, committed)
        yield from _out_of_order(index, group, committed)
        if is_complete:
            yield from _lost(index, group, committed, [x for x in operations if x.outcome is Outcome.UNKNOWN])


def _values(operations: Sequence[Operation]) -> list[str]:
    return [value for operation in operations for poll in operation.polls for _, value in poll.events]


def _twice(group: str, committed: Sequence[Operation]) -> Iterator[Anomaly]:
    twice = sorted(value for value, times in Counter(_values(committed)).items() if times > 1)
    if twice:
        yield Anomaly(Kind.PROCESSED_TWICE, f"by group {group}: {twice[:5]}, {len(twice)} in all")


def _lost(index: Index, group: str, committed: Sequence[Operation], unknown: Sequence[Operation]) -> Iterator[Anomaly]:
    """Of what a commit that was not answered would have covered, nobody knows."""
    seen = {*_values(committed), *_values(unknown)}
    there = {send.value for x in index.writers() if x.outcome is Outcome.OK for send in x.sends} | set(index.readers_of)
    lost = sorted(there - seen)
    if lost:
        yield Anomaly(Kind.NOT_PROCESSED, f"by group {group}: {lost[:5]}, {len(lost)} in all")


def _out_of_order(index: Index, group: str, committed: Sequence[Operation]) -> Iterator[Anomaly]:
    reached: dict[str, Place] = {}
    for operation in committed:
        for poll in operation.polls:
            for position, value in poll.events:
                key, place = index.key_of.get(value, value), Place(poll.segment, position)
                if place <= reached.get(key, Place(-1, -1)):
                    yield Anomaly(Kind.OUT_OF_ORDER, f"by group {group}: {value} at {place} behind {reached[key]}")
                reached[key] = place


Node = tuple[str, int]
Edges = dict[Node, dict[Node, str]]
"""node → node behind it → why."""

STARTS_MAX = 50
"""From so many nodes a cycle is looked for: any short one will do to show."""


class _Search:
    """One depth-first search over all nodes."""

    def __init__(self, edges: Edges) -> None:
        self.found: list[set[Node]] = []
        self._edges = edges
        self._number: dict[Node, int] = {}
        self._lowest: dict[Node, int] = {}
        self._waiting: dict[Node, None] = {}
        for root in list(edges):
            if root not in self._number:
                self._from(root)

    def _from(self, root: Node) -> None:
        path = [self._enter(root)]
        while path:
            node, following = path[-1]
            other = next(following, None)
            if other is None:
                path.pop()
                if path:
                    self._lower(path[-1][0], self._lowest[node])
                self._leave(node)
            elif other not in self._number:
                path.append(self._enter(other))
            elif other in self._waiting:
                self._lower(node, self._number[other])

    def _enter(self, node: Node) -> tuple[Node, Iterator[Node]]:
        self._number[node] = self._lowest[node] = len(self._number)
        self._waiting[node] = None
        return node, iter(self._edges.get(node, {}))

    def _lower(self, node: Node, number: int) -> None:
        self._lowest[node] = min(self._lowest[node], number)

    def _leave(self, node: Node) -> None:
        if self._lowest[node] != self._number[node]:
            return
        component: set[Node] = set()
        while node not in component:
            component.add(self._waiting.popitem()[0])
        if len(component) > 1:
            self.found.append(component)


def components(edges: Edges) -> list[set[Node]]:
    """Return the sets of several nodes that all reach each other."""
    return _Search(edges).found


def short_cycle(edges: Edges, component: set[Node], starts: Sequence[Node]) -> list[Node]:
    """Return the nodes of a short cycle within a component, one of ``starts`` at both ends."""
    return min((_around(edges, component, start) for start in starts[:STARTS_MAX]), key=len)


def _around(edges: Edges, component: set[Node], start: Node) -> list[Node]:
    came: dict[Node, Node] = {}
    queue = deque([start])
    while start not in came:
        node = queue.popleft()
        for other in edges.get(node, {}):
            if other in component and other not in came:
                came[other] = node
                queue.append(other)
    path = [start, came[start]]
    while path[-1] != start:
        path.append(came[path[-1]])
    return path[::-1]


OPERATION, MOMENT = "operation", "moment"


class Dependencies:
    """Who must have come before whom, and why.

    - write, write: the one wrote in front of the other
    - write, read: what the one wrote is the last that the other read
    - read, write: the one found the end of a segment in front of what the other wrote
    - process: one process did both
    - real time: the one had ended before the other could take effect
    """

    def __init__(self, index: Index, *, is_real_time: bool) -> None:
        self.edges: Edges = defaultdict(dict)
        self._index = index
        self._numbers = {id(operation): number for number, operation in enumerate(index.operations)}
        self._log: dict[int, list[tuple[int, Operation]]] = defaultdict(list)
        for place in sorted(index.values_at):
            writer = index.writer_of.get(min(index.values_at[place]))
            if writer is not None:
                self._log[place.segment].append((place.position, writer))
        for log in self._log.values():
            for (_, first), (_, second) in pairwise(log):
                self._before(first, second, "write, write")
        for operation in index.operations:
            self._reads(operation)
        for operations in index.by_process().values():
            for first, second in pairwise(operations):
                self._before(first, second, "process")
        if is_real_time:
            self._real_time()

    def _node(self, operation: Operation) -> Node:
        return OPERATION, self._numbers[id(operation)]

    def _before(self, first: Operation, second: Operation, why: str) -> None:
        if first is not second:
            self.edges[self._node(first)].setdefault(self._node(second), why)

    def _reads(self, operation: Operation) -> None:
        for poll in operation.polls:
            writer = self._index.writer_of.get(poll.events[-1][1]) if poll.events else None
            if writer is not None:
                self._before(writer, operation, "write, read")
            log = self._log[poll.segment]
            if poll.end is not None and (at := bisect_left(log, poll.end, key=lambda x: x[0])) < len(log):
                self._before(operation, log[at][1], "read, write")

    def _real_time(self) -> None:
        """One moment for each end: whoever takes effect behind it comes behind all that ended up to it."""
        ended = {self._node(x): x.ended_ns for x in self._index.operations if x.ended_ns and x.outcome is Outcome.OK}
        moments = sorted(set(ended.values()))
        for number in range(1, len(moments)):
            self.edges[MOMENT, number - 1][MOMENT, number] = "real time"
        for node, ended_ns in ended.items():
            self.edges[node][MOMENT, bisect_left(moments, ended_ns)] = "real time"
        for operation in self._index.operations:
            before = bisect_left(moments, operation.effect_ns)
            if before:
                self.edges[MOMENT, before - 1][self._node(operation)] = "real time"


def cycles(index: Index, *, is_real_time: bool) -> Iterator[Anomaly]:
    """Tell a short cycle of each set of operations that all depend on each other."""
    edges = Dependencies(index, is_real_time=is_real_time).edges
    for component in components(edges):
        starts = sorted(node for node in component if node[0] == OPERATION)
        told = [
            f"{index.operations[first[1]]} ({edges[first][second]})"
            for first, second in pairwise(short_cycle(edges, component, starts))
            if first[0] == OPERATION
        ]
        yield Anomaly(Kind.CYCLE, " → ".join([*told, "the first one"]))


def anomalies(operations: Iterable[Operation], *, is_complete: bool = True, is_real_time: bool = True) -> list[Anomaly]:
    """Return what is wrong with a history.

    Args:
        operations: of all processes, in any order.
        is_complete: somebody has read everything when all had ended.
        is_real_time: whoever looks sees what was acknowledged before it looked; else only what its own process has
            done and seen.
    """
    index = Index.of(operations)
    found = [anomaly for check in POSITIONS for anomaly in check(index)]
    found += cycles(index, is_real_time=is_real_time)
    found += group_anomalies(index, is_complete=is_complete)
    return [*found, *lost_in_the_end(index)] if is_complete else found
