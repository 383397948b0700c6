"""Two loops whose results others have published: ``2n − n = n`` of FLIP-16's test, and Flink ML's sums per round."""

from __future__ import annotations

import random
from functools import partial

from headgate.model.graph import Edge, Graph, Node, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.sim.history import Record
from headgate.sim.kinds import Kind, Spec
from headgate.sim.plainmodel import expect
from headgate.sim.workload import Workload

SPLITS = 4
RECORDS = 20
"""Per split."""

ROUNDS = 5

LOOP = (NodeName("P"),)

_by_key = partial(Edge, partitioner=Partitioner.HASH, keys=("key",))


def add_and_subtract(rng: random.Random, parallelism: int) -> Workload:
    """Every record adds 2 to the sum of its key, goes round, and takes 1 away (A1 of the loops' reference).

    At the end the sum of a key is the number of its records, and so is the number of records behind the loop.
    """
    nodes = (
        _source([[(number, rng.randrange(5), 2) for number in range(RECORDS)] for _ in range(SPLITS)]),
        _head("lower"),
        _operator("tally", Spec(Kind.TALLY), "P"),
        _operator("again", Spec(Kind.AGAIN, trips_max=1, sends_all=True), "tally"),
        _operator("lower", Spec(Kind.LOWER), "again"),
        _operator("back", Spec(Kind.RETURNED), "tally"),
        _sink("out", "back"),
        _sink("state", "tally"),
    )
    return _workload(nodes, parallelism)


def sums_per_round(rng: random.Random, parallelism: int) -> Workload:
    """All records are summed up in round 0; the sum goes round and is summed up again in each round (A2)."""
    nodes = (
        _source([[(number, 0, number) for number in range(RECORDS)] for _ in range(SPLITS)]),
        _head("again", Spec(Kind.HEAD, has_rounds=True, rounds_max=ROUNDS)),
        _operator("sum", Spec(Kind.ROUND_SUM), "P", is_keyed=True),
        _operator("again", Spec(Kind.AGAIN, trips_max=ROUNDS + 5, sends_all=True), "sum"),
        _sink("out", "sum"),
    )
    return _workload(nodes, parallelism)


def _workload(nodes: tuple[Node, ...], parallelism: int) -> Workload:
    graph = Graph(nodes)
    return Workload(graph, *expect(graph, parallelism))


def _source(splits: list[list[tuple[int, int, int]]]) -> Node:
    found = []
    for index, rows in enumerate(splits):
        records: tuple[Record, ...] = tuple((f"s/{index}", number, key, value, number) for number, key, value in rows)
        found.append((f"s/{index}", records))
    return Node(NodeName("s"), Role.SOURCE, (), Spec(Kind.SOURCE, tuple(found)), state_text="positions")


def _head(feedback: str, spec: Spec | None = None) -> Node:
    inputs, back = (_by_key(NodeName("s")),), (_by_key(NodeName(feedback)),)
    spec = spec or Spec(Kind.HEAD)
    return Node(LOOP[0], Role.LOOP_HEAD, inputs, spec, state_text="loop by key", feedback=back, loops=LOOP)


def _operator(name: str, spec: Spec, upstream: str, *, is_keyed: bool = False) -> Node:
    edge = _by_key(NodeName(upstream)) if is_keyed else Edge(NodeName(upstream))
    return Node(NodeName(name), Role.OPERATOR, (edge,), spec, state_text=spec.kind.value, loops=LOOP)


def _sink(name: str, upstream: str) -> Node:
    return Node(NodeName(name), Role.SINK, (Edge(NodeName(upstream)),), Spec(Kind.SINK))
