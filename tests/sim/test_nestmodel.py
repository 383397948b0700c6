"""The plain model of loops, and the live operators that must agree with it without any fault."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headgate.model.graph import MAIN, Edge, Node, Role
from headgate.model.ids import NodeName
from headgate.model.plan import make_plan
from headgate.sim.history import Record
from headgate.sim.kinds import Kind, Spec, goes_again
from headgate.sim.loopgraphs import draw_loops
from headgate.sim.nestmodel import TooManyRecords, run_nest

P = NodeName("P")
FIRST: Record = ("s", 1, 0, 5, 0)


def loop(trips_max: int, body: Kind = Kind.REKEY) -> list[Node]:
    """A head, one operator, and a tail that sends everything round."""
    tail = Spec(Kind.AGAIN, trips_max=trips_max, sends_all=True)
    return [
        Node(P, Role.LOOP_HEAD, (), Spec(Kind.HEAD), feedback=(Edge(NodeName("a")),), loops=(P,)),
        Node(NodeName("b"), Role.OPERATOR, (Edge(P),), Spec(body), loops=(P,)),
        Node(NodeName("a"), Role.OPERATOR, (Edge(NodeName("b")),), tail, loops=(P,)),
    ]


def test_a_record_goes_round_as_often_as_it_may() -> None:
    sent = run_nest(loop(2), {P: Counter([FIRST])}, 1)
    origins = sorted(record[0] for record in sent[NodeName("b"), MAIN])
    assert origins == ["s.b", "s.b@P.b", "s.b@P.b@P.b"]


def test_a_keyed_sum_counts_every_trip() -> None:
    sent = run_nest(loop(3, Kind.TALLY), {P: Counter([FIRST])}, 1)[NodeName("b"), MAIN]
    assert sent[("=b", 4, 0, 20, 0)] == 1


def test_a_body_that_amplifies_too_much_is_refused() -> None:
    with pytest.raises(TooManyRecords):
        run_nest(loop(50, Kind.SPLIT), {P: Counter({FIRST: 100})}, 1, records_max=500)


def test_what_was_made_of_the_end_does_not_go_round() -> None:
    assert not goes_again(("=b", 4, 0, 20, 0), Spec(Kind.AGAIN, trips_max=9, sends_all=True))


def test_drawn_graphs_have_every_shape() -> None:
    plans = [make_plan(draw_loops(random.Random(seed), 2).graph, 2, 8) for seed in range(300)]
    nests = [nest for plan in plans for nest in plan.nests()]
    assert any(len(nest.heads) > 1 for nest in nests), "a loop within a loop"
    assert any(len(plan.nests()) > 1 for plan in plans), "several loops"
    assert any(len(nest.entrances) > 1 for nest in nests), "a body that reads from outside"
    assert any(nest.leaves for nest in nests), "a body operator that sends nothing on within the loop"
    backs = [Counter(edge.target for edge in plan.edges if edge.is_feedback) for plan in plans]
    assert any(max(back.values()) > 1 for back in backs), "several feedback streams into one head"
    assert len({edge.partitioner for plan in plans for edge in plan.edges if edge.is_feedback}) == 4
