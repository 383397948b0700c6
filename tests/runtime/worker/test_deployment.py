"""Which inputs of a subtask have a source upstream that sets its own barrier (UA20)."""

from __future__ import annotations

from tests.model.test_plan import REBALANCE, edge, node, plan, sink, source, vertex

from headgate.model.ids import SubtaskId
from headgate.runtime.worker.deployment import late_inputs


def test_a_barrier_takes_credit_wherever_such_a_source_is_in_front_of_it() -> None:  # UA20
    made = plan(
        source("tape"),
        source("ordinary"),
        node("marked", edge("tape", REBALANCE)),
        node("plain", edge("ordinary", REBALANCE)),
        node("both", edge("plain", REBALANCE), edge("marked"), edge("ordinary")),
        sink("out", edge("both", REBALANCE)),
    )

    def late(name: str, *induced: str) -> set[str]:
        subtask = SubtaskId(vertex(name), 1)
        found = late_inputs(made, subtask, {vertex(each) for each in induced})
        return {str(i.upstream) for i in made.inputs(subtask) if i.channel in found}

    assert late("marked", "tape") == {"tape[0]", "tape[1]"}
    assert late("plain", "tape") == set()
    assert late("both", "tape") == {"marked[1]"}
    assert late("out", "tape") == {"both[0]", "both[1]"}
    assert late("both", "tape", "ordinary") == {"marked[1]", "plain[0]", "plain[1]", "ordinary[1]"}
    assert late("out") == set()
