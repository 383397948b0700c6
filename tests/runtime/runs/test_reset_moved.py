"""A sink that was moved has several targets and one owner: a reset empties all of them, wherever it dies."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import few
from tests.runtime.runs.test_reset_killed import Killed, Reaper, log_of, reaping

import headgate as hg
from headgate.api import launch
from headgate.connectors.base import SinkContext
from headgate.connectors.registry import targets_of
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Committable, Manifest
from headgate.model.pipeline_identity import Target
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import SilentObserver
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.driver import restart
from headgate.runtime.driver.reset import Reset
from headgate.store.store import Store

SCHEMA = pa.schema({"number": pa.int64()})
ORDERS = list(itertools.permutations(("app/a", "app/b")))


class Moved:
    """A pipeline whose only sink wrote to one stream after the other. Any of ``stores`` is a name of the same."""

    def __init__(self, root: Path, streams: tuple[str, ...], stores: tuple[str, ...] = ("store", "store")) -> None:
        self.root, self.streams = root, streams
        self.stores = [str(root / store) for store in stores]
        (root / "store").mkdir(parents=True)
        for store in stores:
            if store != "store":
                (root / store).symlink_to(root / "store")
        for number in range(len(streams)):
            self.produce(number)
        assert self.counts() == Counter(streams)

    def program(self, number: int = -1) -> PipelineDefinition:
        kept = hg.Checkpointing("100ms", dir=str(self.root / "home"))
        made = hg.Pipeline("p", checkpointing=kept)
        rows = made.source(hg.FromRows([{"number": 1}]))
        rows.sink(hg.StreamSink(self.streams[number], store=self.stores[number]), name="out")
        found = made.definition()
        return replace(found, targets=targets_of(found.graph))

    def produce(self, number: int = -1) -> None:
        """Do as the pipeline does, without workers: begin a generation, complete and commit a checkpoint."""
        made, log = self.program(number), log_of(self)  # type: ignore[arg-type]
        found = restart.begin_generation(made, log, "test", lambda _: None)
        assert isinstance(found, restart.NewGeneration)
        sink: Any = next(node.spec for node in made.graph.nodes if hasattr(node.spec, "open_committer"))
        writer = sink.open(SinkContext("p", "out", 0, 1, found.generation, SCHEMA))
        writer.write(pa.RecordBatch.from_pylist([{"number": number}], SCHEMA))
        checkpoint = CheckpointId(found.first_checkpoint)
        output = [Committable("out", checkpoint, 0, found.generation, writer.seal(checkpoint).prepare())]
        texts = made.plan.state_texts()
        log.append(Manifest(checkpoint, found.generation, 1, made.plan.max_parallelism, (), tuple(output), texts))
        found.commits.commit(CommitPermit(checkpoint, found.generation), output)
        for closed in (found.commits, writer):
            closed.close()

    def counts(self) -> Counter[str]:
        with Store.open(self.stores[0]) as store:
            return +Counter({info.name: info.events_count for info in store.list_streams()})

    def reset(self) -> None:
        with Reset.holding_the_lock(str(self.root / "home"), "p", self.program()) as resetting:
            resetting.carry_out(resetting.plan())


@pytest.mark.parametrize("streams", ORDERS)
def test_all_that_a_moved_sink_wrote_goes(tmp_path: Path, streams: tuple[str, ...]) -> None:
    moved = Moved(tmp_path, streams)
    moved.reset()
    assert moved.counts() == Counter()
    moved.produce()
    assert moved.counts() == Counter(streams[-1:])


@pytest.mark.parametrize("stores", [("store", "link"), ("link", "store")])
def test_a_store_with_two_names_is_one(tmp_path: Path, stores: tuple[str, ...]) -> None:
    moved = Moved(tmp_path, ("app/a", "app/b"), stores)
    moved.reset()
    assert moved.counts() == Counter()


@pytest.mark.parametrize("order", few(range(len(ORDERS)), 1))
def test_a_reset_of_a_moved_sink_dies_anywhere(  # SO2
    tmp_path: Path, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = ORDERS[order]
    reaper, found = reaping(monkeypatch), []
    for at in itertools.count(1):
        moved = Moved(tmp_path / str(at), streams)
        is_over = reset_killed(moved, reaper, at)
        is_decided = not candidates(log_of(moved).observe())  # type: ignore[arg-type]
        launch.finish_reset(moved.program(), SilentObserver())
        assert moved.counts() == (Counter() if is_decided else Counter(streams))
        found.append(is_decided)
        if is_over:
            break
    assert found == sorted(found), "one step decides"
    assert not found[0]
    moved.produce()
    assert moved.counts() == Counter(streams[-1:])


def reset_killed(moved: Moved, reaper: Reaper, at: int) -> bool:
    reaper.count, reaper.at = 0, at
    try:
        moved.reset()
    except Killed:
        return False
    finally:
        reaper.at = 0
    return True


def test_what_is_emptied_in_one_step(tmp_path: Path) -> None:
    from headgate.connectors.registry import grouped_by_owner, sink_of
    from headgate.model.pipeline_identity import TargetKind

    def stream(sink: str, store: str, name: str) -> Target:
        return Target(sink, TargetKind.STREAM, str(tmp_path / store), name, segments=1)

    files = [Target("out", TargetKind.FILES, str(tmp_path / name)) for name in ("x", "y")]
    targets = [
        stream("out", "s", "a"),
        *files,
        stream("out", "t", "a"),
        stream("in", "s", "b"),
        stream("out", "s", "b"),
    ]
    groups = grouped_by_owner([(target, found) for target in targets if (found := sink_of(target)) is not None])
    sizes = {(group[0][0].place_key): len(group) for group in groups}
    assert sorted(sizes.values()) == [1, 1, 1, 1, 2]
    assert sizes[targets[0].place_key] == 2
