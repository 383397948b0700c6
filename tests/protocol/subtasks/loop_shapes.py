"""Graphs with loops that the machines are tried on: every shape that makes a rule of docs/spec/loops.md necessary."""

from __future__ import annotations

from headgate.model.graph import Edge, Graph, Node, Partitioner, Role
from headgate.model.ids import NodeName, SubtaskId
from headgate.model.plan import Plan, make_plan
from headgate.protocol.subtasks.loops import LoopPlace

ALL, FORWARD = Partitioner.REBALANCE, Partitioner.FORWARD


def edge(upstream: str, partitioner: Partitioner = ALL) -> Edge:
    return Edge(NodeName(upstream), partitioner)


def source(name: str) -> Node:
    return Node(NodeName(name), Role.SOURCE, (), None)


def sink(name: str, *inputs: Edge) -> Node:
    return Node(NodeName(name), Role.SINK, inputs, None)


def body(name: str, *inputs: Edge, loops: str = "H") -> Node:
    return Node(NodeName(name), Role.OPERATOR, inputs, None, loops=tuple(map(NodeName, loops)))


def head(name: str, *inputs: Edge, feedback: tuple[Edge, ...], loops: str = "") -> Node:
    names = tuple(map(NodeName, loops or name))
    return Node(NodeName(name), Role.LOOP_HEAD, inputs, None, feedback=feedback, loops=names)


SHAPES: dict[str, tuple[Node, ...]] = {
    "shuffle in the body": (
        source("s"),
        head("H", edge("s", FORWARD), feedback=(edge("b", FORWARD),)),
        body("b", edge("H")),
        sink("k", edge("b")),
    ),
    "pointwise body, shuffled feedback": (  # L6: a sentinel or a probe may come back before its head has passed it
        source("s"),
        head("H", edge("s"), feedback=(edge("b"),)),
        body("b", edge("H", FORWARD)),
        sink("k", edge("b")),
    ),
    "several feedback channels": (  # L11
        source("s"),
        head("H", edge("s"), feedback=(edge("b"), edge("c", FORWARD), edge("H"))),
        body("b", edge("H")),
        body("c", edge("b")),
        sink("k", edge("c")),
    ),
    "input from outside": (  # the body waits for a barrier from outside the loop
        source("s"),
        source("t"),
        head("H", edge("s"), feedback=(edge("b"),)),
        body("b", edge("H", FORWARD), edge("t", FORWARD)),
        sink("k", edge("b")),
    ),
    "leaf": (
        source("s"),
        head("H", edge("s"), feedback=(edge("b"),)),
        body("b", edge("H")),
        body("leaf", edge("b"), edge("H")),
        sink("k", edge("leaf")),
    ),
    "loop within a loop": (
        source("s"),
        head("H", edge("s"), feedback=(edge("b"),)),
        head("I", edge("H"), feedback=(edge("i"),), loops="HI"),
        body("i", edge("I"), loops="HI"),
        body("b", edge("i"), edge("H")),
        sink("k", edge("b")),
    ),
    "pointwise loop within a loop": (
        source("s"),
        source("t"),
        head("H", edge("s"), feedback=(edge("b"),)),
        head("I", edge("H", FORWARD), feedback=(edge("i"),), loops="HI"),
        body("i", edge("I", FORWARD), edge("t", FORWARD), loops="HI"),
        body("b", edge("i", FORWARD)),
        sink("k", edge("b")),
    ),
    "two loops within a loop": (
        source("s"),
        head("H", edge("s"), feedback=(edge("b"),)),
        head("I", edge("H"), feedback=(edge("i"),), loops="HI"),
        body("i", edge("I"), edge("H", FORWARD), loops="HI"),
        head("J", edge("i"), feedback=(edge("j"), edge("J")), loops="HJ"),
        body("j", edge("J"), loops="HJ"),
        body("b", edge("j"), edge("i", FORWARD)),
        sink("k", edge("b")),
    ),
}


def plan_of(shape: str, parallelism: int) -> Plan:
    return make_plan(Graph(SHAPES[shape]), parallelism, 128)


def place_of(plan: Plan, subtask: SubtaskId) -> LoopPlace | None:
    """Return where ``subtask`` stands in its nest, as the runtime finds out."""
    if plan.vertex(subtask.vertex).nest is None:
        return None
    inputs = plan.inputs(subtask)
    return LoopPlace(
        inside=frozenset(i.channel for i in inputs if i.edge.nest is not None and not i.edge.is_feedback),
        outside=frozenset(i.channel for i in inputs if i.edge.nest is None),
        feedback=frozenset(i.channel for i in inputs if i.edge.is_feedback),
        is_leaf=all(out.nest is None for out in plan.outputs(subtask.vertex)),
    )
