"""Busy time of operators and edges, by the clock of the surroundings."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
from tests.runtime.worker.test_chain import Sent
from tests.runtime.worker.test_subtask_runner import Made, Reader, batch
from tests.support.clocks import HandClock

from headgate.codec.frames import Watermark, batch_element
from headgate.model.graph import Edge, Node, Partitioner, Role
from headgate.model.ids import ChannelIndex, Generation, NodeName, VertexId, WorkerIndex
from headgate.model.plan import Vertex
from headgate.model.progress import Samples
from headgate.operators import user_functions
from headgate.operators.base import Operator, OperatorContext
from headgate.runtime.wire.channels import ChannelKey, InputChannel
from headgate.runtime.wire.exchange import ExchangeMetrics
from headgate.runtime.worker.chain import Chain, HeldBack, InputMeter, NodeTotals, Stopwatch
from headgate.runtime.worker.metrics import WorkerMetrics

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


def test_an_operator_is_charged_its_own_time_without_that_of_those_behind_it() -> None:
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
    chain.head.output.divert(user_functions.bad_records("a", ["why"], ["here"], ["what"]))
    chain.links[1].context.metrics.add("late", 3)
    assert chain.counted() == {
        "a": {"records_in": 2, "records_out": 4, "bad_records": 1},
        "b": {"records_in": 4, "records_out": 8, "bad_records": 0, "late": 3},
    }


def test_time_that_is_held_back_is_counted_while_it_lasts() -> None:
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


# -- what is measured of the edges of one subtask -----


MS = 1_000_000


def channel(edge: int, sender: int = 0, credit: int = 1_000) -> InputChannel:
    return InputChannel(ChannelKey(edge, WorkerIndex(sender), WorkerIndex(0)), credit, lambda _: None, lambda _: None)


def test_an_edge_says_whether_it_is_the_one_without_room() -> None:
    clock = HandClock(passed_ms=50)
    full = Sent(Partitioner.REBALANCE, 1, credit=1, clock_ns=clock.monotonic_ns)
    made = Made(reader=Reader([batch(1), batch(2), batch(3)]), beside=[full], clock_ns=clock.monotonic_ns)
    for _ in range(3):
        made.runner.step()
        clock.advance(20)
    assert full.outlet.held_back.total_ns == made.runner.held_back.total_ns == 40 * MS, "until now"
    assert made.sent.outlet.held_back.total_ns == 0
    full.channels[0].add_credit(1_000_000)
    made.runner.step()
    clock.advance(1_000)
    made.runner.step()
    assert full.outlet.held_back.total_ns == made.runner.held_back.total_ns == 40 * MS
    clock.advance(1_000)
    made.runner.step()
    assert full.outlet.held_back.total_ns == 40 * MS, "the source has ended: nothing is left to send"


def test_an_edge_says_how_long_its_records_kept_the_receiver_busy() -> None:
    clock = HandClock(passed_ms=50)
    meter = InputMeter([channel(3), channel(7), channel(3, 1)], clock.monotonic_ns)
    meter.work(ChannelIndex(0), partial(clock.advance, 5))
    clock.advance(1_000)
    meter.work(ChannelIndex(1), partial(clock.advance, 40))
    meter.work(ChannelIndex(2), partial(clock.advance, 1))
    assert {edge: found.busy_ns for edge, found in meter.edges.items()} == {3: 6 * MS, 7: 40 * MS}


def test_an_edge_is_as_full_as_its_fullest_channel() -> None:
    one, other = channel(3), channel(3, 1)
    meter = InputMeter([one, other], lambda: 0)
    size = batch_element(batch(1)).size_bytes
    for _ in range(250 // size + 1):
        one.put(batch_element(batch(1)))
    other.put(batch_element(batch(1)))
    other.put(Watermark(5))
    found = meter.edges[3]
    assert found.queued == (len(one) + 2, one.size_bytes + size)
    assert found.fill == one.size_bytes / 1_000 > 0.25
    for _ in range(1_000):
        other.put(batch_element(batch(1)))
    assert found.fill == 1.0, "credit may be overdrawn"


def test_a_report_has_what_leaves_and_what_comes() -> None:
    made = Made(inputs=2)
    made.inputs[0].put(batch_element(batch(1, 2)))
    made.runner.step()
    made.inputs[1].put(batch_element(batch(3)))
    message = WorkerMetrics(lambda: 0).message(Generation(1), 0.5, [made.runner], ExchangeMetrics(0, 0, 0, 0, 0))
    found = Samples(message.samples).of("edge", "0")
    waiting = batch_element(batch(3)).size_bytes
    assert (found["records"], found["queued_batches"], found["queued_bytes"]) == (2, 1, waiting)
    assert set(found) >= {"busy_ms", "held_back_ms", "fill"}
