"""Sources that lose or repeat records when a generation dies, or goes on at another parallelism, are caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader, owner_of_split
from headgate.testing import check_source

SCHEMA = pa.schema([("n", pa.int64())])
COUNT = 6


@dataclass
class Broker:
    """Queues that forget what was acknowledged."""

    queues: dict[str, list[int]] = field(
        default_factory=lambda: {name: [ord(name) * 100 + n for n in range(COUNT)] for name in "abcd"}
    )
    forgotten: dict[str, int] = field(default_factory=dict)

    def read(self, queue: str, at: int) -> tuple[int, int] | None:
        """Return the next record that is there, and where it is."""
        at = max(at, self.forgotten.get(queue, 0))
        return (self.queues[queue][at], at) if at < COUNT else None

    def acknowledge(self, queue: str, end: int) -> None:
        self.forgotten[queue] = max(end, self.forgotten.get(queue, 0))


@dataclass
class Queues(Source):
    """Acknowledges what completed checkpoints cover; ``acknowledges`` says when instead."""

    acknowledges: str = "when told"
    broker: Broker = field(default_factory=Broker)

    def schema(self) -> pa.Schema:
        return SCHEMA

    def identity(self) -> str:
        return "queues"

    def open(self, context: SourceContext) -> QueuesReader:
        return QueuesReader(self, context)


class QueuesReader(SourceReader, hg.CheckpointedFunction, hg.CheckpointListener):
    def __init__(self, source: Queues, context: SourceContext) -> None:
        self.source = source
        names = [
            name for i, name in enumerate("abcd") if owner_of_split(i, context.parallelism) == context.subtask_index
        ]
        self.at = {name: int((context.positions or {}).get(name, b"0")) for name in names}
        self.covered: dict[int, dict[str, int]] = {}

    def restore(self, context: hg.RestoreContext) -> None:
        """What a completed checkpoint covers was perhaps never acknowledged."""
        self.began = context.list("began", int)
        if context.is_restored:
            self.acknowledge(self.at)

    def snapshot(self, context: hg.SnapshotContext) -> None:
        self.began.append(context.checkpoint_id)
        self.covered[context.checkpoint_id] = dict(self.at)

    def acknowledge(self, positions: dict[str, int]) -> None:
        if self.source.acknowledges == "never":
            return
        for name, at in positions.items():
            self.source.broker.acknowledge(name, at)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        if self.source.acknowledges == "all when told":
            self.acknowledge(self.at)
        for number in [number for number in self.covered if number <= checkpoint_id]:
            self.acknowledge(self.covered.pop(number))

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        if self.source.acknowledges == "when given up":
            self.acknowledge(self.covered.pop(checkpoint_id))

    def splits(self) -> Sequence[str]:
        return [name for name, at in self.at.items() if at < COUNT]

    def poll(self) -> SourceBatch | None:
        for name in self.splits()[:1]:
            found = self.source.broker.read(name, self.at[name])
            rows = [] if found is None else [found[0]]
            self.at[name] = COUNT if found is None else found[1] + 1
            if self.source.acknowledges == "at poll":
                self.acknowledge(self.at)
            return SourceBatch(name, pa.record_batch([rows], SCHEMA), None, self.at[name] == COUNT)
        return None

    def positions(self) -> dict[str, bytes]:
        if self.source.acknowledges == "at positions":
            self.acknowledge(self.at)
        return {name: b"%d" % at for name, at in self.at.items()}


def test_a_source_that_acknowledges_what_completed_checkpoints_cover_passes() -> None:
    brokers: list[Broker] = []

    def fresh() -> Queues:
        brokers.append(Broker())
        return Queues(broker=brokers[-1])

    assert len(check_source(fresh, parallelisms=(1, 3))) == 4 * COUNT
    assert brokers[-1].forgotten == dict.fromkeys("abcd", COUNT), "it acknowledged everything in the end"


@pytest.mark.parametrize(
    ("acknowledges", "scenario"),
    [
        ("at poll", "Crashed before its first checkpoint completed, .*: lost"),
        ("at positions", "Crashed before its first checkpoint completed, .*: lost"),
        ("all when told", "Crashed after a completed checkpoint, and .*: lost"),
        ("when given up", "Crashed after a completed checkpoint, and after one that was aborted, .*: lost"),
    ],
)
def test_a_source_that_acknowledges_too_early_is_caught(acknowledges: str, scenario: str) -> None:
    with pytest.raises(AssertionError, match=scenario):
        check_source(lambda: Queues(acknowledges))


def test_a_source_that_listens_needs_another_broker_each_time() -> None:
    with pytest.raises(hg.UsageError, match=r"give check_source\(\) a function that makes the source"):
        check_source(Queues())


@dataclass
class Numbers(Queues):
    """Puts something about its parallelism into its positions."""

    acknowledges: str = "never"
    problem: str = ""

    def open(self, context: SourceContext) -> QueuesReader:
        found = {name: at.partition(b" of ") for name, at in (context.positions or {}).items()}
        mine = b"%d" % (context.parallelism if self.problem == "begins anew" else context.subtask_index)
        usable = {name: at for name, (at, _, of) in found.items() if not self.problem or of == mine}
        if self.problem == "passes over":
            usable |= dict.fromkeys(found.keys() - usable.keys(), b"%d" % COUNT)
        reader = QueuesReader(self, replace(context, positions=usable))
        positions = reader.positions
        reader.positions = lambda: {name: at + b" of " + mine for name, at in positions().items()}  # type: ignore[method-assign]
        return reader


@pytest.mark.parametrize(("problem", "message"), [("begins anew", "delivered again"), ("passes over", "lost")])
def test_a_source_that_cannot_be_rescaled_is_caught(problem: str, message: str) -> None:
    assert len(check_source(Numbers, parallelisms=(2,))) == 4 * COUNT
    story = f"Stopped with checkpoints, and started at one parallelism after the other, .* 2 to 2: {message}"
    with pytest.raises(AssertionError, match=story):
        check_source(lambda: Numbers(problem=problem), parallelisms=(2,))


def test_a_source_is_started_at_every_other_parallelism() -> None:
    seen: set[tuple[int, int]] = set()

    @dataclass
    class Seen(Numbers):
        def open(self, context: SourceContext) -> QueuesReader:
            seen.update(
                (int(at.partition(b" of ")[2]), context.parallelism) for at in (context.positions or {}).values()
            )
            reader = super().open(context)
            positions = reader.positions
            of = b" of %d" % context.parallelism
            reader.positions = lambda: {  # type: ignore[method-assign]
                name: at.partition(b" of ")[0] + of for name, at in positions().items()
            }
            return reader

    check_source(Seen, parallelisms=(2, 3))
    assert seen == {(2, 3), (3, 2), (2, 2), (3, 3), (2, 1), (3, 1), (1, 2), (1, 3)}
