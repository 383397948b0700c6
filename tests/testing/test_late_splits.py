"""Splits that appear late are read once: by our sources, and sources that do not are caught."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors.base import Source, SourceBatch, SourceContext, owner_of_split
from headgate.testing import Growing, check_late_splits

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
