"""Routing: every row leaves exactly once (broadcast: once per receiver), control elements go everywhere in line."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.frames import Barrier, BatchElement, Element, EndOfData, Idle, Watermark
from headgate.model.graph import MAIN, Partitioner
from headgate.model.ids import CheckpointId, NodeName, VertexId, WorkerIndex
from headgate.model.plan import Plan, PlanEdge
from headgate.runtime.wire.channels import ChannelKey, OutputChannel
from headgate.runtime.worker import chain
from headgate.runtime.worker.chain import EdgeOutlet

CREDIT = 1 << 20


class Sent:
    """An outlet whose channels write down what they carry."""

    def __init__(
        self,
        partitioner: Partitioner,
        parallelism: int,
        index: int = 0,
        credit: int = CREDIT,
        clock_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        count = 1 if partitioner is Partitioner.FORWARD else parallelism
        keys = ("key",) if partitioner is Partitioner.HASH else ()
        edge = PlanEdge(0, VertexId("a"), NodeName("a"), MAIN, VertexId("b"), partitioner, keys)
        plan = Plan((), (edge,), parallelism, 128)
        self.elements: list[list[Element]] = [[] for _ in range(count)]
        channels = [
            OutputChannel(
                ChannelKey(0, WorkerIndex(index), WorkerIndex(i)), credit, self.elements[i].append, lambda _: None
            )
            for i in range(count)
        ]
        self.channels = channels
        self.outlet = EdgeOutlet(edge, plan, channels, index, clock_ns)

    def rows(self) -> list[list[tuple[int, int]]]:
        return [
            [
                (row["key"], row["id"])
                for element in elements
                if isinstance(element, BatchElement)
                for row in element.batch.to_pylist()
            ]
            for elements in self.elements
        ]


def batch(keys: list[int], first_id: int = 0) -> pa.RecordBatch:
    ids = pa.array(range(first_id, first_id + len(keys)), pa.int64())
    return pa.record_batch({"key": pa.array(keys, pa.int64()), "id": ids})


@given(
    st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=30), min_size=1, max_size=5),
    st.sampled_from(list(Partitioner)),
    st.integers(1, 4),
)
def test_every_row_is_delivered_as_often_as_the_partitioner_says(
    batches: list[list[int]], partitioner: Partitioner, parallelism: int
) -> None:
    sent = Sent(partitioner, parallelism)
    wanted: list[tuple[int, int]] = []
    for keys in batches:
        made = batch(keys, len(wanted))
        wanted += [(row["key"], row["id"]) for row in made.to_pylist()]
        sent.outlet.send(made)
    found = sent.rows()
    if partitioner is Partitioner.BROADCAST:
        assert found == [wanted] * parallelism
        return
    assert sorted(row for rows in found for row in rows) == sorted(wanted)
    assert all(rows == sorted(rows, key=lambda row: row[1]) for rows in found), "order is kept on each channel"
    if partitioner is Partitioner.HASH:
        owners = [{key for key, _ in rows} for rows in found]
        assert sum(map(len, owners)) == len(set().union(*owners)), "a key has one owner"


def test_rebalancing_takes_turns_and_senders_begin_at_different_receivers() -> None:
    first, second = Sent(Partitioner.REBALANCE, 3, index=0), Sent(Partitioner.REBALANCE, 3, index=1)
    for number in range(3):
        first.outlet.send(batch([number]))
        second.outlet.send(batch([number]))
    assert [[key for key, _ in rows] for rows in first.rows()] == [[0], [1], [2]]
    assert [[key for key, _ in rows] for rows in second.rows()] == [[2], [0], [1]]


@pytest.mark.parametrize("partitioner", list(Partitioner))
def test_everything_but_records_goes_to_every_channel_behind_the_records(partitioner: Partitioner) -> None:
    sent = Sent(partitioner, 3)
    sent.outlet.send(batch(list(range(50))))
    sent.outlet.send_watermark(7)
    sent.outlet.send_idle(True)
    sent.outlet.send_element(Barrier(CheckpointId(1)))
    sent.outlet.send_element(EndOfData())
    for elements in sent.elements:
        assert elements[-4:] == [Watermark(7), Idle(True), Barrier(CheckpointId(1)), EndOfData()]


def test_a_batch_beyond_the_limit_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "BATCH_BYTES_MAX", 160)
    sent = Sent(Partitioner.FORWARD, 1)
    sent.outlet.send(batch(list(range(100))))
    sizes = [e.batch.num_rows for e in sent.elements[0] if isinstance(e, BatchElement)]
    assert sum(sizes) == 100
    assert max(sizes) <= 10


def test_one_channel_without_credit_holds_the_whole_edge_back() -> None:
    sent = Sent(Partitioner.REBALANCE, 2, credit=1)
    assert sent.outlet.can_send
    sent.outlet.send(batch([1]))
    assert not sent.outlet.can_send


def test_an_edge_counts_each_record_once_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:  # OM14
    monkeypatch.setattr(chain, "BATCH_BYTES_MAX", 160)
    sent = Sent(Partitioner.HASH, 3)
    sent.outlet.send(batch(list(range(100))))
    assert sent.outlet.records == 100
