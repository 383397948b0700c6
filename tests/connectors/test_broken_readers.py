"""Readers of users: what they get from ``SourceReader``, and that one whose ``poll`` raised says so each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.connectors.source_reading import context

from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader, owner_of_split
from headgate.connectors.files import parquet
from headgate.connectors.files.file_tracker import FileTracker
from headgate.connectors.files.line_decoders import TextDecoder
from headgate.connectors.files.line_file import LineFile
from headgate.connectors.files.line_source import TextFiles
from headgate.connectors.files.parquet import ParquetFiles
from headgate.connectors.streams import StreamSource
from headgate.errors import StorageError
from headgate.store.reader import SegmentReader
from headgate.store.store import Store
from headgate.testing import check_source


def lines(where: Path) -> Source:
    for name in "ab":
        (where / f"{name}.log").write_text(f"{name}1\n{name}2\n")
    return TextFiles(where)


def single(where: Path) -> Source:
    (where / "all.log").write_text("a1\na2\nb1\nb2\n")
    return TextFiles(where)


def followed(where: Path) -> Source:
    lines(where)
    return TextFiles(where, follow=True, discovery_interval="0s")


def parquet_files(where: Path) -> Source:
    for name in "ab":
        pq.write_table(pa.table({"line": [f"{name}1", f"{name}2"]}), where / f"{name}.parquet")
    return ParquetFiles(where)


def stream(where: Path) -> Source:
    with Store.open(where / "store") as store:
        store.create_stream("s", pa.schema([("line", pa.large_string())]), segments=2, routing_key="line")
        with store.writer("s") as writer:
            for line in ("a1", "a2", "b1", "b2"):
                writer.append(pa.record_batch({"line": pa.array([line], pa.large_string())}))
    return StreamSource("s", store=str(where / "store"), follow=False)


CASES: dict[str, tuple[Callable[[Path], Source], type, str]] = {
    "lines that cannot be read": (lines, LineFile, "step"),
    "lines that were read and cannot be decoded": (lines, TextDecoder, "decode"),
    "a directory that cannot be listed": (followed, FileTracker, "discover"),
    "the only file": (single, LineFile, "step"),
    "parquet": (parquet_files, parquet._File, "next"),
    "stream": (stream, SegmentReader, "read"),
}


@pytest.mark.parametrize(("made", "owner", "name"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("failing", [1, 2])
def test_a_reader_that_failed_says_so_each_time_and_another_one_reads_on(
    made: Callable[[Path], Source],
    owner: type,
    name: str,
    failing: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = made(tmp_path)
    source.schema()
    original, calls = getattr(owner, name), iter(range(1, 1_000))

    def once(*arguments: Any, **options: Any) -> Any:
        if next(calls) == failing:
            raise StorageError("read", "x", "the disk failed for a moment")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, once)
    reader = source.open(context())
    positions = [reader.positions()]
    rows: list[dict[str, Any]] = []
    with pytest.raises(StorageError, match="for a moment"):
        poll(reader, rows, positions)
    for ask in (reader.poll, reader.positions, reader.poll):
        with pytest.raises(StorageError, match="for a moment"):
            ask()
    assert not reader.is_finished()
    reader.close()
    poll(source.open(context(positions=positions[-1])), rows, positions)
    assert sorted(row["line"] for row in rows) == ["a1", "a2", "b1", "b2"]


def poll(reader: SourceReader, rows: list[dict[str, Any]], positions: list[dict[str, bytes]]) -> None:
    """Poll more often than there is anything; note the records, and the positions after each poll."""
    for _ in range(20):
        batch = reader.poll()
        rows += [] if batch is None else batch.batch.to_pylist()
        positions.append(reader.positions())


SCHEMA = pa.schema([("n", pa.int64())])
COUNT = 7


@dataclass(frozen=True)
class Numbers(Source):
    """So many splits, each with some numbers."""

    splits_count: int

    def schema(self) -> pa.Schema:
        return SCHEMA

    def identity(self) -> str:
        return "numbers"

    def open(self, context: SourceContext) -> NumbersReader:
        mine = [s for s in range(self.splits_count) if owner_of_split(s, context.parallelism) == context.subtask_index]
        return NumbersReader({str(s): int((context.positions or {}).get(str(s), b"0")) for s in mine})


class NumbersReader(SourceReader):
    def __init__(self, following: dict[str, int]) -> None:
        self._following = following

    def splits(self) -> Sequence[str]:
        return [split for split, following in self._following.items() if following < COUNT]

    def poll(self) -> SourceBatch | None:
        for split in self.splits()[:1]:
            self._following[split] += 1
            batch = pa.record_batch([[self._following[split]]], SCHEMA)
            return SourceBatch(split, batch, is_split_finished=self._following[split] == COUNT)
        return None

    def positions(self) -> dict[str, bytes]:
        return {split: b"%d" % following for split, following in self._following.items()}


def test_a_reader_that_derives_has_ended_without_splits() -> None:
    assert len(check_source(Numbers(3))) == 3 * COUNT
    reader = Numbers(1).open(SourceContext("p", "numbers", 0, 1, None))
    while not reader.is_finished():
        assert reader.poll() is not None
    assert (reader.splits(), reader.poll(), reader.wakeup_ms()) == ([], None, 100)
    reader.close()
    assert Numbers(0).open(SourceContext("p", "numbers", 0, 1, None)).is_finished()
