"""Channels keep their order, and credit stops exactly the sender that a slow reader is behind."""

from __future__ import annotations

import errno
import os
import threading
import tracemalloc
from collections import deque
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.frames import Barrier, BatchElement, Cancel, Element, EndOfData, Idle, Watermark, batch_element
from headgate.errors import CorruptionError, StorageError
from headgate.model.ids import CheckpointId, WorkerIndex
from headgate.runtime.wire.channels import (
    ChannelKey,
    FeedbackChannel,
    InputChannel,
    OutputChannel,
    local_channel,
    local_feedback_channel,
)
from headgate.runtime.wire.spill import SpillBudget, SpillFile

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


FEEDBACK_KEY = ChannelKey(3, WorkerIndex(0), WorkerIndex(1))
SCHEMA = pa.schema([("value", pa.int64()), ("text", pa.large_string())])
PLENTY = 1 << 30


def batch(value: int, rows: int = 1) -> pa.RecordBatch:
    return pa.record_batch([[value] * rows, [None if row % 2 else "é" for row in range(rows)]], schema=SCHEMA)


def element(value: int, rows: int = 1) -> BatchElement:
    return batch_element(batch(value, rows))


class Reader:
    """A feedback channel and what it reported."""

    def __init__(self, memory_bytes: int, disk_bytes: int = PLENTY, piece_bytes: int = 2_000) -> None:
        self.ready = 0
        self.budget = SpillBudget(memory_bytes, disk_bytes, piece_bytes=piece_bytes)
        self.channel, self.output = local_feedback_channel(
            FEEDBACK_KEY, SCHEMA, self.budget, self._on_ready, self._on_credit, "loop 'ranks', channel 3:0→1"
        )

    def _on_ready(self, channel: FeedbackChannel) -> None:
        assert channel is self.channel
        self.ready += 1

    def _on_credit(self, channel: OutputChannel) -> None:
        raise AssertionError("feedback gives no credit back")

    def poll_all(self) -> list[Element]:
        return list(iter(self.channel.poll, None))


def put_many(channel: FeedbackChannel, count: int) -> None:
    for value in range(count):
        channel.put(element(value))


def value_of(found: Element | None) -> object:
    return found.batch.to_pydict() if isinstance(found, BatchElement) else found


def test_a_sender_of_feedback_is_never_out_of_credit_and_never_overdrawn() -> None:
    reader = Reader(memory_bytes=0)
    for _ in range(100):
        assert reader.output.can_send
        reader.output.send(element(1))
    assert (len(reader.channel), reader.channel.outstanding_bytes) == (100, 0)
    reader.channel.close()


def test_batches_that_fit_into_memory_pass_by_reference() -> None:
    reader = Reader(PLENTY)
    sent = [element(1), Barrier(CheckpointId(1)), element(2), EndOfData()]
    for one in sent:
        reader.channel.put(one)
    assert all(one is other for one, other in zip(reader.poll_all(), sent, strict=True))
    assert (reader.budget.memory_used_bytes, reader.budget.disk_used_bytes) == (0, 0)


def test_a_small_slice_does_not_keep_a_large_batch_in_memory() -> None:
    reader = Reader(PLENTY)
    before = pa.total_allocated_bytes()
    for number in range(20):
        reader.channel.put(batch_element(batch(number, 10_000).slice(number, 100)))
    assert pa.total_allocated_bytes() - before < 20 * batch(1, 10_000).nbytes / 10
    assert value_of(reader.channel.poll()) == batch(0, 100).to_pydict()
    reader.channel.close()


def test_batches_beyond_the_memory_share_come_back_from_disk_in_their_place() -> None:
    cost = element(1).size_bytes
    reader = Reader(memory_bytes=cost)
    sent: list[Element] = [element(1), Watermark(5), element(2, 3), element(3), Idle(True), element(4)]
    for one in sent:
        reader.channel.put(one)
    metrics = reader.channel.metrics
    assert (metrics.elements, metrics.memory_bytes) == (6, cost)
    assert metrics.size_bytes == cost + metrics.spilled_bytes == metrics.size_bytes_max
    assert metrics.spilled_bytes > 0
    assert [value_of(one) for one in reader.poll_all()] == [value_of(one) for one in sent]
    assert reader.channel.size_bytes == len(reader.channel) == 0
    assert (reader.budget.memory_used_bytes, reader.budget.disk_used_bytes) == (0, 0)


def test_a_spilled_batch_costs_a_few_bytes_of_memory_however_small_it_is() -> None:
    channel, one, count = (
        FeedbackChannel(FEEDBACK_KEY, SCHEMA, SpillBudget(0, PLENTY), lambda _: None),
        element(1),
        3_000,
    )
    tracemalloc.start()
    for _ in range(count):
        channel.put(one)
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used_bytes < 20 * count
    channel.close()


def test_pieces_that_were_read_are_closed_while_later_ones_fill() -> None:
    reader = Reader(memory_bytes=0, piece_bytes=1_000)
    put_many(reader.channel, 50)
    full = reader.budget.disk_used_bytes
    for _ in range(40):
        reader.channel.poll()
    assert reader.budget.disk_used_bytes < full / 3
    reader.channel.close()
    assert reader.budget.disk_used_bytes == 0


def test_the_mailbox_is_woken_when_the_channel_fills_and_when_it_is_unblocked() -> None:
    reader = Reader(memory_bytes=0)
    reader.channel.put(element(1))
    reader.channel.put(element(2))
    assert reader.ready == 1
    reader.channel.block()
    assert (reader.channel.poll(), reader.channel.is_blocked, len(reader.channel)) == (None, True, 2)
    reader.channel.unblock()
    assert reader.ready == 2
    assert len(reader.poll_all()) == 2
    reader.channel.block()
    reader.channel.put(element(3))
    assert reader.ready == 2
    reader.channel.close()


def test_at_the_disk_limit_one_sentence_says_which_loop_and_how_much() -> None:
    reader = Reader(memory_bytes=0, disk_bytes=2_000)
    with pytest.raises(StorageError, match=r"cannot spill loop 'ranks', channel 3:0→1: .* limit on disk is") as raised:
        put_many(reader.channel, 100)
    assert not raised.value.is_transient
    assert "in memory and" in str(raised.value)
    assert "raise the limit" in str(raised.value)
    assert reader.ready == 2  # the failure wakes the mailbox
    with pytest.raises(StorageError):  # what was lost is a hole: nobody goes on
        reader.channel.put(Barrier(CheckpointId(1)))
    with pytest.raises(StorageError):
        reader.channel.poll()
    reader.channel.close()
    assert reader.budget.disk_used_bytes == 0


@pytest.mark.parametrize("where", ["pwrite", "TemporaryFile"])
def test_a_full_disk_is_an_error_that_names_the_directory(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    reader = Reader(memory_bytes=0)
    monkeypatch.setattr(f"headgate.runtime.wire.spill.{'os' if where == 'pwrite' else 'tempfile'}.{where}", full)
    with pytest.raises(StorageError, match=r"cannot spill loop 'ranks'.*is full \(No space left"):
        reader.channel.put(element(1))
    assert reader.budget.disk_used_bytes == 0


def test_short_writes_and_reads_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[:100], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:70]], at))
    reader = Reader(memory_bytes=0)
    reader.channel.put(element(7, 50))
    assert [value_of(one) for one in reader.poll_all()] == [batch(7, 50).to_pydict()]


def test_bytes_that_changed_on_disk_are_not_delivered() -> None:
    reader = Reader(memory_bytes=0)
    file = SpillFile("loop 'ranks'", SCHEMA, reader.budget)
    extent = file.write(batch(1))
    os.pwrite(extent.piece.file.fileno(), b"\xff\xfe", extent.offset + 40)
    with pytest.raises(CorruptionError, match="spill file of loop 'ranks' is damaged"):
        file.read(extent)
    file.close()


def test_spill_files_have_no_name(tmp_path: Path) -> None:
    budget = SpillBudget(0, PLENTY, tmp_path)
    channel = FeedbackChannel(FEEDBACK_KEY, SCHEMA, budget, lambda _: None)
    channel.put(element(1))
    assert budget.disk_used_bytes > 0
    assert list(tmp_path.iterdir()) == []
    channel.close()
    channel.close()
    channel.put(element(2))
    assert (len(channel), budget.disk_used_bytes, channel.poll()) == (0, 0, None)


@given(
    st.integers(0, 1_500),
    st.lists(st.one_of(st.integers(1, 6), st.just("poll"), st.just("mark"), st.just("block")), max_size=60),
)
def test_any_traffic_is_the_traffic_of_a_plain_queue(memory_bytes: int, moves: list[int | str]) -> None:
    reader, expected = Reader(memory_bytes), deque[Element]()
    channel = reader.channel
    for number, move in enumerate(moves):
        if move == "poll":
            due = expected.popleft() if expected and not channel.is_blocked else None
            assert value_of(channel.poll()) == value_of(due)
        elif move == "block":
            channel.unblock() if channel.is_blocked else channel.block()
        else:
            new = Watermark(number) if move == "mark" else element(number, int(move))
            channel.put(new)
            expected.append(new)
        assert len(channel) == len(expected)
        assert channel.metrics.memory_bytes == reader.budget.memory_used_bytes <= memory_bytes
        assert channel.size_bytes == sum(one.size_bytes for one in expected if isinstance(one, BatchElement))
        assert (reader.budget.disk_used_bytes == 0) == (channel.metrics.spilled_bytes == 0)
    channel.unblock()
    assert [value_of(one) for one in reader.poll_all()] == [value_of(one) for one in expected]
    assert (reader.budget.memory_used_bytes, reader.budget.disk_used_bytes) == (0, 0)


# L21
@given(
    st.sampled_from([0, 800, PLENTY]),
    st.integers(1, 2_000),
    st.lists(st.one_of(st.integers(1, 6), st.just("mark")), max_size=40),
)
def test_merged_batches_keep_their_order_their_size_limit_and_their_place(
    memory_bytes: int, merge_bytes_max: int, moves: list[int | str]
) -> None:
    budget = SpillBudget(memory_bytes, PLENTY, piece_bytes=1_000)
    channel = FeedbackChannel(FEEDBACK_KEY, SCHEMA, budget, lambda _: None, merge_bytes_max=merge_bytes_max)
    sent: list[object] = []
    for number, move in enumerate(moves):
        channel.put(Watermark(number) if move == "mark" else element(number, int(move)))
        sent += [Watermark(number)] if move == "mark" else batch(number, int(move)).to_pylist()
    found: list[object] = []
    sizes: list[int] = []
    while (one := channel.poll()) is not None:
        found += one.batch.to_pylist() if isinstance(one, BatchElement) else [one]
        size_bytes = one.size_bytes if isinstance(one, BatchElement) else merge_bytes_max + 1
        assert size_bytes <= max(merge_bytes_max, element(1, 6).size_bytes) or isinstance(one, Watermark)
        assert not sizes or sizes[-1] + size_bytes > merge_bytes_max  # as few as the limit allows
        sizes.append(size_bytes)
    assert found == sent
    assert (len(channel), channel.size_bytes, budget.memory_used_bytes, budget.disk_used_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("memory_bytes", [0, 3_000, PLENTY])
def test_two_threads_lose_nothing_and_no_wake_up(memory_bytes: int) -> None:
    count, is_ready = 3_000, threading.Event()
    budget = SpillBudget(memory_bytes, PLENTY, piece_bytes=20_000)
    channel = FeedbackChannel(FEEDBACK_KEY, SCHEMA, budget, lambda _: is_ready.set())

    def put_all() -> None:
        for number in range(count):
            channel.put(Watermark(number) if number % 7 == 0 else element(number))

    putting = threading.Thread(target=put_all)
    putting.start()
    found: list[int] = []
    while len(found) < count:
        assert is_ready.wait(120), "a wake-up was lost"
        is_ready.clear()
        while (one := channel.poll()) is not None:
            found.append(one.watermark_ms if isinstance(one, Watermark) else one.batch.column(0)[0].as_py())
    putting.join()
    assert found == list(range(count))
    assert (budget.memory_used_bytes, budget.disk_used_bytes, len(channel)) == (0, 0, 0)


def test_ten_times_the_memory_share_waits_on_disk_not_in_memory() -> None:
    share, process = 8 << 20, psutil.Process()
    budget = SpillBudget(share, PLENTY)
    channel = FeedbackChannel(FEEDBACK_KEY, SCHEMA, budget, lambda _: None)
    pa.default_memory_pool().release_unused()
    before, allocated = process.memory_info().rss, pa.total_allocated_bytes()
    rows = 20_000
    sent = 0
    while channel.size_bytes < 10 * share:
        column = pa.array(range(sent * rows, (sent + 1) * rows))
        channel.put(batch_element(pa.record_batch([column, pa.nulls(rows, pa.large_string())], schema=SCHEMA)))
        sent += 1
    assert pa.total_allocated_bytes() - allocated <= 1.1 * share
    assert process.memory_info().rss - before < 4 * share
    for number in range(sent):
        one = channel.poll()
        assert isinstance(one, BatchElement)
        assert one.batch.column(0)[0].as_py() == number * rows
    assert (channel.poll(), budget.disk_used_bytes) == (None, 0)
    assert channel.metrics.size_bytes_max >= 10 * share
