from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.conftest import few
from tests.support.killing import run_killing

import headgate as hg
from headgate.model.graph import BAD_RECORDS, Edge, OutputTag, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.testing import Collect, run

ROWS = [{"service": "a", "level": "ERROR", "n": 1, "ts": 5_000}]


def made(bad_records: hg.DeadLetter | None = None) -> tuple[hg.Pipeline, hg.Stream]:
    pipeline = hg.Pipeline("test", bad_records=bad_records)
    return pipeline, pipeline.source(hg.FromRows(ROWS))


def inputs(pipeline: hg.Pipeline, node: str) -> tuple[Edge, ...]:
    return pipeline.definition().graph.node(NodeName(node)).inputs


def names(pipeline: hg.Pipeline) -> list[str]:
    return [str(node.name) for node in pipeline.definition().graph.nodes]


def test_names_are_derived_from_the_verbs_in_order() -> None:
    pipeline, rows = made()
    rows.filter(pl.col("n") > 0).filter(pl.col("n") > 1).select("n").sink(hg.Discard())
    rows.sink(hg.Discard())
    assert names(pipeline) == ["source", "filter", "filter-2", "select", "sink", "sink-2"]


def test_an_explicit_name_is_taken_and_only_once() -> None:
    _, rows = made()
    rows.filter(pl.col("n") > 0, name="positive")
    with pytest.raises(hg.UsageError, match="two operators are named 'positive'"):
        rows.select("n", name="positive")


def test_a_derived_name_avoids_an_explicit_one() -> None:
    pipeline, rows = made()
    rows.select("n", name="filter").filter(pl.col("n") > 0).sink(hg.Discard())
    assert names(pipeline) == ["source", "filter", "filter-2", "sink"]


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "a b", "x" * 101])
def test_a_name_that_would_break_paths_is_refused(name: str) -> None:
    _, rows = made()
    with pytest.raises(hg.UsageError, match="must be named with"):
        rows.select("n", name=name)


def test_the_name_of_the_dead_letter_sink_is_reserved() -> None:
    _, rows = made()
    with pytest.raises(hg.UsageError, match="reserved"):
        rows.select("n", name="bad-records")


def test_every_stream_knows_its_schema() -> None:
    _, rows = made()
    assert rows.columns == ["service", "level", "n", "ts"]
    assert rows.select("n", twice=pl.col("n") * 2).columns == ["n", "twice"]
    assert rows.with_columns(one=1, copied="service").schema.field("copied").type == pa.large_string()
    assert rows.map(lambda row: {"x": 1.0}, {"x": float}).schema == pa.schema([("x", pa.float64())])
    assert rows.map(lambda row: row).schema == rows.schema
    assert rows.map_batches(lambda frame: frame.select("n")).columns == ["n"]


def test_an_unknown_column_is_told_with_operator_and_columns() -> None:
    _, rows = made()
    with pytest.raises(hg.UsageError, match=r"operator 'filter'.*nope.*service: large_string"):
        rows.filter(pl.col("nope") == 1)
    with pytest.raises(hg.UsageError, match=r"operator 'by': there is no column 'nope'; the columns are service"):
        rows.key_by("nope", name="by")
    with pytest.raises(hg.UsageError, match=r"operator 'with-timestamps': .*'nope'"):
        rows.with_timestamps("nope")


def test_a_wrong_type_is_told_when_the_pipeline_is_built() -> None:
    _, rows = made()
    with pytest.raises(hg.UsageError, match=r"operator 'select'"):
        rows.select(pl.col("service").dt.year())


def test_rebalance_and_broadcast_change_the_next_edge_only() -> None:
    pipeline, rows = made()
    rows.rebalance().select("n", name="spread").sink(hg.Discard())
    rows.broadcast().select("n", name="all").sink(hg.Discard())
    assert inputs(pipeline, "spread") == (Edge(NodeName("source"), Partitioner.REBALANCE),)
    assert inputs(pipeline, "all") == (Edge(NodeName("source"), Partitioner.BROADCAST),)
    assert inputs(pipeline, "sink") == (Edge(NodeName("spread")),)


def test_union_gives_the_next_operator_all_inputs() -> None:
    pipeline, rows = made()
    other = pipeline.source(hg.FromRows(ROWS), name="other")
    rows.union(other.rebalance()).sink(hg.Discard(), name="out")
    assert inputs(pipeline, "out") == (Edge(NodeName("source")), Edge(NodeName("other"), Partitioner.REBALANCE))


def test_union_refuses_other_schemas_other_pipelines_and_itself() -> None:
    _, rows = made()
    with pytest.raises(hg.UsageError, match="equal schemas"):
        rows.union(rows.select("n"))
    with pytest.raises(hg.UsageError, match="one pipeline"):
        rows.union(made()[1])
    with pytest.raises(hg.UsageError, match="twice"):
        rows.union(rows)


def test_reduce_reads_checked_keys_over_a_hash_edge() -> None:
    pipeline, rows = made()
    rows.key_by("service").reduce(lambda so_far, row: row).sink(hg.Discard())
    assert inputs(pipeline, "reduce") == (Edge(NodeName("key-by"), Partitioner.HASH, ("service",)),)
    assert pipeline.definition().graph.node(NodeName("reduce")).state_text.startswith("keyed state(keys service")


def test_an_aggregation_that_decomposes_is_combined_before_the_shuffle() -> None:
    pipeline, rows = made()
    keyed = rows.with_timestamps("ts").key_by("service")
    counts = keyed.window(hg.Tumbling("5s")).agg(n=pl.len(), total=pl.col("n").sum())
    counts.sink(hg.Discard())
    assert counts.columns == ["service", "window_start", "window_end", "n", "total"]
    assert inputs(pipeline, "window-combine") == (Edge(NodeName("key-by")),)
    assert inputs(pipeline, "window") == (Edge(NodeName("window-combine"), Partitioner.HASH, ("service",)),)
    assert [str(v.id) for v in pipeline.definition().plan.vertices] == ["source", "window"]


def test_an_aggregation_that_does_not_decompose_keeps_its_records_behind_the_shuffle() -> None:
    pipeline, rows = made()
    rows.with_timestamps("ts").key_by("service").window(hg.Tumbling("5s")).agg(m=pl.col("n").median()).sink(
        hg.Discard()
    )
    assert inputs(pipeline, "window") == (Edge(NodeName("key-by"), Partitioner.HASH, ("service",)),)


def test_a_window_needs_event_times_that_are_still_there() -> None:
    _, rows = made()
    with pytest.raises(hg.UsageError, match="needs event times"):
        rows.key_by("service").window(hg.Tumbling("5s"))
    timed = rows.with_timestamps("ts")
    with pytest.raises(hg.UsageError, match="needs event times"):
        timed.select("service").key_by("service").window(hg.Tumbling("5s"))
    timed.select("service", "ts").key_by("service").window(hg.Tumbling("5s"))


@pytest.mark.parametrize("name", ["__group", "__start", "__rows", "__partial_0", "__headgate_sum_0"])
@pytest.mark.parametrize("window", [hg.Tumbling("5s"), hg.Session("5s"), hg.Count(5)])
def test_a_window_refuses_columns_with_names_of_its_own(name: str, window: Any) -> None:
    rows = hg.Pipeline("p").source(hg.FromRows([], schema={name: int, "k": int, "ts": pa.timestamp("us")}))
    windowed = rows.with_timestamps("ts").key_by("k").window(window)
    with pytest.raises(hg.UsageError, match=f"windows have a column '{name}' themselves; give yours another name"):
        windowed.agg(n=pl.len())
    with pytest.raises(hg.UsageError, match=f"windows have a column '{name}' themselves"):
        windowed.apply(lambda key, rows: None, {"n": int})


def test_an_expression_given_as_the_operators_name_is_explained() -> None:
    _, rows = made()
    with pytest.raises(hg.UsageError, match=r"alias\('name'\)"):
        rows.select(name=pl.col("service"))  # type: ignore[arg-type]


def test_diverted_records_of_every_operator_that_refuses_some_reach_one_sink() -> None:
    pipeline, rows = made(hg.DeadLetter(hg.Discard()))
    rows.map(lambda row: row).filter(pl.col("n") > 0).with_timestamps("ts").key_by("service").reduce(
        lambda a, b: b
    ).sink(hg.Discard())
    definition = pipeline.definition()
    node = definition.graph.node(NodeName("bad-records"))
    assert node.role is Role.SINK
    assert [str(e.upstream) for e in node.inputs] == ["source", "map", "with-timestamps", "key-by", "reduce"]
    assert {e.tag for e in node.inputs} == {BAD_RECORDS}
    assert definition.diverts


def test_without_a_dead_letter_sink_there_is_no_such_node() -> None:
    pipeline, rows = made()
    rows.sink(hg.Discard())
    assert names(pipeline) == ["source", "sink"]
    assert not pipeline.definition().diverts


def test_sessions_that_are_updated_are_changes() -> None:
    _, rows = made()
    keyed = rows.with_timestamps("ts").key_by("service")
    visits = keyed.window(hg.Session("5s"), allowed_lateness="1s").agg(n=pl.len())
    assert visits.schema.names == ["service", "window_start", "window_end", "n", "op"]
    assert visits._change_keys == ("service", "window_start")
    assert keyed.window(hg.Session("5s"), late_output="late").agg(n=pl.len())._change_keys is None
    both = keyed.window(hg.Session("5s"), allowed_lateness="1s", retractions=True).agg(n=pl.len())
    both.key_by("n").agg(visits=pl.len())
    for window in (hg.Session("5s"), hg.Tumbling("5s")):
        with pytest.raises(hg.UsageError, match="retractions=True is for results that are changes"):
            keyed.window(window, retractions=True)
    for retractions, keys in ((False, ("service", "window_start")), (True, ())):
        updated = keyed.window(hg.Session("5s"), early="1s", retractions=retractions)
        assert updated.apply(lambda key, frame: None, {"n": pa.int64()})._change_keys == keys
        reduced = updated.reduce(lambda total, row: total)
        assert reduced._change_keys == ("service", "window_start")
        assert reduced.schema.names[0] == "service"
        assert reduced.schema.names[-1] == "op"
    with pytest.raises(hg.UsageError, match="'op'"):
        updated.apply(lambda key, frame: None, {"op": pa.string()})
    with pytest.raises(hg.UsageError, match="accumulate=False needs tumbling windows"):
        keyed.window(hg.Session("5s"), early="1s", accumulate=False)


def test_pre_aggregation_reads_the_output_and_input_that_the_window_would_read() -> None:
    keyed = hg.Pipeline("p").source(hg.FromRows([{"k": 1, "ts": 1}])).with_timestamps("ts").key_by("k")
    side = OutputTag("side")
    keyed._pipeline._builder.outputs[NodeName("key-by")][side] = keyed.schema
    keyed._all_edges = tuple(replace(edge, tag=side) for edge in keyed._edges)
    keyed.window(hg.Tumbling("1m")).agg(n=pl.len())
    assert keyed._pipeline._builder.node(NodeName("window-combine")).inputs == (Edge(NodeName("key-by"), tag=side),)


PAYMENTS = [{"service": "a", "n": 1, "ts": 5_000}]


class Count(hg.ProcessFunction):
    schema = {"service": pa.string(), "times": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.times = state.value("times", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.times.put(self.times.get(0) + 1)
        yield {"service": context.key, "times": self.times.get()}


def processed() -> tuple[hg.Pipeline, hg.Stream]:
    pipeline = hg.Pipeline("test")
    return pipeline, pipeline.source(hg.FromRows(PAYMENTS)).with_timestamps("ts")


def test_process_reads_checked_keys_over_a_hash_edge_and_knows_its_schema_and_state() -> None:
    pipeline, rows = processed()
    counted = rows.key_by("service").process(Count(), name="count")
    counted.sink(hg.Discard())
    node = pipeline.definition().graph.node(NodeName("count"))
    assert node.inputs == (Edge(NodeName("key-by"), Partitioner.HASH, ("service",)),)
    assert node.state_text == "keyed state(keys service: large_string; value times: int64)"
    assert counted.schema == pa.schema([("service", pa.large_string()), ("times", pa.int64())])


def test_event_time_survives_when_its_column_does() -> None:
    class Same(hg.ProcessFunction):
        pass

    _, rows = processed()
    assert rows.key_by("service").process(Same())._time_column == "ts"
    assert rows.key_by("service").process(Count())._time_column is None


def test_a_vectorised_function_has_the_same_state_as_one_by_row() -> None:
    class CountBatches(hg.BatchProcessFunction):
        schema = Count.schema

        def open(self, state: hg.BatchStateHandle) -> None:
            self.times = state.value("times", pa.int64())

    texts = []
    for function in (Count(), CountBatches()):
        pipeline, rows = processed()
        rows.key_by("service").process(function, name="count").sink(hg.Discard())
        texts.append(pipeline.definition().graph.node(NodeName("count")).state_text)
    assert texts[0] == texts[1]


def test_process_without_a_key_says_key_by_first() -> None:
    _, rows = processed()
    with pytest.raises(hg.UsageError, match=r"call key_by\(...\) first"):
        rows.process(Count())


@pytest.mark.parametrize("function", [Count, lambda row: row, None])
def test_process_takes_an_instance_of_a_process_function(function: Any) -> None:
    _, rows = processed()
    with pytest.raises(hg.UsageError, match="operator 'process': an instance of a ProcessFunction or"):
        rows.key_by("service").process(function)


@pytest.mark.parametrize("base", [hg.ProcessFunction, hg.BatchProcessFunction])
def test_a_function_with_timers_in_a_loop_is_refused(base: Any) -> None:
    class Timed(base):  # type: ignore[misc]
        def process(self, given: Any, context: Any) -> None:
            return None

        def on_timer(self, timer: Any, context: Any) -> None:
            return None

    def body(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
        step = loop.process(Timed(), name="timed")
        return step, step

    _, rows = processed()
    with pytest.raises(hg.UsageError, match=r"operator 'timed' has on_timer, but is in loop 'trips'"):
        rows.key_by("service").iterate(body, name="trips")


def test_timers_alone_are_state() -> None:  # TM6
    class Timed(hg.ProcessFunction):
        def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> None:
            return None

    pipeline, rows = processed()
    rows.key_by("service").process(Timed(), name="timed").sink(hg.Discard())
    node = pipeline.definition().graph.node(NodeName("timed"))
    assert node.state_text == "keyed state(keys service: large_string; timers)"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda rows: rows.explode(pl.col("items")), "explode: the name of one column is needed, such as 'items'"),
        (lambda rows: rows.explode("items", position=True), "position= must be the name of a column to add"),
        (lambda rows: rows.explode("items", position=""), "position= must be the name of a column to add"),
    ],
)
def test_explode_takes_names(call: Any, said: str) -> None:
    rows = hg.Pipeline("p").source(hg.FromRows([{"items": [1]}]))
    with pytest.raises(hg.UsageError, match=said):
        call(rows)


def test_a_process_function_without_process_is_named() -> None:
    misspelled = type("Misspelled", (hg.ProcessFunction,), {"proces": lambda self, row, context: [row]})
    pipeline = hg.Pipeline("p", restart=hg.NoRestart())
    pipeline.source(hg.FromRows([{"k": 1}])).key_by("k").process(misspelled()).sink(hg.Discard())
    with pytest.raises(hg.PipelineFailed, match="Misspelled has no method process; define it"):
        run(pipeline)


ASKED = [{"x": 1, "k": "a"}]


async def same(row: dict[str, Any]) -> Any:
    return row


def async_spec() -> tuple[hg.Pipeline, hg.Stream]:
    pipeline = hg.Pipeline("p")
    return pipeline, pipeline.source(hg.FromRows(ASKED))


def test_it_keeps_or_declares_the_schema_and_stands_in_a_vertex_of_its_own() -> None:
    pipeline, rows = async_spec()
    one = rows.map_async(same)
    assert one.schema == rows.schema
    other = one.key_by("k").map_async(same, {"y": int}, name="ask")
    assert other.schema == pa.schema([("y", pa.int64())])
    assert isinstance(other, hg.Stream)
    other.sink(hg.Discard())
    vertices = pipeline.definition().plan.vertices
    assert [[str(n.name) for n in v.nodes] for v in vertices] == [
        ["source"],
        ["map-async"],
        ["key-by"],
        ["ask"],
        ["sink"],
    ]


def test_event_time_goes_through() -> None:
    rows = hg.Pipeline("p").source(hg.FromRows([{"k": 1, "t": 5}])).with_timestamps("t")
    rows.map_async(same).key_by("k").window(hg.Tumbling("1s"))


def test_bound_methods_partial_functions_and_objects_that_are_called_are_taken() -> None:
    from functools import partial

    class Ask:
        async def __call__(self, row: dict[str, Any]) -> Any:
            return row

        async def method(self, row: dict[str, Any]) -> Any:
            return row

    async def given(more: int, row: dict[str, Any]) -> Any:
        return row

    for function in (Ask(), Ask().method, partial(given, 1)):
        async_spec()[1].map_async(function)


class NoCall(hg.AsyncFunction):
    pass


class Ordinary(hg.AsyncFunction):
    def call(self, row: dict[str, Any]) -> Any:  # type: ignore[override]
        return row


class Opened:
    def open(self) -> None: ...

    async def __call__(self, row: dict[str, Any]) -> Any:
        return row


async def yielding(row: dict[str, Any]) -> Any:
    yield row


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda row: row, "needs an 'async def' function of a row .* for an ordinary function use map"),
        (7, "needs an 'async def' function"),
        (NoCall(), "NoCall has no method 'async def call"),
        (NoCall, r"give an instance, such as NoCall\(\), not the class"),
        (Ordinary(), "Ordinary.call must be an 'async def'"),
        (Opened(), "Opened.open would never be called; derive the class from headgate.AsyncFunction"),
        (yielding, "must return a list of dicts instead of yielding them"),
    ],
)
def test_what_is_no_async_function_is_refused(function: Any, problem: str) -> None:
    with pytest.raises(hg.UsageError, match=f"operator 'map-async': .*{problem}"):
        async_spec()[1].map_async(function)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"limit": 0}, "limit must be a number from 1 on, not 0"),
        ({"limit": True}, "limit must be a number from 1 on"),
        ({"retries": -1}, "retries must be a number from 0 on"),
        ({"timeout": 0}, "timeout must be positive"),
        ({"on_timeout": 5}, "on_timeout must be an ordinary function"),
        ({"on_timeout": same}, "on_timeout must be an ordinary function"),
        ({"retry_if": "ConnectionError"}, "retry_if must be an ordinary function"),
        ({"capacity": 7}, "capacity"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(hg.UsageError, match=problem):
        async_spec()[1].map_async(same, **options)


def test_it_is_refused_in_a_loop_and_taken_after_one() -> None:
    _, rows = async_spec()
    with pytest.raises(hg.UsageError, match="cannot be in the body of loop 'iterate'"):
        rows.iterate(lambda loop: (loop.map_async(same), loop))
    rows.iterate(lambda loop: (loop.filter(lambda row: False), loop)).map_async(same)


AUCTIONS = [{"id": i, "seller": i % 7, "note": f"auction {'x' * (i % 30)}"} for i in range(60)]
BIDS = [{"auction": i * 13 % 70, "price": i * 31 % 97, "text": None if i % 5 == 0 else f"bid {i}"} for i in range(900)]


def streams(pipeline: hg.Pipeline) -> tuple[hg.Stream, hg.Stream]:
    return (
        pipeline.source(hg.FromRows(AUCTIONS, splits=3, batch_rows=8), name="auctions"),
        pipeline.source(hg.FromRows(BIDS, splits=3, batch_rows=50), name="bids"),
    )


def joined(pipeline: hg.Pipeline, how: Any = "inner") -> hg.Stream:
    auctions, bids = streams(pipeline)
    return auctions.join(bids, left_on="id", right_on="auction", ttl=None, how=how)


def shuffles_to(stream: hg.Stream, name: str) -> bool:
    stream.sink(hg.Discard())
    graph = stream._pipeline.definition().graph
    return any(
        edge.partitioner is Partitioner.HASH for node in graph.nodes if node.name == name for edge in node.inputs
    )


@pytest.mark.parametrize(
    ("change", "key", "is_needed"),
    [
        (lambda pairs: pairs, "id", False),
        (lambda pairs: pairs.filter(pl.col("price") > 5), "id", False),
        (lambda pairs: pairs.select(pl.col("id").alias("auction"), "price"), "auction", False),
        (lambda pairs: pairs.with_columns(price=pl.col("price") + 1), "id", False),
        (lambda pairs: pairs.with_columns(id=pl.col("id") // 2), "id", True),
        (lambda pairs: pairs.select((pl.col("id") // 2).alias("id"), "price"), "id", True),
        (lambda pairs: pairs.select(pl.col("seller").alias("id"), "price"), "id", True),
        (lambda pairs: pairs.map_batches(lambda batch: batch), "id", True),
        (lambda pairs: pairs.rebalance(), "id", True),
        (lambda pairs: pairs, "seller", True),
    ],
)
def test_a_shuffle_is_left_out_where_the_key_is_that_of_the_join(change: Any, key: str, is_needed: bool) -> None:
    pairs = change(joined(hg.Pipeline("test")))
    assert shuffles_to(pairs.key_by(key).top(1, by="price", within=None), "top") is is_needed


@pytest.mark.parametrize("how", ["right", "full", "left"])
def test_rows_without_a_partner_are_sent_to_the_subtask_of_their_key(how: str) -> None:
    pairs = joined(hg.Pipeline("test"), how).filter(pl.col("id").is_not_null())
    assert shuffles_to(pairs.key_by("id").top(1, by="price", within=None), "top")


@pytest.mark.parametrize(("parallelism", "is_killed"), few(product((1, 2, 3), (False, True)), 3))
def test_the_best_partner_of_each_row_is_the_same(parallelism: int, is_killed: bool, tmp_path: Path) -> None:
    checkpoints = hg.Checkpointing(interval="20ms", dir=str(tmp_path / "c"))
    pipeline = hg.Pipeline("test", parallelism=parallelism, checkpointing=checkpoints)
    some = joined(pipeline).filter(pl.col("price") % 3 != 0)
    best = some.key_by("id").top(2, by=["price", "text"], descending=[True, False], within=None)
    sink = Collect(tmp_path / "out")
    best.sink(sink)
    if is_killed:
        run_killing(pipeline, 1)
    else:
        run(pipeline)
    found = {(row["id"], row["rank"]): (row["price"], row["text"], row["note"]) for row in sink.rows()}
    pairs = pl.DataFrame(AUCTIONS).join(pl.DataFrame(BIDS), left_on="id", right_on="auction")
    ordered = pairs.filter(pl.col("price") % 3 != 0).sort("price", "text", descending=[True, False], nulls_last=True)
    expected = {
        (row["id"], rank): (row["price"], row["text"], row["note"])
        for _, rows in ordered.group_by("id", maintain_order=True)
        for rank, row in enumerate(rows.head(2).to_dicts(), 1)
    }
    assert found == expected
