"""Plans of cyclic graphs: chains, feedback edges and channels, nests (docs/spec/loops.md)."""

from __future__ import annotations

import pytest

from headgate.errors import UsageError
from headgate.model.graph import Edge, Graph, Node, Partitioner, Role
from headgate.model.ids import NodeName, SubtaskId, VertexId
from headgate.model.plan import LoopNest, Plan, make_plan

HASH, REBALANCE, FORWARD = Partitioner.HASH, Partitioner.REBALANCE, Partitioner.FORWARD


def edge(upstream: str, partitioner: Partitioner = FORWARD) -> Edge:
    return Edge(NodeName(upstream), partitioner, ("k",) if partitioner is HASH else ())


def node(name: str, *inputs: Edge, loops: str = "", role: Role = Role.OPERATOR) -> Node:
    return Node(NodeName(name), role, inputs, None, loops=_names(loops))


def head(name: str, *inputs: Edge, feedback: tuple[Edge, ...], loops: str = "") -> Node:
    return Node(NodeName(name), Role.LOOP_HEAD, inputs, None, feedback=feedback, loops=_names(f"{loops} {name}"))


def _names(text: str) -> tuple[NodeName, ...]:
    return tuple(NodeName(name) for name in text.split())


def source(name: str = "source") -> Node:
    return node(name, role=Role.SOURCE)


def sink(*inputs: Edge) -> Node:
    return node("sink", *inputs, role=Role.SINK)


def plan(*nodes: Node, parallelism: int = 2) -> Plan:
    return make_plan(Graph(nodes), parallelism, 128)


def chains(made: Plan) -> dict[str, list[str]]:
    return {v.id: [n.name for n in v.nodes] for v in made.vertices}


def simple(partitioner: Partitioner = FORWARD) -> Plan:
    return plan(
        source(),
        head("loop", edge("source"), feedback=(edge("step", partitioner),)),
        node("step", edge("loop"), loops="loop"),
        sink(edge("step")),
    )


def nested() -> Plan:
    return plan(
        source(),
        head("outer", edge("source"), feedback=(edge("back", HASH),)),
        head("inner", edge("outer"), feedback=(edge("again"), edge("step", HASH)), loops="outer"),
        node("step", edge("inner", HASH), loops="outer inner"),
        node("again", edge("step"), loops="outer inner"),
        node("back", edge("again", REBALANCE), loops="outer"),
        node("aside", edge("step", REBALANCE), loops="outer"),
        sink(edge("back", REBALANCE)),
    )


def test_a_head_begins_a_chain_even_behind_a_forward_edge_and_its_body_joins_it() -> None:
    assert chains(simple()) == {"source": ["source"], "loop": ["loop", "step", "sink"]}
    assert simple().vertex(VertexId("loop")).is_loop_head
    assert not simple().vertex(VertexId("source")).is_loop_head


def test_a_feedback_edge_leads_from_the_body_back_to_the_head() -> None:
    made = simple()
    assert [(e.source, e.from_node, e.target, e.is_feedback, e.nest) for e in made.edges] == [
        ("source", "source", "loop", False, None),
        ("loop", "step", "loop", True, "loop"),
    ]


@pytest.mark.parametrize(("partitioner", "senders"), [(FORWARD, [1]), (HASH, [0, 1])])
def test_feedback_channels_come_last_and_are_counted_like_others(partitioner: Partitioner, senders: list[int]) -> None:
    channels = simple(partitioner).inputs(SubtaskId(VertexId("loop"), 1))
    assert [c.channel for c in channels] == list(range(len(channels)))
    assert [c.edge.is_feedback for c in channels] == [False] + [True] * len(senders)
    assert [c.upstream.index for c in channels[1:]] == senders


def test_the_nest_is_the_outermost_loop_of_both_ends() -> None:
    made = nested()
    assert {(str(e.source), str(e.target), e.is_feedback): e.nest for e in made.edges} == {
        ("source", "outer", False): None,
        ("back", "outer", True): "outer",
        ("outer", "inner", False): "outer",
        ("step", "inner", True): "outer",
        ("inner", "step", False): "outer",
        ("step", "back", False): "outer",
        ("step", "aside", False): "outer",
        ("back", "sink", False): None,
    }


def test_a_nest_has_its_outermost_head_first_and_knows_where_probes_end() -> None:
    assert nested().nests() == (
        LoopNest(NodeName("outer"), (VertexId("outer"), VertexId("inner")), (VertexId("outer"),), (VertexId("aside"),)),
    )


def test_an_operator_that_also_reads_from_outside_is_an_entrance() -> None:
    made = plan(
        source(),
        source("other"),
        head("loop", edge("source"), feedback=(edge("step", HASH),)),
        node("step", edge("loop", HASH), edge("other", HASH), loops="loop"),
        sink(edge("step")),
    )
    assert made.nests()[0].entrances == ("loop", "step")


def test_loops_side_by_side_are_nests_of_their_own() -> None:
    made = plan(
        source(),
        head("one", edge("source"), feedback=(edge("a"),)),
        node("a", edge("one"), loops="one"),
        head("two", edge("a"), feedback=(edge("b"),)),
        node("b", edge("two"), loops="two"),
        sink(edge("b")),
    )
    assert [nest.name for nest in made.nests()] == ["one", "two"]
    assert made.downstream(VertexId("one")) == {"one", "two"}, "a loop is downstream of itself"
    assert made.downstream(VertexId("two")) == {"two"}
    assert [e.nest for e in made.edges if not e.is_feedback] == [None, None]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            (source(), head("loop", edge("source"), feedback=()), sink(edge("loop"))),
            "operator 'loop' must be a loop head with feedback, or neither",
        ),
        (
            (source(), head("loop", edge("source"), feedback=(edge("source"),)), sink(edge("loop"))),
            "the feedback 'source' of loop 'loop' does not come from the loop",
        ),
        (
            (source(), head("loop", edge("source"), feedback=(edge("nobody"),)), sink(edge("loop"))),
            "the feedback 'nobody' of loop 'loop' does not come from the loop",
        ),
    ],
)
def test_a_cycle_that_no_probe_could_go_round_is_refused(nodes: tuple[Node, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*nodes)
