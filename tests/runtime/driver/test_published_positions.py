"""Sources that publish how far checkpoints have read: when, in front of what, and what a failure does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from tests.runtime.runs.test_storages import WAIT_S, Watching

import headgate as hg
from headgate import testing
from headgate.connectors.base import AnyReader, HoldContext, Source, SourceContext
from headgate.errors import FencedError, PipelineFailed, StorageError
from headgate.model.ids import CheckpointId

Call = tuple[int, int | None, bool]
"""Generation, checkpoint, and whether it begins there."""


class Published(Source):
    """Input without an end, which remembers what it was asked to publish."""

    publishes = True

    def __init__(self, fail: Callable[[Call], None] = lambda call: None) -> None:
        self.source = hg.Generator({"n": hg.RowNumber()}, rows_per_second=1_000, time="deterministic")
        self.calls: list[Call] = []
        self.positions: list[Mapping[str, bytes]] = []
        self.fail = fail

    def schema(self) -> pa.Schema:
        return self.source.schema()

    def identity(self) -> str:
        return self.source.identity()

    def open(self, context: SourceContext) -> AnyReader:
        return self.source.open(context)

    def publish(
        self, context: HoldContext, checkpoint: CheckpointId | None, positions: Mapping[str, bytes], *, begins: bool
    ) -> None:
        call = (int(context.generation), None if checkpoint is None else int(checkpoint), begins)
        self.fail(call)
        self.calls.append(call)
        self.positions.append(positions)


def pipeline_of(source: Published, place: Path) -> hg.Pipeline:
    pipeline = hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="20ms", dir=place / "checkpoints"))
    pipeline.source(source, name="in").sink(testing.Collect(place / "out"), name="out")
    return pipeline


def stopped(source: Published, place: Path) -> int:
    """Run a pipeline for some checkpoints and stop it; return the last one."""
    watching = Watching()
    with testing.running(pipeline_of(source, place), observer=watching) as run:
        watching.wait_checkpoints(3)
        run.stop()
        run.wait(WAIT_S)
    return watching.completed[-1]


def test_each_generation_begins_with_what_it_restores_and_ends_with_its_last_checkpoint(tmp_path: Path) -> None:
    source = Published()
    last = stopped(source, tmp_path)
    assert source.calls[0] == (1, None, True)
    assert source.positions[0] == {}
    assert source.calls[-1] == (1, last, False)
    assert all(source.positions[1:])
    assert [call[1] for call in source.calls[1:]] == sorted({call[1] for call in source.calls[1:]})  # type: ignore[type-var]
    again = Published()
    stopped(again, tmp_path)
    assert again.calls[0] == (2, last, True)
    assert again.positions[0] == source.positions[-1]


def test_a_failure_is_noted_once_and_the_next_checkpoint_is_published(tmp_path: Path) -> None:
    failed: list[Call] = []

    def fail(call: Call) -> None:
        if not call[2] and len(failed) < 2:
            failed.append(call)
            raise StorageError("reach", "the group", "it is away")

    source, watching = Published(fail), Watching()
    with testing.running(pipeline_of(source, tmp_path), observer=watching) as run:
        watching.wait(lambda: len(source.calls) > 1)
        run.stop()
        run.wait(WAIT_S)
    noted = [note for note in watching.notes if "was not published: cannot reach the group" in note]
    assert len(failed) == 2
    assert len(noted) == 1


def test_what_others_use_too_ends_the_pipeline_with_its_sentence(tmp_path: Path) -> None:
    def fail(call: Call) -> None:
        if not call[2]:
            raise hg.UsageError("the group is shared")

    with pytest.raises(PipelineFailed, match="the group is shared"):
        testing.run(pipeline_of(Published(fail), tmp_path), timeout_s=WAIT_S)


def test_a_generation_that_was_replaced_stops(tmp_path: Path) -> None:
    def fail(call: Call) -> None:
        if not call[2]:
            raise FencedError("the group", 1, 9)

    with pytest.raises(FencedError):
        testing.run(pipeline_of(Published(fail), tmp_path), timeout_s=WAIT_S)
