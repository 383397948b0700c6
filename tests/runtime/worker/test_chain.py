"""The operator chain of one subtask: order of calls, bad records, errors, and routing to its edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.running import definition_of, pipeline_at

import headgate as hg
from headgate.codec.frames import Barrier, BatchElement, Element, EndOfData, Idle, Watermark
from headgate.errors import BadRecord
from headgate.model.graph import BAD_RECORDS, MAIN, Edge, InputName, Node, OutputTag, Partitioner, Role
from headgate.model.ids import CheckpointId, NodeName, VertexId, WorkerIndex
from headgate.model.plan import Plan, PlanEdge, Vertex
from headgate.operators import user_functions
from headgate.operators.base import Operator, OperatorContext
from headgate.operators.expressions import filter_spec, fuse, fused_groups, with_columns_spec
from headgate.runtime.wire.channels import ChannelKey, OutputChannel
from headgate.runtime.worker import chain
from headgate.runtime.worker.chain import Chain, EdgeOutlet, NodeError


class Told(Operator):
    """Writes down every call, then passes on."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def process(self, batch: pa.RecordBatch) -> None:
        self._calls.append(f"{self._name} {batch.num_rows}")
        self.output.emit(batch)

    def on_watermark(self, watermark_ms: int) -> None:
        self._calls.append(f"{self._name} at {watermark_ms}")
        self.output.emit_watermark(watermark_ms)

    def before_barrier(self) -> None:
        self._calls.append(f"{self._name} flush")

    def finish(self) -> None:
        self._calls.append(f"{self._name} finish")

    def close(self) -> None:
        self._calls.append(f"{self._name} close")
        if self._name == "b":
            raise OSError("cannot close b")


class Failing(Operator):
    def process(self, batch: pa.RecordBatch) -> None:
        raise ValueError("of the operator")


def chain_of(operators: dict[str, Operator], upstream: dict[str, Edge], diverts: bool = False) -> Chain:
    nodes = tuple(Node(NodeName(name), Role.OPERATOR, (), None) for name in operators)
    chain = Chain(Vertex(VertexId("v"), nodes))
    for node in nodes:
        context = OperatorContext("p", str(node.name), 0, 1, 128, clock_ms=lambda: 0, diverts=diverts)
        chain.add(node, upstream.get(str(node.name)), operators[str(node.name)], context, diverts)
    chain.open()
    return chain


def tree(calls: list[str]) -> Chain:
    """``a`` feeds ``b`` and ``d``; ``b`` feeds ``c``."""
    upstream = {"b": Edge(NodeName("a")), "c": Edge(NodeName("b")), "d": Edge(NodeName("a"))}
    return chain_of({name: Told(name, calls) for name in "abcd"}, upstream)


BATCH = pa.record_batch({"id": pa.array([1, 2], pa.int64())})


def test_records_and_watermarks_go_depth_first_and_are_counted() -> None:
    calls: list[str] = []
    chain = tree(calls)
    chain.head.process(BATCH)
    chain.advance(5)
    chain.advance(5)
    chain.advance(4)
    assert calls == ["a 2", "b 2", "c 2", "d 2", "a at 5", "b at 5", "c at 5", "d at 5"]
    assert {str(n): (t.records_in, t.records_out) for n, t in chain.totals.items()} == dict.fromkeys("abcd", (2, 2))


def test_flush_and_finish_go_upstream_first() -> None:
    calls: list[str] = []
    chain = tree(calls)
    chain.before_barrier()
    chain.advance(2**63 - 1)
    del calls[4:]
    chain.finish()
    assert calls == [f"{n} flush" for n in "abcd"] + [f"{n} finish" for n in "abcd"]


def test_everything_is_closed_although_one_cannot_be() -> None:
    calls: list[str] = []
    with pytest.raises(OSError, match="cannot close b"):
        tree(calls).close()
    assert calls == [f"{n} close" for n in "abcd"]


def test_an_error_names_the_operator_that_raised_and_not_its_upstream() -> None:
    chain = chain_of({"a": Told("a", []), "b": Failing()}, {"b": Edge(NodeName("a"))})
    with pytest.raises(NodeError) as raised:
        chain.head.process(BATCH)
    assert (raised.value.node, str(raised.value.error)) == ("b", "of the operator")


def bad() -> pa.RecordBatch:
    row = {"node": "a", "problem": "is absurd", "position": "file byte 3", "record": "x" * 9_000}
    return pa.RecordBatch.from_pylist([row], schema=user_functions.BAD_RECORD_SCHEMA)


def test_bad_records_fail_with_their_place_and_a_shortened_record() -> None:
    chain = chain_of({"a": Told("a", [])}, {})
    with pytest.raises(BadRecord, match="operator 'a' refused a record at file byte 3: is absurd") as raised:
        chain.head.output.divert(bad())
    assert len(raised.value.record) == 500


def test_bad_records_are_diverted_past_the_children() -> None:
    calls: list[str] = []
    operators: dict[str, Operator] = {"a": Told("a", calls), "b": Told("b", calls), "bad": Told("bad", calls)}
    upstream = {"b": Edge(NodeName("a")), "bad": Edge(NodeName("a"), tag=BAD_RECORDS)}
    chain_of(operators, upstream, diverts=True).head.output.divert(bad())
    assert calls == ["bad 1"]


class TwoWays(Told):
    """Tells its inputs apart, and sends everything to its side output as well."""

    def process_input(self, name: InputName, batch: pa.RecordBatch) -> None:
        self._calls.append(f"{name} of {self._name} {batch.num_rows}")
        self.output.emit_to(OutputTag("side"), batch)
        self.output.emit_to(OutputTag("nobody reads it"), batch)


def test_outputs_have_names_and_event_time_goes_with_all_of_them_but_bad_records() -> None:
    calls: list[str] = []
    names = {"a": TwoWays("a", calls), "b": TwoWays("b", calls), "bad": Told("bad", calls), "c": Told("c", calls)}
    upstream = {
        "b": Edge(NodeName("a"), tag=OutputTag("side"), input=InputName("left")),
        "c": Edge(NodeName("b"), tag=OutputTag("side")),
        "bad": Edge(NodeName("a"), tag=BAD_RECORDS),
    }
    chain = chain_of({**names}, upstream, diverts=True)
    chain.head.process(BATCH, InputName("right"))
    rows = BATCH.num_rows
    assert calls == [f"right of a {rows}", f"left of b {rows}", f"c {rows}"]
    sent = [chain.totals[NodeName(name)].records_out for name in "ab"]
    assert sent == [rows, rows], "records of a side output count if anything reads it"
    calls.clear()
    chain.advance(5)
    assert calls == ["a at 5", "b at 5", "c at 5"]


def test_neighbouring_expressions_run_as_one_unless_something_else_consumes_them(tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    source = pipeline.source(hg.FromRows([{"id": 1}]))
    first = source.filter(pl.col("id") > 0, name="f1").with_columns(name="f2", b=pl.col("id")).select("id", name="f3")
    first.sink(hg.Discard(), name="end")
    branch = first.filter(pl.col("id") > 5, name="f4")
    branch.sink(hg.Discard(), name="other")
    plan = definition_of(pipeline).plan
    groups = [[str(node.name) for node in group] for v in plan.vertices for group in fused_groups(v, plan)]
    assert sorted(groups) == [["end"], ["f1", "f2", "f3"], ["f4"], ["other"], ["source"]]


class Holding(Operator):
    """Holds records back until it must not, and adds one of its own at the end of a round."""

    def __init__(self) -> None:
        self.held: list[pa.RecordBatch] = []
        self.seen: list[str] = []

    def process(self, batch: pa.RecordBatch) -> None:
        self.seen.append("records")
        self.held.append(batch)

    def before_barrier(self) -> None:
        held, self.held = self.held, []
        for batch in held:
            self.output.emit(batch)

    def on_round(self, round_: int) -> None:
        self.seen.append("round")
        self.output.emit(pa.RecordBatch.from_pydict({"n": [round_]}))


def test_the_end_of_a_round_comes_behind_what_operators_above_held_back() -> None:  # L27, L35
    operators = [Holding(), Holding()]
    nodes = [
        replace(node, loops=(NodeName("loop"),))
        for node in (
            Node(NodeName("a"), Role.OPERATOR, (), None),
            Node(NodeName("b"), Role.OPERATOR, (Edge(NodeName("a")),), None),
        )
    ]
    chain = Chain(Vertex(VertexId("a"), tuple(nodes)))
    for node, operator, upstream in zip(nodes, operators, (None, nodes[1].inputs[0]), strict=True):
        chain.add(node, upstream, operator, OperatorContext("p", str(node.name), 0, 1, 128, lambda: 0), False)
    chain.open()
    chain.head.process(pa.RecordBatch.from_pydict({"n": [7]}))
    chain.on_round(0, NodeName("loop"))
    assert operators[1].seen == ["records", "records", "round"]


def test_a_pass_is_measured_operator_by_operator() -> None:
    names = ("kept", "doubled", "few")
    nodes = [Node(NodeName(name), Role.OPERATOR, (Edge(NodeName("above")),), None) for name in names]
    steps = filter_spec(pl.col("n") > 1), with_columns_spec((pl.col("n") * 2).alias("d")), filter_spec(pl.col("d") > 4)
    chain = Chain(Vertex(VertexId("v"), tuple(nodes)))
    context = OperatorContext("p", "few", 0, 1, 128, clock_ms=lambda: 0)
    chain.add(nodes[-1], None, fuse(steps).build(), context, False, passes=nodes[:-1])
    chain.open()
    context.metrics.add("own", 5)
    chain.head.process(pa.RecordBatch.from_pydict({"n": [1, 2, 3, 4]}))
    chain.advance(7)
    found = {one.node: (one.records_in, one.records_out, one.watermark_ms) for one in chain.head.measured()}
    assert found == {"kept": (4, 3, 7), "doubled": (3, 3, 7), "few": (3, 2, 7)}
    assert {name: (n["records_in"], n["records_out"], n.get("own")) for name, n in chain.counted().items()} == {
        "kept": (4, 3, None),
        "doubled": (3, 3, None),
        "few": (3, 2, 5),
    }
    assert chain.head.totals.records_in == 4, "the pass is called once"


# -- routing -----


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


def test_an_edge_counts_each_record_once_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "BATCH_BYTES_MAX", 160)
    sent = Sent(Partitioner.HASH, 3)
    sent.outlet.send(batch(list(range(100))))
    assert sent.outlet.records == 100
