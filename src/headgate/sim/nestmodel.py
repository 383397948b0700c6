"""A plain model of a nest of loops: records go round in worklists until nothing is left, without order or time.

The result does not depend on the order: stateless nodes see every record alone, counting nodes emit the n-th record of
a key whatever came n-th, and rounds are summed up when no record of them is anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from headgate.model.graph import BAD_RECORDS, MAIN, Edge, Node, OutputTag, Partitioner
from headgate.model.ids import NodeName
from headgate.sim import kinds
from headgate.sim.history import Record
from headgate.sim.kinds import Kind, Stream, spec_of

RECORDS_MAX = 1_200
"""Records that the nodes of a nest may process together; a graph that needs more is not worth its time."""

Batch: TypeAlias = Counter[Record]


class TooManyRecords(Exception):  # noqa: N818 - an answer, not an error of ours
    """The nest amplifies its input beyond ``RECORDS_MAX``."""


def run_nest(
    nodes: Sequence[Node], arrivals: Mapping[NodeName, Batch], parallelism: int, records_max: int = RECORDS_MAX
) -> dict[Stream, Batch]:
    """Return everything that each node of a nest sends, given what reaches it from outside.

    Raises:
        TooManyRecords
    """
    nest = _Nest(nodes, parallelism, records_max)
    for node in nodes:
        nest.arrive(node, arrivals.get(node.name, Counter()))
    nest.settle()
    nest.close_rounds()
    nest.fire()
    nest.finish()
    return nest.sent


class _Nest:
    """The nodes of one nest while they run."""

    def __init__(self, nodes: Sequence[Node], parallelism: int, records_max: int) -> None:
        self._nodes = nodes
        self._parallelism = parallelism
        self._left = records_max
        self._waiting: dict[NodeName, Batch] = {}
        self._targets: dict[Stream, list[tuple[Node, Edge, bool]]] = {}
        for node in nodes:
            for edge in node.inputs:
                self._targets.setdefault((edge.upstream, edge.tag), []).append((node, edge, False))
            for edge in node.feedback:
                self._targets.setdefault((edge.upstream, edge.tag), []).append((node, edge, True))
        self._keyed: dict[NodeName, dict[tuple[int, int], tuple[int, int]]] = {node.name: {} for node in nodes}
        self._round_max = 0
        self.sent: dict[Stream, Batch] = {(n.name, tag): Counter() for n in nodes for tag in (MAIN, BAD_RECORDS)}

    @property
    def _outer(self) -> Node:
        return self._nodes[0]

    def arrive(self, node: Node, records: Batch) -> None:
        """Put ``records`` in front of ``node``."""
        if records:
            self._waiting.setdefault(node.name, Counter()).update(records)

    def settle(self) -> None:
        """Process until nothing waits anywhere."""
        while self._waiting:
            for node in self._nodes:
                records = self._waiting.pop(node.name, None)
                if records:
                    self._left -= sum(records.values())
                    if self._left < 0:
                        raise TooManyRecords
                    self._process(node, records)

    def close_rounds(self) -> None:
        """End one round after another: what that makes may begin another one."""
        if not spec_of(self._outer).has_rounds:
            return
        round_ = 0
        while round_ <= self._round_max:
            for node in self._nodes:
                if spec_of(node).kind is Kind.ROUND_SUM:
                    self._close(node, round_)
                    self.settle()
            round_ += 1

    def fire(self) -> None:
        """Let windows fire, in order: event time has ended. What comes of that may go round, but not into windows."""
        for node in self._nodes:
            if spec_of(node).kind is Kind.WINDOW:
                name, state = str(node.name), self._keyed[node.name]
                fired = [kinds.windowed(name, key, start, count) for (key, start), (count, _) in state.items()]
                self._send(node, Counter(fired))
                self.settle()

    def finish(self) -> None:
        """Let the nodes sum up, in order."""
        for node in self._nodes:
            if spec_of(node).kind in (Kind.TALLY, Kind.VISITS):
                name, state = str(node.name), self._keyed[node.name]
                sums = [kinds.summed(name, key, count, total) for (key, _), (count, total) in state.items()]
                self._send(node, Counter(sums))
                self.settle()

    def _close(self, node: Node, round_: int) -> None:
        name, head, state = str(node.name), str(self._outer.name), self._keyed[node.name]
        out: Batch = Counter()
        for key, round_of in [k for k in state if k[1] <= round_]:
            count, total = state.pop((key, round_of))
            out[kinds.round_sum(name, head, round_of, key, count, total)] += 1
        if spec_of(node).marks_rounds:
            out.update(kinds.round_mark(name, round_, index) for index in range(self._parallelism))
        self._send(node, out)

    def _process(self, node: Node, records: Batch) -> None:
        name, spec = str(node.name), spec_of(node)
        main: Batch = Counter()
        match spec.kind:
            case Kind.HEAD:
                main = records
            case Kind.MAP:
                bad = {r: times for r, times in records.items() if spec.diverts and kinds.is_bad(r)}
                for record, times in records.items():
                    if record not in bad:
                        main[kinds.mapped(record, name)] += times  # large values may become equal
                rejected = Counter({kinds.rejected(r, name): times for r, times in bad.items()})
                self._send(node, rejected, BAD_RECORDS)
            case Kind.FILTER:
                main.update({(f"{r[0]}.{name}", *r[1:]): t for r, t in records.items() if kinds.passes(r)})
            case Kind.TALLY | Kind.VISITS | Kind.ROUND_SUM:
                main = self._collect(node, records)
            case Kind.WINDOW:
                self._gather(node, records)
            case _:
                for record, times in records.items():
                    for made in kinds.transformed(spec, name, record):
                        main[made] += times
        self._send(node, main)

    def _collect(self, node: Node, records: Batch) -> Batch:
        """Update keyed state; return what goes on at once."""
        name, kind, state = str(node.name), spec_of(node).kind, self._keyed[node.name]
        out: Batch = Counter()
        for record, times in records.items():
            if kinds.is_summary(record):
                if kind is not Kind.ROUND_SUM:
                    out[f"{record[0]}.{name}", *record[1:]] += times
                continue
            round_ = kinds.trips(record, str(self._outer.name)) if kind is Kind.ROUND_SUM else 0
            count, total = state.get((record[2], round_), (0, 0))
            state[record[2], round_] = (count + times, total + record[3] * times)
            if kind is Kind.TALLY:
                out[f"{record[0]}.{name}", *record[1:]] += times
            elif kind is Kind.VISITS:
                out.update(kinds.counted(name, record[2], count + i) for i in range(1, times + 1))
        return out

    def _gather(self, node: Node, records: Batch) -> None:
        """Put records into their windows."""
        state = self._keyed[node.name]
        for record, times in records.items():
            if not kinds.is_timeless(record):
                window = (record[2], kinds.window_start(record[4]))
                state[window] = (state.get(window, (0, 0))[0] + times, 0)

    def _send(self, node: Node, records: Batch, tag: OutputTag = MAIN) -> None:
        if not records:
            return
        self.sent[node.name, tag].update(records)
        for target, edge, is_feedback in self._targets.get((node.name, tag), ()):
            copies = self._parallelism if edge.partitioner is Partitioner.BROADCAST else 1
            found: Batch = Counter({record: times * copies for record, times in records.items()})
            self.arrive(target, self._returned(target, found) if is_feedback else found)

    def _returned(self, head: Node, records: Batch) -> Batch:
        """What ``head`` makes of records that come back."""
        name, found = str(head.name), Counter[Record]()
        for record, times in records.items():
            back = kinds.came_back(record, name)
            if not kinds.is_dropped(back, name, spec_of(head)):
                found[back] += times
                if head is self._outer:
                    self._round_max = max(self._round_max, kinds.trips(back, name))
        return found
