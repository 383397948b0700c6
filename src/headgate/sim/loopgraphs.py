"""Random graphs with loops: nested, side by side and one after another, with shuffles and inputs from outside.

Whether a record goes round again is a pure function of it (``kinds.goes_again``), so every schedule must produce the
same multiset; ``nestmodel`` computes it. Counterpart for graphs without loops: ``workload``.
"""

from __future__ import annotations

import random
from dataclasses import replace

from headgate.model.graph import BAD_RECORDS, MAIN, Edge, Graph, Node, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.sim.history import Record
from headgate.sim.kinds import KEYED, OUT_OF_ORDER_MS, Kind, Spec, Stream, spec_of
from headgate.sim.nestmodel import TooManyRecords
from headgate.sim.plainmodel import expect
from headgate.sim.workload import Workload

BODY = (Kind.MAP, Kind.REKEY, Kind.REKEY, Kind.SPLIT, Kind.TALLY, Kind.TALLY, Kind.HOLD, Kind.FILTER)


def draw_loops(rng: random.Random, parallelism: int) -> Workload:
    """Return a random workload with loops."""
    while True:
        graph = _Drawing(rng).graph()
        try:
            return Workload(graph, *expect(graph, parallelism))
        except TooManyRecords:
            continue


class _Drawing:
    """A graph that grows node by node, in topological order."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._nodes: list[Node] = []
        self._used: set[Stream] = set()
        self._trips_max = rng.choice((1, 2, 3, 4, 6, 9))
        self._may_broadcast = rng.random() < 0.2
        self._has_rounds = False
        self._rest = rng.choice((Kind.VISITS, Kind.VISITS, Kind.WINDOW))

    def graph(self) -> Graph:
        """Draw everything."""
        rng = self._rng
        streams = [self._source(f"s{i}") for i in range(rng.choice((1, 1, 2)))]
        timed = list(streams)
        if rng.random() < 0.3:
            streams.append(self._operator(rng.choice((Kind.MAP, Kind.COUNT)), [rng.choice(streams)], ())[0])
        returned: list[Stream] = []
        begun = len(self._nodes)
        for name in ("P", "Q")[: rng.choice((1, 1, 2))]:
            outputs = self._loop(name, (), streams + returned, streams)
            returned += outputs
        in_time = returned + timed  # what loops send may be late only behind the last watermark
        for _ in range(rng.choice((0, 1, 2))):
            kind = rng.choice((Kind.MAP, Kind.COUNT, Kind.WINDOW))
            pool = in_time if kind is Kind.WINDOW else returned + streams
            returned += self._operator(kind, rng.sample(pool, min(len(pool), rng.choice((1, 2)))), ())
        for index in range(rng.choice((1, 2))):
            self._sink(f"out{index}", returned, streams)
        head = self._nodes[begun]
        if rng.random() < 0.3:  # a sink in the head's own chain: what it seals waits for the log, too
            self._add(Node(NodeName("at"), Role.SINK, (Edge(head.name),), Spec(Kind.SINK)))
        return Graph(tuple(self._nodes))

    def _source(self, name: str) -> Stream:
        rng, splits = self._rng, []
        for index in range(rng.choice((1, 2))):
            origin, records, base = f"{name}/{index}", list[Record](), rng.randrange(100)
            for number in range(rng.choice((0, 3, 8, 15, 20))):
                time = max(base + number * 7 - rng.randrange(OUT_OF_ORDER_MS), 0)
                records.append((origin, number, rng.randrange(5), rng.randrange(1000), time))
            splits.append((origin, tuple(records)))
        spec = Spec(Kind.SOURCE, tuple(splits))
        return self._add(Node(NodeName(name), Role.SOURCE, (), spec, state_text="positions"))

    def _sink(self, name: str, returned: list[Stream], others: list[Stream]) -> None:
        rng = self._rng
        unused = [s for s in returned if s not in self._used] or returned
        streams = [*rng.sample(unused, min(len(unused), rng.choice((1, 2, 3)))), rng.choice(returned)]
        streams += [rng.choice(others)] if rng.random() < 0.1 else []
        edges = tuple(self._edge(stream, Kind.SINK) for stream in dict.fromkeys(streams))
        self._add(Node(NodeName(name), Role.SINK, edges, Spec(Kind.SINK)))

    def _loop(self, name: str, path: tuple[NodeName, ...], inputs: list[Stream], outside: list[Stream]) -> list[Stream]:
        """Draw a loop that reads from ``inputs``; its body may read from ``outside`` too (L14)."""
        rng, is_outermost = self._rng, not path
        path = (*path, NodeName(name))
        is_keyed = rng.random() < 0.6
        has_rounds = rng.random() < 0.4 if is_outermost else self._has_rounds
        self._has_rounds = has_rounds
        rounds_max = rng.choice((None, None, 1, 2, 3)) if has_rounds and is_outermost else None
        spec = Spec(Kind.HEAD, has_rounds=has_rounds and is_outermost, rounds_max=rounds_max)
        streams = rng.sample(inputs, min(len(inputs), rng.choice((1, 1, 2))))
        edges = tuple(self._edge(s, Kind.TALLY if is_keyed else Kind.HEAD) for s in streams)
        at = len(self._nodes)
        state_text = f"loop {'by key' if is_keyed else ''}"
        pool = [self._add(Node(NodeName(name), Role.LOOP_HEAD, edges, spec, state_text=state_text, loops=path))]
        if is_keyed and rng.random() < 0.5:
            pool += self._operator(Kind.TALLY, [pool[0]], path, is_chained=True)
        kinds: tuple[Kind, ...] = BODY
        if not has_rounds:  # a second count of what a window sent would depend on time
            kinds += (self._rest,)
        for _ in range(rng.choice((1, 2, 3))):
            kind = rng.choice(kinds)
            pool += self._operator(kind, self._from(pool, outside), path)
        if is_outermost and rng.random() < 0.35:
            pool += self._loop(name.lower(), path, pool, outside)
        if has_rounds and is_outermost:
            sums: list[Stream] = []
            for _ in range(rng.choice((1, 1, 2))):
                source = [rng.choice(pool), *([rng.choice(sums)] if sums and rng.random() < 0.5 else [])]
                sums += self._operator(Kind.ROUND_SUM, source, path)
            pool += sums + sums
        tails = [self._tail(pool, path) for _ in range(rng.choice((1, 1, 2)))]
        feedback = tuple(self._edge(tail, Kind.TALLY if is_keyed else Kind.HEAD) for tail in dict.fromkeys(tails))
        self._nodes[at] = replace(self._nodes[at], feedback=feedback)
        return list(dict.fromkeys(pool + tails))

    def _from(self, pool: list[Stream], outside: list[Stream]) -> list[Stream]:
        """Return what a body operator reads: something of the loop first."""
        rng = self._rng
        streams = [rng.choice(pool), *([rng.choice(pool)] if rng.random() < 0.25 else [])]
        return streams + ([rng.choice(outside)] if rng.random() < 0.25 else [])

    def _tail(self, pool: list[Stream], path: tuple[NodeName, ...]) -> Stream:
        """Draw an AGAIN: it decides what comes back."""
        unused = [s for s in pool if s not in self._used] or pool
        return self._operator(Kind.AGAIN, [self._rng.choice(unused)], path)[0]

    def _operator(
        self, kind: Kind, streams: list[Stream], path: tuple[NodeName, ...], *, is_chained: bool = False
    ) -> list[Stream]:
        """Draw an operator; return its outputs."""
        rng, name = self._rng, f"{kind.value[:2]}{len(self._nodes)}"
        streams = list(dict.fromkeys(streams))
        edges = tuple(Edge(s[0], tag=s[1]) if is_chained else self._edge(s, kind) for s in streams)
        spec = Spec(kind, diverts=kind is Kind.MAP and rng.random() < 0.3, trips_max=self._trips_max)
        if kind is Kind.ROUND_SUM:
            spec = replace(spec, marks_rounds=rng.random() < 0.5)
        state_text = kind.value if kind in KEYED else ""
        main = self._add(Node(NodeName(name), Role.OPERATOR, edges, spec, state_text=state_text, loops=path))
        return [main, (main[0], BAD_RECORDS)] if spec_of(self._nodes[-1]).diverts else [main]

    def _edge(self, stream: Stream, kind: Kind) -> Edge:
        self._used.add(stream)
        if kind in KEYED:
            return Edge(stream[0], Partitioner.HASH, ("key",), stream[1])
        ways = (Partitioner.FORWARD, Partitioner.HASH, Partitioner.REBALANCE, Partitioner.BROADCAST)
        partitioner = self._rng.choices(ways, (5, 4, 2, 1 if self._may_broadcast else 0))[0]
        return Edge(stream[0], partitioner, ("key",) if partitioner is Partitioner.HASH else (), stream[1])

    def _add(self, node: Node) -> Stream:
        self._nodes.append(node)
        return node.name, MAIN
