"""Chaining, edges and channels (docs/spec/plan.md)."""

from __future__ import annotations

import pytest

from headgate.errors import UsageError
from headgate.model.graph import BAD_RECORDS, MAIN, Edge, Graph, Node, OutputTag, Partitioner, Role
from headgate.model.ids import ChannelIndex, NodeName, SubtaskId, VertexId
from headgate.model.plan import InputChannel, LoopNest, Plan, PlanEdge, make_plan

HASH, REBALANCE, FORWARD = Partitioner.HASH, Partitioner.REBALANCE, Partitioner.FORWARD


def node(name: str, *inputs: Edge, role: Role = Role.OPERATOR, state_text: str = "") -> Node:
    return Node(NodeName(name), role, inputs, spec=None, state_text=state_text)


def source(name: str) -> Node:
    return node(name, role=Role.SOURCE)


def sink(name: str, *inputs: Edge) -> Node:
    return node(name, *inputs, role=Role.SINK)


def edge(upstream: str, partitioner: Partitioner = FORWARD, *keys: str, tag: OutputTag = MAIN) -> Edge:
    return Edge(NodeName(upstream), partitioner, keys, tag)


def plan(*nodes: Node, parallelism: int = 2) -> Plan:
    return make_plan(Graph(nodes), parallelism, 128)


def vertex(name: str) -> VertexId:
    return VertexId(name)


def chains(made: Plan) -> dict[str, list[str]]:
    return {v.id: [n.name for n in v.nodes] for v in made.vertices}


def test_forward_edges_are_chained_and_others_are_not() -> None:
    made = plan(source("in"), node("map", edge("in")), node("sum", edge("map", HASH, "user")), sink("out", edge("sum")))
    assert chains(made) == {"in": ["in", "map"], "sum": ["sum", "out"]}
    assert made.edges == (PlanEdge(0, vertex("in"), NodeName("map"), MAIN, vertex("sum"), HASH, ("user",)),)


def test_a_chain_is_a_tree() -> None:
    made = plan(source("in"), node("a", edge("in")), node("b", edge("in")), sink("x", edge("a")), sink("y", edge("b")))
    assert chains(made) == {"in": ["in", "a", "b", "x", "y"]}
    assert made.edges == ()


def test_a_node_with_several_inputs_begins_a_chain_even_if_all_are_forward() -> None:
    made = plan(source("l"), source("r"), node("both", edge("l"), edge("r")), sink("out", edge("both")))
    assert chains(made) == {"l": ["l"], "r": ["r"], "both": ["both", "out"]}
    left, right = made.edges
    assert made.inputs(SubtaskId(vertex("both"), 1)) == (
        InputChannel(ChannelIndex(0), left, SubtaskId(vertex("l"), 1)),
        InputChannel(ChannelIndex(1), right, SubtaskId(vertex("r"), 1)),
    )


@pytest.mark.parametrize("partitioner", [HASH, REBALANCE, Partitioner.BROADCAST])
def test_a_shuffle_has_a_channel_from_every_upstream_subtask(partitioner: Partitioner) -> None:
    made = plan(source("in"), sink("out", edge("in", partitioner)), parallelism=3)
    (only,) = made.edges
    assert made.inputs(SubtaskId(vertex("out"), 2)) == tuple(
        InputChannel(ChannelIndex(i), only, SubtaskId(vertex("in"), i)) for i in range(3)
    )
    assert made.inputs(SubtaskId(vertex("in"), 0)) == ()


def test_channels_are_numbered_edge_by_edge() -> None:
    made = plan(source("l"), source("r"), node("j", edge("l", HASH, "k"), edge("r")), sink("out", edge("j")))
    inputs = made.inputs(SubtaskId(vertex("j"), 0))
    assert [(c.channel, c.upstream.vertex, c.upstream.index) for c in inputs] == [(0, "l", 0), (1, "l", 1), (2, "r", 0)]


def test_outputs_of_a_chain_name_the_node_and_the_tag_that_emit() -> None:
    bad = edge("map", REBALANCE, tag=BAD_RECORDS)
    made = plan(source("in"), node("map", edge("in")), sink("out", edge("map")), sink("bad", bad))
    assert made.outputs(vertex("in")) == (
        PlanEdge(0, vertex("in"), NodeName("map"), BAD_RECORDS, vertex("bad"), REBALANCE, ()),
    )
    assert made.outputs(vertex("bad")) == ()


def test_all_subtasks_take_part_in_checkpoints() -> None:  # C8
    made = plan(source("in"), sink("out", edge("in", REBALANCE)))
    assert [str(s) for s in made.subtasks()] == ["in[0]", "in[1]", "out[0]", "out[1]"]
    assert made.vertex(vertex("in")).is_source
    assert not made.vertex(vertex("out")).is_source


def test_what_records_may_reach_is_behind_a_vertex() -> None:  # EI36
    made = plan(
        source("left"),
        source("right"),
        node("both", edge("left", REBALANCE), edge("right", REBALANCE)),
        sink("out", edge("both", REBALANCE)),
        sink("beside", edge("right")),
    )
    assert made.downstream(vertex("left")) == made.downstream(vertex("right")) == {"both", "out"}
    assert made.downstream(vertex("both")) == {"out"}
    assert made.downstream(vertex("out")) == frozenset()


def test_the_state_of_every_node_is_named() -> None:
    made = plan(source("in"), node("sum", edge("in", HASH, "k"), state_text="sum by k"), sink("out", edge("sum")))
    assert made.state_texts() == {"in": "", "sum": "sum by k", "out": ""}


@pytest.mark.parametrize(
    ("nodes", "parallelism", "problem"),
    [
        ((source("a"), source("a")), 1, "two operators are named 'a'"),
        ((source("a"), sink("b", edge("c"))), 1, "operator 'b' reads from unknown operator 'c'"),
        ((source("a"), node("b", edge("b")), sink("c", edge("a"))), 1, "operator 'b' reads from unknown operator 'b'"),
        ((source("a"),), 1, "the pipeline has no sink"),
        ((source("a"), sink("b", edge("a"))), 0, "parallelism must be between 1 and 128, but is 0"),
        ((source("a"), sink("b", edge("a"))), 129, "parallelism must be between 1 and 128, but is 129"),
    ],
)
def test_a_graph_that_cannot_run_is_refused(nodes: tuple[Node, ...], parallelism: int, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        plan(*nodes, parallelism=parallelism)


def test_a_node_is_found_by_its_name() -> None:
    graph = Graph((source("in"), sink("out", edge("in"))))
    assert graph.node(NodeName("out")).role is Role.SINK


# -- loops (more in test_plan.py) -----------------------------------------------------------------------------


def in_loop(name: str, *inputs: Edge, loops: str = "loop") -> Node:
    return Node(NodeName(name), Role.OPERATOR, inputs, spec=None, loops=tuple(map(NodeName, loops.split())))


def loop_head(name: str, *inputs: Edge, feedback: str, outer: str = "") -> Node:
    loops = tuple(map(NodeName, [*outer.split(), name]))
    return Node(NodeName(name), Role.LOOP_HEAD, inputs, spec=None, feedback=(edge(feedback, HASH),), loops=loops)


def test_a_feedback_channel_is_numbered_behind_the_regular_ones_and_carries_probes() -> None:
    body = in_loop("body", edge("loop"))
    made = plan(source("in"), loop_head("loop", edge("in"), feedback="body"), body, sink("out", edge("body")))
    inputs = made.inputs(SubtaskId(vertex("loop"), 1))
    assert [(c.channel, c.edge.is_feedback, c.edge.nest) for c in inputs] == [
        (0, False, None),
        (1, True, "loop"),
        (2, True, "loop"),
    ]


def test_an_operator_that_a_loop_does_not_reach_is_refused() -> None:
    """No probe would ever come to 'lost', so 'body' would wait for it for ever."""
    lost = in_loop("lost", edge("in", HASH))
    body = in_loop("body", edge("loop"), edge("lost"))
    with pytest.raises(UsageError, match="operator 'lost' is in loop 'loop', but reads nothing from it"):
        plan(source("in"), loop_head("loop", edge("in"), feedback="body"), lost, body, sink("out", edge("body")))


def test_output_of_a_loop_does_not_come_back_beside_the_feedback() -> None:
    """'outside' ends when the loop has, which would wait for its end."""
    outside = node("outside", edge("loop", HASH))
    body = in_loop("body", edge("loop"), edge("outside"))
    with pytest.raises(UsageError, match="operator 'body' brings output 'outside' of loop 'loop' back"):
        plan(source("in"), loop_head("loop", edge("in"), feedback="body"), outside, body, sink("out", edge("body")))


def test_what_leaves_an_inner_loop_stays_in_the_outer_one() -> None:
    made = plan(
        source("in"),
        loop_head("outer", edge("in"), feedback="after"),
        loop_head("inner", edge("outer"), feedback="step", outer="outer"),
        in_loop("step", edge("inner", HASH), edge("outer", HASH), loops="outer inner"),
        in_loop("after", edge("step", HASH), loops="outer"),
        sink("out", edge("after")),
    )
    assert [e.nest for e in made.edges] == [None, "outer", "outer", "outer", "outer", "outer", "outer"]
    (nest,) = made.nests()
    assert (nest.heads, nest.leaves) == (("outer", "inner"), ())


def loop_edge(upstream: str, partitioner: Partitioner = FORWARD) -> Edge:
    return Edge(NodeName(upstream), partitioner, ("k",) if partitioner is HASH else ())


def loop_node(name: str, *inputs: Edge, loops: str = "", role: Role = Role.OPERATOR) -> Node:
    return Node(NodeName(name), role, inputs, None, loops=_names(loops))


def head(name: str, *inputs: Edge, feedback: tuple[Edge, ...], loops: str = "") -> Node:
    return Node(NodeName(name), Role.LOOP_HEAD, inputs, None, feedback=feedback, loops=_names(f"{loops} {name}"))


def _names(text: str) -> tuple[NodeName, ...]:
    return tuple(NodeName(name) for name in text.split())


def loop_source(name: str = "source") -> Node:
    return loop_node(name, role=Role.SOURCE)


def loop_sink(*inputs: Edge) -> Node:
    return loop_node("sink", *inputs, role=Role.SINK)


def simple(partitioner: Partitioner = FORWARD) -> Plan:
    return plan(
        loop_source(),
        head("loop", loop_edge("source"), feedback=(loop_edge("step", partitioner),)),
        loop_node("step", loop_edge("loop"), loops="loop"),
        loop_sink(loop_edge("step")),
    )


def nested() -> Plan:
    return plan(
        loop_source(),
        head("outer", loop_edge("source"), feedback=(loop_edge("back", HASH),)),
        head("inner", loop_edge("outer"), feedback=(loop_edge("again"), loop_edge("step", HASH)), loops="outer"),
        loop_node("step", loop_edge("inner", HASH), loops="outer inner"),
        loop_node("again", loop_edge("step"), loops="outer inner"),
        loop_node("back", loop_edge("again", REBALANCE), loops="outer"),
        loop_node("aside", loop_edge("step", REBALANCE), loops="outer"),
        loop_sink(loop_edge("back", REBALANCE)),
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
        loop_source(),
        loop_source("other"),
        head("loop", loop_edge("source"), feedback=(loop_edge("step", HASH),)),
        loop_node("step", loop_edge("loop", HASH), loop_edge("other", HASH), loops="loop"),
        loop_sink(loop_edge("step")),
    )
    assert made.nests()[0].entrances == ("loop", "step")


def test_loops_side_by_side_are_nests_of_their_own() -> None:
    made = plan(
        loop_source(),
        head("one", loop_edge("source"), feedback=(loop_edge("a"),)),
        loop_node("a", loop_edge("one"), loops="one"),
        head("two", loop_edge("a"), feedback=(loop_edge("b"),)),
        loop_node("b", loop_edge("two"), loops="two"),
        loop_sink(loop_edge("b")),
    )
    assert [nest.name for nest in made.nests()] == ["one", "two"]
    assert made.downstream(VertexId("one")) == {"one", "two"}, "a loop is downstream of itself"
    assert made.downstream(VertexId("two")) == {"two"}
    assert [e.nest for e in made.edges if not e.is_feedback] == [None, None]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            (loop_source(), head("loop", loop_edge("source"), feedback=()), loop_sink(loop_edge("loop"))),
            "operator 'loop' must be a loop head with feedback, or neither",
        ),
        (
            (
                loop_source(),
                head("loop", loop_edge("source"), feedback=(loop_edge("source"),)),
                loop_sink(loop_edge("loop")),
            ),
            "the feedback 'source' of loop 'loop' does not come from the loop",
        ),
        (
            (
                loop_source(),
                head("loop", loop_edge("source"), feedback=(loop_edge("nobody"),)),
                loop_sink(loop_edge("loop")),
            ),
            "the feedback 'nobody' of loop 'loop' does not come from the loop",
        ),
    ],
)
def test_a_cycle_that_no_probe_could_go_round_is_refused(nodes: tuple[Node, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*nodes)
