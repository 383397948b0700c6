"""Who listens to checkpoints and would never be told is refused, with one sentence (HL20)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import polars as pl
import pytest

import headgate as hg


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


def rows(pipeline: hg.Pipeline | None = None) -> hg.Stream:
    return (pipeline or hg.Pipeline("p")).source(hg.FromRows([{"n": 1}]))


def looped(stream: hg.Stream, on_round: Any) -> hg.Stream:
    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        return loop.filter(pl.col("n") > 0), loop.filter(pl.col("n") <= 0)

    return stream.iterate(body, on_round=on_round, name="trips")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda: hg.Pipeline("p").source(DeafSource([{"n": 1}])), "source 'source': DeafSource.notify_checkpoint_c"),
        (lambda: rows().sink(DeafSink(), name="out"), "sink 'out': DeafSink.notify_checkpoint_complete would never be"),
        (lambda: looped(rows(), Deaf()), "on_round of loop 'trips': Deaf.notify_checkpoint_complete would never be"),
        (lambda: hg.Pipeline("p").add_hook("x", DeafHook()), "hook 'x': DeafHook.notify_checkpoint_complete would"),
        (lambda: looped(rows(), Keeping()), "on_round of loop 'trips': Keeping is .* called in the driver"),
        (lambda: hg.Pipeline("p").add_hook("x", KeepingHook()), "hook 'x': KeepingHook is .* called in the driver"),
        (lambda: rows().filter(Deaf()), "filter: Deaf.notify_checkpoint_complete would never be called"),
        (lambda: rows().map(Listening().step), "map: Listening listens .* give the object itself"),
        (lambda: rows().filter(Keeping().step), "filter: Keeping listens .* give the object itself"),
        (lambda: rows().flat_map(partial(Listening(), 1)), "flat_map: Listening listens .* give the object itself"),
        (lambda: rows().map_batches(partial(Listening().step, 1)), "Listening listens .* give the object itself"),
        (lambda: looped(rows(), Listening().step), "on_round of loop 'trips': Listening listens .* give the object"),
    ],
)
def test_an_object_that_would_never_be_told_is_refused(write: Callable[[], object], said: str) -> None:  # HL20
    with pytest.raises(hg.UsageError, match=said):
        write()


def test_methods_of_objects_that_do_not_listen_are_taken() -> None:  # HL20
    rows().map([].append)  # type: ignore[arg-type]
    rows().filter(partial(max, 1))
    looped(rows(), {1: 2}.get)


def with_source(pipeline: hg.Pipeline) -> None:
    pipeline.source(ListeningSource([{"n": 1}]), name="there").sink(hg.Discard())


def with_sink(pipeline: hg.Pipeline) -> None:
    rows(pipeline).sink(ListeningSink(), name="there")


def with_loop(pipeline: hg.Pipeline) -> None:
    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        return loop.filter(pl.col("n") > 0), loop.filter(pl.col("n") <= 0)

    rows(pipeline).iterate(body, on_round=Listening(), name="there").sink(hg.Discard())


@pytest.mark.parametrize("place", [with_source, with_sink, with_loop])
def test_what_sources_sinks_and_loops_have_yet_to_do_is_not_removed(place: Callable[[hg.Pipeline], None]) -> None:
    # C75
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(retain_on_cancel=False))
    place(pipeline)
    with pytest.raises(hg.UsageError, match=r"operator 'there' acts when .* leave retain_on_cancel out"):
        pipeline.definition()


def test_a_sink_that_only_tidies_up_says_so() -> None:  # C75
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(retain_on_cancel=False))
    rows(pipeline).sink(TidyingSink())
    pipeline.definition()
