"""``connect``: a broadcast stream beside another one (docs/spec/broadcast.md)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operators.process.broadcast_functions import BatchLimits, Limits, Unkeyed

import headgate as hg
from headgate.errors import UsageError
from headgate.model.graph import BROADCAST_INPUT, Partitioner


class Same(Unkeyed):
    schema = None

    def process(self, row: Any, context: Any) -> list[Any]:
        return [row]


def streams(name: str = "p") -> tuple[hg.Pipeline, hg.Stream, hg.Stream]:
    pipeline = hg.Pipeline(name)
    events = pipeline.source(hg.FromRows([{"key": 1, "name": "a", "value": 1}]), name="events")
    rules = pipeline.source(hg.FromRows([{"name": "a", "limit": 1}]), name="rules")
    return pipeline, events, rules


@pytest.mark.parametrize("function", [Limits(), BatchLimits()])
def test_a_function_of_two_sides_has_the_columns_of_its_schema(function: Any) -> None:
    pipeline, events, rules = streams()
    told = events.key_by("key").connect(rules.broadcast()).process(function, name="apply", state=hg.Memory())
    assert told.columns == ["key", "value", "limit", "number"]
    told.sink(hg.Discard())
    edges = {(str(e.from_node), e.partitioner, e.input) for e in pipeline.definition().plan.edges if e.target != "sink"}
    assert ("rules", Partitioner.FIRST, "main") in edges
    assert ("apply-broadcast", Partitioner.BROADCAST, BROADCAST_INPUT) in edges
    assert ("key-by", Partitioner.HASH, "main") in edges


def test_names_are_derived_as_everywhere() -> None:
    pipeline, events, rules = streams()
    once = events.connect(rules.broadcast()).process(Unkeyed())
    again = events.connect(rules.broadcast()).process(Unkeyed())
    once.union(again).sink(hg.Discard())
    names = [str(node.name) for vertex in pipeline.definition().plan.vertices for node in vertex.nodes]
    assert names == ["events", "rules", "process-broadcast", "process", "process-2-broadcast", "process-2", "sink"]


def test_event_times_of_the_stream_go_on() -> None:
    _, events, rules = streams()
    timed = events.with_timestamps("value").connect(rules.broadcast()).process(Same())
    timed.key_by("key").window(hg.Tumbling("1s"))
    plain = events.connect(rules.with_timestamps("limit").broadcast()).process(Same())
    with pytest.raises(UsageError, match="needs event times"):
        plain.key_by("key").window(hg.Tumbling("1s"))


def test_connect_in_loops_is_placed_where_its_records_are() -> None:
    pipeline, events, rules = streams()

    class Timed(Limits):
        def on_timer(self, timer: Any, context: Any) -> None: ...

    def body(loop: hg.Stream) -> Any:
        outside = loop.key_by("key").connect(rules.broadcast()).process(Same(), name="outside")
        inside = outside.connect(outside.broadcast()).process(Same(), name="inside")
        with pytest.raises(UsageError, match="operator 'timed' has on_timer, but is in loop 'loop'"):
            loop.key_by("key").connect(rules.broadcast()).process(Timed(), name="timed")
        return inside.filter(lambda row: False), inside

    out = events.iterate(body, name="loop")
    out.connect(rules.broadcast()).process(Same(), name="behind")
    loops = {str(node.name): node.loops for node in pipeline._builder.nodes}
    assert loops["outside"] == loops["inside"] == loops["inside-broadcast"] == ("loop",)
    assert loops["outside-broadcast"] == loops["behind"] == loops["behind-broadcast"] == ()
    assert not {"timed", "timed-broadcast"} & loops.keys(), "of what was refused nothing stays"


def test_what_cannot_be_connected_is_refused() -> None:
    _, events, rules = streams()
    _, others, _ = streams("q")
    side: Any
    for main, side, problem in (
        (events, rules, r"connect takes a broadcast stream: stream\.connect\(rules\.broadcast\(\)\); or call key_by"),
        (events, rules.broadcast().map(lambda row: row), r"connect takes a broadcast stream: stream\.connect"),
        (events, "rules", r"or a stream with a key, not str"),
        (events, rules.key_by("name"), r"call key_by\(...\) on this one as well"),
        (events.key_by("key"), rules, r"or call key_by\(\.\.\.\) on both streams"),
        (others, rules.broadcast(), "these belong to two"),
        (events.broadcast(), rules.broadcast(), "both sides of connect are broadcast"),
    ):
        with pytest.raises(UsageError, match=problem):
            main.connect(side)
    for wrong in (hg.ProcessFunction(), Limits, lambda row: row):
        with pytest.raises(UsageError, match="an instance of a BroadcastProcessFunction or Batch"):
            events.key_by("key").connect(rules.broadcast()).process(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Limits has a broadcast side; connect the stream with one"):
        events.key_by("key").process(Limits())
    assert repr(events.connect(rules.broadcast())).startswith("ConnectedStreams(Stream(key: int64")
