"""Looks for cycles among the operations of a history: no order of them explains what they saw.

Counterpart: ``checks``; ``components`` finds them. Source: docs/spec/log-histories.md. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.logs.checks import Anomaly, Kind
from tests.logs.components import Edges, Node, components, short_cycle
from tests.logs.history import Index, Operation, Outcome

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
