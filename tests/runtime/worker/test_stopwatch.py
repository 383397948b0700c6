"""Whose time it is: an operator's own, by the clock of the surroundings."""

from __future__ import annotations

import pyarrow as pa
from tests.clocks import HandClock

from headgate.model.graph import Edge, Node, Role
from headgate.model.ids import NodeName, VertexId
from headgate.model.plan import Vertex
from headgate.operators import bad_records
from headgate.operators.base import Operator, OperatorContext
from headgate.runtime.worker.busy_time import HeldBack, NodeTotals, Stopwatch
from headgate.runtime.worker.chain import Chain

BATCH = pa.RecordBatch.from_pydict({"n": [1, 2]})


class Slow(Operator):
    """Takes ``before_ms``, sends twice, and takes ``after_ms``; with a watermark the same."""

    def __init__(self, clock: HandClock, before_ms: int, after_ms: int) -> None:
        self._clock, self._before_ms, self._after_ms = clock, before_ms, after_ms

    def process(self, batch: pa.RecordBatch) -> None:
        self._clock.advance(self._before_ms)
        self.output.emit(batch)
        self.output.emit(batch)
        self._clock.advance(self._after_ms)

    def on_watermark(self, watermark_ms: int) -> None:
        self._clock.advance(self._before_ms)
        self.output.emit_watermark(watermark_ms)

    def before_barrier(self) -> None:
        self._clock.advance(self._after_ms)


def chain_of(clock: HandClock, watch: Stopwatch, **times: tuple[int, int]) -> Chain:
    nodes = tuple(Node(NodeName(name), Role.OPERATOR, (), None) for name in times)
    chain = Chain(Vertex(VertexId("v"), nodes), watch)
    above = None
    for node in nodes:
        context = OperatorContext("p", str(node.name), 0, 1, 128, clock_ms=clock.monotonic_ms)
        chain.add(node, above, Slow(clock, *times[str(node.name)]), context, diverts=True)
        above = Edge(node.name)
    chain.open()
    return chain


def busy_ms(chain: Chain) -> list[int]:
    return [totals.busy_ns // 1_000_000 for totals in chain.totals.values()]


def test_an_operator_is_charged_its_own_time_without_that_of_those_behind_it() -> None:  # OM2
    clock = HandClock()
    chain = chain_of(clock, Stopwatch(clock.monotonic_ns), a=(1, 2), b=(10, 20), c=(100, 0))
    clock.advance(5_000)
    chain.head.process(BATCH)
    assert busy_ms(chain) == [3, 60, 400]
    clock.advance(5_000)
    chain.advance(7)
    assert busy_ms(chain) == [4, 70, 500]
    chain.before_barrier()
    assert busy_ms(chain) == [6, 90, 500]


def test_without_a_clock_nothing_is_measured() -> None:
    clock = HandClock()
    chain = chain_of(clock, Stopwatch(), a=(1, 2))
    chain.head.process(BATCH)
    assert busy_ms(chain) == [0]


def test_the_stopwatch_says_who_runs() -> None:
    watch, one, other = Stopwatch(), NodeTotals(node="one"), NodeTotals(node="other")
    before = watch.switch(one)
    assert (before, watch.running) == (None, one)
    inner = watch.switch(other)
    assert (inner, watch.running) == (one, other)
    watch.switch(inner)
    watch.switch(before)
    assert watch.running is None


def test_what_is_counted_is_what_went_through_and_what_was_bad() -> None:
    clock = HandClock()
    chain = chain_of(clock, Stopwatch(), a=(0, 0), b=(0, 0))
    chain.head.process(BATCH)
    chain.head.output.divert(bad_records.bad_records("a", ["why"], ["here"], ["what"]))
    chain.links[1].context.metrics.add("late", 3)
    assert chain.counted() == {
        "a": {"records_in": 2, "records_out": 4, "bad_records": 1},
        "b": {"records_in": 4, "records_out": 8, "bad_records": 0, "late": 3},
    }


def test_time_that_is_held_back_is_counted_while_it_lasts() -> None:  # OM4
    clock = HandClock(passed_ms=50)
    held = HeldBack(clock.monotonic_ns)
    held.note(False)
    clock.advance(10)
    assert held.total_ns == 0
    held.note(True)
    clock.advance(20)
    assert held.total_ns == 20_000_000
    held.note(True)
    clock.advance(20)
    held.note(False)
    clock.advance(1_000)
    held.note(True)
    clock.advance(1)
    assert held.total_ns == 41_000_000
