"""The checkers of loops reject hand-made bad histories (X4)."""

from __future__ import annotations

import random

import pytest

from headgate.model.ids import CheckpointId, Generation, NodeName, SubtaskId, VertexId
from headgate.model.plan import make_plan
from headgate.sim import history
from headgate.sim.checkers import Checkers
from headgate.sim.fixedloops import sums_per_round
from headgate.sim.history import HistoryEvent, Record
from headgate.sim.world import Violation

WORKLOAD = sums_per_round(random.Random(0), 1)
PLAN = make_plan(WORKLOAD.graph, 1, 8)
ONE, NEST = Generation(1), NodeName("P")
HEAD = SubtaskId(VertexId("P"), 0)
EDGE = next(edge.index for edge in PLAN.edges if edge.is_feedback)
CHANNEL = (EDGE, 0, 0)
RECORD: Record = ("rsum", 1, 0, 7, 0)
BACK: Record = ("rsum@P", 1, 0, 7, 0)


def sent(position: int, sentinel: int | None = None) -> HistoryEvent:
    """Records, or a sentinel."""
    if sentinel is None:
        return history.FeedbackSent(ONE, CHANNEL, position, (RECORD,))
    return history.FeedbackSent(ONE, CHANNEL, position, (), CheckpointId(sentinel))


def read(position: int, *, is_records: bool = True) -> HistoryEvent:
    return history.FeedbackRead(ONE, HEAD, CHANNEL, position, is_records)


def barrier(checkpoint: int = 1) -> HistoryEvent:
    return history.BarrierPassed(ONE, HEAD, CheckpointId(checkpoint), True)


def sealed(*positions: int) -> HistoryEvent:
    return history.LogSealed(ONE, HEAD, CheckpointId(1), tuple((EDGE, 0, at, (BACK,)) for at in positions))


def show(events: list[HistoryEvent]) -> None:
    checkers = Checkers(WORKLOAD, PLAN)
    for event in events:
        checkers.observe(event)


BAD: dict[str, tuple[str, list[HistoryEvent]]] = {
    "a log without what circulated": ("L1", [sent(1), barrier(), sent(2, 1), sealed()]),
    "a log with what was read before the barrier": ("L1", [sent(1), read(1), barrier(), sent(2, 1), sealed(1)]),
    "a log with what was sent after the sentinel": ("L1", [barrier(), sent(1, 1), sent(2), sealed(2)]),
    "a log with what nobody sent": ("L1", [barrier(), sent(1, 1), sealed(9)]),
    "a log that holds something twice": ("L2", [sent(1), barrier(), sent(2, 1), sealed(1, 1)]),
    "a log sealed before the sentinel": ("L4", [sent(1), barrier(), sealed(1)]),
    "a record behind an early sentinel": ("L6", [sent(1, 1), sent(2), read(1, is_records=False), read(2), barrier()]),
    "a replay after new input": ("L17", [history.InputRead(ONE, HEAD), history.Replayed(ONE, HEAD)]),
    "a replay after a barrier": ("L17", [barrier(), history.Replayed(ONE, HEAD)]),
    "a round left out": ("L35", [history.RoundFinished(ONE, NEST, n) for n in (0, 2)]),
    "a round that ends twice": ("L35", [history.RoundFinished(ONE, NEST, n) for n in (0, 0)]),
    "a loop that ends twice": ("L29", [history.LoopFoundEmpty(ONE, NEST)] * 2),
    "a loop that is not empty": ("L34", [sent(1), history.LoopFoundEmpty(ONE, NEST)]),
    "records after the end of a loop": ("L29", [history.LoopFoundEmpty(ONE, NEST), sent(1)]),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_history_is_rejected(name: str) -> None:
    rule, events = BAD[name]
    with pytest.raises(Violation) as caught:
        show(events)
    assert caught.value.invariant == rule


def test_a_good_history_is_accepted() -> None:
    events = [
        *(history.Replayed(ONE, HEAD), history.InputRead(ONE, HEAD)),
        *(sent(1), sent(2), read(1), barrier(), read(2), sent(3, 1), read(3, is_records=False), sent(4), read(4)),
        *(sealed(2), history.RoundFinished(ONE, NEST, 0), history.LoopFoundEmpty(ONE, NEST)),
    ]
    show(events)


def test_rounds_may_begin_again_in_another_generation() -> None:  # L36
    show([history.RoundFinished(Generation(generation), NEST, round_) for generation in (1, 2) for round_ in (2, 3)])
