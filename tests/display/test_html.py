"""What notebooks show of pipelines, streams and runs: nothing runs for it, and names stay text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors.base import Source, SourceContext
from headgate.display.html import GAP_X, MARGIN, NODES_MAX, WIDTH, graph_svg, make_layout, value_text
from headgate.display.progress import end_text, progress_html
from headgate.model.graph import Edge, Node, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.model.progress import LoopProgress, NodeProgress, PipelineState, Progress, RunResult

ODD = '<script>alert("x")</script>&\'\x00\ud800 ☃'
SVG = "{http://www.w3.org/2000/svg}"


def node(name: str, *upstream: str, role: Role = Role.OPERATOR, feedback: tuple[str, ...] = ()) -> Node:
    inputs = tuple(Edge(NodeName(one)) for one in upstream)
    return Node(NodeName(name), role, inputs, None, "n: int64", feedback=tuple(Edge(NodeName(one)) for one in feedback))


class Untouchable(Source):
    """A source that must be neither opened nor asked for more than its columns."""

    def schema(self) -> pa.Schema:
        return pa.schema({ODD.replace("\ud800", "").replace("\x00", ""): pa.int64(), "ts": pa.timestamp("us")})

    def identity(self) -> str:
        return "untouchable"

    def open(self, context: SourceContext) -> Any:
        raise AssertionError("looking at a stream opened its source")


def is_harmless(html: str) -> bool:
    """Whether ``html`` is well formed and has neither scripts nor what browsers and XML cannot take."""
    parsed = ElementTree.fromstring(html)
    tags = {element.tag.removeprefix(SVG) for element in parsed.iter()}
    return "script" not in tags and "\x00" not in html and html.encode() is not None


def test_a_stream_shows_its_columns_and_runs_nothing() -> None:
    p = hg.Pipeline("p")
    stream = p.source(Untouchable()).with_timestamps("ts")
    html = stream._repr_html_()
    assert is_harmless(html)
    assert "&lt;script&gt;" in html
    assert "int64" in html
    assert "event time" in html
    assert "<td" in stream.key_by("ts")._repr_html_()
    keyed = stream.key_by("ts")._repr_html_()
    assert "key, event time" in keyed
    assert "show()" in html
    assert "show()" not in keyed, "which it does not have"


def test_rows_that_the_program_gave_are_shown_and_computed_ones_are_not() -> None:
    p = hg.Pipeline("p")
    rows = [{"word": ODD.replace("\ud800", "") if number == 0 else f"w{number}", "n": None} for number in range(9)]
    stream = p.source(hg.FromRows(rows, schema={"word": str, "n": int}))
    html = stream._repr_html_()
    assert is_harmless(html)
    assert "w4" in html
    assert "null" in html
    assert "w5" not in html
    assert "w1" not in stream.filter(pl.col("n") > 1)._repr_html_()
    assert "w1" not in stream.union(p.source(hg.FromRows(rows, schema={"word": str, "n": int})))._repr_html_()


def test_wide_schemas_are_cut() -> None:
    p = hg.Pipeline("p")
    wide = p.source(hg.FromRows([{f"c{number}": number for number in range(300)}]))
    assert "and 270 more columns" in wide._repr_html_()
    assert "and 100 more columns" in wide.filter(pl.col("c1") > 0)._repr_html_()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), ("x" * 99, "x" * 59 + "…"), (1.5, "1.5"), (b"ab", "b'ab'"), ([1] * 9, "[1, 1, 1, 1, 1, 1, ...]")],
)
def test_values_fit_their_cells(value: object, text: str) -> None:
    assert value_text(value) == text


def test_a_pipeline_is_drawn_while_it_is_written() -> None:
    p = hg.Pipeline("p", bad_records=hg.DeadLetter(hg.Discard()))
    assert "0 operators" in p._repr_html_()
    assert p._repr_svg_() is None
    keyed = p.source(Untouchable(), name="in").key_by("ts")
    assert "by ts" not in p._repr_html_()
    keyed.reduce(lambda one, other: other, name="last").sink(hg.Discard())
    html, svg = p._repr_html_(), p._repr_svg_()
    assert is_harmless(html)
    assert svg is not None
    for picture in (ElementTree.fromstring(svg), ElementTree.fromstring(html)):
        texts = [text.text for text in picture.iter(f"{SVG}text")]
        assert {"in", "last", "sink", "bad-records", "by ts"} <= set(texts), "what would run, with its dead letters"


def test_operators_stand_behind_all_that_feed_them_and_nowhere_twice() -> None:
    nodes = [node("a"), node("b"), node("c", "a"), node("d", "a", "b"), node("e", "c", "d"), node("f", "a")]
    layout = make_layout(nodes)
    columns = {name: round((place.x - MARGIN) / (WIDTH + GAP_X)) for name, place in layout.places.items()}
    assert columns == {"a": 0, "b": 0, "c": 1, "d": 1, "f": 1, "e": 2}
    assert len({(place.x, place.y) for place in layout.places.values()}) == len(nodes)
    assert all(place.x + WIDTH < layout.width and place.y < layout.height for place in layout.places.values())
    assert make_layout([]).places == {}


def test_what_leads_back_is_drawn_and_has_no_say_in_the_places() -> None:
    head = node("loop", "in", role=Role.LOOP_HEAD, feedback=("step",))
    nodes = [node("in", role=Role.SOURCE), head, node("step", "loop"), node("out", "step", role=Role.SINK)]
    assert sum(arrow.is_feedback for arrow in make_layout(nodes).arrows) == 1
    svg = graph_svg(nodes)
    assert is_harmless(svg)
    assert svg.count('stroke="#b25e00"') == 2, "the head of the loop, and the way back"


def test_keys_and_routes_are_written_on_the_arrows() -> None:
    edge = Edge(NodeName("a"), Partitioner.HASH, (ODD,))
    spread = Edge(NodeName("a"), Partitioner.BROADCAST)
    nodes = [node("a"), Node(NodeName("b"), Role.SINK, (edge, spread), None, ODD)]
    svg = graph_svg(nodes)
    assert is_harmless(svg)
    assert "by &lt;script&gt;" in svg
    assert "broadcast" in svg


def test_a_picture_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    p = hg.Pipeline("p")
    stream = p.source(hg.FromRows([{"n": 1}]))
    for _ in range(NODES_MAX):
        stream.sink(hg.Discard())
    assert "<svg" not in p._repr_html_()
    assert f"{NODES_MAX + 1} operators; describe() prints them" in p._repr_html_()
    assert p._repr_svg_() is None


def test_a_run_is_shown_with_its_numbers_and_its_end() -> None:
    nodes = (NodeProgress(NodeName("map"), records_in=1_234, busy=0.2), NodeProgress(NodeName("sink"), busy=0.9))
    progress = Progress(PipelineState.FAILED, nodes=nodes, loops=(LoopProgress(NodeName("loop"), came_back=7),))
    html = progress_html("p", progress, end_text(hg.PipelineFailed(ODD)))
    assert is_harmless(html)
    assert html.index("sink") < html.index("map"), "the busiest first"
    assert "1,234" in html
    assert "7 came back" in html
    assert "&lt;script&gt;" in html


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (RunResult(True, 1, 1, None, 0, 1), "all input has been processed"),
        (RunResult(False, 1, 1, None, 0, 1), "begins at the beginning"),
    ],
)
def test_the_end_of_a_run_says_what_the_next_one_does(result: RunResult, text: str) -> None:
    assert text in end_text(result)


@pytest.mark.parametrize("look", [lambda p: p._repr_html_(), lambda p: p._repr_svg_(), repr])
def test_looking_changes_nothing(look: Callable[[hg.Pipeline], object]) -> None:
    p = hg.Pipeline("p")
    p.source(hg.FromRows([{"n": 1}])).map(lambda row: row).sink(hg.Discard())
    before = p.describe()
    look(p)
    assert p.describe() == before
