"""A plain model of what a graph must produce: all input at once, with no subtasks, barriers or time.

Counterpart: ``chain``, the live operators. Loops are in ``nestmodel``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from headgate.model.graph import BAD_RECORDS, MAIN, Graph, Node, Partitioner
from headgate.model.ids import NodeName
from headgate.sim import kinds
from headgate.sim.history import Record
from headgate.sim.kinds import (
    Kind,
    Stream,
    counted,
    is_bad,
    mapped,
    passes,
    rejected,
    spec_of,
    summed,
    window_start,
    windowed,
)
from headgate.sim.nestmodel import run_nest


def expected_of_prefixes(graph: Graph, parallelism: int, read: Mapping[str, int]) -> dict[str, Counter[Record]]:
    """Return what must be committed per sink when only the first ``read[split]`` records of each split were read."""
    nodes = []
    for node in graph.nodes:
        spec = spec_of(node)
        cut = tuple((name, records[: read.get(name, 0)]) for name, records in spec.splits)
        nodes.append(replace(node, spec=replace(spec, splits=cut)))
    return expect(Graph(tuple(nodes)), parallelism)[0]


def expect(graph: Graph, parallelism: int) -> tuple[dict[str, Counter[Record]], dict[str, frozenset[str]]]:
    """Return what must be committed per sink, and the origins whose order is promised there."""
    streams = _Streams(parallelism)
    expected: dict[str, Counter[Record]] = {}
    ordered: dict[str, frozenset[str]] = {}
    for unit in _units(graph):
        if unit[0].loops:
            streams.add_nest(unit)
            continue
        node, name = unit[0], str(unit[0].name)
        records, loose = streams.arriving(node)
        if spec_of(node).kind is Kind.SINK:
            expected[name] = records
            ordered[name] = frozenset(r[0] for r in records) - loose
            continue
        main, bad = _apply(node, records)
        streams.add(node.name, main, bad, loose)
    return expected, ordered


def _units(graph: Graph) -> list[list[Node]]:
    """Return the nodes one by one, those of a nest of loops together; a nest's nodes follow each other."""
    units: list[list[Node]] = []
    for node in graph.nodes:
        if node.loops and units and units[-1][0].loops[:1] == node.loops[:1]:
            units[-1].append(node)
        else:
            units.append([node])
    return units


class _Streams:
    """What went through every stream so far, and which of its origins have no order."""

    def __init__(self, parallelism: int) -> None:
        self._parallelism = parallelism
        self._out: dict[Stream, Counter[Record]] = {}
        self._unordered: dict[Stream, frozenset[str]] = {}

    def arriving(self, node: Node) -> tuple[Counter[Record], frozenset[str]]:
        """Return what reaches ``node`` on inputs whose streams are known."""
        records: Counter[Record] = Counter()
        loose: frozenset[str] = frozenset()
        for edge in node.inputs:
            stream = (edge.upstream, edge.tag)
            if stream not in self._out:
                continue
            copies = self._parallelism if edge.partitioner is Partitioner.BROADCAST else 1
            for record, times in self._out[stream].items():
                records[record] += times * copies
            keeps = edge.partitioner in (Partitioner.FORWARD, Partitioner.HASH)
            loose |= self._unordered[stream] if keeps else frozenset(r[0] for r in self._out[stream])
        return records, loose

    def add(self, node: NodeName, main: Counter[Record], bad: Counter[Record], loose: frozenset[str]) -> None:
        """Remember the outputs of a node outside loops."""
        for tag, found in ((MAIN, main), (BAD_RECORDS, bad)):
            self._out[node, tag] = found
            grown = frozenset(f"{origin}{sign}{node}" for origin in loose for sign in ".!")
            self._unordered[node, tag] = grown & frozenset(r[0] for r in found)

    def add_nest(self, nodes: list[Node]) -> None:
        """Run a nest of loops to its end and remember what its nodes sent; nothing of it has an order."""
        arrivals = {node.name: self.arriving(node)[0] for node in nodes}
        for stream, found in run_nest(nodes, arrivals, self._parallelism).items():
            self._out[stream] = found
            self._unordered[stream] = frozenset(r[0] for r in found)


def _apply(node: Node, records: Counter[Record]) -> tuple[Counter[Record], Counter[Record]]:
    name, spec = str(node.name), spec_of(node)
    main: Counter[Record] = Counter()
    bad: Counter[Record] = Counter()
    match spec.kind:
        case Kind.SOURCE:
            main.update(record for _, split in spec.splits for record in split)
        case Kind.MAP:
            for record, times in records.items():
                if spec.diverts and is_bad(record):
                    bad[rejected(record, name)] += times
                else:
                    main[mapped(record, name)] += times
        case Kind.FILTER:
            main.update({(f"{r[0]}.{name}", *r[1:]): times for r, times in records.items() if passes(r)})
        case Kind.HOLD:
            for record, times in records.items():
                main.update(dict.fromkeys(kinds.transformed(spec, name, record), times))
        case Kind.COUNT:
            for key in {r[2] for r in records}:
                mine = [(r[3], times) for r, times in records.items() if r[2] == key]
                count = sum(times for _, times in mine)
                main.update(counted(name, key, i) for i in range(1, count + 1))
                main[summed(name, key, count, sum(value * times for value, times in mine))] += 1
        case Kind.WINDOW:
            windows: Counter[tuple[int, int]] = Counter()
            for record, times in records.items():
                if kinds.is_timeless(record):
                    continue
                windows[record[2], window_start(record[4])] += times
            main.update(windowed(name, key, start, count) for (key, start), count in windows.items())
        case _:
            raise AssertionError(f"{name} is no operator outside loops")
    return main, bad
