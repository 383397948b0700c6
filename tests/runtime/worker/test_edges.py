"""What is measured of the edges of one subtask: which of them holds it back, and what those that end here carry."""

from __future__ import annotations

from functools import partial

from tests.clocks import HandClock
from tests.runtime.worker.test_outlets import Sent
from tests.runtime.worker.test_subtask_runner import Made, Reader, batch

from headgate.codec.frames import Watermark, batch_element
from headgate.model.graph import Partitioner
from headgate.model.ids import ChannelIndex, Generation, WorkerIndex
from headgate.model.metrics import Samples
from headgate.runtime.wire.channels import ChannelKey, InputChannel
from headgate.runtime.wire.exchange import ExchangeMetrics
from headgate.runtime.worker.busy_time import InputMeter
from headgate.runtime.worker.metrics import WorkerMetrics

MS = 1_000_000


def channel(edge: int, sender: int = 0, credit: int = 1_000) -> InputChannel:
    return InputChannel(ChannelKey(edge, WorkerIndex(sender), WorkerIndex(0)), credit, lambda _: None, lambda _: None)


def test_an_edge_says_whether_it_is_the_one_without_room() -> None:  # OM14
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


def test_an_edge_says_how_long_its_records_kept_the_receiver_busy() -> None:  # OM14
    clock = HandClock(passed_ms=50)
    meter = InputMeter([channel(3), channel(7), channel(3, 1)], clock.monotonic_ns)
    meter.work(ChannelIndex(0), partial(clock.advance, 5))
    clock.advance(1_000)
    meter.work(ChannelIndex(1), partial(clock.advance, 40))
    meter.work(ChannelIndex(2), partial(clock.advance, 1))
    assert {edge: found.busy_ns for edge, found in meter.edges.items()} == {3: 6 * MS, 7: 40 * MS}


def test_an_edge_is_as_full_as_its_fullest_channel() -> None:  # OM14
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


def test_a_report_has_what_leaves_and_what_comes() -> None:  # OM14
    made = Made(inputs=2)
    made.inputs[0].put(batch_element(batch(1, 2)))
    made.runner.step()
    made.inputs[1].put(batch_element(batch(3)))
    message = WorkerMetrics(lambda: 0).message(Generation(1), 0.5, [made.runner], ExchangeMetrics(0, 0, 0, 0, 0))
    found = Samples(message.samples).of("edge", "0")
    waiting = batch_element(batch(3)).size_bytes
    assert (found["records"], found["queued_batches"], found["queued_bytes"]) == (2, 1, waiting)
    assert set(found) >= {"busy_ms", "held_back_ms", "fill"}
