"""Random acyclic graphs with bounded input; what their nodes do is in ``kinds``, what they produce in ``plainmodel``.

The origin of a record grows by the name of each operator that it passes, so equal records met on two paths stay
distinguishable.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from headgate.model.graph import BAD_RECORDS, MAIN, Edge, Graph, Node, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.sim.history import Record
from headgate.sim.kinds import OUT_OF_ORDER_MS, Kind, Spec, Stream, spec_of
from headgate.sim.plainmodel import expect


@dataclass(frozen=True, slots=True)
class Workload:
    """A graph and what it must produce: per sink, the committed multiset, and the origins whose order is promised."""

    graph: Graph
    expected: dict[str, Counter[Record]]
    ordered: dict[str, frozenset[str]]


def draw_workload(rng: random.Random, parallelism: int) -> Workload:
    """Return a random workload."""
    nodes = [_source(rng, f"s{i}") for i in range(rng.choice((1, 1, 2)))]
    timed: list[Stream] = [(n.name, MAIN) for n in nodes]
    untimed: list[Stream] = []
    used: set[Stream] = set()
    for index in range(rng.choice((1, 2, 2, 3, 4))):
        kind = rng.choice((Kind.MAP, Kind.MAP, Kind.FILTER, Kind.COUNT, Kind.WINDOW))
        pool = timed if kind is Kind.WINDOW else timed + untimed
        node, streams = _operator(rng, f"{kind.value[0]}{index}", kind, pool)
        nodes.append(node)
        used.update(streams)
        is_timed = kind in (Kind.MAP, Kind.FILTER) and all(s in timed for s in streams)
        (timed if is_timed else untimed).append((node.name, MAIN))
        if spec_of(node).diverts:
            (timed if is_timed else untimed).append((node.name, BAD_RECORDS))
    everything = timed + untimed
    unused = [s for s in everything if s not in used]
    for index in range(rng.choice((1, 2))):
        first = unused.pop(rng.randrange(len(unused))) if unused else rng.choice(everything)
        also = [rng.choice(everything)] if rng.random() < 0.3 else []
        streams = list(dict.fromkeys([first, *also]))
        edges = tuple(_edge(rng, stream, Kind.SINK) for stream in streams)
        nodes += _held_back(Node(NodeName(f"out{index}"), Role.SINK, edges, Spec(Kind.SINK)))
    graph = Graph(tuple(nodes))
    return Workload(graph, *expect(graph, parallelism))


def _held_back(sink: Node) -> list[Node]:
    """Return ``sink``, now and then behind an operator in its chain that holds records back until a barrier (U8)."""
    (first, *others) = sink.inputs
    if others or first.partitioner is not Partitioner.FORWARD or random.Random(repr(first)).random() < 0.5:
        return [sink]
    hold = Node(NodeName(f"h{sink.name}"), Role.OPERATOR, (first,), Spec(Kind.HOLD))
    return [hold, replace(sink, inputs=(Edge(hold.name, Partitioner.FORWARD),))]


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
