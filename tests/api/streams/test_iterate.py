"""What ``iterate`` makes of a body, and what it refuses. The runtime is elsewhere (tests/runtime)."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import polars as pl
import pytest

import headgate as hg
from headgate.model.graph import Edge, Node, Partitioner, Role
from headgate.model.ids import NodeName
from headgate.operators.loop_head import LoopHeadSpec

ROWS = [{"id": 1, "n": 7}]
BIG, SMALL = pl.col("n") > 9, pl.col("n") <= 9


class Step(hg.ProcessFunction):
    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterable[dict[str, Any]]:
        return [row]


class Listening(Step):
    def on_round(self, round: int, context: hg.ProcessContext) -> None:
        return None


class ListeningByBatch(hg.BatchProcessFunction):
    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        return batch

    def on_round(self, round: int, context: hg.BatchContext) -> pl.DataFrame | None:
        return None


def made(bad_records: hg.DeadLetter | None = None) -> tuple[hg.Pipeline, hg.Stream]:
    pipeline = hg.Pipeline("test", bad_records=bad_records)
    return pipeline, pipeline.source(hg.FromRows(ROWS))


def halve(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
    return loop.filter(BIG, name="big"), loop.filter(SMALL, name="small")


def nodes(pipeline: hg.Pipeline) -> dict[str, Node]:
    return {str(node.name): node for node in pipeline.definition().graph.nodes}


def test_the_head_gets_the_input_and_the_feedback_and_the_body_is_in_the_loop() -> None:
    pipeline, rows = made()
    rows.iterate(halve).sink(hg.Discard())
    found = nodes(pipeline)
    assert list(found) == ["source", "iterate", "big", "small", "sink"]
    head = found["iterate"]
    assert head.role is Role.LOOP_HEAD
    assert head.inputs == (Edge(NodeName("source")),)
    assert head.feedback == (Edge(NodeName("big")),)
    assert head.spec == LoopHeadSpec((), rows.schema)
    assert head.state_text == "loop(columns id: int64, n: int64; log 1)"
    assert {name: node.loops for name, node in found.items()} == {
        "source": (),
        "iterate": ("iterate",),
        "big": ("iterate",),
        "small": ("iterate",),
        "sink": (),
    }


def test_the_loop_stream_of_a_stream_is_a_stream_with_its_columns_and_the_round() -> None:
    _, rows = made()
    seen: list[hg.Stream] = []

    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        seen.append(loop)
        return halve(loop)

    rows.iterate(body, round_column="trip")
    assert isinstance(seen[0], hg.Stream)
    assert seen[0].columns == ["id", "n", "trip"]


def test_a_keyed_loop_gives_a_keyed_stream_and_brings_feedback_to_its_key() -> None:
    pipeline, rows = made()

    def body(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
        assert isinstance(loop, hg.KeyedStream)
        assert loop.keys == ("id",)
        return halve(loop.process(Step(), name="step"))

    rows.key_by("id").iterate(body).sink(hg.Discard())
    found = nodes(pipeline)
    assert found["iterate"].inputs == (Edge(NodeName("key-by"), Partitioner.HASH, ("id",)),)
    assert found["step"].inputs == (Edge(NodeName("iterate")),)  # chained: records are where their key belongs
    assert found["iterate"].feedback == (Edge(NodeName("iterate-feedback"), Partitioner.HASH, ("id",)),)
    assert found["iterate-feedback"].inputs == (Edge(NodeName("big")),)
    assert found["iterate-feedback"].loops == ("iterate",)


def test_a_null_key_that_comes_back_is_diverted_like_any_other() -> None:
    pipeline, rows = made(hg.DeadLetter(hg.Discard()))
    rows.key_by("id").iterate(lambda loop: halve(loop.process(Step()))).sink(hg.Discard())
    assert "iterate-feedback" in {str(edge.upstream) for edge in nodes(pipeline)["bad-records"].inputs}


def test_feedback_by_the_keys_of_the_loop_needs_no_second_check() -> None:
    pipeline, rows = made()

    def body(loop: hg.KeyedStream) -> tuple[hg.KeyedStream, hg.Stream]:
        big, small = halve(loop.process(Step()))
        return big.key_by("id", name="again"), small

    rows.key_by("id").iterate(body).sink(hg.Discard())
    assert nodes(pipeline)["iterate"].feedback == (Edge(NodeName("again"), Partitioner.HASH, ("id",)),)


def test_several_feedback_streams_and_several_outputs() -> None:
    pipeline, rows = made()

    def body(loop: hg.Stream) -> tuple[list[hg.Stream], tuple[hg.Stream, hg.Stream]]:
        big, small = halve(loop)
        return [big.rebalance(), small.union(big.filter(BIG, name="bigger"))], (big, small)

    first, second = rows.iterate(body)
    first.sink(hg.Discard())
    second.sink(hg.Discard())
    assert nodes(pipeline)["iterate"].feedback == (
        Edge(NodeName("big"), Partitioner.REBALANCE),
        Edge(NodeName("small")),
        Edge(NodeName("bigger")),
    )


def test_a_loop_may_end_in_its_own_sinks() -> None:
    pipeline, rows = made()

    def body(loop: hg.Stream) -> tuple[hg.Stream, tuple[()]]:
        loop.filter(SMALL).sink(hg.Discard())
        return loop.filter(BIG), ()

    assert rows.iterate(body) == ()
    assert nodes(pipeline)["sink"].loops == ("iterate",)


def test_a_body_whose_only_reader_is_the_feedback_is_read() -> None:
    pipeline, rows = made()
    rows.iterate(lambda loop: (loop.filter(BIG), loop)).sink(hg.Discard())
    pipeline.definition()


def test_the_feedback_may_be_the_loop_itself_if_rounds_are_limited() -> None:
    pipeline, rows = made()
    rows.iterate(lambda loop: (loop, loop), max_rounds=3).sink(hg.Discard())
    assert nodes(pipeline)["iterate"].feedback == (Edge(NodeName("iterate")),)


@pytest.mark.parametrize(
    ("options", "column"),
    [({}, None), ({"max_rounds": 3}, "round"), ({"on_round": print}, "round"), ({"round_column": "r"}, "r")],
)
def test_rounds_are_counted_when_something_needs_them(options: dict[str, Any], column: str | None) -> None:
    pipeline, rows = made()
    rows.iterate(halve, **options).sink(hg.Discard())
    spec = nodes(pipeline)["iterate"].spec
    assert isinstance(spec, LoopHeadSpec)
    assert spec.round_column == column
    assert (spec.max_rounds, spec.on_round) == (options.get("max_rounds"), options.get("on_round"))


def test_loops_nest_and_stand_side_by_side() -> None:
    pipeline, rows = made()

    def outer(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        inner = loop.select("id", "n", name="before").iterate(halve)
        return inner.filter(BIG, name="back"), inner.filter(SMALL, name="out")

    first = rows.iterate(outer)
    first.iterate(lambda loop: (loop.filter(BIG, name="more"), loop), name="beside").sink(hg.Discard())
    loops = {name: node.loops for name, node in nodes(pipeline).items() if node.loops}
    assert loops == {
        "iterate": ("iterate",),
        "before": ("iterate",),
        "iterate-2": ("iterate", "iterate-2"),
        "big": ("iterate", "iterate-2"),
        "small": ("iterate", "iterate-2"),
        "back": ("iterate",),
        "out": ("iterate",),
        "beside": ("beside",),
        "more": ("beside",),
    }


def test_a_loop_in_a_loop_by_key_begins_where_the_records_are() -> None:
    pipeline, rows = made()

    def inner(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
        return halve(loop.process(Step()))

    rows.key_by("id").iterate(
        lambda loop: (loop.iterate(inner), loop.process(Step())),
    ).sink(hg.Discard())
    assert nodes(pipeline)["iterate-2"].inputs == (Edge(NodeName("iterate")),)


def test_what_does_not_come_from_the_loop_is_not_in_it() -> None:
    pipeline, rows = made()

    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        aside = rows.filter(BIG, name="aside")
        return loop.union(aside).filter(BIG, name="both"), loop

    rows.iterate(body).sink(hg.Discard())
    found = nodes(pipeline)
    assert (found["aside"].loops, found["both"].loops) == ((), ("iterate",))


def test_event_time_ends_at_a_loop_and_can_begin_again_in_it_and_behind_it() -> None:
    _, rows = made()
    window = hg.Tumbling("1s")

    def body(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
        with pytest.raises(hg.UsageError, match=r"no loop carries round; call \.with_timestamps"):
            loop.window(window)
        step = loop.process(Step())
        timed = step.with_timestamps("n")
        timed.key_by("id").window(window).agg(pl.len()).sink(hg.Discard())
        return step.filter(BIG), timed

    behind = rows.with_timestamps("n").key_by("id").iterate(body)
    with pytest.raises(hg.UsageError, match=r"needs event times; call \.with_timestamps"):
        behind.key_by("id").window(window)
    behind.with_timestamps("n").key_by("id").window(window)


def test_the_error_of_a_body_comes_through_and_nothing_of_the_loop_remains() -> None:
    pipeline, rows = made()

    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        loop.filter(BIG).sink(hg.Discard())
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        rows.iterate(body)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "body"
    rows.iterate(halve).sink(hg.Discard())
    assert list(nodes(pipeline)) == ["source", "iterate", "big", "small", "sink"]


@pytest.mark.parametrize("run", [hg.Stream.collect, lambda stream: stream._pipeline.describe()])
def test_a_pipeline_does_not_run_within_a_body(run: Callable[[hg.Stream], object]) -> None:
    _, rows = made()

    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        run(loop)
        return halve(loop)

    with pytest.raises(hg.UsageError, match="the body of loop 'iterate' is still being written"):
        rows.iterate(body)


REFUSED: list[tuple[str, Callable[[hg.Stream], object], str]] = [
    ("no function", lambda s: s.iterate(s), "iterate needs a function body"),  # type: ignore[arg-type]
    ("no pair", lambda s: s.iterate(lambda loop: loop), r"must return a pair .* but returned Stream\(id"),  # type: ignore[arg-type, return-value]
    ("nothing", lambda s: s.iterate(lambda loop: None), "must return a pair .* but returned None"),  # type: ignore[arg-type, return-value]
    ("three", lambda s: s.iterate(lambda loop: (loop, loop, loop)), "but returned 3 values"),  # type: ignore[arg-type, return-value]
    ("feedback is text", lambda s: s.iterate(lambda loop: ("n", loop)), "feedback must be a stream or a tuple"),  # type: ignore[arg-type, return-value]
    ("output is text", lambda s: s.iterate(lambda loop: (loop.filter(BIG), "n")), "output must be a stream or a tuple"),
    ("no feedback", lambda s: s.iterate(lambda loop: ((), loop)), "the body feeds nothing back"),
    (
        "feedback twice",
        lambda s: s.iterate(lambda loop: ([loop.filter(BIG, name="big")] * 2, loop)),
        "one stream is fed back twice",
    ),
    ("itself", lambda s: s.iterate(lambda loop: (loop, loop)), "feeds back its own stream as it is.*max_rounds="),
    (
        "by key itself",
        lambda s: s.key_by("id").iterate(lambda loop: (loop, loop.process(Step()))),
        "feeds back its own stream as it is",
    ),
    ("outside", lambda s: s.iterate(lambda loop: (s, loop)), "feedback 'source' does not come from the loop"),
    (
        "partly outside",
        lambda s: s.iterate(lambda loop: (loop.filter(BIG).union(s), loop)),
        "feedback 'source' does not come from the loop",
    ),
    (
        "other loop",
        lambda s: s.iterate(lambda out: (out.iterate(lambda loop: (out.filter(BIG, name="o"), loop)), out)),
        "loop 'iterate-2': the feedback 'o' does not come from the loop",
    ),
    (
        "loop around",
        lambda s: s.iterate(lambda out: (out, s.iterate(lambda loop: (loop.union(out).filter(BIG), loop)))),
        "feedback 'filter' also comes from loop 'iterate' around it.*unite those with a stream of 'iterate'",
    ),
    ("missing", lambda s: s.iterate(lambda loop: (loop.select("id"), loop)), "but column 'n' is missing"),
    (
        "no round",
        lambda s: s.iterate(lambda loop: (loop.select("id", "n"), loop), max_rounds=2),
        "feedback 'select' .* but the round column 'round' is missing; pass it on through the body",
    ),
    (
        "type",
        lambda s: s.iterate(lambda loop: (loop.with_columns(n=pl.col("n") / 2), loop)),
        "column 'n' is double instead of int64",
    ),
    ("new", lambda s: s.iterate(lambda loop: (loop.with_columns(x=1), loop)), "column 'x' is new; leave it out"),
    (
        "order",
        lambda s: s.iterate(lambda loop: (loop.select("n", "id"), loop)),
        r"in another order; end it with .select\('id', 'n'\)",
    ),
    (
        "keyed feedback",
        lambda s: s.iterate(lambda loop: (loop.filter(BIG).key_by("id"), loop)),
        "'iterate' has no key, but its feedback 'key-by' is keyed by id; call key_by before iterate",
    ),
    (
        "other key",
        lambda s: s.key_by("id").iterate(lambda loop: (loop.process(Step()).key_by("n"), loop)),
        "is keyed by id, but its feedback 'key-by-2' by n; feed back the stream as it is before key_by",
    ),
    ("no rounds", lambda s: s.iterate(halve, max_rounds=0), "max_rounds must be an integer of at least 1, but is 0"),
    ("half", lambda s: s.iterate(halve, max_rounds=1.5), "max_rounds must be an integer"),  # type: ignore[arg-type]
    ("true", lambda s: s.iterate(halve, max_rounds=True), "max_rounds must be an integer"),
    ("column taken", lambda s: s.iterate(halve, round_column="n"), "already has a column 'n'.*with round_column="),
    ("no column", lambda s: s.iterate(halve, round_column=""), "round_column must be the name of a column"),
    ("no callback", lambda s: s.iterate(halve, on_round=3), "on_round must be a function"),  # type: ignore[arg-type]
    (
        "callback within",
        lambda s: s.iterate(lambda out: (out.iterate(halve, on_round=print), out)),
        "'iterate-2' has on_round, but loop 'iterate-2' is inside loop 'iterate'",
    ),
    ("name taken", lambda s: s.iterate(halve, name="source"), "two operators are named 'source'"),
]


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_loop_that_cannot_be_is_refused_in_one_sentence(make: Callable[[hg.Stream], object], message: str) -> None:
    pipeline, rows = made()
    with pytest.raises(hg.UsageError, match=message) as caught:
        make(rows)
    assert "\n" not in str(caught.value)
    assert "iterate" in str(caught.value) or "loop" in str(caught.value) or "named" in str(caught.value)
    assert not any(node.role is Role.LOOP_HEAD for node in pipeline._builder.nodes)


def test_streams_of_two_pipelines_make_no_loop() -> None:
    _, rows = made()
    other = hg.Pipeline("other").source(hg.FromRows(ROWS))
    sentence = "loop 'iterate' is in pipeline 'test', but its {} 'source' in pipeline 'other'"
    with pytest.raises(hg.UsageError, match=sentence.format("feedback")):
        rows.iterate(lambda loop: (other, loop))
    with pytest.raises(hg.UsageError, match=sentence.format("output")):
        rows.iterate(lambda loop: (loop.filter(BIG), other))


FUNCTIONS = pytest.mark.parametrize("function", [Listening(), ListeningByBatch()], ids=["by row", "by batch"])


@FUNCTIONS
def test_a_function_hears_of_rounds_only_if_they_are_counted(function: Any) -> None:
    pipeline, rows = made()
    keyed = rows.key_by("id")

    def body(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
        step = loop.process(function)
        return step.filter(BIG), step.filter(SMALL)

    with pytest.raises(hg.UsageError, match="'process' has on_round, but loop 'iterate' does not count rounds"):
        keyed.iterate(body)
    keyed.iterate(body, round_column="round").sink(hg.Discard())
    pipeline.definition()


@FUNCTIONS
def test_a_function_hears_of_rounds_only_in_an_outermost_loop(function: Any) -> None:
    pipeline, rows = made()
    keyed = rows.key_by("id")

    def with_inner(inner_function: Any) -> Callable[[hg.KeyedStream], tuple[hg.Stream, hg.Stream]]:
        def body(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
            inner = loop.iterate(lambda within: halve(within.process(inner_function)))
            step = inner.key_by("id").process(function)
            return step.filter(BIG), step.filter(SMALL)

        return body

    with pytest.raises(hg.UsageError, match="loop 'iterate-2' is inside loop 'iterate', and a round finishes for all"):
        keyed.iterate(with_inner(function), round_column="round")
    keyed.iterate(with_inner(Step()), round_column="round", on_round=print).sink(hg.Discard())
    pipeline.definition()


def test_a_function_that_does_not_listen_needs_no_rounds() -> None:
    pipeline, rows = made()
    rows.key_by("id").iterate(lambda loop: halve(loop.process(Step()))).sink(hg.Discard())
    pipeline.definition()


def test_two_builds_of_one_program_name_their_loops_alike() -> None:
    def build() -> list[str]:
        pipeline, rows = made()
        rows.key_by("id").iterate(lambda loop: halve(loop.process(Step()))).iterate(
            lambda loop: (loop.filter(BIG), loop)
        ).sink(hg.Discard())
        return list(nodes(pipeline))

    assert build() == build()
    assert "iterate-2" in build()


def test_describe_shows_heads_what_comes_back_and_what_is_in_a_loop() -> None:
    pipeline, rows = made()

    def outer(loop: hg.KeyedStream) -> tuple[hg.Stream, hg.Stream]:
        return halve(loop.process(Step(), name="step").rebalance().iterate(lambda within: (within.filter(BIG), within)))

    rows.key_by("id").iterate(outer, max_rounds=5).sink(hg.Discard())
    text = pipeline.describe()
    columns = "id: int64, n: int64, round: int64"
    assert text.splitlines()[4:13] == [
        "chain iterate",
        "  <- key-by, hash on id",
        "  <- iterate-feedback, hash on id, comes back",
        f"  iterate [loop-head, by id, rounds in round, at most 5] {columns}",
        f"  step [operator, in iterate] {columns}",
        "chain iterate-2",
        "  <- step, rebalance",
        "  <- filter, forward, comes back",
        f"  iterate-2 [loop-head, in iterate] {columns}",
    ]
    assert f"  filter [operator, in iterate > iterate-2] {columns}" in text


def test_a_loop_and_an_alignment_timeout_are_refused() -> None:  # UA2
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(alignment_timeout="1s"))
    rows = pipeline.source(hg.FromRows([{"left": 1}]))
    out = rows.iterate(lambda loop: (loop.filter(pl.col("left") > 0), loop.filter(pl.col("left") == 0)), name="trips")
    out.sink(hg.Discard())
    with pytest.raises(hg.UsageError, match="loop 'trips': unaligned checkpoints cannot cross a loop") as caught:
        pipeline.definition()
    assert "\n" not in str(caught.value)


def test_a_listener_outside_any_loop_is_refused() -> None:
    pipeline = hg.Pipeline("p")
    keyed = pipeline.source(hg.FromRows([{"k": 1}])).key_by("k")
    with pytest.raises(hg.UsageError, match="'listener' has on_round, but is in no loop"):
        keyed.process(_ListensOutside(), name="listener").sink(hg.Print())


class _ListensOutside(hg.ProcessFunction):
    def on_round(self, round: int, context: hg.ProcessContext) -> None:
        return None


def test_limits_of_loops_are_numbers_of_bytes() -> None:
    runtime = hg.Pipeline("p", loop_memory_bytes=0)._runtime
    assert runtime.loop_memory_bytes == 0
    with pytest.raises(hg.UsageError, match="loop_disk_bytes_max must be a number of bytes"):
        hg.Pipeline("p", loop_disk_bytes_max=-1)
