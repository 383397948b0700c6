"""Channels keep their order, and credit stops exactly the sender that a slow reader is behind."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.frames import Barrier, BatchElement, Cancel, Element, EndOfData, Watermark, batch_element
from headgate.model.ids import CheckpointId, WorkerIndex
from headgate.runtime.wire.channels import ChannelKey, InputChannel, OutputChannel, local_channel

KEY = ChannelKey(0, WorkerIndex(0), WorkerIndex(0))
BATCH = pa.record_batch({"value": [1]})


def sized(size_bytes: int) -> BatchElement:
    return BatchElement(BATCH, size_bytes)


class Ends:
    """Both ends of a local channel and what they reported."""

    def __init__(self, credit_bytes: int) -> None:
        self.ready = 0
        self.credits = 0
        self.input, self.output = local_channel(KEY, credit_bytes, self._on_ready, self._on_credit)

    def _on_ready(self, channel: InputChannel) -> None:
        assert channel is self.input
        self.ready += 1

    def _on_credit(self, channel: OutputChannel) -> None:
        assert channel is self.output
        self.credits += 1

    def poll_all(self) -> list[Element]:
        found = []
        while (element := self.input.poll()) is not None:
            found.append(element)
        return found


def test_elements_pass_by_reference_and_in_order() -> None:
    ends = Ends(1_000)
    sent = [sized(5), Barrier(CheckpointId(1)), sized(6), Watermark(3), EndOfData()]
    for element in sent:
        ends.output.send(element)
    assert all(one is other for one, other in zip(ends.poll_all(), sent, strict=True))


def test_one_batch_may_overdraw_the_credit_and_the_next_waits() -> None:
    ends = Ends(10)
    ends.output.send(sized(9))
    assert ends.output.can_send
    ends.output.send(sized(100))
    assert (ends.output.can_send, ends.output.credit_bytes, ends.input.size_bytes) == (False, -99, 109)


def test_control_elements_pass_without_credit_and_cost_none() -> None:
    ends = Ends(10)
    ends.output.send(sized(10))
    ends.output.send(Barrier(CheckpointId(1)))
    assert ends.output.credit_bytes == 0
    assert ends.poll_all()[1:] == [Barrier(CheckpointId(1))]


def test_credit_comes_back_half_a_window_at_a_time() -> None:
    ends = Ends(100)
    for _ in range(10):
        ends.output.send(sized(10))
    seen = []
    for _ in range(10):
        ends.input.poll()
        seen.append(ends.output.credit_bytes)
    assert seen == [0, 0, 0, 0, 50, 50, 50, 50, 50, 100]
    assert ends.credits == 2


def test_a_blocked_channel_is_not_read_and_stops_its_sender() -> None:
    ends = Ends(10)
    ends.input.block()
    ends.output.send(sized(10))
    assert (ends.input.poll(), ends.output.can_send, len(ends.input), ends.ready) == (None, False, 1, 0)
    ends.input.unblock()
    assert ends.ready == 1
    assert ends.input.poll() is not None
    assert ends.output.can_send


def test_the_mailbox_is_woken_once_per_time_the_channel_fills() -> None:
    ends = Ends(1_000)
    ends.output.send(sized(1))
    ends.output.send(sized(1))
    assert ends.ready == 1
    ends.poll_all()
    ends.output.send(sized(1))
    assert ends.ready == 2


def test_credit_that_arrives_after_an_overdraft_is_always_announced() -> None:
    ends = Ends(10)
    output = ends.output
    output.send(sized(15))
    output.add_credit(5)
    assert (output.can_send, ends.credits) == (False, 0)
    output.add_credit(1)
    assert (output.can_send, ends.credits) == (True, 1)


def test_a_slice_costs_only_what_it_shows() -> None:
    whole = pa.record_batch({"value": list(range(10_000))})
    assert batch_element(whole.slice(0, 10)).size_bytes < 1_000 < batch_element(whole).size_bytes


@given(st.integers(1, 50), st.lists(st.one_of(st.integers(1, 80), st.none()), max_size=60))
def test_any_traffic_stays_bounded_and_never_sticks(credit: int, moves: list[int | None]) -> None:
    ends, sent, received = Ends(credit), 0, 0
    for size in moves:
        if size is None:
            received += len([ends.input.poll()]) if len(ends.input) else 0
        elif ends.output.can_send:
            ends.output.send(sized(size))
            sent += 1
        assert ends.input.outstanding_bytes < credit + 80
        assert ends.input.size_bytes <= ends.input.outstanding_bytes == credit - ends.output.credit_bytes
    assert received + len(ends.poll_all()) == sent
    assert ends.output.can_send


def test_a_barrier_or_cancel_marker_that_waits_is_known_unless_the_channel_is_blocked() -> None:
    ends = Ends(100)
    for element in (sized(1), Barrier(CheckpointId(1)), sized(1), Cancel(CheckpointId(2))):
        ends.output.send(element)
    found = []
    while True:
        found.append(ends.input.has_marker)
        if ends.input.poll() is None:
            break
    assert found == [True, True, True, True, False]
    ends.output.send(Barrier(CheckpointId(3)))
    ends.input.block()
    assert not ends.input.has_marker
