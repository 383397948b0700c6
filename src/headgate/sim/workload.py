"""Random graphs with bounded input, and a plain model of what they must produce.

Every record is ``(origin, number, key, value, event time)``. The origin grows by the name of each operator that the
record passes, so equal records met on two paths stay distinguishable. The model runs the graph on all input at once,
with no subtasks, barriers or time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from headgate.model.graph import Edge, Graph, Node, OutputTag, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.sim.history import Record

WINDOW_MS = 40
"""Width of the tumbling windows of WINDOW nodes."""

OUT_OF_ORDER_MS = 20
"""Records of a split are at most this late."""

Stream: TypeAlias = tuple[NodeName, OutputTag]


class Kind(Enum):
    """What a node does."""

    SOURCE = "source"
    MAP = "map"
    FILTER = "filter"
    COUNT = "count"
    WINDOW = "window"
    SINK = "sink"


@dataclass(frozen=True, slots=True)
class Spec:
    """Configuration of a node. ``splits`` (sources): the input. ``diverts`` (MAP): every fifth record is bad."""

    kind: Kind
    splits: tuple[tuple[str, tuple[Record, ...]], ...] = ()
    diverts: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """A graph and what it must produce: per sink, the committed multiset, and the origins whose order is promised."""

    graph: Graph
    expected: dict[str, Counter[Record]]
    ordered: dict[str, frozenset[str]]


def spec_of(node: Node) -> Spec:
    """Return the node's configuration."""
    assert isinstance(node.spec, Spec)
    return node.spec


def mapped(record: Record, name: str) -> Record:
    """What a MAP called ``name`` makes of ``record``."""
    origin, number, key, value, time = record
    return f"{origin}.{name}", number, key, (value * 31 + 7) % 1009, time


def is_bad(record: Record) -> bool:
    """Whether a diverting MAP refuses ``record``."""
    return record[1] % 5 == 0


def rejected(record: Record, name: str) -> Record:
    """What a MAP called ``name`` diverts instead of ``record``."""
    return f"{record[0]}!{name}", *record[1:]


def passes(record: Record) -> bool:
    """Whether a FILTER keeps ``record``."""
    return (record[1] + record[3]) % 3 != 0


def counted(name: str, key: int, number: int) -> Record:
    """What a COUNT emits for the ``number``-th record of ``key``."""
    return f"#{name}", number, key, number, 0


def summed(name: str, key: int, count: int, total: int) -> Record:
    """What a COUNT emits for ``key`` when its input has ended."""
    return f"={name}", count, key, total, 0


def windowed(name: str, key: int, start_ms: int, count: int) -> Record:
    """What a WINDOW emits for ``key`` and the window that starts at ``start_ms``."""
    return f"w{name}", start_ms, key, count, 0


def window_start(time_ms: int) -> int:
    """Return the start of the window that ``time_ms`` falls into."""
    return time_ms - time_ms % WINDOW_MS


def draw_workload(rng: random.Random, parallelism: int) -> Workload:
    """Return a random workload."""
    nodes = [_source(rng, f"s{i}") for i in range(rng.choice((1, 1, 2)))]
    timed: list[Stream] = [(n.name, OutputTag.MAIN) for n in nodes]
    untimed: list[Stream] = []
    used: set[Stream] = set()
    for index in range(rng.choice((1, 2, 2, 3, 4))):
        kind = rng.choice((Kind.MAP, Kind.MAP, Kind.FILTER, Kind.COUNT, Kind.WINDOW))
        pool = timed if kind is Kind.WINDOW else timed + untimed
        node, streams = _operator(rng, f"{kind.value[0]}{index}", kind, pool)
        nodes.append(node)
        used.update(streams)
        is_timed = kind in (Kind.MAP, Kind.FILTER) and all(s in timed for s in streams)
        (timed if is_timed else untimed).append((node.name, OutputTag.MAIN))
        if spec_of(node).diverts:
            (timed if is_timed else untimed).append((node.name, OutputTag.BAD_RECORDS))
    everything = timed + untimed
    unused = [s for s in everything if s not in used]
    for index in range(rng.choice((1, 2))):
        first = unused.pop(rng.randrange(len(unused))) if unused else rng.choice(everything)
        also = [rng.choice(everything)] if rng.random() < 0.3 else []
        streams = list(dict.fromkeys([first, *also]))
        edges = tuple(_edge(rng, stream, Kind.SINK) for stream in streams)
        nodes.append(Node(NodeName(f"out{index}"), Role.SINK, edges, Spec(Kind.SINK)))
    graph = Graph(tuple(nodes))
    return Workload(graph, *_expect(graph, parallelism))


def _source(rng: random.Random, name: str) -> Node:
    splits = []
    for index in range(rng.choice((1, 2, 3))):
        origin, records, base = f"{name}/{index}", [], rng.randrange(100)
        for number in range(rng.choice((0, 5, 15, 30, 40))):
            time = max(base + number * 7 - rng.randrange(OUT_OF_ORDER_MS), 0)
            records.append((origin, number, rng.randrange(5), rng.randrange(1000), time))
        splits.append((origin, tuple(records)))
    return Node(NodeName(name), Role.SOURCE, (), Spec(Kind.SOURCE, tuple(splits)), state_text="positions")


def _operator(rng: random.Random, name: str, kind: Kind, pool: list[Stream]) -> tuple[Node, list[Stream]]:
    streams = rng.sample(pool, min(len(pool), rng.choice((1, 1, 1, 2))))
    edges = tuple(_edge(rng, stream, kind) for stream in streams)
    spec = Spec(kind, diverts=kind is Kind.MAP and rng.random() < 0.3)
    state_text = kind.value if kind in (Kind.COUNT, Kind.WINDOW) else ""
    return Node(NodeName(name), Role.OPERATOR, edges, spec, state_text=state_text), streams


def _edge(rng: random.Random, stream: Stream, kind: Kind) -> Edge:
    if kind in (Kind.COUNT, Kind.WINDOW):
        return Edge(stream[0], Partitioner.HASH, ("key",), stream[1])
    partitioner = rng.choices(
        (Partitioner.FORWARD, Partitioner.HASH, Partitioner.REBALANCE, Partitioner.BROADCAST), (5, 4, 2, 1)
    )[0]
    return Edge(stream[0], partitioner, ("key",) if partitioner is Partitioner.HASH else (), stream[1])


# -- the plain model ------------------------------------------------------------------------------------------------


def expected_of_prefixes(graph: Graph, parallelism: int, read: Mapping[str, int]) -> dict[str, Counter[Record]]:
    """Return what must be committed per sink when only the first ``read[split]`` records of each split were read."""
    nodes = []
    for node in graph.nodes:
        spec = spec_of(node)
        cut = tuple((name, records[: read[name]]) for name, records in spec.splits)
        nodes.append(replace(node, spec=replace(spec, splits=cut)))
    return _expect(Graph(tuple(nodes)), parallelism)[0]


def _expect(graph: Graph, parallelism: int) -> tuple[dict[str, Counter[Record]], dict[str, frozenset[str]]]:
    out: dict[Stream, Counter[Record]] = {}
    unordered: dict[Stream, frozenset[str]] = {}
    expected: dict[str, Counter[Record]] = {}
    ordered: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        records: Counter[Record] = Counter()
        loose: frozenset[str] = frozenset()
        for edge in node.inputs:
            stream = (edge.upstream, edge.tag)
            copies = parallelism if edge.partitioner is Partitioner.BROADCAST else 1
            for record, times in out[stream].items():
                records[record] += times * copies
            keeps = edge.partitioner in (Partitioner.FORWARD, Partitioner.HASH)
            loose |= unordered[stream] if keeps else frozenset(r[0] for r in out[stream])
        name = str(node.name)
        if spec_of(node).kind is Kind.SINK:
            expected[name] = records
            ordered[name] = frozenset(r[0] for r in records) - loose
            continue
        main, bad = _apply(node, records)
        for tag, found in ((OutputTag.MAIN, main), (OutputTag.BAD_RECORDS, bad)):
            out[node.name, tag] = found
            grown = frozenset(f"{origin}{sign}{name}" for origin in loose for sign in ".!")
            unordered[node.name, tag] = grown & frozenset(r[0] for r in found)
    return expected, ordered


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
        case Kind.COUNT:
            for key in {r[2] for r in records}:
                mine = [(r[3], times) for r, times in records.items() if r[2] == key]
                count = sum(times for _, times in mine)
                main.update(counted(name, key, i) for i in range(1, count + 1))
                main[summed(name, key, count, sum(value * times for value, times in mine))] += 1
        case Kind.WINDOW:
            windows: Counter[tuple[int, int]] = Counter()
            for record, times in records.items():
                windows[record[2], window_start(record[4])] += times
            main.update(windowed(name, key, start, count) for (key, start), count in windows.items())
        case Kind.SINK:
            raise AssertionError("a sink emits nothing")
    return main, bad
