"""A reader whose ``poll`` raised says so each time: it never seems to be at the end of its input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.connectors.source_reading import context

from headgate.connectors.base import Source, SourceReader
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
