"""The operators of one subtask: the order of their calls, bad records, and whose error it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from tests.runtime.running import definition_of, pipeline_at

import headgate as hg
from headgate.errors import BadRecord
from headgate.model.graph import BAD_RECORDS, Edge, InputName, Node, OutputTag, Role
from headgate.model.ids import NodeName, VertexId
from headgate.model.plan import Vertex
from headgate.operators import bad_records
from headgate.operators.base import Operator, OperatorContext
from headgate.operators.expressions import filter_spec, fuse, fused_groups, with_columns_spec
from headgate.runtime.worker.chain import Chain, NodeError


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
    return pa.RecordBatch.from_pylist([row], schema=bad_records.SCHEMA)


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


# P10, P11
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


def test_a_pass_is_measured_operator_by_operator() -> None:  # OM15
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
