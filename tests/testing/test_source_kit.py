"""Splits that appear late are read once: by our sources, and sources that do not are caught."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader, owner_of_split
from headgate.testing import Growing, check_late_splits, check_source

SCHEMA = pa.schema({"n": pa.int64()})


class Lists(Source):
    """Reads lists of numbers, of which more may come. ``owner`` says whose a list is."""

    def __init__(self) -> None:
        self.lists: dict[str, list[int]] = {"m": [0, 1, 2], "p": [3, 4, 5, 6]}
        self.names = iter("azbycx")
        self.numbers = itertools.count(7)

    def schema(self) -> pa.Schema:
        return SCHEMA

    def identity(self) -> str:
        return "lists"

    def add(self) -> list[dict[str, int]]:
        name = next(self.names)
        self.lists[name] = [next(self.numbers) for _ in range(3)]
        return [{"n": n} for n in self.lists[name]]

    def owner(self, name: str, parallelism: int) -> int:
        return ord(name) % parallelism

    def open(self, context: SourceContext) -> ListsReader:
        return ListsReader(self, context)


class ListsReader:
    def __init__(self, source: Lists, context: SourceContext) -> None:
        self.source, self.context = source, context
        self.known = dict(context.positions or {})
        self.at: dict[str, int] = {}
        self.discover()

    def discover(self) -> None:
        for name in sorted(self.source.lists):
            if self.source.owner(name, self.context.parallelism) == self.context.subtask_index:
                self.at.setdefault(name, self.begin(name))

    def begin(self, name: str) -> int:
        return int(self.known.get(name, b"0"))

    def splits(self) -> Sequence[str]:
        return [name for name, at in self.at.items() if at < len(self.source.lists[name])]

    def poll(self) -> SourceBatch | None:
        self.discover()
        for name in self.splits():
            self.at[name] += 1
            row = {"n": self.source.lists[name][self.at[name] - 1]}
            return SourceBatch(name, pa.RecordBatch.from_pylist([row], SCHEMA))
        return None

    def is_finished(self) -> bool:
        return False

    def positions(self) -> dict[str, bytes]:
        return {name: b"%d" % at for name, at in self.at.items()}

    def wakeup_ms(self) -> int:
        return 1

    def close(self) -> None:
        pass


class Bounded(Lists):
    """A list is found by a start only, and the source ends."""

    def open(self, context: SourceContext) -> ListsReader:
        class Reader(ListsReader):
            def poll(self) -> SourceBatch | None:
                self.discover = lambda: None  # type: ignore[method-assign]
                return super().poll()

            def is_finished(self) -> bool:
                return not self.splits()

        return Reader(self, context)


class OwnedByPlace(Lists):
    """The owner depends on what else there is."""

    def owner(self, name: str, parallelism: int) -> int:
        return owner_of_split(sorted(self.lists).index(name), parallelism)


class LooksOnce(Lists):
    """A reader looks for lists when it is opened, and never again."""

    def open(self, context: SourceContext) -> ListsReader:
        reader = super().open(context)
        reader.discover = lambda: None  # type: ignore[method-assign]
        return reader


class ForgetsWhatEnded(Lists):
    """Positions of lists that were read to their ends are left out."""

    def open(self, context: SourceContext) -> ListsReader:
        reader = super().open(context)
        reader.positions = lambda: {name: b"%d" % reader.at[name] for name in reader.splits()}  # type: ignore[method-assign]
        return reader


class BeginsAtTheEnd(Lists):
    """After a restart, what it does not know is taken for old."""

    def open(self, context: SourceContext) -> ListsReader:
        class Reader(ListsReader):
            def begin(self, name: str) -> int:
                is_new = bool(self.known) and name not in self.known
                return len(self.source.lists[name]) if is_new else super().begin(name)

        return Reader(self, context)


class EverybodyReads(Lists):
    """A late list is everybody's."""

    def owner(self, name: str, parallelism: int) -> int:
        return super().owner(name, parallelism) if name in "mp" else -1

    def open(self, context: SourceContext) -> ListsReader:
        class Reader(ListsReader):
            def discover(self) -> None:
                super().discover()
                for name in self.source.lists.keys() - set("mp"):
                    self.at.setdefault(name, self.begin(name))

        return Reader(self, context)


class RestoresItsOwn(Lists):
    """A split comes back to who had it, although another one owns it now."""

    def open(self, context: SourceContext) -> ListsReader:
        reader = super().open(context)
        if context.subtask_index == 0:
            for name in reader.known:
                reader.at.setdefault(name, reader.begin(name))
        return reader


def growing(kind: type[Lists]) -> Callable[[], Growing]:
    def fresh() -> Growing:
        source = kind()
        rows = [{"n": n} for n in range(7)]
        return Growing(source, rows, source.add, wait=lambda ms: None)

    return fresh


@pytest.mark.parametrize("kind", [Lists, Bounded])
def test_a_source_that_grows_passes(kind: type[Lists]) -> None:
    check_late_splits(growing(kind))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OwnedByPlace, "delivered again|lost|own split"),
        (LooksOnce, "Splits appeared while others were read.*lost"),
        (ForgetsWhatEnded, "delivered again"),
        (BeginsAtTheEnd, "lost"),
        (EverybodyReads, "delivered again|own split"),
        (RestoresItsOwn, "delivered again|own split"),
    ],
)
def test_sources_that_mistake_late_splits_are_caught(kind: type[Lists], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_late_splits(growing(kind))


def test_a_late_split_of_one_record_is_no_test() -> None:
    def fresh() -> Growing:
        return Growing(Lists(), [{"n": n} for n in range(7)], lambda: [{"n": 7}], wait=lambda ms: None)

    with pytest.raises(AssertionError, match="needs two records or more"):
        check_late_splits(fresh, [1])


class Files:
    """A directory to which files of lines are added."""

    def __init__(self, root: Path, follow: bool) -> None:
        self.root = root
        self.names = iter(["z.log", "a.log", "deep/m.log", "b.log", "y.log", "c.log"])
        root.mkdir()
        self.records = self.add("k.log") + self.add("n.log")
        options: dict[str, Any] = {"follow": True, "poll_interval": "1ms", "discovery_interval": 0} if follow else {}
        self.source = hg.TextFiles(root, **options)

    def add(self, name: str | None = None) -> list[dict[str, str]]:
        path = self.root / (name or next(self.names))
        path.parent.mkdir(exist_ok=True)
        lines = [f"{path.name} {number}" for number in range(4)]
        (self.root / ".hidden").write_text("".join(f"{line}\n" for line in lines))
        (self.root / ".hidden").rename(path)
        return [{"line": line} for line in lines]


@pytest.mark.parametrize("follow", [True, False], ids=["followed", "bounded"])
def test_files_that_appear_late_are_read_once(follow: bool, tmp_path: Path) -> None:
    roots = (tmp_path / str(number) for number in itertools.count())

    def fresh() -> Growing:
        files = Files(next(roots), follow)
        return Growing(files.source, files.records, files.add, *([] if follow else [lambda ms: None]))

    check_late_splits(fresh, [1, 3])


def test_parquet_files_that_appear_late_are_read_once(tmp_path: Path) -> None:
    roots = (tmp_path / str(number) for number in itertools.count())

    def fresh() -> Growing:
        root, numbers, names = next(roots), itertools.count(), iter("mpzaybcx")
        root.mkdir()

        def add() -> list[dict[str, int]]:
            rows = [{"n": next(numbers)} for _ in range(3)]
            pq.write_table(pa.Table.from_pylist(rows), root / f"{next(names)}.parquet", row_group_size=1)
            return rows

        records = add() + add()
        return Growing(hg.ParquetFiles(root), records, add)

    check_late_splits(fresh, [1, 3])


RUN_SCHEMA = pa.schema([("n", pa.int64())])
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
        return RUN_SCHEMA

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
            return SourceBatch(name, pa.record_batch([rows], RUN_SCHEMA), None, self.at[name] == COUNT)
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
