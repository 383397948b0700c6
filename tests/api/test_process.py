from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.model.graph import Edge, Partitioner
from headgate.model.ids import NodeName

ROWS = [{"service": "a", "n": 1, "ts": 5_000}]


class Count(hg.ProcessFunction):
    schema = {"service": pa.string(), "times": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.times = state.value("times", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        self.times.put(self.times.get(0) + 1)
        yield {"service": context.key, "times": self.times.get()}


def made() -> tuple[hg.Pipeline, hg.Stream]:
    pipeline = hg.Pipeline("test")
    return pipeline, pipeline.source(hg.FromRows(ROWS)).with_timestamps("ts")


def test_process_reads_checked_keys_over_a_hash_edge_and_knows_its_schema_and_state() -> None:
    pipeline, rows = made()
    counted = rows.key_by("service").process(Count(), name="count")
    counted.sink(hg.Discard())
    node = pipeline.definition().graph.node(NodeName("count"))
    assert node.inputs == (Edge(NodeName("key-by"), Partitioner.HASH, ("service",)),)
    assert node.state_text == "keyed state(keys service: large_string; value times: int64)"
    assert counted.schema == pa.schema([("service", pa.large_string()), ("times", pa.int64())])


def test_event_time_survives_when_its_column_does() -> None:
    class Same(hg.ProcessFunction):
        pass

    _, rows = made()
    assert rows.key_by("service").process(Same())._time_column == "ts"
    assert rows.key_by("service").process(Count())._time_column is None


def test_a_vectorised_function_has_the_same_state_as_one_by_row() -> None:
    class CountBatches(hg.BatchProcessFunction):
        schema = Count.schema

        def open(self, state: hg.BatchStateHandle) -> None:
            self.times = state.value("times", pa.int64())

    texts = []
    for function in (Count(), CountBatches()):
        pipeline, rows = made()
        rows.key_by("service").process(function, name="count").sink(hg.Discard())
        texts.append(pipeline.definition().graph.node(NodeName("count")).state_text)
    assert texts[0] == texts[1]


def test_process_without_a_key_says_key_by_first() -> None:
    _, rows = made()
    with pytest.raises(hg.UsageError, match=r"call key_by\(...\) first"):
        rows.process(Count())


@pytest.mark.parametrize("function", [Count, lambda row: row, None])
def test_process_takes_an_instance_of_a_process_function(function: Any) -> None:
    _, rows = made()
    with pytest.raises(hg.UsageError, match="operator 'process': an instance of a ProcessFunction or"):
        rows.key_by("service").process(function)


@pytest.mark.parametrize("base", [hg.ProcessFunction, hg.BatchProcessFunction])
def test_a_function_with_timers_in_a_loop_is_refused(base: Any) -> None:  # TM11
    class Timed(base):  # type: ignore[misc]
        def process(self, given: Any, context: Any) -> None:
            return None

        def on_timer(self, timer: Any, context: Any) -> None:
            return None

    def body(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
        step = loop.process(Timed(), name="timed")
        return step, step

    _, rows = made()
    with pytest.raises(hg.UsageError, match=r"operator 'timed' has on_timer, but is in loop 'trips'"):
        rows.key_by("service").iterate(body, name="trips")


def test_timers_alone_are_state() -> None:  # TM6
    class Timed(hg.ProcessFunction):
        def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> None:
            return None

    pipeline, rows = made()
    rows.key_by("service").process(Timed(), name="timed").sink(hg.Discard())
    node = pipeline.definition().graph.node(NodeName("timed"))
    assert node.state_text == "keyed state(keys service: large_string; timers)"
