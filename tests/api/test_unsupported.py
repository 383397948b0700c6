"""What is not there, or is called otherwise, is said in a sentence instead of an AttributeError without help."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import polars as pl
import pytest

import headgate as hg
from headgate.api.unsupported import KEYED_HINTS, METHODS_TO_COME, NAMES_TO_COME, PIPELINE_HINTS, STREAM_HINTS


def rows() -> hg.Stream:
    return hg.Pipeline("p").source(hg.FromRows([{"k": 1, "n": 1}]))


@pytest.mark.parametrize("name", NAMES_TO_COME)
def test_a_name_to_come_is_not_there_and_says_what_to_do(name: str) -> None:
    assert not hasattr(hg, name), "it is there: take it off the list"
    with pytest.raises(AttributeError, match=f"headgate has no name '{name}': .*(not there yet|headgate.)"):
        getattr(hg, name)


def test_any_other_name_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"headgate has no name 'Nonsense'$"):
        hg.Nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda s: s.agg(pl.len()), r"agg needs a key: .*key_by\('column'\)\.window"),
        (lambda s: s.deduplicate(within=None), "deduplicate needs a key"),
        (lambda s: s.top(3, by="n", within=None), "top needs a key"),
        (lambda s: s.reduce(max), "reduce needs a key"),
        (lambda s: s.window(hg.Tumbling("1m")), "window needs a key"),
        (lambda s: s.group_by("k"), "group_by is called key_by"),
    ],
)
def test_a_verb_at_the_wrong_place_says_which_one_is_missing(call: Callable[[Any], object], problem: str) -> None:
    with pytest.raises(hg.UsageError, match=problem):
        call(rows())


def test_what_a_keyed_stream_has_not_is_to_be_called_before() -> None:
    keyed = rows().key_by("k")
    for name in ("map", "filter", "sink", "collect"):
        with pytest.raises(AttributeError, match=f"a keyed stream has no '{name}': call it before key_by"):
            getattr(keyed, name)
    with pytest.raises(AttributeError, match="'KeyedStream' object has no attribute 'nonsense'"):
        keyed.nonsense  # noqa: B018


@pytest.mark.parametrize("method", METHODS_TO_COME)
@pytest.mark.parametrize("kind", [hg.ProcessFunction, hg.BatchProcessFunction])
def test_a_method_that_would_never_be_called_is_refused(method: str, kind: type) -> None:
    function = type("Mine", (kind,), {method: lambda self, *args: None})()
    with pytest.raises(hg.UsageError, match=rf"operator 'process': Mine\.{method} would never be called: "):
        rows().key_by("k").process(function)


def test_time_to_live_without_its_class_is_refused() -> None:
    class Mine(hg.ProcessFunction):
        def open(self, state: hg.StateHandle) -> None:
            self.last = state.value("last", int, ttl="1h")

    with pytest.raises(hg.UsageError, match=r"operator 'process': the ttl of state 'last' is a TTL\('7d'\), not '1h'"):
        rows().key_by("k").process(Mine())


@pytest.mark.parametrize(
    ("words", "kind", "made"),
    [
        (STREAM_HINTS, hg.Stream, rows),
        (STREAM_HINTS | KEYED_HINTS, hg.KeyedStream, lambda: rows().key_by("k")),
        (PIPELINE_HINTS, hg.Pipeline, lambda: hg.Pipeline("p")),
    ],
)
def test_a_verb_of_another_engine_says_what_it_is_called_here(
    words: dict[str, str], kind: type, made: Callable[[], Any]
) -> None:
    tried = made()
    for word, why in words.items():
        assert not hasattr(kind, word), f"{kind.__name__}.{word} is there: take it off the list"
        with pytest.raises(AttributeError) as caught:
            getattr(tried, word)
        assert str(caught.value) == f"'{kind.__name__}' object has no attribute '{word}': {why}"
    with pytest.raises(AttributeError, match=f"^'{kind.__name__}' object has no attribute 'nonsense'$"):
        tried.nonsense  # noqa: B018


@pytest.mark.parametrize("verb", ["map", "flat_map", "filter", "map_batches"])
def test_methods_of_a_function_object_that_would_not_be_called_are_refused(verb: str) -> None:
    def method(self: object, context: object) -> None: ...

    async def asynchronous(self: object) -> None: ...

    for methods, problem in (
        ({"on_timer": method}, r"Mine\.on_timer would never be called; use a headgate\.ProcessFunction"),
        ({"open": method}, r"Mine\.open is called without arguments"),
        ({"close": method}, r"Mine\.close is called without arguments"),
        ({"open": asynchronous}, r"Mine\.open must not be async; map_async takes such functions"),
    ):
        function = type("Mine", (), {"__call__": method, **methods})()
        with pytest.raises(hg.UsageError, match=f"{verb}: {problem}"):
            getattr(rows(), verb)(function)
    getattr(rows(), verb)(type("Mine", (), {"__call__": lambda self, given: given})())


def test_map_batches_does_not_call_a_function_that_is_not_open() -> None:
    class Opened:
        def open(self) -> None:
            self.factor = 2

        def __call__(self, frame: pl.DataFrame) -> pl.DataFrame:
            return frame * self.factor

    with pytest.raises(hg.UsageError, match=r"operator 'map-batches': give schema=.*Opened is opened on the workers"):
        rows().map_batches(Opened())


class Deaf:
    """Has the method, and derives from nothing."""

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None: ...

    def __call__(self, *args: Any) -> Any: ...


class DeafSource(hg.FromRows, Deaf): ...


class DeafSink(hg.Discard, Deaf): ...


class DeafHook(hg.CoordinatorHook, Deaf):
    def trigger(self, checkpoint_id: int) -> bytes | None: ...

    def restore(self, checkpoint_id: int, data: bytes | None) -> None: ...

    def reset(self) -> None: ...


class KeepingHook(DeafHook, hg.CheckpointListener, hg.CheckpointedFunction): ...  # type: ignore[misc]


class Listening(hg.CheckpointListener):
    def __call__(self, *args: Any) -> Any: ...

    def step(self, *args: Any) -> Any: ...


class Keeping(hg.CheckpointedFunction):
    def __call__(self, *args: Any) -> Any: ...

    def step(self, *args: Any) -> Any: ...


class ListeningSink(hg.Discard, hg.CheckpointListener): ...


class ListeningSource(hg.FromRows, hg.CheckpointListener): ...


class TidyingSink(ListeningSink):
    is_listening = False


def numbers(pipeline: hg.Pipeline | None = None) -> hg.Stream:
    return (pipeline or hg.Pipeline("p")).source(hg.FromRows([{"n": 1}]))


def looped(stream: hg.Stream, on_round: Any) -> hg.Stream:
    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        return loop.filter(pl.col("n") > 0), loop.filter(pl.col("n") <= 0)

    return stream.iterate(body, on_round=on_round, name="trips")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda: hg.Pipeline("p").source(DeafSource([{"n": 1}])), "source 'source': DeafSource.notify_checkpoint_c"),
        (
            lambda: numbers().sink(DeafSink(), name="out"),
            "sink 'out': DeafSink.notify_checkpoint_complete would never be",
        ),
        (lambda: looped(numbers(), Deaf()), "on_round of loop 'trips': Deaf.notify_checkpoint_complete would never be"),
        (lambda: hg.Pipeline("p").add_hook("x", DeafHook()), "hook 'x': DeafHook.notify_checkpoint_complete would"),
        (lambda: looped(numbers(), Keeping()), "on_round of loop 'trips': Keeping is .* called in the driver"),
        (lambda: hg.Pipeline("p").add_hook("x", KeepingHook()), "hook 'x': KeepingHook is .* called in the driver"),
        (lambda: numbers().filter(Deaf()), "filter: Deaf.notify_checkpoint_complete would never be called"),
        (lambda: numbers().map(Listening().step), "map: Listening listens .* give the object itself"),
        (lambda: numbers().filter(Keeping().step), "filter: Keeping listens .* give the object itself"),
        (lambda: numbers().flat_map(partial(Listening(), 1)), "flat_map: Listening listens .* give the object itself"),
        (lambda: numbers().map_batches(partial(Listening().step, 1)), "Listening listens .* give the object itself"),
        (lambda: looped(numbers(), Listening().step), "on_round of loop 'trips': Listening listens .* give the object"),
    ],
)
def test_an_object_that_would_never_be_told_is_refused(write: Callable[[], object], said: str) -> None:
    with pytest.raises(hg.UsageError, match=said):
        write()


def test_methods_of_objects_that_do_not_listen_are_taken() -> None:
    numbers().map([].append)  # type: ignore[arg-type]
    numbers().filter(partial(max, 1))
    looped(numbers(), {1: 2}.get)


def with_source(pipeline: hg.Pipeline) -> None:
    pipeline.source(ListeningSource([{"n": 1}]), name="there").sink(hg.Discard())


def with_sink(pipeline: hg.Pipeline) -> None:
    numbers(pipeline).sink(ListeningSink(), name="there")


def with_loop(pipeline: hg.Pipeline) -> None:
    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        return loop.filter(pl.col("n") > 0), loop.filter(pl.col("n") <= 0)

    numbers(pipeline).iterate(body, on_round=Listening(), name="there").sink(hg.Discard())


@pytest.mark.parametrize("place", [with_source, with_sink, with_loop])
def test_what_sources_sinks_and_loops_have_yet_to_do_is_not_removed(place: Callable[[hg.Pipeline], None]) -> None:
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(retain_on_cancel=False))
    place(pipeline)
    with pytest.raises(hg.UsageError, match=r"operator 'there' acts when .* leave retain_on_cancel out"):
        pipeline.definition()


def test_a_sink_that_only_tidies_up_says_so() -> None:
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(retain_on_cancel=False))
    numbers(pipeline).sink(TidyingSink())
    pipeline.definition()
